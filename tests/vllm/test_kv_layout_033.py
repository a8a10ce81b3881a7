"""Strides and views against vLLM 0.33's own, on one grid of specs, layouts and kernel blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import vllm.v1.kv_cache_interface as vllm_interface
from vllm.v1.kv_cache_layout import KVCacheLayout as VllmLayout
from vllm.v1.worker.utils import allocate_kv_cache

from k3backend.common import kv_spec
from k3backend.common.errors import LayoutError
from k3backend.common.k3_model import Deployment
from k3backend.common.kv_layout import (
    KVCacheLayout,
    layer_shape_bytes,
    layout_strides_bytes,
    tensor_geometry,
)
from k3backend.common.kv_spec import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from k3backend.common.kv_views import config_views, layer_views
from k3backend.rocm.mla_specs import build_layer_specs

pytestmark = pytest.mark.vllm

LAYOUTS = [layout.name for layout in KVCacheLayout]
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("FullAttentionSpec", {"block_size": 8, "num_kv_heads": 2, "head_size": 4}),
    "gqa-one-head": ("FullAttentionSpec", {"block_size": 8, "num_kv_heads": 1, "head_size": 4}),
    "gqa-padded": (
        "FullAttentionSpec",
        {"block_size": 8, "num_kv_heads": 2, "head_size": 4, "page_size_padded": 320},
    ),
    "packed-slots": (
        "FullAttentionSpec",
        {
            "block_size": 8,
            "num_kv_heads": 2,
            "head_size": 4,
            "num_head_slots": 3,
            "state_content_bytes": 20,
        },
    ),
    "window": (
        "SlidingWindowSpec",
        {"block_size": 4, "num_kv_heads": 2, "head_size": 4, "sliding_window": 64},
    ),
    "several-states": (
        "FullAttentionSpec",
        {"block_size": 4, "num_kv_heads": 1, "head_size": 4, "tokens_per_state": Fraction(1, 2)},
    ),
    "mla": ("MLAAttentionSpec", {"block_size": 8, "num_kv_heads": 1, "head_size": 16}),
    "mla-padded": (
        "MLAAttentionSpec",
        {"block_size": 8, "num_kv_heads": 1, "head_size": 16, "page_size_padded": 300},
    ),
    "mla-aligned": (
        "MLAAttentionSpec",
        {"block_size": 8, "num_kv_heads": 1, "head_size": 18, "alignment": 128},
    ),
    "mla-compressed": (
        "MLAAttentionSpec",
        {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "tokens_per_state": 4},
    ),
    "state": ("MambaSpec", {"block_size": 8, "shapes": ((4, 3), (5,))}),
    "state-padded": (
        "MambaSpec",
        {"block_size": 8, "shapes": ((4, 3), (5,)), "page_size_padded": 64},
    ),
}


def _pair(name: str) -> tuple[Any, Any]:
    """The same spec in both worlds."""
    cls, fields = SPECS[name]
    if cls == "MambaSpec":
        dtypes: dict[str, Any] = {"dtypes": (torch.bfloat16, torch.float32)}
    else:
        dtypes = {"dtype": torch.bfloat16}
    ours = getattr(kv_spec, cls)(**fields, **dtypes)
    theirs = getattr(vllm_interface, cls)(**fields, **dtypes)
    return ours, theirs


def _outcome(call: Callable[[], Any], errors: tuple[type[Exception], ...]) -> Any:
    try:
        return call()
    except errors:
        return "refused"


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_and_dense_strides_equal_vllms(name: str, layout: str) -> None:
    ours, theirs = _pair(name)
    for blocks, layers in product((1, 3), (1, 4)):
        assert layer_shape_bytes(ours, blocks) == vllm_interface.compute_layer_kv_cache_shape_bytes(
            theirs, blocks
        )
        expected = _outcome(
            partial(
                vllm_interface.compute_layout_strides, theirs, blocks, layers, VllmLayout[layout]
            ),
            (AssertionError,),
        )
        found = _outcome(
            partial(layout_strides_bytes, ours, blocks, layers, KVCacheLayout[layout]),
            (LayoutError,),
        )
        assert found == expected


def _placements(theirs: Any, layout: str, blocks: int, layers: int) -> list[tuple[int, int, int]]:
    """(layer stride, block stride, offset): dense, with an offset, and packed with slack."""
    try:
        dense = vllm_interface.compute_layout_strides(theirs, blocks, layers, VllmLayout[layout])
    except AssertionError:
        return []
    page = theirs.page_size_bytes
    found = [(dense[0], dense[1], 0), (dense[0], dense[1], 64)]
    if VllmLayout[layout].is_block_outermost and VllmLayout[layout].is_block_compact:
        found.append((page, page * layers + 48, 0))
    return found


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_equal_vllms(name: str, layout: str) -> None:
    ours, theirs = _pair(name)
    compared = 0
    for blocks, layers, kernel in product((1, 3), (1, 2), (None, 8, 4, 2)):
        if kernel is not None and ours.block_size % kernel:
            continue
        for layer_stride, block_stride, offset in _placements(theirs, layout, blocks, layers):
            size = max(layer_stride * layers, block_stride * blocks) * 4 + offset
            names = [str(number) for number in range(layers)]
            placement = {
                "size": size,
                "layers": names,
                "layer_stride": layer_stride,
                "block_stride": block_stride,
                "offset": offset,
            }
            if _is_known_overlap(ours, layout, kernel) or _cuts_a_state(ours, kernel):
                with pytest.raises(LayoutError):
                    tensor_geometry(
                        ours, blocks, KVCacheLayout[layout], KVCacheTensor(**placement), kernel
                    )
                continue
            buffer = torch.zeros(size, dtype=torch.int8)
            expected = _outcome(
                partial(
                    vllm_interface.create_kv_cache_views,
                    buffer,
                    theirs,
                    blocks,
                    VllmLayout[layout],
                    vllm_interface.KVCacheTensor(**placement),
                    kernel,
                ),
                (AssertionError, ValueError),
            )
            found = _outcome(
                partial(
                    layer_views,
                    buffer,
                    ours,
                    blocks,
                    KVCacheLayout[layout],
                    KVCacheTensor(**placement),
                    kernel,
                ),
                (LayoutError,),
            )
            assert _described(found) == _described(expected)
            compared += 1
    padded_and_cut = name in ("gqa-padded",) and layout in ("LHBNC", "BHLNC")
    assert compared > 0 or padded_and_cut


def _described(views: Any) -> Any:
    if isinstance(views, str):
        return views
    return [(v.shape, v.stride(), v.storage_offset(), v.dtype, v.data_ptr()) for v in views]


def _is_known_overlap(ours: Any, layout: str, kernel: int | None) -> bool:
    """Kernel blocks of several heads where heads lie outside the block; see the test below."""
    split = kernel not in (None, ours.block_size)
    return split and ours.num_heads > 1 and not KVCacheLayout[layout].is_block_compact


def _cuts_a_state(ours: Any, kernel: int | None) -> bool:
    """A kernel block that holds no whole number of states: vLLM views parts that are no states."""
    if kernel is None:
        return False
    ratio = ours.block_size // kernel
    return ours.get_num_kernel_states(kernel) * ratio != ours.num_states


def test_vllms_split_views_overlap_in_bhlnc_and_ours_refuse() -> None:
    ours, theirs = _pair("gqa")
    strides = vllm_interface.compute_layout_strides(theirs, 3, 1, VllmLayout.BHLNC)
    placement = {
        "size": 3 * theirs.page_size_bytes,
        "layers": ["a"],
        "layer_stride": strides[0],
        "block_stride": strides[1],
    }
    buffer = torch.zeros(2 * placement["size"], dtype=torch.int8)  # its views leave the tensor
    (view,) = vllm_interface.create_kv_cache_views(
        buffer,
        theirs,
        3,
        VllmLayout.BHLNC,
        vllm_interface.KVCacheTensor(**placement),
        kernel_block_size=4,
    )
    view[0, 1].fill_(1.0)
    assert bool((view[1, 0] == 1.0).all()), "vLLM repaired its views; drop this exception"
    with pytest.raises(LayoutError, match="cuts pages apart along H"):
        tensor_geometry(ours, 3, KVCacheLayout.BHLNC, KVCacheTensor(**placement), 4)


def test_a_cut_state_is_viewed_by_vllm_and_refused_here() -> None:
    ours, theirs = _pair("mla-compressed")
    placement = {"size": 4096, "layers": ["a"], "layer_stride": 384, "block_stride": 128}
    views = vllm_interface.create_kv_cache_views(
        torch.zeros(4096, dtype=torch.int8),
        theirs,
        3,
        VllmLayout.LBNHC,
        vllm_interface.KVCacheTensor(**placement),
        kernel_block_size=2,
    )
    assert views[0].shape[2] == 0
    with pytest.raises(LayoutError, match="hold 0 states each"):
        tensor_geometry(ours, 3, KVCacheLayout.LBNHC, KVCacheTensor(**placement), 2)


def _to_vllm(spec: Any) -> Any:
    """A K3 spec rebuilt as vLLM's class, field by field."""
    cls = getattr(vllm_interface, type(spec).__name__)
    names = {f.name for f in fields(cls)}
    values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name in names}
    for name, convert in _TO_VLLM.items():
        if name in values:
            values[name] = convert(values[name])
    return cls(**values)


