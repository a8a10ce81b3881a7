"""Views over one buffer: what is written through a view lies where the geometry says."""

from __future__ import annotations

import pytest
import torch

from k3backend.common.errors import InputError, LayoutError, ShapeError
from k3backend.common.kv_layout import KVCacheLayout, layout_strides_bytes
from k3backend.common.kv_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from k3backend.common.kv_views import config_views, layer_views

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=2, dtype="bfloat16")
STATE = MambaSpec(
    block_size=4, shapes=((2, 3), (5,)), dtypes=("bfloat16", "float32"), page_size_padded=64
)


def _tensor(layout: KVCacheLayout, spec: object, blocks: int, layers: list[str]) -> KVCacheTensor:
    strides = layout_strides_bytes(spec, blocks, len(layers), layout)
    return KVCacheTensor(
        size=64 * blocks * len(layers),
        layers=layers,
        layer_stride=strides[0],
        block_stride=strides[1],
    )


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_layers_fill_the_buffer_without_overlap(layout: KVCacheLayout) -> None:
    tensor = _tensor(layout, SPEC, 3, ["a", "b"])
    buffer = torch.zeros(tensor.size, dtype=torch.int8)
    views = layer_views(buffer, SPEC, 3, layout, tensor)
    for number, view in enumerate(views, 1):
        assert view.dtype == torch.bfloat16
        assert view.shape == (3, 2, 4, 4)
        view.fill_(float(number))
    filled = buffer.view(torch.bfloat16)
    assert filled.unique().tolist() == [1.0, 2.0]
    assert (filled == 1).sum() == (filled == 2).sum() == filled.numel() // 2


def test_states_stay_bytes_and_padding_stays_untouched() -> None:
    tensor = _tensor(KVCacheLayout.LBNHC, STATE, 2, ["a"])
    buffer = torch.zeros(tensor.size, dtype=torch.int8)
    (view,) = layer_views(buffer, STATE, 2, KVCacheLayout.LBNHC, tensor)
    assert (view.dtype, tuple(view.shape)) == (torch.int8, (2, 1, 1, 32))
    view.fill_(7)
    pages = buffer.view(2, 64)
    assert bool((pages[:, :32] == 7).all())
    assert bool((pages[:, 32:] == 0).all())


def test_groups_of_a_config_alias_the_one_buffer() -> None:
    layout = KVCacheLayout.LBNHC
    config = KVCacheConfig(
        num_blocks=2,
        kv_cache_tensors=[_tensor(layout, SPEC, 2, ["a"]), _tensor(layout, STATE, 2, ["m"])],
        kv_cache_groups=[KVCacheGroupSpec(["a"], SPEC), KVCacheGroupSpec(["m"], STATE)],
    )
    views = config_views(config, layout, kernel_block_sizes=[2, None])
    assert views["a"].shape == (4, 2, 2, 4)
    views["m"].fill_(1)
    assert views["a"].view(torch.int8).sum() == 64


def test_a_config_is_checked() -> None:
    layout = KVCacheLayout.LBNHC
    groups = [KVCacheGroupSpec(["a"], SPEC)]
    tensor = _tensor(layout, SPEC, 2, ["a"])
    config = KVCacheConfig(num_blocks=2, kv_cache_tensors=[tensor], kv_cache_groups=groups)
    with pytest.raises(InputError, match="kernel_block_sizes has 2 entries"):
        config_views(config, layout, kernel_block_sizes=[2, 2])
    foreign = KVCacheConfig(num_blocks=2, kv_cache_tensors=[tensor], kv_cache_groups=[])
    with pytest.raises(LayoutError, match="layer a of a tensor is in no group"):
        config_views(foreign, layout)
    larger = KVCacheTensor(size=256, layers=["b"], layer_stride=128, block_stride=64)
    mixed = KVCacheConfig(num_blocks=2, kv_cache_tensors=[tensor, larger], kv_cache_groups=groups)
    with pytest.raises(LayoutError, match="128, 256 B, expected one"):
        config_views(mixed, layout)
    empty = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    assert config_views(empty, layout) == {}


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(192, dtype=torch.uint8),
        torch.zeros(3, 64, dtype=torch.int8),
        torch.zeros(384, dtype=torch.int8)[::2],
        torch.zeros(191, dtype=torch.int8),
    ],
    ids=["dtype", "rank", "strided", "short"],
)
def test_a_wrong_buffer_is_refused(buffer: torch.Tensor) -> None:
    tensor = _tensor(KVCacheLayout.LBNHC, SPEC, 3, ["a"])
    with pytest.raises(ShapeError, match="buffer"):
        layer_views(buffer, SPEC, 3, KVCacheLayout.LBNHC, tensor)


def test_bytes_that_are_no_whole_elements_are_refused() -> None:
    tensor = KVCacheTensor(size=200, layers=["a"], layer_stride=192, block_stride=64, offset=1)
    buffer = torch.zeros(200, dtype=torch.int8)
    with pytest.raises(LayoutError, match="offset of 1 B is no whole number of bfloat16"):
        layer_views(buffer, SPEC, 3, KVCacheLayout.LBNHC, tensor)
