"""Labels that mean the same bytes are brought to one form before grouping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from k3backend.common import kv_merge as km
from k3backend.common import kv_spec as ks

LATENT: dict[str, Any] = {"block_size": 1536, "num_kv_heads": 1, "head_size": 576}
TARGET = ks.MLAAttentionSpec(
    **LATENT, dtype="uint8", cache_dtype_str="fp8", kv_quant_mode="FP8_PER_TENSOR", max_tp_shards=1
)
DRAFT = replace(TARGET, is_draft=True, non_causal_multi_token_decode=True)


def _normalize(*specs: ks.KVCacheSpec) -> tuple[list[ks.KVCacheSpec], list[km.LabelReport]]:
    named = {f"l{index}": spec for index, spec in enumerate(specs)}
    result, reports = km.normalize_labels(named)
    assert list(result) == list(named)
    for name, spec in named.items():
        assert result[name].page_size_bytes == spec.page_size_bytes
        assert result[name].is_draft == spec.is_draft
    return list(result.values()), reports


def test_two_names_of_one_dtype_become_the_first() -> None:
    specs, reports = _normalize(TARGET, TARGET, replace(DRAFT, cache_dtype_str="fp8_e4m3"))
    assert specs == [TARGET, TARGET, DRAFT]
    assert km.mergeable(specs)
    assert [(r.field, r.left, r.right, r.layer_names) for r in reports] == [
        ("cache_dtype_str", "fp8_e4m3", "fp8", ("l2",))
    ]
    assert reports[0].message.startswith("cache_dtype_str 'fp8_e4m3' of l2 means the same bytes")


@pytest.mark.parametrize("label", [None, "auto", "bfloat16", "bf16"])
def test_names_of_a_plain_cache(label: str | None) -> None:
    plain = ks.MLAAttentionSpec(**LATENT, dtype="bfloat16", cache_dtype_str="auto")
    specs, reports = _normalize(plain, replace(plain, cache_dtype_str=label))
    assert specs == [plain, plain]
    assert len(reports) == (label != "auto")


@pytest.mark.parametrize(
    ("mine", "theirs", "joint"),
    [
        (None, ks.MultipleOf(64), ks.MultipleOf(64)),
        (ks.MultipleOf(64), None, ks.MultipleOf(64)),
        (ks.MultipleOf(32), ks.MultipleOf(64), ks.MultipleOf(64)),
        (ks.MultipleOf(64), ks.MultipleOf(96), ks.MultipleOf(192)),
        (None, 576, 576),
        (64, 96, 192),
    ],
)
def test_an_alignment_that_holds_anyway_joins_the_stricter(
    mine: Any, theirs: Any, joint: Any
) -> None:
    specs, reports = _normalize(
        replace(TARGET, block_stride_alignment=mine), replace(DRAFT, block_stride_alignment=theirs)
    )
    assert [spec.block_stride_alignment for spec in specs] == [joint, joint]
    assert {report.field for report in reports} == {"block_stride_alignment"}
    assert km.mergeable(specs)


@pytest.mark.parametrize("theirs", [5000, 884_737])
def test_an_alignment_that_does_not_hold_stays(theirs: int) -> None:
    specs, reports = _normalize(TARGET, replace(DRAFT, block_stride_alignment=theirs))
    assert [spec.block_stride_alignment for spec in specs] == [None, theirs]
    assert reports == []


def test_bytes_and_kernel_blocks_cannot_be_joined() -> None:
    left = replace(TARGET, block_stride_alignment=64)
    right = replace(DRAFT, block_stride_alignment=ks.MultipleOf(64))
    assert _normalize(left, right) == ([left, right], [])


def test_a_size_that_repeats_what_holds_is_dropped() -> None:
    repeated = replace(
        DRAFT, page_size_padded=884_736, num_head_slots=1, state_content_bytes=576, alignment=64
    )
    specs, reports = _normalize(TARGET, repeated)
    assert km.mergeable(specs)
    assert specs[1] == replace(DRAFT, alignment=64)
    assert {report.field for report in reports} == {
        "page_size_padded",
        "num_head_slots",
        "state_content_bytes",
        "alignment",
    }


def test_nothing_changes_where_more_than_labels_differ() -> None:
    others = (
        replace(DRAFT, cache_dtype_str="fp8_e4m3", max_tp_shards=None),
        replace(DRAFT, cache_dtype_str="fp8_e4m3", head_size=512),
        replace(DRAFT, cache_dtype_str="fp8_e5m2"),
        replace(DRAFT, cache_dtype_str="fp8_ds_mla"),
    )
    for other in others:
        assert _normalize(TARGET, other) == ([TARGET, other], [])


def test_one_label_for_all_is_left_alone() -> None:
    aligned = replace(TARGET, block_stride_alignment=ks.MultipleOf(64), cache_dtype_str="fp8_e4m3")
    specs = {"a": aligned, "b": aligned}
    result, reports = km.normalize_labels(specs)
    assert result == specs
    assert reports == []
    assert km.normalize_labels({}) == ({}, [])


def test_one_report_per_label_lists_its_layers() -> None:
    alias = replace(TARGET, cache_dtype_str="fp8_e4m3")
    _, reports = _normalize(TARGET, alias, alias, TARGET, alias)
    assert [report.layer_names for report in reports] == [("l1", "l2", "l4")]
    assert "3 layers (l1, …)" in reports[0].message
