"""How a replay is set up and what it reports. Nothing here needs vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from k3backend.common.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How a trace is fed to the scheduler.

    Attributes:
        memory_bytes: bytes of the pool; one block of it is the null block.
        max_num_seqs: requests that may run at once.
        max_batched_tokens: tokens of one step.
        shared_prefix_tokens: leading tokens that every prompt shares. A trace of lengths has no
            text, so sharing is an assumption that the caller states.
        arrivals: "burst" queues the whole trace at once; "trace" honours the timestamps on a clock
            that advances by ``step_ms`` per step.
        step_ms: milliseconds one step stands for when ``arrivals`` is "trace".

    Raises:
        InputError: a value is out of range.
    """

    memory_bytes: int
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    shared_prefix_tokens: int = 0
    arrivals: str = "burst"
    step_ms: float = 25.0

    def __post_init__(self) -> None:
        limits = (
            ("memory_bytes", 1),
            ("max_num_seqs", 1),
            ("max_batched_tokens", 1),
            ("shared_prefix_tokens", 0),
        )
        for name, minimum in limits:
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                raise InputError(f"{name} is {value!r}, expected an integer >= {minimum}; give one")
        if self.max_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_batched_tokens is {self.max_batched_tokens}, expected at least max_num_seqs "
                f"({self.max_num_seqs}); one step gives every running request a token"
            )
        if self.arrivals not in ("burst", "trace"):
            raise InputError(f"arrivals is {self.arrivals!r}, expected burst or trace; give one")
        if not 0 < self.step_ms < 1e6:
            raise InputError(f"step_ms is {self.step_ms!r}, expected milliseconds above 0")


@dataclass(slots=True)
class ReplayReport:
    """What one layout did with a trace. Times are microseconds of processor time on this host.

    Attributes:
        groups: per group: kind, layers, block_size, blocks held at the peak, and the mean blocks
            of one running request.
        admitted_peak: most requests that ran at once.
        admitted_mean: mean number of running requests over the steps in which others waited;
            0 where none ever waited.
        prefix_hit_tokens: multiple of tokens at which a prefix hit ends in this vLLM.
        hit_tokens, looked_up_tokens: prompt tokens found in the prefix cache, and looked up.
        schedule_us, update_us: per step: ``Scheduler.schedule`` and ``update_from_output``.
        allocate_us: per call of ``KVCacheManager.allocate_slots``.
    """

    name: str
    block_bytes: int
    num_blocks: int
    prefix_hit_tokens: int
    groups: list[dict[str, Any]]
    requests_finished: int = 0
    requests_skipped: int = 0
    steps: int = 0
    preemptions: int = 0
    admitted_peak: int = 0
    admitted_mean: float = 0.0
    pool_usage_peak: float = 0.0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    schedule_us: dict[str, float] = field(default_factory=dict)
    update_us: dict[str, float] = field(default_factory=dict)
    allocate_us: dict[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "name": self.name,
            "num_groups": len(self.groups),
            "block_bytes": self.block_bytes,
            "num_blocks": self.num_blocks,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "requests": {"finished": self.requests_finished, "skipped": self.requests_skipped},
            "steps": self.steps,
            "preemptions": self.preemptions,
            "admitted": {"peak": self.admitted_peak, "mean": round(self.admitted_mean, 3)},
            "pool_usage_peak": round(self.pool_usage_peak, 4),
            "prefix_cache": {
                "looked_up_tokens": self.looked_up_tokens,
                "hit_tokens": self.hit_tokens,
            },
            "groups": self.groups,
            "host_us": {
                "schedule": self.schedule_us,
                "update": self.update_us,
                "allocate_slots": self.allocate_us,
            },
        }
