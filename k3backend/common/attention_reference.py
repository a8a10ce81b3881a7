"""Torch reference of MLA decode: whole requests, partials of a plan's pieces, and their merge.

Kernels are tested against it, the ``reference`` vendor is built on it. It needs no triton and
computes in float32 or float64.

A request has S query tokens and H heads: S * H rows, token-major, that read the same keys. A key is
576 wide (512 latent, 64 rope), its value is its first 512 columns. For one row

    score = (q . k) * scale * q_scale * k_scale        over the keys that the row sees
    lse2  = log2(sum exp2(score * log2(e)))
    out   = sum exp2(score * log2(e) - lse2) * value * k_scale

because the cache holds key / k_scale. A row that sees no key has out 0 and lse2 -inf.

Keys past a request's length are never read: page tails, null blocks and unused block-table entries
may hold anything.
"""

from __future__ import annotations

import math

import torch

HEAD_DIM = 576
VALUE_DIM = 512
LOG2_E = math.log2(math.e)


def local_length(
    total: torch.Tensor, world: int = 1, rank: int = 0, interleave: int = 1
) -> torch.Tensor:
    """Keys that one DCP rank holds of sequences of ``total`` keys.

    Rank ``r`` of D holds positions whose ``position // interleave % D`` is r, in order.

    Args:
        total: integer tensor; values below 0 count as 0.
        world, rank, interleave: D, r and the run of consecutive keys a rank holds, in tokens.
    Returns:
        Integer tensor like ``total``.
    """
    total = total.clamp(min=0)
    round_tokens = world * interleave
    rest = (total % round_tokens - rank * interleave).clamp(0, interleave)
    return total // round_tokens * interleave + rest


def visible_keys(
    seq_lens: torch.Tensor,
    q_len: int,
    *,
    causal: bool = True,
    causal_lens: torch.Tensor | None = None,
    cp: tuple[int, int, int] = (1, 0, 1),
) -> torch.Tensor:
    """How many of the local keys each query token sees: always the first ones.

    Args:
        seq_lens: [requests] integer; keys this rank holds.
        q_len: query tokens per request.
        causal: token i of S sees the keys up to its own position; otherwise all.
        causal_lens: [requests] integer; keys of all ranks. None: ``seq_lens``.
        cp: (world, rank, interleave) of decode context parallelism.
    Returns:
        [requests, q_len] int64.
    """
    lens = seq_lens.to(torch.int64)
    if not causal:
        return lens[:, None].expand(-1, q_len).contiguous()
    total = lens if causal_lens is None else causal_lens.to(torch.int64)
    ahead = torch.arange(q_len - 1, -1, -1, device=lens.device)
    world, rank, interleave = cp
    seen = local_length(total[:, None] - ahead, world, rank, interleave)
    return torch.minimum(seen, lens[:, None])


