"""Where the bytes of a KV cache lie: six physical orders of the logical axes [L, B, H, N, C].

L is the layer within a tensor, B the block, H the head, N the state within a block, C the bytes of
one head's state. A layout says in which order the axes lie in memory; strides here are in bytes and
in logical order. Worked example, LBNHC, two layers, three blocks, two heads, four states, 8 B::

    shape   L 2, B 3, H 2, N 4, C 8
    strides C 1, H 8, N 16, B 64, L 192      (innermost first: C, H, N, B, L)

A padded page puts the padding behind a page's last byte, so the page must be one run of bytes:
nothing but L, B and axes of length 1 may lie outside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from k3backend.common.errors import InputError, LayoutError

if TYPE_CHECKING:
    from k3backend.common.kv_spec import KVCacheSpec, KVCacheTensor

AXES = "LBHNC"
_L, _B, _H, _N, _C = range(5)
Bytes5 = tuple[int, int, int, int, int]


class KVCacheLayout(Enum):
    """A physical order: the logical axes, outermost first."""

    LBHNC = (_L, _B, _H, _N, _C)
    LBNHC = (_L, _B, _N, _H, _C)
    LHBNC = (_L, _H, _B, _N, _C)
    BLHNC = (_B, _L, _H, _N, _C)
    BLNHC = (_B, _L, _N, _H, _C)
    BHLNC = (_B, _H, _L, _N, _C)

    @classmethod
    def parse(cls, name: str) -> KVCacheLayout:
        """The layout of this name. Raises InputError that lists the names."""
        try:
            return cls[name]
        except KeyError:
            raise InputError(
                f"--layout is {name!r}, expected one of {', '.join(cls.__members__)}; choose one"
            ) from None

    @property
    def stride_order(self) -> Bytes5:
        """The logical axes in physical order, outermost first."""
        return self.value

    @property
    def layer_view_order(self) -> tuple[int, ...]:
        """The same for one layer's [B, H, N, C] view."""
        return tuple(axis - 1 for axis in self.value if axis != _L)

    @property
    def is_layer_compact(self) -> bool:
        """Whether a layer's bytes are one run: L is outermost."""
        return self.value[0] == _L

    @property
    def is_block_contiguous(self) -> bool:
        """Whether [H, N, C] lies in that order within a block."""
        return self.value[-3:] == (_H, _N, _C)

    @property
    def is_block_compact(self) -> bool:
        """Whether a page's bytes are one run: L and B are the two outermost axes."""
        return set(self.value[:2]) == {_L, _B}

    @property
    def is_block_outermost(self) -> bool:
        """Whether all layers of a block lie together: B is outermost."""
        return self.value[0] == _B


BLOCK_COMPACT_NAMES = ", ".join(layout.name for layout in KVCacheLayout if layout.is_block_compact)
LAYER_COMPACT_NAMES = ", ".join(
    layout.name for layout in KVCacheLayout if layout.is_layer_compact and layout.is_block_compact
)


def layer_shape_bytes(
    spec: KVCacheSpec, num_blocks: int, kernel_block_size: int | None = None
) -> tuple[int, int, int, int]:
    """Logical shape [B, H, N, C] of one layer, C in bytes.

    Args:
        num_blocks: blocks of the block table.
        kernel_block_size: tokens of a kernel block, where blocks are split; B then counts these.
    Raises:
        InputError: ``num_blocks`` is no positive integer.
        LayoutError: kernel blocks of this size do not make up a block.
    """
    _check_count("num_blocks", num_blocks)
    ratio = kernel_blocks_per_block(spec, kernel_block_size)
    tokens = spec.block_size // ratio
    return (
        num_blocks * ratio,
        spec.num_heads,
        spec.get_num_kernel_states(tokens),
        spec.state_content_size_bytes,
    )


def kernel_blocks_per_block(spec: KVCacheSpec, kernel_block_size: int | None) -> int:
    """Kernel blocks in one block: 1 where ``kernel_block_size`` is None or the block itself.

    Raises:
        LayoutError: the size does not divide the block, or cuts a stored state apart.
    """
    if kernel_block_size is None:
        return 1
    _check_count("kernel_block_size", kernel_block_size)
    if spec.block_size % kernel_block_size:
        raise LayoutError(
            f"kernel blocks of {kernel_block_size} tokens do not divide the block of "
            f"{spec.block_size}; take a block size that is a multiple of {kernel_block_size}"
        )
    ratio: int = spec.block_size // kernel_block_size
    states = spec.get_num_kernel_states(kernel_block_size)
    if states * ratio != spec.num_states:
        raise LayoutError(
            f"{ratio} kernel blocks of {kernel_block_size} tokens hold {states} states each, the "
            f"block of {spec.block_size} tokens holds {spec.num_states}; take kernel blocks of "
            f"{spec.block_size} tokens"
        )
    return ratio


