"""Typed launches of the decode and combine kernels. Callers have checked their arguments."""

from __future__ import annotations

import math

import torch
import triton

from k3backend.common.kernels.combine import combine_kernel
from k3backend.common.kernels.folded_decode import folded_decode_kernel
from k3backend.common.launch_config import LaunchConfig

INTERPRETING = bool(triton.knobs.runtime.interpret)
COMBINE_SCAN = 1024

# Scaling fp8 probabilities by 2**n before rounding keeps those above 2**-(n + 9) of the largest one
# (2**-9 is e4m3's smallest step); n is the largest whose 2**n the format still holds.
P_EXP = {torch.float8_e4m3fn: 8, torch.float8_e4m3fnuz: 7, torch.bfloat16: 0}


def launch_decode(
    config: LaunchConfig,
    *,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    causal_lens: torch.Tensor | None,
    worker_indptr: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    lse2: torch.Tensor | None,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    score_scale: float,
    out_scale: float,
    q_len: int,
    causal: bool,
    cp: tuple[int, int, int],
) -> None:
    """Run every piece of the plan: one program per worker.

    Args:
        config: the vendor's choice.
        q: [tokens, heads, 576] contiguous, float8_e4m3 or bfloat16.
        kv_cache: [blocks, block_size, 576], last dimension contiguous; q's dtype, or fp8 under a
            bfloat16 q.
        block_table: [requests, columns] int32, last dimension contiguous.
        seq_lens, causal_lens: [requests] int32; causal_lens None: seq_lens.
        worker_indptr, work: of the plan, whose tile_tokens the config's divides.
        out: [tokens, heads, 512] bfloat16, contiguous. lse2: [tokens, heads] float32 or None.
        partial: float32, at least slots * slot_rows * 512. partial_lse: slots * slot_rows.
        score_scale: scale * q_scale * k_scale, without log2(e). out_scale: k_scale.
    Mutates out, lse2, partial, partial_lse. Does not sync; graph-safe; deterministic per plan.
    """
    # Triton knows Python's own numbers alone; a caller's may be numpy's.
    world, rank, interleave = (int(value) for value in cp)
    folded_decode_kernel[(worker_indptr.shape[0] - 1,)](
        q,
        kv_cache,
        block_table,
        seq_lens,
        seq_lens if causal_lens is None else causal_lens,
        worker_indptr,
        work,
        out,
        partial_lse if lse2 is None else lse2,
        partial,
        partial_lse,
        float(score_scale) * math.log2(math.e),
        float(out_scale),
        kv_cache.stride(0),
        block_table.stride(0),
        world,
        rank,
        interleave,
        HEADS=q.shape[1],
        Q_LEN=int(q_len),
        ROWS_A=config.row_groups[0],
        ROWS_B=config.row_groups[1],
        TILE=config.tile_tokens,
        CHUNK=config.value_chunk,
        BLOCK_SIZE=kv_cache.shape[1],
        TOKEN_STRIDE=kv_cache.stride(1),
        CAUSAL=bool(causal and (q_len > 1 or causal_lens is not None)),
        CP=causal_lens is not None,
        PREFETCH=config.prefetch,
        STAGES=config.num_stages,
        HOIST=config.hoist,
        P_EXP=P_EXP[q.dtype],
        EXACT_SUMS=config.exact_sums,
        NUM_XCDS=config.num_xcds,
        STORE_LSE=lse2 is not None,
        UPCAST=INTERPRETING,
        num_warps=config.num_warps,
        **({} if INTERPRETING else dict(config.backend_options)),
    )


def launch_combine(
    config: LaunchConfig,
    *,
    counts: torch.Tensor,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse2: torch.Tensor | None,
    counter: torch.Tensor,
    out_scale: float,
    rows: int,
    min_splits: int = 2,
) -> None:
    """Merge split pairs in split order and write rows without keys.

    Args:
        counts: [requests * row tiles] int32. rows: heads * q_len.
        counter: int64 [2], ``decode_counters.device_counter``.
        min_splits: pairs with fewer splits have no slots; 1 merges unsplit pairs too, whose pieces
            must then have slots (a test of the combine).
    Mutates out and lse2 of those pairs, and counter. Does not sync; graph-safe; deterministic.
    """
    # Columns are independent; whole rows are fewer programs, which is what an interpreter pays for.
    columns = 512 if INTERPRETING else config.combine_columns
    grid = (counts.shape[0], config.slot_rows(rows), 512 // columns)
    combine_kernel[grid](
        counts,
        partial,
        partial_lse,
        out,
        partial_lse if lse2 is None else lse2,
        counter,
        float(out_scale),
        ROWS_PER_REQUEST=int(rows),
        TILE_ROWS=config.tile_rows,
        SPLITS=config.combine_splits,
        COLUMNS=columns,
        MIN_SPLITS=min_splits,
        SCAN=COMBINE_SCAN,
        STORE_LSE=lse2 is not None,
        UPCAST=INTERPRETING,
        num_warps=config.combine_warps,
    )
