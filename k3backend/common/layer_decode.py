"""The decode object that one MLA layer owns: limits at construction, one plan per forward.

Layers of one lane share a plan: the first layer of a forward computes it, the others find it by
(forward context, lengths buffer, shape). Plan buffers and scratch are claimed when the layer is
built, through the host's workspace, because a server sizes its KV cache by what is left.

The host is met through three small protocols: the config (`DecodeConfig`, or an object with vLLM's
config attributes), the metadata of a step (`DecodeMetadata`) and the layer's scales.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from k3backend.common.balanced_mla import BalancedMla, dtype_name
from k3backend.common.decode_checks import (
    MAX_HEADS,
    integer_problems,
    not_a_tensor,
    shape_problems,
)
from k3backend.common.errors import UnsupportedDecodeError, WorkspaceError
from k3backend.common.kernel_device import missing_gpu_problems
from k3backend.common.layer_config import DecodeConfig, read_config
from k3backend.common.query_lengths import read_query_length

LOGGER = logging.getLogger("k3backend")


class DecodePart(Protocol):
    """Tensors of the requests that decode."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


class DecodeMetadata(Protocol):
    """One step: what a layer object reads of it. Query starts: see ``query_lengths``."""

    num_decodes: int
    num_decode_tokens: int
    causal: bool
    decode: Any


class LayerScales(Protocol):
    """Quantisation scales as host floats."""

    _q_scale_float: float
    _k_scale_float: float


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One layer of one step, read from what the host gave.

    Attributes:
        q, kv_cache, block_table, seq_lens, causal_lens, q_len, causal, cp: as in
            ``BalancedMla.decode``.
        scale: softmax scale alone. q_scale, k_scale: those that apply to the dtypes.
        with_lse: whether lse2 is returned.
        forward: identifies the forward that is running: its context, or else its metadata.
        in_context: whether ``forward`` is a forward context, within which lengths do not change.
        capturing: whether a graph is being captured.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    causal_lens: torch.Tensor | None
    q_len: int
    causal: bool
    cp: tuple[int, int, int]
    scale: float
    q_scale: float
    k_scale: float
    with_lse: bool
    forward: object
    in_context: bool
    capturing: bool


@dataclass(slots=True)
class PlanMark:
    """Which forward a lane's buffers hold the plan of.

    It keeps the plan's inputs alive: memory that is freed and handed out again cannot pass for
    them.
    """

    forward: object = None
    inputs: tuple[torch.Tensor, ...] = ()
    planned: tuple[object, ...] | None = None

    def renew(
        self,
        step: DecodeStep,
        plan: Callable[[], None],
        inputs: tuple[torch.Tensor, ...],
        *shape: object,
    ) -> bool:
        """Call ``plan`` unless the buffers hold the step's plan; returns whether it was called.

        Args:
            inputs: every tensor that the plan is computed from. shape: what else it depends on.

        A plan made outside a capture is not part of the graph, so capturing plans anew. An input
        that changes in place within a forward shows in its version. Inference tensors have none:
        a plan of them is found again within a forward context alone. A plan that fails leaves the
        buffers unmarked.
        """
        key: tuple[object, ...] | None = (
            step.q_len, step.capturing, *shape, *(_identity(tensor) for tensor in inputs)
        )  # fmt: skip
        if not step.in_context and any(tensor.is_inference() for tensor in inputs):
            key = None
        if key is not None and self.forward is step.forward and self.planned == key:
            return False
        self.forward, self.inputs, self.planned = None, (), None
        plan()
        self.forward, self.inputs, self.planned = step.forward, inputs, key
        return True


@dataclass(slots=True)
class LanePlan:
    """What the layers of one lane share: plan buffers, one core per query length, the last plan."""

    counts: torch.Tensor
    work: torch.Tensor
    cores: dict[tuple[int, bool], BalancedMla] = field(default_factory=dict)
    mark: PlanMark = field(default_factory=PlanMark)


