"""Tensors over the planned bytes: one int8 buffer, one [B, H, N, C] view per layer.

Imports torch; planning does not need this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from k3backend.common.errors import InputError, LayoutError, ShapeError
from k3backend.common.kv_dtype import DType
from k3backend.common.kv_layout import KVCacheLayout, TensorGeometry, tensor_geometry
from k3backend.common.kv_spec import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from k3backend.common.kv_spec import KVCacheConfig, KVCacheSpec, KVCacheTensor


def layer_views(
    buffer: torch.Tensor,
    spec: KVCacheSpec,
    num_blocks: int,
    layout: KVCacheLayout,
    tensor: KVCacheTensor,
    kernel_block_size: int | None = None,
) -> list[torch.Tensor]:
    """Views of a tensor's layers, in the tensor's layer order.

    Args:
        buffer: [tensor.size or more] int8, contiguous; views alias it, nothing is copied.
        spec, num_blocks, layout, tensor, kernel_block_size: as for tensor_geometry.
    Returns:
        One [B, H, N, C] view per layer, of the spec's dtype; int8 bytes for state specs, which
        hold several dtypes.
    Raises:
        ShapeError: the buffer's dtype, rank, stride or size.
        LayoutError: see tensor_geometry; also bytes that are no whole elements of the dtype.
    """
    geometry = tensor_geometry(spec, num_blocks, layout, tensor, kernel_block_size)
    _check_buffer(buffer, tensor.size)
    dtype: DType | None = getattr(spec, "dtype", None)
    if dtype is not None:
        _check_elements(geometry, dtype, tensor)
    layers = torch.as_strided(
        buffer, geometry.shape, geometry.strides, buffer.storage_offset() + geometry.offset
    )
    views = list(layers.unbind(0))
    return views if dtype is None else [view.view(dtype.torch) for view in views]


def config_views(
    config: KVCacheConfig,
    layout: KVCacheLayout,
    kernel_block_sizes: Sequence[int | None] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Allocate a config's buffer, zeroed, and view it per layer. Groups alias the same bytes.

    Args:
        kernel_block_sizes: tokens of a kernel block per group; None splits nothing.
        device: where the buffer is made.
    Returns:
        Layer name -> view; layers without shaped views (HiSparse) get the whole buffer.
    Raises:
        InputError: one kernel block size per group is expected.
        LayoutError: tensors of different buffers, or as for layer_views.
    """
    if kernel_block_sizes is not None and len(kernel_block_sizes) != len(config.kv_cache_groups):
        raise InputError(
            f"kernel_block_sizes has {len(kernel_block_sizes)} entries, expected one per group "
            f"({len(config.kv_cache_groups)})"
        )
    sizes = {tensor.size for tensor in config.kv_cache_tensors}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise LayoutError(
            f"tensors name buffers of {', '.join(map(str, sorted(sizes)))} B, expected one; "
            "place every group in the one pool"
        )
    buffer = torch.zeros(sizes.pop(), dtype=torch.int8, device=device)
    views: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        group_id, spec = _spec_of(config, tensor)
        if not spec.has_layer_views:
            views.update((name, buffer) for name in tensor.layers)
            continue
        kernel_block_size = kernel_block_sizes[group_id] if kernel_block_sizes else None
        views.update(
            zip(
                tensor.layers,
                layer_views(
                    buffer,
                    spec,
                    config.num_blocks_of(tensor),
                    layout,
                    tensor,
                    kernel_block_size,
                ),
                strict=True,
            )
        )
    return views


def _spec_of(config: KVCacheConfig, tensor: KVCacheTensor) -> tuple[int, KVCacheSpec]:
    """Group and spec of a tensor's layers."""
    layer = tensor.layers[0]
    for group_id, group in enumerate(config.kv_cache_groups):
        if layer in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[layer]
            return group_id, spec
    raise LayoutError(f"layer {layer} of a tensor is in no group; plan its group")


def _check_buffer(buffer: torch.Tensor, size_bytes: int) -> None:
    if buffer.dtype != torch.int8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ShapeError(
            f"buffer is {buffer.dtype} {list(buffer.shape)}, expected int8 [bytes], contiguous; "
            "allocate one flat buffer"
        )
    if buffer.numel() < size_bytes:
        raise ShapeError(
            f"buffer has {buffer.numel()} B, expected {size_bytes}; allocate the tensor's size"
        )


def _check_elements(geometry: TensorGeometry, dtype: DType, tensor: KVCacheTensor) -> None:
    """Every outer stride, the offset and C must be whole elements, or no typed view exists."""
    steps = {
        "offset": geometry.offset,
        "content": geometry.shape[4],
        **dict(zip(("layer stride", "block stride", "H", "N"), geometry.strides[:4], strict=True)),
    }
    for name, step in steps.items():
        if step % dtype.itemsize:
            raise LayoutError(
                f"layers {tensor.layers[0]} to {tensor.layers[-1]}: {name} of {step} B is no whole "
                f"number of {dtype.name} elements of {dtype.itemsize} B; pad it to a multiple"
            )
