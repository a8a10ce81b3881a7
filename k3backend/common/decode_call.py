"""What one call of ``mla_decode`` requires of its arguments, the same for every backend.

A backend adds only the dtype pairs that it takes and the device that it runs on. Nothing here
waits for a device: what the tensors hold is looked at on the CPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from k3backend.common.decode_checks import (
    HEAD_DIM,
    MAX_HEADS,
    MAX_PLANNED_REQUESTS,
    MAX_Q_LEN,
    cache_problems,
    parallel_problems,
    query_problems,
    scale_problems,
    table_problems,
    tensor_problems,
)

DtypePair = tuple[torch.dtype, torch.dtype]
"""A query's dtype and its cache's."""


def kernel_pairs(fp8_dtype: torch.dtype) -> tuple[DtypePair, ...]:
    """The pairs of the Triton kernels on a device with this fp8 format."""
    return (
        (fp8_dtype, fp8_dtype),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, fp8_dtype),
    )


def call_problems(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    scale: object,
    q_scale: object,
    k_scale: object,
    q_len: Any,
    causal: bool,
    causal_lens: Any,
    cp: object,
    pairs: Sequence[DtypePair],
) -> list[str]:
    """Every reason why a decode of these arguments cannot run; empty if it can.

    Args:
        q, kv_cache, block_table, seq_lens, scale, q_scale, k_scale, q_len, causal, causal_lens,
            cp: as of ``k3backend.decode.mla_decode``, of any type.
        pairs: dtypes of query and cache that the backend takes together.
    """
    given = {"kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    if causal_lens is not None:
        given["causal_lens"] = causal_lens
    reasons = [
        f"{name} is a {type(value).__name__}, expected a torch.Tensor"
        for name, value in given.items()
        if not isinstance(value, torch.Tensor)
    ]
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    first = next((t for t in (q, *given.values()) if isinstance(t, torch.Tensor)), None)
    device = torch.device("cpu") if first is None else first.device

    tokens = _integer_problems("q_len", q_len, MAX_Q_LEN)
    reasons += tokens
    requests = None
    if "seq_lens" in tensors:
        reasons += tensor_problems("seq_lens", seq_lens, device, (torch.int32,), None)
        if seq_lens.ndim == 1:
            requests = seq_lens.shape[0]
            if requests > MAX_PLANNED_REQUESTS:
                reasons.append(
                    f"seq_lens has {requests} requests, expected at most {MAX_PLANNED_REQUESTS}; "
                    "decode in parts"
                )
        else:
            reasons.append(f"seq_lens has shape {list(seq_lens.shape)}, expected [requests]")

    shapeless = query_problems(q)
    reasons += shapeless
    if not shapeless:
        reasons += _query_shape_problems(q, requests, None if tokens else int(q_len))
        if not q.is_contiguous():
            reasons.append(
                f"q is not contiguous (strides {list(q.stride())}); pass a contiguous one"
            )
    if "kv_cache" in tensors:
        reasons += cache_problems(kv_cache, device)
        if isinstance(q, torch.Tensor):
            reasons += _pair_problems(q.dtype, kv_cache.dtype, pairs)
    if "block_table" in tensors:
        rows = block_table.shape[0] if block_table.ndim and requests is None else requests
        reasons += table_problems(block_table, rows or 0, device)
    if "causal_lens" in tensors:
        shape = None if requests is None else (requests,)
        reasons += tensor_problems("causal_lens", causal_lens, device, (torch.int32,), shape)
    reasons += parallel_problems(causal_lens, cp, causal)
    reasons += scale_problems(scale, k_scale, q_scale)
    if not reasons and device.type == "cpu":
        reasons += _content_problems(kv_cache, block_table, seq_lens)
    return reasons


def _integer_problems(name: str, value: object, most: int) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, Integral):
        return [f"{name} is {value!r}, expected an integer from 1 to {most}"]
    return [] if 1 <= int(value) <= most else [f"{name} is {value}, expected 1 to {most}"]


def _query_shape_problems(q: torch.Tensor, requests: int | None, q_len: int | None) -> list[str]:
    tokens, heads, width = q.shape
    wanted, why = "tokens", ""
    if requests is not None and q_len is not None:
        wanted = str(requests * q_len)
        why = f": {requests} requests of q_len {q_len} tokens each"
    reasons = []
    if not 1 <= heads <= MAX_HEADS:
        reasons.append(f"heads is {heads} (dimension 1 of q), expected 1 to {MAX_HEADS}")
    if width != HEAD_DIM or wanted not in ("tokens", str(tokens)):
        reasons.append(f"q has shape {list(q.shape)}, expected [{wanted}, heads, {HEAD_DIM}]{why}")
    return reasons


def _pair_problems(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, pairs: Sequence[DtypePair]
) -> list[str]:
    if (q_dtype, kv_dtype) in pairs:
        return []
    reasons = []
    for name, dtype, known in (
        ("q", q_dtype, [q for q, _ in pairs]),
        ("kv_cache", kv_dtype, [kv for _, kv in pairs]),
    ):
        if dtype not in known:
            expected = " or ".join(str(one) for one in dict.fromkeys(known))
            stored = "; view the bytes of an fp8 cache as its fp8 dtype"
            remedy = stored if dtype == torch.uint8 else ""
            reasons.append(f"{name} is {dtype}, expected {expected}{remedy}")
    if not reasons:
        fitting = " or ".join(str(q) for q, kv in pairs if kv == kv_dtype)
        reasons.append(f"q is {q_dtype} over a kv_cache of {kv_dtype}, expected {fitting}")
    return reasons


def _content_problems(
    kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> list[str]:
    """Lengths and block numbers that would be read outside of the tensors."""
    if seq_lens.numel() == 0:
        return []
    shortest, longest = int(seq_lens.min()), int(seq_lens.max())
    if shortest < 0:
        return [f"seq_lens holds {shortest}, expected lengths of at least 0"]
    blocks, block_size, _ = kv_cache.shape
    columns = block_table.shape[1]
    needed = -(-longest // block_size)
    if needed > columns:
        return [
            f"block_table has {columns} columns, expected at least {needed}: the longest request "
            f"has {longest} keys in blocks of {block_size}"
        ]
    first_keys = torch.arange(needed, device=seq_lens.device) * block_size
    used = first_keys < seq_lens[:, None]
    outside = used & ((block_table[:, :needed] < 0) | (block_table[:, :needed] >= blocks))
    if bool(outside.any()):
        request, column = (int(at) for at in outside.nonzero()[0])
        return [
            f"block_table[{request}, {column}] is {int(block_table[request, column])}, expected a "
            f"block from 0 to {blocks - 1}: request {request} has {int(seq_lens[request])} keys"
        ]
    return []
