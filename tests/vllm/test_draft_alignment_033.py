"""``align_draft_spec`` on the spec objects of vLLM 0.33, alone and mixed with this package's."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface

from k3backend.common.errors import KvMergeError, SpecError
from k3backend.common.kv_merge import merge_specs
from k3backend.common.kv_spec import MLAAttentionSpec
from k3backend.rocm.mla_specs import align_draft_spec
from k3backend.vllm_plugin.translate import from_vllm_spec

pytestmark = pytest.mark.vllm
MLA: dict[str, Any] = {
    "block_size": 64,
    "num_kv_heads": 1,
    "head_size": 576,
    "dtype": torch.uint8,
    "cache_dtype_str": "fp8",
    "kv_quant_mode": interface.KVQuantMode.FP8_PER_TENSOR,
}


def ours(**changes: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        **(MLA | {"kv_quant_mode": "FP8_PER_TENSOR"} | {"max_tp_shards": 1} | changes)
    )


def theirs(**changes: Any) -> interface.MLAAttentionSpec:
    return interface.MLAAttentionSpec(**(MLA | {"max_tp_shards": 1} | changes))


@pytest.mark.parametrize("make_target", [ours, theirs])
def test_a_draft_of_vllm_is_repaired_in_its_own_class(make_target: Any) -> None:
    draft = theirs(max_tp_shards=None, cache_dtype_str="fp8_e4m3")
    aligned, repairs = align_draft_spec(make_target(), draft)
    assert type(aligned) is interface.MLAAttentionSpec
    assert [(r.field, r.was, r.now) for r in repairs] == [
        ("max_tp_shards", None, 1),
        ("cache_dtype_str", "fp8_e4m3", "fp8"),
    ]
    assert aligned == theirs()
    if "is_draft" in {field.name for field in fields(draft)}:
        assert aligned.is_draft
    assert draft.max_tp_shards is None
    merge_specs([from_vllm_spec(theirs()), from_vllm_spec(aligned)])


def test_our_draft_fits_a_target_of_vllm() -> None:
    aligned, repairs = align_draft_spec(theirs(), ours(max_tp_shards=None))
    assert (type(aligned), aligned.max_tp_shards, aligned.is_draft) == (MLAAttentionSpec, 1, True)
    assert [repair.field for repair in repairs] == ["max_tp_shards"]


@pytest.mark.parametrize("make_target", [ours, theirs])
def test_another_dtype_is_still_refused(make_target: Any) -> None:
    none = interface.KVQuantMode.NONE
    draft = theirs(dtype=torch.bfloat16, cache_dtype_str="auto", kv_quant_mode=none)
    with pytest.raises(KvMergeError) as error:
        align_draft_spec(make_target(), draft)
    assert error.value.field == "dtype"


def test_every_spec_of_mla_reads_as_the_plugin_reads_it() -> None:
    spec = replace(theirs(), non_causal=True, alignment=576)
    aligned, repairs = align_draft_spec(from_vllm_spec(spec), spec)
    assert (repairs, from_vllm_spec(aligned).page_size_bytes) == ((), spec.page_size_bytes)


def test_what_is_no_spec_is_named() -> None:
    with pytest.raises(SpecError, match="draft is None"):
        align_draft_spec(theirs(), None)
    with pytest.raises(SpecError, match="target is"):
        align_draft_spec({"block_size": 64}, theirs())
    with pytest.raises(SpecError, match="draft is"):
        align_draft_spec(theirs(), interface.MLAAttentionSpec)
