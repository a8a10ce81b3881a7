"""What a balanced decode requires of its arguments: each function lists every broken limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch

HEAD_DIM = 576
MAX_HEADS = 128
MAX_Q_LEN = 64
MAX_PLANNED_REQUESTS = 1024
MAX_PLANNED_ITEMS = 16384
"""Requests x row tiles of one plan: the device planner holds an item in registers, 64 per lane."""
MAX_INT32 = 2**31 - 1
SMALLEST_SCALE, LARGEST_SCALE = 1e-30, 1e30
"""Scales whose scores stay inside float32 (3.4e38): 576 products of two e4m3 values, each at most
448, add up to 1.2e8."""


def shape_problems(heads: object, q_len: object, max_requests: object = 1) -> list[str]:
    """Every limit that a shape breaks."""
    limits = (
        ("heads", heads, MAX_HEADS),
        ("q_len", q_len, MAX_Q_LEN),
        ("max_requests", max_requests, MAX_PLANNED_REQUESTS),
    )
    return [
        reason for name, value, most in limits for reason in integer_problems(name, value, most)
    ]


def integer_problems(name: str, value: object, most: int) -> list[str]:
    """An integer from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return [f"{name} is {value!r}, expected an integer from 1 to {most}"]
    return [] if 1 <= int(value) <= most else [f"{name} is {value}, expected 1 to {most}"]


