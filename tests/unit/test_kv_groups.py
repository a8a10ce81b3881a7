"""Groups of the public cases, the order of the planner's steps, and checks of foreign groups."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3backend.common.errors import PlanError
from k3backend.common.kv_config import pool_block_bytes, request_blocks, request_bytes
from k3backend.common.kv_groups import (
    check_partition,
    kv_tp_replicas,
    largest_divisor,
    mark_draft_groups,
    plan_groups,
)
from k3backend.common.kv_packed_groups import least_padding_divisor
from k3backend.common.kv_spec import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from k3backend.common.plan_context import PlanContext
from k3backend.common.spec_file import parse_spec_document

CASES = sorted((Path(__file__).parents[1] / "data" / "planning").glob("*.json"))
CONTEXT = PlanContext(max_model_len=4096)


def full(**fields: Any) -> FullAttentionSpec:
    """16 tokens of 2 heads x 64 elements in bf16: a page of 8,192 B."""
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
    return FullAttentionSpec(**{**shape, **fields})


def window(**fields: Any) -> SlidingWindowSpec:
    """As ``full``, for a window of 512 tokens."""
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
    return SlidingWindowSpec(**{**shape, "sliding_window": 512, **fields})


def mla(**fields: Any) -> MLAAttentionSpec:
    """64 tokens of 576 B: a page of 36,864 B."""
    shape = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": "uint8"}
    return MLAAttentionSpec(**{**shape, **fields})


def layers(**counts_and_specs: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """``a=(2, spec)`` gives layers a.0 and a.1."""
    return {
        f"{prefix}.{index}": spec
        for prefix, (count, spec) in counts_and_specs.items()
        for index in range(count)
    }


def names(groups: list[KVCacheGroupSpec]) -> list[list[str]]:
    """Layer names per group."""
    return [group.layer_names for group in groups]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_public_case(path: Path) -> None:
    case = json.loads(path.read_text())
    expected = case["expect"]["vllm"]
    file = parse_spec_document(case["specs"], path.name)
    if "error" in expected:
        # Both cases hold a draft whose page is too large: it is named, not the target.
        with pytest.raises(PlanError, match=r"^layer draft\.0 ") as raised:
            plan_groups(file.specs, file.context)
        assert raised.value.layer_name == "draft.0"
        assert "\n" not in str(raised.value)
        return
    groups = plan_groups(file.specs, file.context)
    assert [len(group.layer_names) for group in groups] == expected["group_sizes"]
    assert [group.kv_cache_spec.block_size for group in groups] == expected["block_sizes"]
    assert pool_block_bytes(groups, file.context) == expected["block_bytes"]
    assert sum(request_blocks(groups, file.context)) == expected["request_blocks"]
    assert request_bytes(groups, file.context) == expected["request_bytes"]
    assert kv_tp_replicas(groups, file.context) == expected["kv_tp_replicas"]


def test_no_layers_make_no_groups() -> None:
    assert plan_groups({}, CONTEXT) == []


def test_the_callers_specs_stay_as_they_are() -> None:
    specs = layers(f=(2, full()), s=(2, window(num_kv_heads=1)))
    before = dict(specs)
    plan_groups(specs, replace(CONTEXT, disable_hybrid_kv_cache_manager=True))
    plan_groups(specs, CONTEXT)
    assert specs == before


def test_layers_are_dealt_round_robin() -> None:
    groups = plan_groups(layers(f=(2, full()), s=(5, window())), CONTEXT)
    assert names(groups) == [
        ["f.0", "f.1"],
        ["s.0", "s.3"],
        ["s.1", "s.4"],
        ["s.2"],
    ]


def test_a_widest_bucket_below_one_and_a_half_times_sets_the_width() -> None:
    assert names(plan_groups(layers(f=(3, full()), s=(4, window())), CONTEXT))[1] == [
        "s.0",
        "s.1",
        "s.2",
        "s.3",
    ]
    # 6 is 1.5 times 4, so the smaller bucket sets it.
    assert len(plan_groups(layers(f=(4, full()), s=(6, window())), CONTEXT)) == 3


def test_a_smaller_page_gets_a_larger_block() -> None:
    groups = plan_groups(layers(f=(1, full()), s=(1, window(num_kv_heads=1))), CONTEXT)
    assert [group.kv_cache_spec.block_size for group in groups] == [16, 32]
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {8192}


def test_pages_that_do_not_divide_are_padded_but_not_latent_ones() -> None:
    wide = full(num_kv_heads=3)
    groups = plan_groups(layers(f=(1, wide), s=(1, window())), CONTEXT)
    assert groups[1].kv_cache_spec.page_size_bytes == wide.page_size_bytes == 12288
    assert groups[1].kv_cache_spec.block_size == 16
    state = MambaSpec(block_size=64, shapes=((40000,),), dtypes=("uint8",))
    with pytest.raises(PlanError, match=r"^layer m\.0 .*36864 B does not divide the 40000 B"):
        plan_groups(layers(k=(3, state), m=(1, mla())), CONTEXT)


def test_latent_beside_a_window_of_another_page_falls_back_to_full_allocation() -> None:
    specs = layers(m=(2, mla()), s=(1, window(block_size=64, num_kv_heads=5, is_draft=True)))
    (group,) = plan_groups(specs, CONTEXT)
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    promoted = group.kv_cache_spec.kv_cache_specs["s.0"]
    assert isinstance(promoted, FullAttentionSpec)
    assert promoted.sliding_window == 512
    assert promoted.is_draft
    with pytest.raises(PlanError, match=r"^layer s\.0 "):
        plan_groups({**specs, "h": hidden_state()}, CONTEXT)


def hidden_state(**fields: Any) -> HiddenStateCacheSpec:
    """7,168 elements in bf16 for a token."""
    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 7168, "dtype": "bfloat16"}
    return HiddenStateCacheSpec(**{**shape, **fields})


def test_hidden_states_take_the_common_page_and_stand_alone() -> None:
    # 7168 x 2 = 14,336 B a token, so pages of 8,192 B double with their blocks; one token fits.
    groups = plan_groups({**layers(f=(2, full()), s=(2, window())), "h": hidden_state()}, CONTEXT)
    assert names(groups) == [["f.0", "f.1"], ["s.0", "s.1"], ["h"]]
    assert [group.kv_cache_spec.block_size for group in groups] == [32, 32, 1]
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {16384}


def test_without_the_hybrid_manager_local_attention_is_allocated_in_full() -> None:
    context = replace(CONTEXT, disable_hybrid_kv_cache_manager=True)
    specs = layers(f=(2, full()), s=(2, window()))
    (group,) = plan_groups(specs, context)
    assert group.layer_names == list(specs)
    assert isinstance(group.kv_cache_spec, FullAttentionSpec)
    assert group.kv_cache_spec.sliding_window == 512
    state = MambaSpec(block_size=64, shapes=((64,),), dtypes=("uint8",))
    with pytest.raises(PlanError, match=r"layer k\.0 cannot share"):
        plan_groups({**specs, "k.0": state}, context)


def test_block_outermost_layouts_pack_pages_of_several_sizes() -> None:
    context = replace(CONTEXT, layout="BLHNC")
    specs = layers(m=(2, mla()), s=(4, window(num_kv_heads=4)))
    groups = plan_groups(specs, context)
    # Two latent pages of 36,864 B give room for four windows of 16,384 B.
    assert names(groups) == [["m.0", "m.1"], ["s.0", "s.1", "s.2", "s.3"]]
    assert pool_block_bytes(groups, context) == 73728


@pytest.mark.parametrize(
    ("groups", "layer", "message"),
    [
        ([["a"], ["b"]], "c", "is in no group"),
        ([["a", "b"], ["b", "c"]], "b", "more than one place"),
        ([["a", "a"], ["b", "c"]], "a", "more than one place"),
        ([["a", "b", "c", "d"]], "d", "is not a layer of the model"),
    ],
)
def test_partition_check_names_the_layer(groups: Any, layer: str, message: str) -> None:
    foreign = [KVCacheGroupSpec(group, full()) for group in groups]
    with pytest.raises(PlanError, match=message) as raised:
        check_partition(foreign, ["a", "b", "c"])
    assert raised.value.layer_name == layer
    check_partition([KVCacheGroupSpec(["c", "a"], full()), KVCacheGroupSpec(["b"], full())], "abc")


def test_replicas_are_the_gcd_over_layers() -> None:
    context = PlanContext(max_model_len=4096, tp_size=8)

    def replicas(*specs: KVCacheSpec, **changes: Any) -> int:
        groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
        return kv_tp_replicas(groups, replace(context, **changes))

    assert replicas(mla(max_tp_shards=1)) == 8
    assert replicas(mla(max_tp_shards=1), full(max_tp_shards=4)) == 2
    assert replicas(mla(max_tp_shards=1), full()) == 1
    assert replicas(mla(max_tp_shards=1), dcp_size=2) == 1
    assert replicas(mla(max_tp_shards=1, dcp_sharded=False), dcp_size=2) == 8
    assert replicas(full(max_tp_shards=16)) == 1
    assert replicas() == 1


@pytest.mark.parametrize("draft_first", [False, True])
@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (window(is_draft=True), [False, True]),
        # Merged, and dealt over both groups: every group of the draft's is a draft group.
        (full(is_draft=True), [True]),
        (full(is_draft=True, non_causal=True), [True]),
        # A spec per layer.
        (full(num_kv_heads=4, is_draft=True), [True]),
    ],
)
def test_groups_with_a_draft_layer_are_marked(
    draft: KVCacheSpec, expected: list[bool], draft_first: bool
) -> None:
    sides = {"t": (2, full()), "d": (2, draft)}
    specs = layers(**dict(reversed(sides.items()) if draft_first else sides.items()))
    groups = plan_groups(specs, CONTEXT)
    assert sorted(group.is_eagle_group for group in groups) == expected
    for group in groups:
        holds = any(specs[name].is_draft for name in group.layer_names)
        assert group.is_eagle_group == group.kv_cache_spec.is_draft == holds
        for name, spec in getattr(group.kv_cache_spec, "kv_cache_specs", {}).items():
            assert spec.is_draft == specs[name].is_draft


def test_a_foreign_mark_is_corrected() -> None:
    specs = layers(f=(2, full()), s=(2, window()))
    marked = [
        replace(
            group, is_eagle_group=True, kv_cache_spec=replace(group.kv_cache_spec, is_draft=True)
        )
        for group in plan_groups(specs, CONTEXT)
    ]
    for group in mark_draft_groups(marked, specs):
        assert not group.is_eagle_group
        assert not group.kv_cache_spec.is_draft


def test_one_quantisation_under_two_names_keeps_its_names() -> None:
    """vLLM 0.33.0 counts the two as equal; each layer's own name survives full allocation."""
    specs = layers(
        m=(2, mla()),
        a=(1, window(block_size=64, num_kv_heads=5, kv_quant_mode="OCTAVE_K3V4")),
        b=(1, window(block_size=64, num_kv_heads=5, kv_quant_mode="CUSTOM")),
    )
    (group,) = plan_groups(specs, CONTEXT)
    kept = {
        name: spec.kv_quant_mode.name for name, spec in group.kv_cache_spec.kv_cache_specs.items()
    }
    assert [kept[name] for name in list(specs)[2:]] == ["OCTAVE_K3V4", "CUSTOM"]


def test_small_arithmetic() -> None:
    assert [largest_divisor(48, n) for n in (100, 48, 47, 7, 1)] == [48, 48, 24, 6, 1]
    # 7 and 9 take 1 + 3 of padding to multiples of 4, and 2 + 0 to those of 3 and of 9.
    assert least_padding_divisor([7, 9], 2) == 9
    assert least_padding_divisor([4, 8], 3) == 4
