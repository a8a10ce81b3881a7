"""A paged KV cache seen as single tokens, which is how AITER's page-1 kernels address it."""

from __future__ import annotations

import torch

from k3backend.common.errors import ShapeError

HEAD_DIM = 576


def token_view(kv_cache: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The cache as AITER's page-1 buffer: [tokens, 1, 1, 576], without a copy.

    Args:
        kv_cache: [blocks, block_size, 576]; tokens of a block are dense, and blocks are a whole
            number of tokens apart (padded pages are allowed).
    Raises:
        ShapeError: the strides cannot be counted in tokens.
    """
    if kv_cache.dim() != 3 or kv_cache.shape[2] != HEAD_DIM:
        raise ShapeError(
            f"kv_cache has shape {tuple(kv_cache.shape)}, expected [blocks, block_size, {HEAD_DIM}]"
        )
    check_tensor("kv_cache", kv_cache, tuple(kv_cache.shape), dtype, device)
    blocks, block_size, _ = kv_cache.shape
    stride_tokens = block_stride_tokens(kv_cache)
    tokens = (blocks - 1) * stride_tokens + block_size if blocks else 0
    return kv_cache.as_strided((tokens, 1, 1, HEAD_DIM), (HEAD_DIM, HEAD_DIM, HEAD_DIM, 1))


def block_stride_tokens(kv_cache: torch.Tensor) -> int:
    """Distance of two blocks of a [blocks, block_size, 576] cache, in tokens.

    Raises:
        ShapeError: it is no whole number of tokens, or tokens of a block are not dense.
    """
    block_stride, token_stride, unit = kv_cache.stride()
    if unit != 1 or token_stride != HEAD_DIM or block_stride % HEAD_DIM:
        raise ShapeError(
            f"kv_cache has strides {kv_cache.stride()}, expected (a multiple of {HEAD_DIM}, "
            f"{HEAD_DIM}, 1): AITER counts in tokens; take the folded kernel for this layout"
        )
    return block_stride // HEAD_DIM


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ShapeError unless the tensor has exactly this shape, dtype and device."""
    if tuple(tensor.shape) != size or tensor.dtype != dtype or tensor.device != device:
        raise ShapeError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected {dtype} "
            f"{size} on {device}; convert it before the call"
        )
