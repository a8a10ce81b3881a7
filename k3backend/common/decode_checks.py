"""What a balanced decode requires of its arguments: each function lists every broken limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    if tensor.device.type != device.type or (
        device.index is not None and tensor.device.index != device.index
    ):
        reasons.append(f"{name} is on {tensor.device}, expected {device}")
    return reasons


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
    if kv_cache.device.type != device.type:
        reasons.append(f"kv_cache is on {kv_cache.device}, expected {device}")
    return reasons


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
    if block_table.device.type != device.type:
        reasons.append(f"block_table is on {block_table.device}, expected {device}")
    return reasons


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter; False where triton is missing."""
    try:
        from k3backend.common.kernels.launch import INTERPRETING
    except ImportError:
        return False
    return INTERPRETING


def scale_problems(scale: float, k_scale: float) -> list[str]:
    """Scales above 0: the softmax takes its maximum before scaling."""
    return [
        f"{name} is {value}, expected a finite number above 0"
        for name, value in (("scale", scale), ("k_scale", k_scale))
        if not 0 < value < math.inf
    ]


def parallel_problems(
    causal_lens: torch.Tensor | None, cp: tuple[int, int, int], causal: bool
) -> list[str]:
    """A possible (world, rank, interleave), with global lengths where rows need them."""
    world, rank, interleave = cp
    reasons = []
    if world < 1 or not 0 <= rank < world or interleave < 1:
        reasons.append(f"cp is {cp}, expected (world >= 1, 0 <= rank < world, interleave >= 1)")
    if causal_lens is None and world > 1 and causal:
        reasons.append(
            f"cp world is {world} and causal_lens is None; pass the global lengths, local ones do "
            "not tell what a query token sees"
        )
    return reasons


def dense_problems(
    q: object,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    k_scale: float,
    q_len: int,
    causal: bool,
    causal_lens: torch.Tensor | None,
    cp: tuple[int, int, int],
) -> list[str]:
    """What the torch decode requires: shapes and scales, any float dtype, any strides."""
    reasons = []
    requests = seq_lens.shape[0] if seq_lens.ndim == 1 else -1
    if requests < 0:
        reasons.append(f"seq_lens has shape {list(seq_lens.shape)}, expected [requests]")
    if q_len < 1:
        reasons.append(f"q_len is {q_len}, expected at least 1")
    if not isinstance(q, torch.Tensor):
        reasons.append(f"q is a {type(q).__name__}, expected one tensor [tokens, heads, 576]")
    elif q.ndim != 3 or q.shape[2] != HEAD_DIM or q.shape[0] != requests * q_len:
        reasons.append(
            f"q has shape {list(q.shape)}, expected [{requests * q_len}, heads, {HEAD_DIM}]: "
            f"{requests} requests of q_len {q_len} tokens each"
        )
    if kv_cache.ndim != 3 or kv_cache.shape[2] != HEAD_DIM:
        reasons.append(
            f"kv_cache has shape {list(kv_cache.shape)}, expected [blocks, block_size, {HEAD_DIM}]"
        )
    if block_table.ndim != 2 or block_table.shape[0] != requests:
        reasons.append(
            f"block_table has shape {list(block_table.shape)}, expected [{requests}, columns]"
        )
    if causal_lens is not None and tuple(causal_lens.shape) != (requests,):
        reasons.append(f"causal_lens has shape {list(causal_lens.shape)}, expected [{requests}]")
    return reasons + scale_problems(scale, k_scale) + parallel_problems(causal_lens, cp, causal)
