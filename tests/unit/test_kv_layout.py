"""Byte strides of the six layouts, padded pages, kernel blocks, and what is refused."""

from __future__ import annotations

import pytest

from k3backend.common.errors import InputError, LayoutError
from k3backend.common.kv_layout import (
    KVCacheLayout,
    kernel_blocks_per_block,
    layer_shape_bytes,
    layout_strides_bytes,
    tensor_geometry,
)
from k3backend.common.kv_spec import (
    FullAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
)

# 4 states, 2 heads, a cell of (2 + 2) x 2 B = 8 B; a page of 64 B.
SPEC = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=2, dtype="bfloat16")
PADDED = FullAttentionSpec(
    block_size=4, num_kv_heads=2, head_size=2, dtype="bfloat16", page_size_padded=80
)
ONE_HEAD = MLAAttentionSpec(
    block_size=4, num_kv_heads=1, head_size=16, dtype="uint8", page_size_padded=80
)


def test_predicates_of_the_six_layouts() -> None:
    table = {
        layout.name: (
            layout.is_layer_compact,
            layout.is_block_contiguous,
            layout.is_block_compact,
            layout.is_block_outermost,
        )
        for layout in KVCacheLayout
    }
    assert table == {
        "LBHNC": (True, True, True, False),
        "LBNHC": (True, False, True, False),
        "LHBNC": (True, False, False, False),
        "BLHNC": (False, True, True, True),
        "BLNHC": (False, False, True, True),
        "BHLNC": (False, False, False, True),
    }


def test_view_order_drops_the_layer() -> None:
    assert KVCacheLayout.LBNHC.layer_view_order == (0, 2, 1, 3)
    assert KVCacheLayout.BHLNC.layer_view_order == (0, 1, 2, 3)
    assert KVCacheLayout.LHBNC.layer_view_order == (1, 0, 2, 3)


def test_logical_shape_counts_bytes_and_kernel_blocks() -> None:
    assert layer_shape_bytes(SPEC, 3) == (3, 2, 4, 8)
    assert layer_shape_bytes(SPEC, 3, 2) == (6, 2, 2, 8)
    assert layer_shape_bytes(SPEC, 3, 4) == (3, 2, 4, 8)
    state = MambaSpec(block_size=1536, shapes=((3, 5),), dtypes=("float32",))
    assert layer_shape_bytes(state, 7) == (7, 1, 1, 60)


@pytest.mark.parametrize(
    ("layout", "strides"),
    [  # [L, B, H, N, C] for 2 layers, 3 blocks, 2 heads, 4 states, 8 B
        ("LBHNC", (192, 64, 32, 8, 1)),
        ("LBNHC", (192, 64, 8, 16, 1)),
        ("LHBNC", (192, 32, 96, 8, 1)),
        ("BLHNC", (64, 128, 32, 8, 1)),
        ("BLNHC", (64, 128, 8, 16, 1)),
        ("BHLNC", (32, 128, 64, 8, 1)),
    ],
)
def test_dense_strides(layout: str, strides: tuple[int, ...]) -> None:
    assert layout_strides_bytes(SPEC, 3, 2, KVCacheLayout[layout]) == strides


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("LBHNC", (240, 80, 32, 8, 1)),
        ("LBNHC", (240, 80, 8, 16, 1)),
        ("BLHNC", (80, 160, 32, 8, 1)),
        ("BLNHC", (80, 160, 8, 16, 1)),
    ],
)
def test_padding_lies_behind_each_page(layout: str, strides: tuple[int, ...]) -> None:
    assert layout_strides_bytes(PADDED, 3, 2, KVCacheLayout[layout]) == strides


def test_one_head_can_be_padded_in_every_layout() -> None:
    for layout in KVCacheLayout:
        strides = layout_strides_bytes(ONE_HEAD, 3, 2, layout)
        assert min(strides[0], strides[1]) == 80


def test_fixed_strides_are_taken_as_given() -> None:
    strides = layout_strides_bytes(
        SPEC, 3, 2, KVCacheLayout.BLNHC, fixed_strides=(None, 1000, None, None, None)
    )
    assert strides == (64, 1000, 8, 16, 1)


def test_the_page_of_kimi_k3_is_dense_and_splits() -> None:
    spec = MLAAttentionSpec(block_size=1536, num_kv_heads=1, head_size=576, dtype="uint8")
    tensor = KVCacheTensor(
        size=23 * 10 * 884_736, layers=["a"], layer_stride=10 * 884_736, block_stride=884_736
    )
    geometry = tensor_geometry(spec, 10, KVCacheLayout.LBNHC, tensor, 64)
    assert geometry.shape == (1, 240, 1, 64, 576)
    assert geometry.strides == (8_847_360, 36_864, 576, 576, 1)


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_a_layout_that_cuts_pages_apart_cannot_pad_them(layout: str) -> None:
    with pytest.raises(LayoutError, match=rf"layout {layout} .* along H .*LBNHC"):
        layout_strides_bytes(PADDED, 3, 2, KVCacheLayout[layout])