def gather_keys(
    kv_cache: torch.Tensor, table_row: torch.Tensor, start: int, end: int
) -> torch.Tensor:
    """Keys [start, end) of one request: [end - start, 576] in the cache's dtype.

    Args:
        kv_cache: [blocks, block_size, 576], any strides.
        table_row: [columns] integer; only the entries that hold keys [start, end) are read.
    """
    block_size = kv_cache.shape[1]
    position = torch.arange(start, end, device=kv_cache.device)
    blocks = table_row[position // block_size].to(torch.int64)
    # One byte per element at least: advanced indexing knows no float8 on the CPU in older torch.
    if kv_cache.element_size() == 1:
        keys = kv_cache.view(torch.uint8)[blocks, position % block_size]
        return keys.view(kv_cache.dtype)
    return kv_cache[blocks, position % block_size]


def attend(
    q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, score_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised attention of rows over keys, before the output scale.

    Args:
        q: [rows, 576], float32 or float64.
        keys: [n, 576] in q's dtype; n may be 0.
        seen: [rows] integer; row r sees keys[:seen[r]], values outside 0..n are clamped.
        score_scale: factor of q . k, natural exponent (without log2(e)).
    Returns:
        out [rows, 512] and lse2 [rows] in q's dtype; 0 and -inf where a row sees no key.
    """
    if keys.shape[0] == 0:
        return q.new_zeros(q.shape[0], VALUE_DIM), q.new_full((q.shape[0],), -math.inf)
    scores = (q @ keys.T) * (score_scale * LOG2_E)
    hidden = torch.arange(keys.shape[0], device=q.device) >= seen[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    top = scores.amax(1)
    reference = torch.where(top == -math.inf, torch.zeros_like(top), top)
    weights = torch.exp2(scores - reference[:, None])
    total = weights.sum(1)
    empty = top == -math.inf
    safe = torch.where(empty, torch.ones_like(total), total)
    out = (weights @ keys[:, :VALUE_DIM]) / safe[:, None]
    lse2 = torch.where(empty, torch.full_like(top, -math.inf), reference + torch.log2(safe))
    return out, lse2


def merge(out: torch.Tensor, lse2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over their first dimension, in order.

    Args:
        out: [splits, ..., d], normalised. lse2: [splits, ...], base 2; -inf marks an empty split,
            whose ``out`` is ignored whatever it holds.
    Returns:
        out [..., d] and lse2 [...]; 0 and -inf where every split is empty.
    """
    if out.shape[0] == 0:
        return out.new_zeros(out.shape[1:]), lse2.new_full(lse2.shape[1:], -math.inf)
    top = lse2.amax(0)
    empty = top == -math.inf
    reference = torch.where(empty, torch.zeros_like(top), top)
    total = torch.zeros_like(top)
    merged = torch.zeros_like(out[0])
    for part, part_lse in zip(out, lse2, strict=True):
        weight = torch.exp2(part_lse - reference)
        total = total + weight
        present = (part_lse != -math.inf)[..., None]
        merged = merged + torch.where(present, part * weight[..., None], torch.zeros_like(part))
    safe = torch.where(empty, torch.ones_like(total), total)
    merged = merged / safe[..., None]
    return merged, torch.where(empty, torch.full_like(top, -math.inf), reference + torch.log2(safe))


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
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step without plan or splits.

    Args:
        q: [requests * q_len, heads, 576], any float dtype.
        kv_cache: [blocks, block_size, 576], any float dtype, any block size, any strides.
        block_table: [requests, columns] integer.
        seq_lens: [requests] integer, keys this rank holds, 0 allowed.
        scale, q_scale, k_scale: see the module. causal, causal_lens, cp: see ``visible_keys``.
        compute_dtype: float32 or float64.
    Returns:
        out [tokens, heads, 512] and lse2 [tokens, heads], both compute_dtype.
    Mutates nothing; reads lengths on the host; deterministic.
    """
    heads = q.shape[1]
    seen = visible_keys(seq_lens, q_len, causal=causal, causal_lens=causal_lens, cp=cp)
    out = q.new_zeros((q.shape[0], heads, VALUE_DIM), dtype=compute_dtype)
    lse2 = q.new_full((q.shape[0], heads), -math.inf, dtype=compute_dtype)
    score_scale = scale * q_scale * k_scale
    for request, length in enumerate(seq_lens.tolist()):
        tokens = slice(request * q_len, (request + 1) * q_len)
        keys = gather_keys(kv_cache, block_table[request], 0, length).to(compute_dtype)
        rows = q[tokens].to(compute_dtype).reshape(q_len * heads, HEAD_DIM)
        row_out, row_lse = attend(rows, keys, seen[request].repeat_interleave(heads), score_scale)
        out[tokens] = row_out.reshape(q_len, heads, VALUE_DIM) * k_scale
        lse2[tokens] = row_lse.reshape(q_len, heads)
    return out, lse2


def decode_piece(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    table_row: torch.Tensor,
    seen: torch.Tensor,
    kv_start: int,
    kv_end: int,
    score_scale: float,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece of a plan: some rows of one request over keys [kv_start, kv_end).

    Args:
        q: [rows, 576]. seen: [rows] integer, keys of the whole request that each row sees.
        score_scale: scale * q_scale * k_scale.
    Returns:
        Normalised partial out [rows, 512], without k_scale, and lse2 [rows], both compute_dtype.
    """
    keys = gather_keys(kv_cache, table_row, kv_start, kv_end).to(compute_dtype)
    return attend(q.to(compute_dtype), keys, seen - kv_start, score_scale)
