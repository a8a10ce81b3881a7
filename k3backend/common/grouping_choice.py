"""What a grouping policy answers: the groups, what it compared them with, and why."""

from __future__ import annotations

from dataclasses import dataclass

from k3backend.common.kv_spec import KVCacheGroupSpec


@dataclass(frozen=True, slots=True)
class PlanWarning:
    """Something in a plan that its reader should know.

    Attributes:
        code: stable name of the kind, in kebab case.
        message: one sentence that names layers and fields.
    """

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class GroupingCandidate:
    """One grouping that was considered.

    Attributes:
        name: short name of the grouping, such as "vllm".
        groups: number of groups.
        block_bytes: bytes of a pool block.
        request_bytes: pool bytes of one request at the planning context.
        chosen: whether the plan uses it.
        why_not: why it was not chosen; None where it was.
    """

    name: str
    groups: int
    block_bytes: int
    request_bytes: int
    chosen: bool
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class GroupingChoice:
    """The groups that a policy chose.

    Attributes:
        groups: in block-table order; each layer in exactly one.
        candidates: all that was compared, the chosen one included.
        reason: one sentence.
        warnings: what was repaired or should be known.
    """

    groups: list[KVCacheGroupSpec]
    candidates: tuple[GroupingCandidate, ...]
    reason: str
    warnings: tuple[PlanWarning, ...] = ()