def test_a_padded_page_cannot_be_split() -> None:
    with pytest.raises(LayoutError, match="padded to 80 B cannot be split"):
        layout_strides_bytes(PADDED, 3, 2, KVCacheLayout.LBNHC, 2)


def test_a_block_with_other_layers_between_cannot_be_split() -> None:
    tensor = KVCacheTensor(size=384, layers=["a", "b"], layer_stride=64, block_stride=128)
    tensor_geometry(SPEC, 3, KVCacheLayout.BLNHC, tensor, 4)
    with pytest.raises(LayoutError, match="block size of 2 tokens, or unpadded pages in LBHNC"):
        tensor_geometry(SPEC, 3, KVCacheLayout.BLNHC, tensor, 2)


def test_heads_outside_the_block_cannot_be_split() -> None:
    """With one layer the block is dense in BHLNC, yet its kernel blocks would overlap."""
    tensor = KVCacheTensor(size=192, layers=["a"], layer_stride=32, block_stride=64)
    tensor_geometry(SPEC, 3, KVCacheLayout.BHLNC, tensor, 4)
    with pytest.raises(LayoutError, match="layout BHLNC cuts pages apart along H"):
        tensor_geometry(SPEC, 3, KVCacheLayout.BHLNC, tensor, 2)


@pytest.mark.parametrize(("tokens", "reason"), [(3, "do not divide"), (5, "do not divide")])
def test_kernel_blocks_must_divide_the_block(tokens: int, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        kernel_blocks_per_block(SPEC, tokens)


def test_kernel_blocks_must_not_cut_a_state() -> None:
    compressed = MLAAttentionSpec(
        block_size=12, num_kv_heads=1, head_size=16, dtype="uint8", tokens_per_state=4
    )
    assert kernel_blocks_per_block(compressed, 4) == 3
    with pytest.raises(LayoutError, match="2 kernel blocks of 6 tokens hold 1 states each"):
        kernel_blocks_per_block(compressed, 6)
    state = MambaSpec(block_size=8, shapes=((3, 5),), dtypes=("float32",))
    with pytest.raises(LayoutError, match="take kernel blocks of 8 tokens"):
        kernel_blocks_per_block(state, 4)


@pytest.mark.parametrize(
    ("size", "offset"), [(191, 0), (200, 9), (1000, -1)], ids=["short", "shifted", "negative"]
)
def test_a_view_outside_the_buffer_is_refused(size: int, offset: int) -> None:
    tensor = KVCacheTensor(
        size=size, layers=["a"], layer_stride=192, block_stride=64, offset=offset
    )
    with pytest.raises(LayoutError, match="layers a to a reach bytes"):
        tensor_geometry(SPEC, 3, KVCacheLayout.LBNHC, tensor)


def test_the_last_byte_of_the_buffer_is_inside() -> None:
    tensor = KVCacheTensor(size=200, layers=["a"], layer_stride=192, block_stride=64, offset=8)
    assert tensor_geometry(SPEC, 3, KVCacheLayout.LBNHC, tensor).end == 200


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3"])
def test_counts_are_positive_integers(value: object) -> None:
    with pytest.raises(InputError, match="num_blocks"):
        layer_shape_bytes(SPEC, value)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="num_layers"):
        layout_strides_bytes(SPEC, 3, value, KVCacheLayout.LBNHC)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="kernel_block_size"):
        layer_shape_bytes(SPEC, 3, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("fixed", [(None,) * 4, (0, None, None, None, None), (1.5, *(None,) * 4)])
def test_fixed_strides_are_five_positive_integers(fixed: tuple[object, ...]) -> None:
    with pytest.raises(InputError, match="fixed_strides"):
        layout_strides_bytes(SPEC, 3, 2, KVCacheLayout.LBNHC, None, fixed)  # type: ignore[arg-type]


def test_fixed_strides_inside_a_padded_page_keep_it_whole() -> None:
    with pytest.raises(LayoutError, match="multiple of the padded page of 80 B"):
        layout_strides_bytes(PADDED, 3, 2, KVCacheLayout.LBHNC, None, (None, None, 50, None, None))


def test_layout_names_are_checked() -> None:
    assert KVCacheLayout.parse("BLNHC") is KVCacheLayout.BLNHC
    with pytest.raises(InputError, match="LBNHC"):
        KVCacheLayout.parse("NHD")
