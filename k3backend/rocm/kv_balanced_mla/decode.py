"""The decode object that one MLA layer owns on ROCm: AITER where its table says so, else folded.

The object, its limits and its errors are NVIDIA's. What differs is which kernel runs an admitted
step: `choose_route` says, per shape, and the first use of a shape logs the route and the reason.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from k3backend.common.balanced_mla import BalancedMla, dtype_name
from k3backend.common.decode_counters import device_counter
from k3backend.common.errors import ShapeError
from k3backend.common.layer_config import DecodeConfig, read_config
from k3backend.common.layer_decode import BalancedDecode, DecodeStep, LanePlan, PlanMark
from k3backend.rocm.aiter_capabilities import ABSENT, ARCHS
from k3backend.rocm.aiter_ops import Aiter, installed_version, load_aiter
from k3backend.rocm.aiter_plan import AiterPlan, AiterScratch, AiterShape
from k3backend.rocm.decode_routes import AITER_CPRR, FOLDED, Route, choose_route
from k3backend.rocm.kv_balanced_mla.core import FP8_DTYPES, KvBalancedMla, gpu_arch
from k3backend.rocm.token_view import block_stride_tokens

__all__ = ["DecodeConfig", "KvBalancedDecode"]

LOGGER = logging.getLogger("k3backend")
MAX_INT32 = 2**31 - 1


@dataclass(slots=True)
class AiterLane:
    """What the layers of one lane share for AITER: buffers, a plan per shape, the current one."""

    scratch: AiterScratch
    plans: dict[AiterShape, AiterPlan] = field(default_factory=dict)
    mark: PlanMark = field(default_factory=PlanMark)


class KvBalancedDecode(BalancedDecode):
    """``KvBalancedDecode(num_heads, config=…)``: see `BalancedDecode` for its contract.

    Attributes:
        arch: the GPU. aiter_version: of the installed AITER, or "absent".
        routes: the route of each shape that was decoded so far.
    """

    platform = "rocm"

    def __init__(self, num_heads: int, config: Any) -> None:
        """See `BalancedDecode`; also loads and checks AITER where it is installed.

        Raises:
            PlatformError: an installed AITER cannot be called.
        """
        given = read_config(config)
        self.arch = gpu_arch(given.device)
        self.aiter_version = installed_version()
        self._aiter: Aiter | None = None if self.aiter_version == ABSENT else load_aiter()
        self.routes: dict[tuple[object, ...], Route] = {}
        fp8_dtype = FP8_DTYPES.get(self.arch, given.fp8_dtype)
        super().__init__(num_heads, replace(given, fp8_dtype=fp8_dtype))

    def make_core(self, q_len: int, causal: bool) -> BalancedMla:
        """A `KvBalancedMla` on the config's device."""
        return KvBalancedMla(
            self.heads,
            q_len,
            self.config.max_requests,
            causal,
            self.config.device,
            q_dtype=self.config.q_dtype,
            arch=self.arch,
        )

    def platform_problems(self) -> list[str]:
        """A GPU without tables and launch choices."""
        if self.arch in ARCHS:
            return []
        return [f"the GPU is {self.arch}, expected {' or '.join(ARCHS)}"]

    def run_step(
        self, lane: LanePlan, core: BalancedMla, step: DecodeStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `BalancedDecode.run_step`; AITER runs the shapes that are its."""
        route = self.route(step)
        if not route.calls_aiter or self._aiter is None:
            return super().run_step(lane, core, step)
        aiter_lane = self._aiter_lane()
        plan = self._aiter_plan(aiter_lane, self._aiter, route, step)
        layout = (step.kv_cache.shape[1], block_stride_tokens(step.kv_cache))
        update = partial(
            plan.update,
            step.block_table,
            step.seq_lens,
            block_size=layout[0],
            block_stride_tokens=layout[1],
            causal_lens=step.causal_lens,
            cp=step.cp,
        )
        # Layers of another KV group have their own block table and need their own token ids.
        inputs: tuple[torch.Tensor, ...] = (step.block_table, step.seq_lens)
        if step.causal_lens is not None:
            inputs += (step.causal_lens,)
        self.plans += aiter_lane.mark.renew(step, update, inputs, plan.shape, layout, step.cp)
        device_counter(self.platform, step.q.device)[:1].add_(1)
        return plan.decode(
            step.q,
            step.kv_cache,
            scale=step.scale,
            q_scale=step.q_scale,
            k_scale=step.k_scale,
            need_lse=step.with_lse,
        )

    def route(self, step: DecodeStep) -> Route:
        """The kernel of a step, found once per shape."""
        cache = step.kv_cache
        key = (
            step.q_len, step.causal, step.q.dtype, cache.dtype, cache.shape, cache.stride(),
            step.with_lse, step.cp[0], step.cp[2],
        )  # fmt: skip
        if key not in self.routes:
            route = self.routes[key] = self._choose(step)
            LOGGER.info(
                "k3backend: %d heads x %d tokens, %s: %s (%s)",
                self.heads, step.q_len, "causal" if step.causal else "non-causal", route.name,
                route.reason,
            )  # fmt: skip
        return self.routes[key]

    def _choose(self, step: DecodeStep) -> Route:
        cache = step.kv_cache
        refusal = self._index_refusal(cache, step.cp)
        if refusal is not None and self._aiter is not None:
            return Route(FOLDED, self.heads, refusal)
        return choose_route(
            heads=self.heads,
            q_len=step.q_len,
            q_dtype=dtype_name(step.q.dtype) or "bf16",
            kv_dtype=dtype_name(cache.dtype) or "bf16",
            causal=step.causal,
            dcp=step.cp[0],
            arch=self.arch,
            need_lse=step.with_lse,
            aiter_version=self.aiter_version,
            kv_interleave=step.cp[2],
            kv_cache_bytes=max(cache.shape[0] * cache.stride(0) * cache.element_size(), 1),
        )

    def _index_refusal(self, cache: torch.Tensor, cp: tuple[int, int, int]) -> str | None:
        """Why token ids cannot address this cache or be listed, or None where they can."""
        most = self.config.max_interleave
        if cp[0] > 1 and 0 < most < cp[2]:
            return (
                f"the interleave is {cp[2]} and AITER's index list was sized for at most {most}; "
                f"start with --cp-kv-cache-interleave-size {cp[2]}"
            )
        if not self.config.max_kv_tokens:
            return "the config does not say max_kv_tokens, so AITER's index list has no size"
        if self.config.max_requests * self.config.max_kv_tokens > MAX_INT32:
            return "max_requests x max_kv_tokens exceeds AITER's int32 offsets"
        try:
            stride = block_stride_tokens(cache)
        except ShapeError as error:
            return str(error)
        if cache.shape[0] * stride > MAX_INT32:
            return "the cache has more tokens than AITER's int32 indices reach"
        return None

    def _claim(self) -> None:
        super()._claim()
        if self._may_use_aiter():
            self._aiter_lane()

    def _may_use_aiter(self) -> bool:
        config = self.config
        if self._aiter is None or not config.max_kv_tokens:
            return False
        if config.max_requests * config.max_kv_tokens > MAX_INT32:
            return False
        return any(
            choose_route(
                heads=self.heads,
                q_len=q_len,
                q_dtype=config.q_dtype,
                kv_dtype=kv_dtype,
                causal=causal,
                dcp=config.dcp_size,
                arch=self.arch,
                need_lse=False,
                aiter_version=self.aiter_version,
            ).calls_aiter
            for q_len in range(1, config.max_q_len + 1)
            for causal in (True, False)
            for kv_dtype in ("fp8", "bf16")
        )

    def _aiter_lane(self) -> AiterLane:
        key = ("k3backend.aiter", self.heads, self.config.max_requests, self.config.q_dtype)
        lane: AiterLane = self.config.workspace.get_persistent_resource(key, self._new_aiter_lane)
        return lane

    def _new_aiter_lane(self) -> AiterLane:
        config = self.config
        scratch = AiterScratch(
            heads=self.heads,
            q_dtype=config.fp8_dtype if config.q_dtype == "fp8" else torch.bfloat16,
            max_tokens=config.max_requests * config.max_q_len,
            max_kv_indices=config.max_requests * config.max_kv_tokens,
            device=torch.device(config.device),
        )
        LOGGER.info(
            "k3backend: AITER token indices %.1f MiB per lane (%d requests x %d tokens)",
            scratch.kv_indices.numel() * 4 / 2**20, config.max_requests, config.max_kv_tokens,
        )  # fmt: skip
        return AiterLane(scratch)

    def _aiter_plan(
        self, lane: AiterLane, aiter: Aiter, route: Route, step: DecodeStep
    ) -> AiterPlan:
        shape = AiterShape(
            heads=self.heads,
            padded_heads=route.padded_heads,
            q_len=step.q_len,
            causal=step.causal,
            cp_round_robin=route.name == AITER_CPRR,
            q_dtype=step.q.dtype,
            kv_dtype=step.kv_cache.dtype,
            max_requests=self.config.max_requests,
            max_kv_tokens=self.config.max_kv_tokens,
            kv_granularity=route.kv_granularity,
        )
        if shape not in lane.plans:
            lane.plans[shape] = AiterPlan(aiter, shape, step.q.device, lane.scratch)
        return lane.plans[shape]