_TO_VLLM: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda dtype: dtype.torch,
    "dtypes": lambda dtypes: tuple(dtype.torch for dtype in dtypes),
    "kv_quant_mode": lambda mode: vllm_interface.KVQuantMode[mode.name],
    "cache_role": lambda role: vllm_interface.SparseCacheRole[role.name],
    "mamba_type": lambda kind: vllm_interface.MambaAttentionBackendEnum[kind.name],
}


@pytest.mark.parametrize("kernel_block_size", [None, 64, 512])
def test_the_cache_of_kimi_k3_equals_vllms(kernel_block_size: int | None) -> None:
    """One layer of each kind in a pool of three blocks, materialised by both."""
    specs = build_layer_specs(Deployment.load(draft="dspark-mla"))
    chosen = [
        "language_model.model.layers.0.self_attn",
        "language_model.model.layers.3.self_attn.attn",
        "model.layers.93.self_attn",
    ]
    kda, mla, draft = (specs[name] for name in chosen)
    blocks, page = 3, 884_736
    grouped = [[chosen[0]], chosen[1:]]
    tensors = [
        {
            "size": 2 * blocks * page,
            "layers": names,
            "layer_stride": blocks * page,
            "block_stride": page,
        }
        for names in grouped
    ]
    merged = [kda, mla]
    assert mla.page_size_bytes == draft.page_size_bytes == kda.page_size_bytes == page
    kernel_sizes = [1536, kernel_block_size or 1536]
    ours = config_views(
        KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(**tensor) for tensor in tensors],
            kv_cache_groups=[
                KVCacheGroupSpec(names, spec) for names, spec in zip(grouped, merged, strict=True)
            ],
        ),
        KVCacheLayout.LBNHC,
        kernel_sizes,
    )
    theirs = allocate_kv_cache(
        vllm_interface.KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[vllm_interface.KVCacheTensor(**tensor) for tensor in tensors],
            kv_cache_groups=[
                vllm_interface.KVCacheGroupSpec(names, _to_vllm(spec))
                for names, spec in zip(grouped, merged, strict=True)
            ],
        ),
        torch.device("cpu"),
        VllmLayout.LBNHC,
        kernel_sizes,
    )
    assert list(ours) == list(theirs)
    for name, view in ours.items():
        other = theirs[name]
        assert (view.shape, view.stride(), view.storage_offset(), view.dtype) == (
            other.shape,
            other.stride(),
            other.storage_offset(),
            other.dtype,
        )


def test_layouts_and_predicates_equal_vllms() -> None:
    assert list(VllmLayout.__members__) == LAYOUTS
    for name in LAYOUTS:
        ours, theirs = KVCacheLayout[name], VllmLayout[name]
        assert ours.stride_order == theirs.stride_order
        assert ours.layer_view_order == theirs.layer_view_order
        for predicate in (
            "is_layer_compact",
            "is_block_contiguous",
            "is_block_compact",
            "is_block_outermost",
        ):
            assert getattr(ours, predicate) == getattr(theirs, predicate)
