"""The CPU decode in torch: planned, split and merged like the kernels.

float32 for fp8, bfloat16 and float32 inputs, float64 for float64 ones. It runs each piece of the
plan on its own and merges partials through slots, so that a wrong plan gives wrong results.
"""

from __future__ import annotations

import math

import torch

from k3backend.common import attention_reference as attention
from k3backend.common.decode_call import DtypePair, call_problems
from k3backend.common.decode_counters import count_decode
from k3backend.common.errors import UnsupportedDecodeError
from k3backend.common.split_plan import SplitPlan, plan_splits

# Small, so that contexts of a few hundred tokens are split and several row tiles occur.
WORKERS = 8
TILE_TOKENS = 16
TILE_ROWS = 64

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_WIDE = (torch.bfloat16, torch.float32, torch.float64)
DTYPE_PAIRS: tuple[DtypePair, ...] = (
    *((dtype, dtype) for dtype in (*_FP8, *_WIDE)),
    *((q, kv) for q in _WIDE for kv in _FP8),
    *((q, kv) for q in (torch.float32, torch.float64) for kv in (torch.bfloat16, torch.float16)),
)
"""A cache under queries of its own dtype, or one of 8 or 16 bits under wider queries."""


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    q_len: int = 1,
    causal: bool = True,
    causal_lens: torch.Tensor | None = None,
    cp: tuple[int, int, int] = (1, 0, 1),
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One decode step. See ``k3backend.decode.mla_decode`` for the arguments.

    Returns:
        out [tokens, heads, 512]: q's dtype for float32 and float64, else bfloat16.
        lse2 [tokens, heads] float32, or None.
    Mutates nothing; reads lengths on the host; deterministic.
    """
    reasons = call_problems(
        q, kv_cache, block_table, seq_lens, scale=scale, q_scale=q_scale, k_scale=k_scale,
        q_len=q_len, causal=causal, causal_lens=causal_lens, cp=cp, pairs=DTYPE_PAIRS,
    )  # fmt: skip
    if reasons:
        raise UnsupportedDecodeError("reference MLA decode cannot run", reasons)
    heads = q.shape[1]
    rows = heads * q_len
    plan = plan_splits(
        seq_lens,
        row_tiles=-(-rows // TILE_ROWS),
        num_workers=WORKERS,
        tile_tokens=TILE_TOKENS,
    )
    seen = attention.visible_keys(seq_lens, q_len, causal=causal, causal_lens=causal_lens, cp=cp)
    seen = seen.repeat_interleave(heads, dim=1)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse2 = run_plan(
        plan,
        q.reshape(-1, rows, attention.HEAD_DIM),
        kv_cache,
        block_table,
        seen,
        scale * q_scale * k_scale,
        compute,
    )
    count_decode("reference", plan.num_slots)
    out = (out * k_scale).reshape(q.shape[0], heads, attention.VALUE_DIM)
    exact = q.dtype in (torch.float32, torch.float64)
    out = out.to(q.dtype if exact else torch.bfloat16)
    return out, lse2.float().reshape(q.shape[0], heads) if return_lse else None


def run_plan(
    plan: SplitPlan,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seen: torch.Tensor,
    score_scale: float,
    compute_dtype: torch.dtype,
    tile_rows: int = TILE_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run every piece of ``plan`` and merge split ones through slots.

    Args:
        q: [requests, rows, 576]. seen: [requests, rows] integer, keys that each row sees.
        score_scale: scale * q_scale * k_scale. compute_dtype: float32 or float64.
        tile_rows: rows of a row tile.
    Returns:
        out [requests, rows, 512], without k_scale, and lse2 [requests, rows], both compute_dtype.
    """
    requests, rows, _ = q.shape
    out = q.new_zeros((requests, rows, attention.VALUE_DIM), dtype=compute_dtype)
    lse2 = q.new_full((requests, rows), -math.inf, dtype=compute_dtype)
    slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for request, row_tile, kv_start, kv_end, slot, _ in plan.work.tolist():
        part = slice(row_tile * tile_rows, min((row_tile + 1) * tile_rows, rows))
        result = attention.decode_piece(
            q[request, part],
            kv_cache,
            block_table[request],
            seen[request, part],
            kv_start,
            kv_end,
            score_scale,
            compute_dtype,
        )
        if slot < 0:
            out[request, part], lse2[request, part] = result
        else:
            slots[slot] = result
    base = plan.slot_base.tolist()
    for item, count in enumerate(plan.counts.tolist()):
        if count > 1:
            request, row_tile = divmod(item, plan.row_tiles)
            part = slice(row_tile * tile_rows, min((row_tile + 1) * tile_rows, rows))
            parts = [slots[base[item] + split] for split in range(count)]
            out[request, part], lse2[request, part] = attention.merge(
                torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
            )
    return out, lse2
