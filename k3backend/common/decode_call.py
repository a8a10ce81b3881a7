"""What one call of ``mla_decode`` requires of its arguments, the same for every backend.

A backend adds only the dtype pairs that it takes and the device that it runs on. Nothing here
waits for a device: what the tensors hold is looked at on the CPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from k3backend.common.decode_checks import (
    HEAD_DIM,
    MAX_HEADS,
    MAX_PLANNED_ITEMS,
    MAX_PLANNED_REQUESTS,
    MAX_Q_LEN,
    cache_problems,
    integer_problems,
    not_a_tensor,
    parallel_problems,
    query_problems,
    scale_problems,
    table_problems,
    tensor_problems,
)
from k3backend.common.decode_contents import content_problems

TILE_ROWS = 64
"""Rows of a tile by which the work of a call is counted; no vendor's tiles are more numerous."""
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
    causal: Any,
    causal_lens: Any,
    cp: Any,
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
    reasons = [reason for name, value in given.items() for reason in not_a_tensor(name, value)]
    tensors = {name: value for name, value in given.items() if not not_a_tensor(name, value)}
    first = next((t for t in (q, *given.values()) if isinstance(t, torch.Tensor)), None)
    device = torch.device("cpu") if first is None else first.device

    tokens = integer_problems("q_len", q_len, MAX_Q_LEN)
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
    if device.type == "meta":
        reasons.append("tensors are on the meta device, which holds no data; pass real ones")
    if not isinstance(causal, (bool, np.bool_)):
        reasons.append(f"causal is {causal!r}, expected True or False")
    if not reasons:
        reasons += content_problems(kv_cache, block_table, seq_lens, causal_lens, cp)
    return reasons


def plain_number(value: Any) -> Any:
    """A number of numpy or another library as Python's own; anything else as it is.

    Kernels are launched with Python's numbers, and a numpy float would lower a product's precision.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value)


def _query_shape_problems(q: torch.Tensor, requests: int | None, q_len: int | None) -> list[str]:
    tokens, heads, width = q.shape
    wanted, why = "tokens", ""
    if requests is not None and q_len is not None:
        wanted = str(requests * q_len)
        why = f": {requests} requests of q_len {q_len} tokens each"
    reasons = []
    if not 1 <= heads <= MAX_HEADS:
        reasons.append(
            f"heads is {heads} (dimension 1 of q), expected 1 to {MAX_HEADS}; decode some at a time"
        )
    row_tiles = -(-heads * (q_len or 1) // TILE_ROWS)
    if requests is not None and requests * row_tiles > MAX_PLANNED_ITEMS:
        reasons.append(
            f"seq_lens has {requests} requests of {heads * (q_len or 1)} rows (heads x q_len), "
            f"{row_tiles} tiles of {TILE_ROWS} each, expected at most {MAX_PLANNED_ITEMS} tiles in "
            "all; decode in parts"
        )
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