class BalancedDecode(ABC):
    """Decode of one MLA layer. A vendor says how to build a core.

    Attributes:
        config: what was read of the host's config.
        heads: query heads that reach the kernel: local heads x DCP size.
        workspace_bytes: scratch claimed per lane.
        plans: plans that this object computed, as opposed to found.
    """

    platform = "none"

    def __init__(self, num_heads: int, config: Any) -> None:
        """Check limits and claim memory in the current lane.

        Args:
            num_heads: local heads of the layer.
            config: a `DecodeConfig` or an object with vLLM's config attributes.
        Raises:
            UnsupportedDecodeError: with every limit that is broken, and the numbers.
            WorkspaceError: the workspace is locked already.
        """
        self.config: DecodeConfig = read_config(config)
        reasons = integer_problems("num_heads", num_heads, MAX_HEADS)
        if reasons:
            raise UnsupportedDecodeError("balanced decode cannot be built", reasons)
        self.heads = num_heads * self.config.dcp_size
        reasons = shape_problems(self.heads, self.config.max_q_len, self.config.max_requests)
        reasons += missing_gpu_problems(self.config.device) or self.platform_problems()
        if reasons:
            raise UnsupportedDecodeError(
                f"balanced decode of {num_heads} heads x DCP {self.config.dcp_size}, "
                f"{self.config.max_q_len} query tokens, {self.config.max_requests} requests",
                reasons,
            )
        sizes = [self.make_core(q_len, True) for q_len in range(1, self.config.max_q_len + 1)]
        self._counts_len = max(core.counts_len for core in sizes)
        self._work_len = max(core.work_len for core in sizes)
        self.workspace_bytes = max(core.workspace_bytes for core in sizes)
        self.plans = 0
        self._shapes: set[tuple[object, ...]] = set()
        self._claim()

    @abstractmethod
    def make_core(self, q_len: int, causal: bool) -> BalancedMla:
        """The vendor's core for ``self.heads``, ``self.config`` and a query length."""

    def platform_problems(self) -> list[str]:
        """Limits of the vendor beside those of the shape, on a device that is here."""
        return []

    def decode(
        self,
        impl: Any,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: DecodeMetadata,
        layer: LayerScales,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode one layer of one step.

        Args:
            impl: has ``scale``; under DCP ``dcp_world_size`` and ``dcp_rank``; where it has
                ``need_to_return_lse_for_decode``, that decides whether lse2 is returned.
            q: [tokens, heads, 576], contiguous. An fp8 query was divided by the layer's q_scale.
            kv_cache: [blocks, block_size, 576]; uint8 is read as fp8.
            metadata: of this step; see `DecodeMetadata`.
            layer: scales; see `LayerScales`.
        Returns:
            out [tokens, heads, 512] bfloat16; lse2 [tokens, heads] float32, base 2, or None.
        Mutates the lane's plan and scratch. Does not sync; graph-safe after a warm-up.
        Raises:
            UnsupportedDecodeError: with every reason why this step cannot run.
            WorkspaceError: a shape appears for the first time inside graph capture.
        """
        problems = _protocol_problems(impl, kv_cache, metadata, layer)
        if problems:
            raise UnsupportedDecodeError("balanced decode cannot read this step", problems)
        length = read_query_length(metadata)
        causal = bool(getattr(metadata, "causal", True))
        q_len = max(length.tokens, 1)
        part: DecodePart | None = metadata.decode
        reasons = list(length.problems)
        if length.tokens > self.config.max_q_len:
            reasons.append(
                f"{length.tokens} query tokens per request, built for at most "
                f"{self.config.max_q_len}; raise the number of speculative tokens in the config"
            )
        if reasons and length.requests > self.config.max_requests:
            reasons.append(
                f"{length.requests} requests, built for at most {self.config.max_requests}; raise "
                "max_requests or decode in parts"
            )
        if part is None:
            reasons.append("metadata.decode is None: this step has no request that decodes")
        if reasons or part is None:
            raise UnsupportedDecodeError("balanced decode cannot run this step", reasons)
        if kv_cache.dtype == torch.uint8:
            kv_cache = kv_cache.view(self.config.fp8_dtype)
        seq_lens = part.seq_lens[: length.requests]
        table = part.block_table[: length.requests]
        world = int(getattr(impl, "dcp_world_size", 1) or 1)
        cp = (world, int(getattr(impl, "dcp_rank", 0)), self.config.interleave())
        causal_lens = None
        total = getattr(part, "dcp_tot_seq_lens", None)
        if world > 1 and causal and total is not None:
            causal_lens = total[: length.requests]
        q_scale, k_scale = _scales(layer, q, kv_cache)
        forward = self.config.forward_context()
        step = DecodeStep(
            q=q,
            kv_cache=kv_cache,
            block_table=table,
            seq_lens=seq_lens,
            causal_lens=causal_lens,
            q_len=q_len,
            causal=causal,
            cp=cp,
            scale=float(impl.scale),
            q_scale=q_scale,
            k_scale=k_scale,
            with_lse=bool(getattr(impl, "need_to_return_lse_for_decode", world > 1)),
            forward=metadata if forward is None else forward,
            in_context=forward is not None,
            capturing=self.config.capturing(),
        )
        lane = self._lane()
        core = lane.cores[q_len, causal]
        self._admit(core, step)
        return self.run_step(lane, core, step)

    def run_step(
        self, lane: LanePlan, core: BalancedMla, step: DecodeStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Plan unless a layer of this forward has done so, and decode an admitted step."""
        self.plans += lane.mark.renew(
            step,
            lambda: core.plan(step.seq_lens, lane.counts, lane.work),
            (step.seq_lens,),
            core.row_tiles,
        )
        q = step.q
        lse = None
        if step.with_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        (scratch,) = self.config.workspace.get_simultaneous(((self.workspace_bytes,), torch.uint8))
        out = core.decode(
            q, step.kv_cache, step.block_table, step.seq_lens,
            step.scale * step.q_scale * step.k_scale, step.k_scale, lane.counts, lane.work, scratch,
            lse=lse, causal_lens=step.causal_lens, cp=step.cp, check=False,
        )  # fmt: skip
        return out, lse

    def _admit(self, core: BalancedMla, step: DecodeStep) -> None:
        """Check every argument, on every call; a new shape may not appear inside a capture."""
        q, world = step.q, step.cp[0]
        reasons = core.decode_problems(
            q, step.kv_cache, step.block_table, step.seq_lens,
            step.scale * step.q_scale * step.k_scale, step.k_scale, None, step.causal_lens, step.cp,
        )  # fmt: skip
        if world != self.config.dcp_size:
            reasons.append(
                f"DCP world is {world}, built for {self.config.dcp_size}; build the layer "
                "again with the config it runs under"
            )
        if reasons:
            raise UnsupportedDecodeError("balanced decode cannot run this step", reasons)
        shape = (
            step.q_len, step.seq_lens.shape[0], step.causal, step.cp, step.with_lse,
            step.causal_lens is None, q.dtype, step.kv_cache.dtype, step.kv_cache.shape[1:],
            step.kv_cache.stride(), step.block_table.stride(),
        )  # fmt: skip
        if shape in self._shapes:
            return
        if step.capturing:
            raise WorkspaceError(
                f"decode of {step.seq_lens.shape[0]} requests x {step.q_len} query tokens appears "
                "for the first time inside graph capture, where nothing can be compiled or "
                "allocated; run this shape once before capturing it"
            )
        self._shapes.add(shape)

    def _claim(self) -> None:
        try:
            self._lane()
            self.config.workspace.get_simultaneous(((self.workspace_bytes,), torch.uint8))
        except AssertionError as error:  # a host's manager that is locked
            raise WorkspaceError(
                f"workspace refused {self.workspace_bytes} bytes of decode scratch ({error}); "
                "build every decode layer before the workspace is locked"
            ) from error

    def _lane(self) -> LanePlan:
        key = (
            "k3backend.plan", self.platform, self.heads, self.config.max_requests,
            self.config.max_q_len, self.config.q_dtype,
        )  # fmt: skip
        lane: LanePlan = self.config.workspace.get_persistent_resource(key, self._new_lane)
        return lane

    def _new_lane(self) -> LanePlan:
        plan_bytes = 4 * (self._counts_len + self._work_len)
        LOGGER.info(
            "k3backend: decode scratch %.1f MiB and plan %.1f KiB per lane (%d heads, %d query "
            "tokens, %d requests)",
            self.workspace_bytes / 2**20, plan_bytes / 2**10, self.heads, self.config.max_q_len,
            self.config.max_requests,
        )  # fmt: skip
        device = self.config.device
        lane = LanePlan(
            torch.empty(self._counts_len, dtype=torch.int32, device=device),
            torch.empty(self._work_len, dtype=torch.int32, device=device),
        )
        # All of them now: a core allocates, which a graph capture may not.
        for q_len in range(1, self.config.max_q_len + 1):
            for causal in (True, False):
                lane.cores[q_len, causal] = self.make_core(q_len, causal)
        return lane


def _protocol_problems(impl: object, kv_cache: object, metadata: Any, layer: object) -> list[str]:
    """What an argument lacks of what a decode reads."""
    wanted = {
        "impl": (impl, ("scale",)),
        "metadata": (metadata, ("num_decodes", "num_decode_tokens", "decode")),
        "layer": (layer, ("_q_scale_float", "_k_scale_float")),
    }
    part = getattr(metadata, "decode", None)
    if part is not None:
        wanted["metadata.decode"] = (part, ("block_table", "seq_lens"))
    reasons = [
        f"{name} (a {type(owner).__name__}) has no attribute {attribute!r}; see the protocols of "
        f"{__name__}"
        for name, (owner, attributes) in wanted.items()
        for attribute in attributes
        if not hasattr(owner, attribute)
    ]
    reasons += not_a_tensor("kv_cache", kv_cache)
    if part is not None and not reasons:
        reasons += not_a_tensor("metadata.decode.block_table", part.block_table)
        reasons += not_a_tensor("metadata.decode.seq_lens", part.seq_lens)
    return reasons


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for the same memory at the same version, as long as the memory is held."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride()


def _scales(layer: LayerScales, q: object, kv_cache: torch.Tensor) -> tuple[float, float]:
    """The scales that apply: a bfloat16 tensor was not quantised, whatever the layer says."""
    q_fp8 = isinstance(q, torch.Tensor) and dtype_name(q.dtype) == "fp8"
    kv_fp8 = dtype_name(kv_cache.dtype) == "fp8"
    return (
        float(layer._q_scale_float) if q_fp8 else 1.0,
        float(layer._k_scale_float) if kv_fp8 else 1.0,
    )
