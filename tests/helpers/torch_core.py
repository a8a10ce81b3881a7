"""The balanced core with torch in the place of its kernels: it plans on the host and decodes by the
plan that it finds in the buffers, so that a stale or foreign plan gives wrong results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from k3backend.common import attention_reference as reference
from k3backend.common.balanced_mla import PLAN_TILE_TOKENS, BalancedMla
from k3backend.common.errors import UnsupportedDecodeError
from k3backend.common.launch_config import DtypeName, LaunchConfig
from k3backend.common.layer_decode import BalancedDecode
from k3backend.common.split_plan import SplitPlan
from k3backend.nvidia.launch_config import decode_launch
from k3backend.reference.mla_decode import run_plan

WORKERS = 6


class TorchCore(BalancedMla):
    """See the module."""

    platform = "torch double"

    def launch_config(self, q_dtype: DtypeName, kv_dtype: DtypeName) -> LaunchConfig:
        return decode_launch(self.rows, q_dtype=q_dtype, kv_dtype=kv_dtype)

    def device_problems(self) -> list[str]:
        return []

    def plan(self, seq_lens: torch.Tensor, counts: torch.Tensor, work: torch.Tensor) -> None:
        indptr, items = self._plan_views(seq_lens.shape[0], work)
        self._plan_on_host(seq_lens, counts, indptr, items)

    def decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, kv_cache, block_table, seq_lens, scale, k_scale, counts, work, workspace = args
        causal_lens, cp = kwargs.get("causal_lens"), kwargs.get("cp", (1, 0, 1))
        lse = kwargs.get("lse")
        reasons = self.decode_problems(
            q, kv_cache, block_table, seq_lens, scale, k_scale, lse, causal_lens, cp
        ) + self._workspace_problems(workspace)
        if reasons:
            raise UnsupportedDecodeError("torch double", reasons)
        requests = seq_lens.shape[0]
        indptr, items = self._plan_views(requests, work)
        plan = SplitPlan(
            work=items[: int(indptr[-1])].numpy(),
            worker_indptr=indptr.numpy(),
            counts=np.asarray(counts[: requests * self.row_tiles].numpy()),
            row_tiles=self.row_tiles,
            num_workers=self.workers,
            tile_tokens=PLAN_TILE_TOKENS,
            cost=self.cost,
        )
        seen = reference.visible_keys(
            seq_lens, self.q_len, causal=self.causal, causal_lens=causal_lens, cp=cp
        ).repeat_interleave(self.heads, dim=1)
        out, lse2 = run_plan(
            plan, q.reshape(requests, self.rows, 576), kv_cache, block_table, seen, scale,
            torch.float32, sum(self.row_groups),
        )  # fmt: skip
        if lse is not None:
            lse.copy_(lse2.reshape(lse.shape))
        return (out * k_scale).to(torch.bfloat16).reshape(*q.shape[:2], 512)


class TorchDecode(BalancedDecode):
    """The layer object over `TorchCore`."""

    platform = "torch double"

    def make_core(self, q_len: int, causal: bool) -> BalancedMla:
        config = self.config
        return TorchCore(
            self.heads, q_len, config.max_requests, causal, config.device, workers=WORKERS,
            q_dtype=config.q_dtype,
        )  # fmt: skip