def most_planned_requests(row_tiles: int) -> int:
    """Most requests that one launch plans."""
    return min(MAX_PLANNED_REQUESTS, MAX_PLANNED_ITEMS // row_tiles)


def not_a_tensor(name: str, value: object) -> list[str]:
    """A value that is no tensor, or a nested or sparse one."""
    if not isinstance(value, torch.Tensor):
        return [f"{name} is a {type(value).__name__}, expected a torch.Tensor"]
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else str(value.layout)
        return [f"{name} is a {kind} tensor, expected a dense one"]
    return []


def query_problems(q: object) -> list[str]:
    """A query that is one tensor of three dimensions."""
    if not isinstance(q, torch.Tensor):
        return [
            f"q is a {type(q).__name__}, expected one tensor [tokens, heads, {HEAD_DIM}]; "
            "concatenate latent and rope parts"
        ]
    reasons = not_a_tensor("q", q)
    if not reasons and q.ndim != 3:
        reasons.append(f"q has shape {list(q.shape)}, expected [tokens, heads, {HEAD_DIM}]")
    return reasons


def tensor_problems(
    name: str,
    tensor: Any,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    shape: tuple[int, ...] | None,
) -> list[str]:
    """Shape (where given), dtype, contiguity and device of one tensor."""
    reasons = not_a_tensor(name, tensor)
    if reasons:
        return reasons
    if shape is not None and tuple(tensor.shape) != shape:
        reasons.append(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        reasons.append(f"{name} is {tensor.dtype}, expected {expected}")
    if not tensor.is_contiguous():
        reasons.append(
            f"{name} is not contiguous (strides {list(tensor.stride())}); pass a contiguous one"
        )
    return reasons + _place_problems(name, tensor, device)


def buffer_problems(
    name: str, buffer: Any, needed: int, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """A flat buffer of at least ``needed`` elements."""
    reasons = tensor_problems(name, buffer, device, (dtype,), None)
    if not isinstance(buffer, torch.Tensor):
        return reasons
    if buffer.ndim != 1 or buffer.shape[0] < needed:
        source = "workspace_bytes" if name == "workspace" else f"{name}_len entries"
        reasons.append(
            f"{name} has shape {list(buffer.shape)}, expected at least [{needed}]; allocate it "
            f"with {source}"
        )
    return reasons


def _place_problems(name: str, tensor: torch.Tensor, device: torch.device) -> list[str]:
    """A tensor that is on another device; ``device`` without an index is any of its kind."""
    found = tensor.device
    if found.type == device.type and device.index in (None, found.index):
        return []
    return [f"{name} is on {found}, expected {device}"]


def cache_problems(kv_cache: Any, device: torch.device) -> list[str]:
    """A paged cache [blocks, block_size, 576] whose last dimension is contiguous.

    Blocks may be any distance apart; what is inside a block is addressed with 32 bits.
    """
    reasons = not_a_tensor("kv_cache", kv_cache)
    if reasons:
        return reasons
    if kv_cache.ndim != 3 or kv_cache.shape[-1] != HEAD_DIM or kv_cache.shape[1] < 1:
        return [
            f"kv_cache has shape {list(kv_cache.shape)}, expected [blocks, block_size, {HEAD_DIM}]"
        ]
    if kv_cache.stride(2) != 1:
        reasons.append(
            f"kv_cache has strides {list(kv_cache.stride())}, expected a contiguous last dimension"
        )
    block_elements = (kv_cache.shape[1] - 1) * kv_cache.stride(1) + HEAD_DIM
    if block_elements > MAX_INT32:
        reasons.append(
            f"kv_cache has {kv_cache.shape[1]} rows {kv_cache.stride(1)} elements apart: a block "
            f"spans {block_elements} elements, expected at most {MAX_INT32}; use smaller blocks or "
            "rows that are closer together"
        )
    return reasons + _place_problems("kv_cache", kv_cache, device)


def table_problems(block_table: Any, requests: int, device: torch.device) -> list[str]:
    """A block table [requests, columns] int32 whose columns are contiguous."""
    reasons = not_a_tensor("block_table", block_table)
    if reasons:
        return reasons
    if block_table.ndim != 2 or block_table.shape[0] != requests:
        return [f"block_table has shape {list(block_table.shape)}, expected [{requests}, columns]"]
    if block_table.dtype != torch.int32:
        reasons.append(f"block_table is {block_table.dtype}, expected torch.int32")
    if block_table.stride(1) != 1:
        reasons.append(
            f"block_table has strides {list(block_table.stride())}, expected contiguous columns"
        )
    return reasons + _place_problems("block_table", block_table, device)


def device_name_problems(device: object) -> list[str]:
    """Something that torch does not know as a device."""
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        return [f'device is {device!r}, expected a torch.device or its name, such as "cuda:0"']
    return []


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter; False where triton is missing."""
    try:
        from k3backend.common.kernels.launch import INTERPRETING
    except ImportError:
        return False
    return INTERPRETING


def device_problems(device: torch.device) -> list[str]:
    """Why kernels cannot run on a device."""
    if device.type != "cpu" or interpreting():
        return []
    return [
        "tensors are on the CPU, where Triton kernels run in its interpreter alone; set "
        "TRITON_INTERPRET=1 before triton is imported or use the reference backend"
    ]


def scale_problems(scale: object, k_scale: object, q_scale: object = 1.0) -> list[str]:
    """Scales above 0 (the softmax takes its maximum before scaling) that float32 can work with."""
    reasons = []
    product = 1.0
    for name, value in (("scale", scale), ("q_scale", q_scale), ("k_scale", k_scale)):
        if isinstance(value, bool) or not isinstance(value, Real):
            remedy = "; pass its item()" if isinstance(value, torch.Tensor) else ""
            reasons.append(f"{name} is a {type(value).__name__}, expected a number{remedy}")
            continue
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        product *= number
        if not 0 < number < math.inf:
            reasons.append(f"{name} is {_short(value)}, expected a finite number above 0")
        elif not SMALLEST_SCALE <= number <= LARGEST_SCALE:
            reasons.append(
                f"{name} is {value}, expected {SMALLEST_SCALE} to {LARGEST_SCALE}: float32 scores "
                "would overflow or vanish"
            )
    if not reasons and not SMALLEST_SCALE <= product <= LARGEST_SCALE:
        reasons.append(
            f"scale x q_scale x k_scale is {product}, expected {SMALLEST_SCALE} to "
            f"{LARGEST_SCALE}: float32 scores would overflow or vanish"
        )
    return reasons


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


def parallel_problems(causal_lens: object, cp: object, causal: bool) -> list[str]:
    """A possible (world, rank, interleave), with global lengths where rows need them."""
    expected = "expected (world >= 1, 0 <= rank < world, interleave >= 1)"
    if (
        not isinstance(cp, tuple | list)
        or len(cp) != 3
        or not all(isinstance(value, Integral) and not isinstance(value, bool) for value in cp)
    ):
        return [f"cp is {cp!r}, {expected}, three integers"]
    world, rank, interleave = cp
    reasons = []
    if world < 1 or not 0 <= rank < world or interleave < 1:
        reasons.append(f"cp is {tuple(cp)}, {expected}")
    elif world * interleave > MAX_INT32:
        reasons.append(
            f"cp is {tuple(cp)}: world x interleave is {world * interleave}, expected at most "
            f"{MAX_INT32} key positions; give the interleave in tokens"
        )
    if causal_lens is None and world > 1 and causal:
        reasons.append(
            f"cp world is {world} and causal_lens is None; pass the global lengths, local ones do "
            "not tell what a query token sees"
        )
    return reasons
