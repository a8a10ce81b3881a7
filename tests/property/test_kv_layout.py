"""Over random specs and layouts: no two layers share a byte, and no view leaves its buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3backend.common.errors import LayoutError
from k3backend.common.kv_layout import (
    KVCacheLayout,
    TensorGeometry,
    layout_strides_bytes,
    tensor_geometry,
)
from k3backend.common.kv_spec import FullAttentionSpec, KVCacheSpec, KVCacheTensor


@st.composite
def specs(draw: st.DrawFn) -> FullAttentionSpec:
    """A page of at most 4 heads x 8 states x 16 B, padded by at most two cells, or not."""
    small = st.integers(1, 4)
    fields = {
        "block_size": draw(st.sampled_from([1, 2, 4, 6, 8])),
        "num_kv_heads": draw(small),
        "head_size": draw(small),
        "dtype": draw(st.sampled_from(["uint8", "bfloat16"])),
    }
    spec = FullAttentionSpec(**fields)
    padding = draw(st.integers(0, 16))
    if not padding or draw(st.booleans()):
        return spec
    return FullAttentionSpec(**fields, page_size_padded=spec.page_size_bytes + padding)


def _addresses(geometry: TensorGeometry, layer: int) -> np.ndarray:
    """Every byte that a layer's view reaches, by the definition of strides."""
    grids = [
        np.arange(length) * stride
        for length, stride in zip(geometry.shape[1:], geometry.strides[1:], strict=True)
    ]
    total = geometry.offset + layer * geometry.strides[0]
    for grid in grids:
        total = np.add.outer(total, grid)
    return total.reshape(-1)


def _check_apart(geometries: list[TensorGeometry], size: int) -> None:
    """All bytes of all layers are different and inside the buffer."""
    seen = np.concatenate(
        [
            _addresses(geometry, layer)
            for geometry in geometries
            for layer in range(geometry.shape[0])
        ]
    )
    assert seen.min() >= 0
    assert seen.max() < size
    assert np.unique(seen).size == seen.size


@given(
    spec=specs(),
    layout=st.sampled_from(list(KVCacheLayout)),
    blocks=st.integers(1, 5),
    layers=st.integers(1, 4),
    split=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=400, deadline=None)
def test_one_tensor_holds_its_layers_apart(
    spec: FullAttentionSpec, layout: KVCacheLayout, blocks: int, layers: int, split: int
) -> None:
    size = layers * blocks * spec.page_size_bytes
    cuts_pages = not layout.is_block_compact and spec.num_heads > 1
    if spec.page_size_padded is not None and cuts_pages:
        with pytest.raises(LayoutError):
            layout_strides_bytes(spec, blocks, layers, layout)
        return
    strides = layout_strides_bytes(spec, blocks, layers, layout)
    tensor = KVCacheTensor(
        size=size,
        layers=[str(number) for number in range(layers)],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    geometry = tensor_geometry(spec, blocks, layout, tensor)
    _check_apart([geometry], size)
    assert geometry.end <= size

    if spec.block_size % split or split == 1:
        return
    dense = spec.page_size_padded is None and strides[1] == spec.real_page_size_bytes
    if not dense or cuts_pages:
        with pytest.raises(LayoutError):
            tensor_geometry(spec, blocks, layout, tensor, spec.block_size // split)
        return
    kernel = tensor_geometry(spec, blocks, layout, tensor, spec.block_size // split)
    assert kernel.shape[1] == blocks * split
    _check_apart([kernel], size)


@given(
    members=st.lists(st.tuples(specs(), st.integers(1, 3)), min_size=1, max_size=3),
    layout=st.sampled_from([KVCacheLayout.BLHNC, KVCacheLayout.BLNHC]),
    blocks=st.integers(1, 4),
    slack=st.integers(0, 32),
)
@settings(max_examples=300, deadline=None)
def test_a_packed_group_of_several_page_sizes_holds_its_layers_apart(
    members: list[tuple[KVCacheSpec, int]], layout: KVCacheLayout, blocks: int, slack: int
) -> None:
    """Block-outermost: a block holds every layer's page, one tensor per page size."""
    pool_block = sum(spec.page_size_bytes * layers for spec, layers in members) + slack
    size = pool_block * blocks
    geometries = []
    offset = 0
    for spec, layers in members:
        tensor = KVCacheTensor(
            size=size,
            layers=[str(number) for number in range(layers)],
            layer_stride=spec.page_size_bytes,
            block_stride=pool_block,
            offset=offset,
        )
        geometries.append(tensor_geometry(spec, blocks, layout, tensor))
        offset += spec.page_size_bytes * layers
    _check_apart(geometries, size)