def layout_strides_bytes(
    spec: KVCacheSpec,
    num_blocks: int,
    num_layers: int,
    layout: KVCacheLayout,
    kernel_block_size: int | None = None,
    fixed_strides: Sequence[int | None] = (None,) * 5,
) -> Bytes5:
    """Byte strides in logical order [L, B, H, N, C].

    Args:
        num_blocks, kernel_block_size: as for layer_shape_bytes.
        num_layers: layers of the tensor.
        fixed_strides: a stride to take as given instead of the dense one, per logical axis.
    Raises:
        LayoutError: the layout cannot hold the padded page, or a padded page is to be split.
    """
    _check_count("num_layers", num_layers)
    fixed = _fixed_strides(fixed_strides)
    shape = (num_layers, *layer_shape_bytes(spec, num_blocks, kernel_block_size))
    order = layout.stride_order
    padded_page: int | None = getattr(spec, "page_size_padded", None)
    innermost_page_axis = max(order.index(_L), order.index(_B))
    if padded_page is not None:
        _check_padded_page(spec, padded_page, shape, layout, kernel_block_size)

    strides = [0] * 5
    stride = 1
    for position in reversed(range(5)):
        axis = order[position]
        if padded_page is not None and position == innermost_page_axis:
            stride = max(stride, padded_page)
            if stride % padded_page:
                raise LayoutError(
                    f"fixed strides give a page {stride} B, expected a multiple of the padded "
                    f"page of {padded_page} B; correct the strides of H, N and C"
                )
        strides[axis] = fixed[axis] or stride
        stride = strides[axis] * shape[axis]
    return (strides[0], strides[1], strides[2], strides[3], strides[4])


@dataclass(frozen=True, slots=True)
class TensorGeometry:
    """How one KVCacheTensor's layers lie in the backing buffer.

    Attributes:
        shape, strides: logical [L, B, H, N, C], both in bytes along C; B counts kernel blocks
            where blocks are split.
        offset: byte of layer 0's block 0.
    """

    shape: Bytes5
    strides: Bytes5
    offset: int

    @property
    def end(self) -> int:
        """One past the last byte that a view reaches."""
        reach = sum(
            (length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)
        )
        return self.offset + reach + 1


def tensor_geometry(
    spec: KVCacheSpec,
    num_blocks: int,
    layout: KVCacheLayout,
    tensor: KVCacheTensor,
    kernel_block_size: int | None = None,
) -> TensorGeometry:
    """Shape and strides of a tensor's layers.

    Args:
        spec: the spec of each of the tensor's layers.
        num_blocks: blocks of the block table.
        tensor: placement: layer and block stride, offset and size, in bytes.
        kernel_block_size: tokens of a kernel block, where the group's backends need smaller ones.
    Raises:
        LayoutError: a block that is no dense page is to be split, the layout cannot hold the
            padded page, or a view would leave the buffer.
    """
    ratio = kernel_blocks_per_block(spec, kernel_block_size)
    block_stride = tensor.block_stride
    if ratio > 1:
        _, heads, states, content = layer_shape_bytes(spec, 1)
        if heads > 1 and not layout.is_block_compact:
            # The block may be dense all the same (BHLNC, one layer); kernel blocks would then
            # have to move the heads, and with a fixed layer stride they overlap.
            raise LayoutError(
                f"layout {layout.name} cuts pages apart along H, so blocks of {heads} heads "
                f"cannot be split into kernel blocks of {kernel_block_size} tokens; take a block "
                f"size of {kernel_block_size} tokens or {LAYER_COMPACT_NAMES}"
            )
        dense_page = heads * states * content
        if block_stride != dense_page:
            raise LayoutError(
                f"layout {layout.name} places blocks of {spec.block_size} tokens {block_stride} B "
                f"apart, their dense page is {dense_page} B, so they cannot be split into "
                f"{ratio} kernel blocks of {kernel_block_size} tokens; take a block size of "
                f"{kernel_block_size} tokens, or unpadded pages in {LAYER_COMPACT_NAMES}"
            )
        block_stride //= ratio
    strides = layout_strides_bytes(
        spec,
        num_blocks,
        len(tensor.layers),
        layout,
        kernel_block_size,
        (tensor.layer_stride, block_stride, None, None, None),
    )
    blocks, heads, states, content = layer_shape_bytes(spec, num_blocks, kernel_block_size)
    geometry = TensorGeometry(
        (len(tensor.layers), blocks, heads, states, content), strides, tensor.offset
    )
    if tensor.offset < 0 or geometry.end > tensor.size:
        raise LayoutError(
            f"layers {tensor.layers[0]} to {tensor.layers[-1]} reach bytes {tensor.offset} to "
            f"{geometry.end} of a buffer of {tensor.size} B in layout {layout.name}; correct the "
            "tensor's strides, offset or size"
        )
    return geometry


def _check_padded_page(
    spec: KVCacheSpec,
    padded_page: int,
    shape: Bytes5,
    layout: KVCacheLayout,
    kernel_block_size: int | None,
) -> None:
    if kernel_block_size not in (None, spec.block_size):
        raise LayoutError(
            f"a page padded to {padded_page} B cannot be split into kernel blocks of "
            f"{kernel_block_size} tokens; take a block size of {kernel_block_size} tokens or a "
            "block whose page needs no padding"
        )
    order = layout.stride_order
    outer = order[: max(order.index(_L), order.index(_B)) + 1]
    if math.prod(shape[axis] for axis in outer) != shape[_L] * shape[_B]:
        apart = [AXES[axis] for axis in outer if axis not in (_L, _B) and shape[axis] != 1]
        raise LayoutError(
            f"layout {layout.name} cuts pages apart along {', '.join(apart)} and cannot hold one "
            f"padded to {padded_page} B; take {BLOCK_COMPACT_NAMES}"
        )


def _fixed_strides(fixed_strides: Sequence[int | None]) -> tuple[int | None, ...]:
    fixed = tuple(fixed_strides)
    if len(fixed) != 5 or any(
        stride is not None and (type(stride) is not int or stride < 1) for stride in fixed
    ):
        raise InputError(
            f"fixed_strides is {fixed!r}, expected five positive byte counts or None, for "
            f"{', '.join(AXES)}"
        )
    return fixed


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InputError(f"{name} is {value!r}, expected an integer >= 1; correct it")
