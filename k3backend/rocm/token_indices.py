"""Block tables expanded to token ids, which is what AITER's page-1 kernels index the cache with.

One launch a forward, not one a layer; work grows with the real lengths, and nothing is filled up to
the capacity of the buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS_PER_REQUEST = 64
CHUNK_TOKENS = 1024


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    table_ptr,
    table_stride,
    lens_ptr,
    indptr_ptr,
    out_ptr,
    block_stride_tokens,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (r, p) writes chunks p, p + P, ... of request r."""
    request = tl.program_id(0)
    length = tl.load(lens_ptr + request)
    base = tl.load(indptr_ptr + request).to(tl.int64)
    step = tl.num_programs(1) * CHUNK
    start = tl.program_id(1) * CHUNK
    # A request without keys is given key 0: AITER's plan must not be empty. Its rows are masked
    # afterwards.
    tl.store(out_ptr + base, 0, mask=(length == 0) & (start == 0))
    while start < length:
        token = start + tl.arange(0, CHUNK)
        inside = token < length
        block = tl.load(
            table_ptr + request.to(tl.int64) * table_stride + token // BLOCK_SIZE,
            mask=inside,
            other=0,
        )
        index = block * block_stride_tokens + token % BLOCK_SIZE
        tl.store(out_ptr + base + token, index, mask=inside)
        start += step


def expand_block_table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    block_stride_tokens: int,
) -> None:
    """Write the token ids of every request's keys to ``out[kv_indptr[r]:kv_indptr[r + 1]]``.

    Args:
        block_table: [requests, columns] int32, unit stride in the last dimension; entries past a
            request's length are not read.
        seq_lens: [requests] int32, 0 allowed: such a request gets one index, 0.
        kv_indptr: [requests + 1] int32, prefix sums of max(length, 1).
        out: [capacity] int32.
        block_size: tokens in a block.
        block_stride_tokens: distance of two blocks in the cache, in tokens.
    Mutates ``out``. No host sync; graph-safe; deterministic.
    """
    requests = seq_lens.shape[0]
    if requests == 0:
        return
    _expand[(requests, PROGRAMS_PER_REQUEST)](
        block_table,
        block_table.stride(0),
        seq_lens,
        kv_indptr,
        out,
        block_stride_tokens,
        BLOCK_SIZE=block_size,
        CHUNK=CHUNK_TOKENS,
    )
