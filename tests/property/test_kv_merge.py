"""Merging is commutative and associative and keeps every field; labels cost no bytes."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from k3backend.common import kv_spec as ks
from k3backend.common.errors import InputError, KvMergeError
from k3backend.common.kv_merge import (
    explain_difference,
    merge_specs,
    mergeable,
    normalize_labels,
    vllm_mergeable,
)
from k3backend.common.spec_file import parse_spec_document
from tests.helpers import random_specs

# Fields of the full-attention family that a merge reconciles; all others are equal in a group.
ANY_OF = ("non_causal", "non_causal_multi_token_decode")
ONE_OF = ("sliding_window", "attention_chunk_size")
LOOSE = ("sliding_window", "attention_chunk_size", "non_causal", "is_draft")


@st.composite
def close_specs(draw: st.DrawFn) -> list[ks.KVCacheSpec]:
    """One to four layers that differ in a field or two, so that many merge."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    maker = draw(st.sampled_from((random_specs.near_uniform, random_specs.full_family)))
    specs: list[ks.KVCacheSpec] = []
    for entry in maker(rng)[:4]:
        document: dict[str, Any] = {
            "schema": "k3backend.specs/1",
            "max_model_len": 1,
            "layers": [dict(entry, count=1, prefix="l", is_draft=rng.random() < 0.3)],
        }
        try:
            specs += parse_spec_document(document).specs.values()
        except InputError:
            continue
    assume(specs)
    loosened = draw(st.lists(st.sampled_from(LOOSE), max_size=3))
    for name in loosened:
        index = rng.randrange(len(specs))
        if hasattr(specs[index], name) and isinstance(specs[index], ks.FullAttentionSpec):
            value: object = rng.choice((None, 512, 1024)) if name in ONE_OF else True
            specs.append(dataclasses.replace(specs[index], **{name: value}))
    return specs[:5]


@given(close_specs(), st.randoms())
@settings(max_examples=250, deadline=None)
def test_merge_does_not_depend_on_order_or_grouping(
    specs: list[ks.KVCacheSpec], rng: random.Random
) -> None:
    shuffled = rng.sample(specs, len(specs))
    assert mergeable(specs) == mergeable(shuffled)
    cut = rng.randrange(len(specs) + 1)
    parts = [part for part in (specs[:cut], specs[cut:]) if part]
    if not mergeable(specs):
        event("refused")
        # Whatever the order of merging, it ends in a refusal.
        with pytest.raises(KvMergeError):
            merge_specs([merge_specs(part) for part in parts])
        return
    event(f"merged {len(set(specs))} different")
    merged = merge_specs(specs)
    for other in (merge_specs(shuffled), merge_specs([merge_specs(part) for part in parts])):
        assert other == merged
        assert other.is_draft == merged.is_draft


@given(close_specs())
@settings(max_examples=250, deadline=None)
def test_a_merged_spec_keeps_every_field(specs: list[ks.KVCacheSpec]) -> None:
    assume(mergeable(specs))
    merged = merge_specs(specs)
    assert {type(spec) for spec in specs} == {type(merged)}
    assert merged.page_size_bytes == specs[0].page_size_bytes
    family = isinstance(merged, ks.FullAttentionSpec)
    for field in dataclasses.fields(merged):
        values = {getattr(spec, field.name) for spec in specs}
        value = getattr(merged, field.name)
        if field.name == "is_draft" or (family and field.name in ANY_OF):
            assert value == any(values)
        elif family and field.name in ONE_OF:
            assert values - {None} == {value} - {None}
        else:
            assert values == {value}


@given(close_specs())
@settings(max_examples=200, deadline=None)
def test_two_layers_merge_if_and_only_if_no_difference_blocks(
    specs: list[ks.KVCacheSpec],
) -> None:
    for left, right in itertools.combinations(specs, 2):
        differences = explain_difference(left, right)
        assert mergeable([left, right]) == (not any(d.blocks for d in differences))
        assert bool(differences) == (left != right)
        swapped = explain_difference(right, left)
        assert {(d.field, d.kind, d.blocks) for d in swapped} == {
            (d.field, d.kind, d.blocks) for d in differences
        }


@given(close_specs())
@settings(max_examples=200, deadline=None)
def test_what_merges_without_loss_merges_in_vllm(specs: list[ks.KVCacheSpec]) -> None:
    """vLLM is laxer, but for the fields that its merge forgets and then misses."""
    assume(mergeable(specs))
    forgets = any(
        (isinstance(spec, ks.MLAAttentionSpec) and spec.head_size_v != 0)
        or (isinstance(spec, ks.SinkFullAttentionSpec) and spec.tokens_per_state != 1)
        or (getattr(spec, "sliding_window", None) and getattr(spec, "attention_chunk_size", None))
        for spec in specs
    )
    assume(not forgets)
    assert vllm_mergeable(specs)


@given(close_specs())
@settings(max_examples=200, deadline=None)
def test_labels_change_no_bytes_and_split_nothing(specs: list[ks.KVCacheSpec]) -> None:
    named = {f"l{index}": spec for index, spec in enumerate(specs)}
    result, reports = normalize_labels(named)
    assert list(result) == list(named)
    for name, spec in named.items():
        assert result[name].page_size_bytes == spec.page_size_bytes
        assert result[name].block_size == spec.block_size
        assert result[name].is_draft == spec.is_draft
    for (left, before), (right, after) in itertools.combinations(named.items(), 2):
        if mergeable([before, after]):
            assert mergeable([result[left], result[right]])
    again, second_reports = normalize_labels(result)
    assert (again, second_reports) == (result, [])
    changed = {name for report in reports for name in report.layer_names}
    assert changed == {name for name, spec in named.items() if result[name] != spec}
