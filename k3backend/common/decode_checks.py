"""What a balanced decode requires of its arguments: each function lists every broken limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch

HEAD_DIM = 576
MAX_HEADS = 128
MAX_Q_LEN = 64
MAX_PLANNED_REQUESTS = 1024
MAX_PLANNED_ITEMS = 16384
"""Requests x row tiles of one plan: the device planner holds an item in registers, 64 per lane."""


def shape_problems(heads: int, q_len: int, max_requests: int = 1) -> list[str]:
    """Every limit that a shape breaks."""
    limits = (
        ("heads", heads, MAX_HEADS),
        ("q_len", q_len, MAX_Q_LEN),
        ("max_requests", max_requests, MAX_PLANNED_REQUESTS),
    )
    return [
        f"{name} is {value}, expected 1 to {most}"
        for name, value, most in limits
        if not 1 <= value <= most
    ]


def most_planned_requests(heads: int, q_len: int, row_tiles: int) -> int:
    """Most requests that one launch plans; 0 for a shape that cannot be decoded."""
    if shape_problems(heads, q_len):
        return 0
    return min(MAX_PLANNED_REQUESTS, MAX_PLANNED_ITEMS // row_tiles)


def query_problems(q: object) -> list[str]:
    """A query that is one tensor of three dimensions."""
    if not isinstance(q, torch.Tensor):
        return [
            f"q is a {type(q).__name__}, expected one tensor [tokens, heads, {HEAD_DIM}]; "
            "concatenate latent and rope parts"
        ]
    if q.ndim != 3:
        return [f"q has shape {list(q.shape)}, expected [tokens, heads, {HEAD_DIM}]"]
    return []


def tensor_problems(
    name: str,
    tensor: torch.Tensor,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    shape: tuple[int, ...] | None,
) -> list[str]:
    """Shape (where given), dtype, contiguity and device of one tensor."""
    reasons = []
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


def _place_problems(name: str, tensor: torch.Tensor, device: torch.device) -> list[str]:
    """A tensor that is on another device; ``device`` without an index is any of its kind."""
    found = tensor.device
    if found.type == device.type and device.index in (None, found.index):
        return []
    return [f"{name} is on {found}, expected {device}"]


def cache_problems(kv_cache: torch.Tensor, device: torch.device) -> list[str]:
    """A paged cache [blocks, block_size, 576] whose last dimension is contiguous."""
    if kv_cache.ndim != 3 or kv_cache.shape[-1] != HEAD_DIM or kv_cache.shape[1] < 1:
        return [
            f"kv_cache has shape {list(kv_cache.shape)}, expected [blocks, block_size, {HEAD_DIM}]"
        ]
    reasons = []
    if kv_cache.stride(2) != 1:
        reasons.append(
            f"kv_cache has strides {list(kv_cache.stride())}, expected a contiguous last dimension"
        )
    return reasons + _place_problems("kv_cache", kv_cache, device)


def table_problems(block_table: torch.Tensor, requests: int, device: torch.device) -> list[str]:
    """A block table [requests, columns] int32 whose columns are contiguous."""
    reasons = []
    if block_table.ndim != 2 or block_table.shape[0] != requests:
        return [f"block_table has shape {list(block_table.shape)}, expected [{requests}, columns]"]
    if block_table.dtype != torch.int32:
        reasons.append(f"block_table is {block_table.dtype}, expected torch.int32")
    if block_table.stride(1) != 1:
        reasons.append(
            f"block_table has strides {list(block_table.stride())}, expected contiguous columns"
        )
    return reasons + _place_problems("block_table", block_table, device)


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
    """Scales above 0: the softmax takes its maximum before scaling."""
    reasons = []
    for name, value in (("scale", scale), ("q_scale", q_scale), ("k_scale", k_scale)):
        if isinstance(value, bool) or not isinstance(value, Real):
            remedy = "; pass its item()" if isinstance(value, torch.Tensor) else ""
            reasons.append(f"{name} is a {type(value).__name__}, expected a number{remedy}")
        elif not 0 < float(value) < math.inf:
            reasons.append(f"{name} is {value}, expected a finite number above 0")
    return reasons


def parallel_problems(causal_lens: object, cp: object, causal: bool) -> list[str]:
    """A possible (world, rank, interleave), with global lengths where rows need them."""
    expected = "expected (world >= 1, 0 <= rank < world, interleave >= 1)"
    if (
        not isinstance(cp, tuple | list)
        or len(cp) != 3
        or not all(isinstance(value, Integral) for value in cp)
    ):
        return [f"cp is {cp!r}, {expected}, three integers"]
    world, rank, interleave = cp
    reasons = []
    if world < 1 or not 0 <= rank < world or interleave < 1:
        reasons.append(f"cp is {cp}, {expected}")
    if causal_lens is None and world > 1 and causal:
        reasons.append(
            f"cp world is {world} and causal_lens is None; pass the global lengths, local ones do "
            "not tell what a query token sees"
        )
    return reasons
