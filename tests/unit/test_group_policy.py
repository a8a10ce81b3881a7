"""The policy on Kimi-K3 and on the public cases: what it chooses, what it rules out, and why."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3backend.common.block_forms import group_kernel_problem
from k3backend.common.errors import InputError, PlanError
from k3backend.common.group_policy import choose_grouping
from k3backend.common.grouping_choice import GroupingCandidate, GroupingChoice
from k3backend.common.kv_capacity import plan_stages
from k3backend.common.kv_config import pool_block_bytes, request_blocks, request_bytes
from k3backend.common.kv_groups import check_partition, kv_tp_replicas, plan_groups
from k3backend.common.kv_plan import make_plan
from k3backend.common.kv_spec import (
    FullAttentionSpec,
    MultipleOf,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from k3backend.common.spec_file import parse_spec_document
from tests.helpers.k3_layers import MILLION, k3_context, k3_layers

CASES = sorted((Path(__file__).parents[1] / "data" / "planning").glob("*.json"))
GIB = 1 << 30


def chosen(choice: GroupingChoice) -> GroupingCandidate:
    (found,) = [candidate for candidate in choice.candidates if candidate.chosen]
    return found


def named(choice: GroupingChoice, start: str) -> GroupingCandidate:
    return next(c for c in choice.candidates if c.name.startswith(start))


def codes(choice: GroupingChoice) -> list[str]:
    return [warning.code for warning in choice.warnings]


def widths(choice: GroupingChoice) -> list[int]:
    return [len(group.layer_names) for group in choice.groups]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_public_case_stays_within_its_bound(path: Path) -> None:
    document = json.loads(path.read_text())
    expected = document["expect"]["k3"]
    file = parse_spec_document(document["specs"], path.name)
    choice = choose_grouping(file.specs, file.context)
    check_partition(choice.groups, file.specs)
    cost = request_bytes(choice.groups, file.context) * (1 + 0.00225 * len(choice.groups))
    assert cost <= expected["max_cost"]
    if "warning" in expected:
        assert any(expected["warning"] in warning.message for warning in choice.warnings)
    plan = make_plan(file.specs, file.context, available_bytes=file.available_bytes)
    assert plan.request.bytes == request_bytes(choice.groups, file.context)


def test_full_attention_draft_is_co_located() -> None:
    specs, context = k3_layers(8, "full"), k3_context(8)
    choice = choose_grouping(specs, context)
    assert widths(choice) == [23, 23, 23, 29]
    assert request_bytes(choice.groups, context) == 18_216_714_240
    shared = choice.groups[3].kv_cache_spec
    assert isinstance(shared, UniformTypeKVCacheSpecs)
    draft = shared.kv_cache_specs["draft.0"]
    assert (draft.block_size, draft.page_size_bytes) == (1536, 884_736)
    assert draft.is_draft
    assert not shared.kv_cache_specs["model.layers.3"].is_draft
    default, apart = named(choice, "vllm"), named(choice, "apart-b1536-w24")
    assert (default.groups, default.request_bytes) == (20, 18_685_624_320)
    assert apart.groups == 5
    assert round(apart.request_bytes / GIB, 3) == 27.547
    assert "18,685,624,320" in choice.reason


def test_a_fixed_kernel_block_rules_co_location_out() -> None:
    specs = k3_layers(8, "full")
    choice = choose_grouping(specs, k3_context(8, mla_kernel_block="64"))
    refused = named(choice, "co-located")
    assert not refused.chosen
    assert "mla_kernel_block (64)" in str(refused.why_not)
    assert "cannot be split into kernel blocks" in str(refused.why_not)
    assert chosen(choice).request_bytes <= 18_701_549_568
    for group in choice.groups:
        assert len({specs[name].is_draft for name in group.layer_names}) == 1


@pytest.mark.parametrize("tokens", ["16", "16,32", "32,64"])
def test_a_draft_with_fixed_kernel_blocks_gets_no_padded_page(tokens: str) -> None:
    """Nothing that runs is as cheap as the default, which itself cannot run: that is said."""
    context = k3_context(8, draft_kernel_block=tokens)
    choice = choose_grouping(k3_layers(8, "full"), context)
    assert chosen(choice).name == "vllm"
    assert codes(choice) == ["kernel-blocks"]
    assert "cannot run" in choice.reason


def test_without_prefix_caching_the_draft_fills_its_page() -> None:
    """1,728 tokens of 16 KV heads x 64 in bf16 take exactly K3's page at every TP."""
    for tp in (1, 2, 4, 8, 16):
        specs, context = k3_layers(tp, "window"), k3_context(tp, prefix_caching=False)
        choice = choose_grouping(specs, context)
        (draft,) = [g for g in choice.groups if specs[g.layer_names[0]].is_draft]
        assert draft.kv_cache_spec.block_size == 1728
        assert draft.kv_cache_spec.page_size_padded is None  # type: ignore[attr-defined]


def test_unpadded_pages_suit_fixed_kernel_blocks() -> None:
    """1,728 is a multiple of 64 as of 32, so such backends can split the draft's page."""
    context = k3_context(8, prefix_caching=False, draft_kernel_block="32,64")
    choice = choose_grouping(k3_layers(8, "full"), context)
    assert chosen(choice).name.startswith("apart-b1728")
    assert codes(choice) == []


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_window_draft_always_plans(tp: int, fp8: bool) -> None:
    specs, context = k3_layers(tp, "window", fp8), k3_context(tp)
    choice = choose_grouping(specs, context)
    check_partition(choice.groups, specs)
    assert len(choice.groups) < 20
    target_block = choice.groups[0].kv_cache_spec.block_size
    for group in choice.groups:
        assert target_block % group.kv_cache_spec.block_size == 0
        drafts = sum(specs[name].is_draft for name in group.layer_names)
        assert drafts in (0, 5)
    try:
        default = request_bytes(plan_groups(specs, context), context) * (1 + 0.00225 * 20)
    except PlanError:
        assert tp * (1 if fp8 else 2) <= 4
    else:
        assert chosen(choice).request_bytes * (1 + 0.00225 * len(choice.groups)) < default


def test_known_numbers_of_the_window_draft() -> None:
    choice = choose_grouping(k3_layers(8, "window"), k3_context(8))
    assert len(choice.groups) == 5
    assert round(chosen(choice).request_bytes / GIB, 3) == 14.199
    assert round(named(choice, "vllm").request_bytes / GIB, 3) == 14.621


def test_window_of_latent_vectors_counts_as_a_draft() -> None:
    specs = k3_layers(8)
    mla = specs["model.layers.3"]
    draft = SlidingWindowMLASpec(
        block_size=1536,
        num_kv_heads=1,
        head_size=576,
        dtype="uint8",  # type: ignore[arg-type]
        cache_dtype_str="fp8",
        sliding_window=2048,
        dcp_sharded=False,
        is_draft=True,
    )
    specs |= {f"draft.{i}": draft for i in range(5)}
    choice = choose_grouping(specs, k3_context(8))
    assert len(choice.groups) == 5
    assert choice.groups[4].kv_cache_spec.page_size_bytes == mla.page_size_bytes


def test_mla_draft_stays_with_the_target() -> None:
    for tp in (1, 8, 16):
        specs, context = k3_layers(tp, "mla", fp8=False), k3_context(tp)
        choice = choose_grouping(specs, context)
        assert widths(choice) == [23, 23, 23, 29]
        assert choice.groups == plan_groups(specs, context)
    isolated = named(choice, "isolate")
    assert round(isolated.request_bytes / GIB, 1) == 54.3
    assert "stays in the target's group" in str(isolated.why_not)
    assert round(chosen(choice).request_bytes / GIB, 1) == 33.0


def test_mla_draft_is_never_set_apart_even_where_that_is_cheaper() -> None:
    specs = k3_layers(8, "mla")
    for tokens in (1, 500, 2000, 20_000, MILLION):
        choice = choose_grouping(specs, k3_context(8, context=tokens))
        for group in choice.groups:
            drafts = [specs[name].is_draft for name in group.layer_names]
            assert not all(drafts)


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"max_tp_shards": None}, "undeclared-shards", "draft.max_tp_shards"),
        ({"cache_dtype_str": "fp8_e4m3"}, "label-alias", "draft.cache_dtype_str"),
        ({"block_stride_alignment": MultipleOf(64)}, "label-alias", "block_stride_alignment"),
        ({"block_stride_alignment": MultipleOf(32)}, "label-alias", "block_stride_alignment"),
    ],
)
def test_what_only_looks_different_is_repaired_and_said(
    fields: dict[str, Any], code: str, word: str
) -> None:
    specs, context = k3_layers(8, "mla", **fields), k3_context(8)
    assert len(plan_groups(specs, context)) == 20
    choice = choose_grouping(specs, context)
    assert widths(choice) == [23, 23, 23, 29]
    (warning,) = [warning for warning in choice.warnings if warning.code == code]
    assert word in warning.message


def test_all_three_differences_at_once_are_repaired() -> None:
    fields = {
        "max_tp_shards": None,
        "cache_dtype_str": "fp8_e4m3",
        "block_stride_alignment": MultipleOf(64),
    }
    choice = choose_grouping(k3_layers(8, "mla", **fields), k3_context(8))
    assert widths(choice) == [23, 23, 23, 29]
    assert set(codes(choice)) == {"label-alias", "undeclared-shards"}


def test_replicas_follow_the_declared_specs() -> None:
    specs = {name: spec for name, spec in k3_layers(8, "mla").items() if "draft" in name}
    target = {name: s for name, s in k3_layers(8).items() if hasattr(s, "cache_dtype_str")}
    only_mla, context = target | specs, k3_context(8)
    assert kv_tp_replicas(choose_grouping(only_mla, context).groups, context) == 8
    with_kda = k3_layers(8, "mla")
    assert kv_tp_replicas(choose_grouping(with_kda, context).groups, context) == 1


def test_a_repair_that_raises_the_replicas_says_so() -> None:
    """Two MLA formats keep the layers in two groups, so the repair decides the grouping."""
    _, mla = k3_layers(8), k3_layers(8)["model.layers.3"]
    window = SlidingWindowMLASpec(
        block_size=1536,
        num_kv_heads=1,
        head_size=576,
        dtype="uint8",  # type: ignore[arg-type]
        cache_dtype_str="fp8",
        sliding_window=2048,
        dcp_sharded=False,
        max_tp_shards=1,
    )
    specs = {f"window.{i}": window for i in range(3)}
    specs |= {f"mla.{i}": mla for i in range(4)}
    specs |= {f"draft.{i}": replace(mla, max_tp_shards=None, is_draft=True) for i in range(2)}
    context = k3_context(8)
    choice = choose_grouping(specs, context)
    assert kv_tp_replicas(plan_groups(specs, context), context) == 1
    assert kv_tp_replicas(choice.groups, context) == 8
    (warning,) = [w for w in choice.warnings if w.code == "undeclared-shards"]
    assert "from 1 to 8" in warning.message


def test_context_decides_between_bytes_and_groups() -> None:
    """Co-located blocks are wide: short requests need fewer bytes in 20 narrow groups."""
    specs, context = k3_layers(8, "full"), k3_context(8)
    shared = choose_grouping(specs, context).groups
    default = plan_groups(specs, context)
    requests = {
        name: [
            60
            * GIB
            // pool_block_bytes(groups, context)
            // sum(request_blocks(groups, context, tokens))
            for tokens in (60_000, MILLION)
        ]
        for name, groups in (("shared", shared), ("default", default))
    }
    assert requests["shared"][0] == 37
    assert requests["default"][0] == 39
    assert requests["shared"][1] >= requests["default"][1]
    assert request_bytes(shared, context) < request_bytes(default, context)
    short = choose_grouping(specs, k3_context(8, context=2_000))
    assert chosen(short).request_bytes < request_bytes(shared, context, 2_000)


def test_isolate_is_the_plain_rule() -> None:
    for tp, block in ((1, 1536), (2, 1536), (4, 1536), (8, 1536), (16, 768)):
        specs = k3_layers(tp, "window")
        choice = choose_grouping(specs, k3_context(tp), "isolate")
        assert widths(choice) == [23, 23, 23, 24, 5]
        assert choice.groups[4].kv_cache_spec.block_size == block
    choice = choose_grouping(k3_layers(8, "full"), k3_context(8), "isolate")
    assert round(chosen(choice).request_bytes / GIB, 3) == 27.547


def test_isolate_without_a_draft_is_the_default() -> None:
    specs, context = k3_layers(8), k3_context(8)
    choice = choose_grouping(specs, context, "isolate")
    assert choice.groups == plan_groups(specs, context)
    assert "no draft" in choice.reason


def test_policy_vllm_is_the_default_planner() -> None:
    specs, context = k3_layers(8, "full"), k3_context(8)
    choice = choose_grouping(specs, context, "vllm")
    assert choice.groups == plan_groups(specs, context)
    assert [candidate.name for candidate in choice.candidates] == ["vllm"]


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(InputError, match="'best', expected k3, vllm or isolate"):
        choose_grouping(k3_layers(8), k3_context(8), "best")


def test_no_layers_give_no_groups() -> None:
    for policy in ("k3", "vllm", "isolate"):
        assert choose_grouping({}, k3_context(8), policy).groups == []


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_packed_layouts_are_left_alone(layout: str) -> None:
    specs, context = k3_layers(8, "full"), k3_context(8, layout=layout)
    choice = choose_grouping(specs, context)
    assert choice.groups == plan_groups(specs, context)
    assert "packs pages" in choice.reason


def test_packed_layouts_with_one_page_size_are_repaired_too() -> None:
    """With equal pages there is nothing to pack, and vLLM splits over the label as elsewhere."""
    specs = k3_layers(8, "mla", max_tp_shards=None)
    choice = choose_grouping(specs, k3_context(8, layout="BLHNC"))
    assert widths(choice) == [23, 23, 23, 29]


def test_layouts_that_cut_heads_apart_take_no_padded_draft() -> None:
    """LHBNC puts a head's blocks side by side, so a padded page of 2 heads has no place."""
    choice = choose_grouping(
        k3_layers(8, "window"), k3_context(8, layout="LHBNC", prefix_caching=False)
    )
    for group in choice.groups:
        spec = group.kv_cache_spec
        assert not isinstance(spec, FullAttentionSpec) or spec.page_size_padded is None


def test_pipeline_stages_stay_balanced() -> None:
    for draft in ("full", "window", "mla"):
        specs, context = k3_layers(8, draft), k3_context(8, pp_size=2)
        names = list(specs)
        stages = {name: int(i >= 47) for i, name in enumerate(names)}
        choice = choose_grouping(specs, context)
        for group in choice.groups:
            counts = Counter(stages[n] for n in group.layer_names if not specs[n].is_draft)
            assert not counts or abs(counts[0] - counts[1]) <= 2
        cut = plan_stages(choice.groups, context, stages)
        assert [stage.layers for stage in cut] == [47, len(names) - 47]
        kda = [[len(group.layer_names) for group in stage.groups[:3]] for stage in cut]
        assert all(max(counts) - min(counts) <= 1 for counts in kda)


def test_stages_count_in_the_cost() -> None:
    """With two stages the draft's stage is 18 pages wide anyway, so KDA needs two groups only."""
    specs, context = k3_layers(8, "mla"), k3_context(8, pp_size=2)
    stages = {name: int(i >= 47) for i, name in enumerate(specs)}
    ours = make_plan(specs, context, "k3", stages)
    default = make_plan(specs, context, "vllm", stages)
    assert [stage.block_bytes // 884_736 for stage in ours.stages] == [18, 18]
    assert (len(ours.groups), len(default.groups)) == (3, 4)
    assert ours.request.bytes < default.request.bytes
    with pytest.raises(PlanError, match="no pipeline stage"):
        choose_grouping(specs, context, "k3", {"draft.0": 1, "draft.1": 0})


def test_dcp_replicated_draft_is_never_worse_than_the_default() -> None:
    specs = k3_layers(8, "mla", dcp_sharded=False)
    context = k3_context(8, dcp_size=8)
    choice = choose_grouping(specs, context)
    default = plan_groups(specs, context)
    cost = request_bytes(choice.groups, context) * (1 + 0.00225 * len(choice.groups))
    assert cost <= request_bytes(default, context) * (1 + 0.00225 * len(default))
    for group in choice.groups:
        assert len({specs[name].is_draft for name in group.layer_names}) == 1


def test_several_drafts_are_grouped_together() -> None:
    specs = k3_layers(8, "full")
    window = k3_layers(8, "window")["draft.0"]
    specs |= {f"window.{i}": window for i in range(3)}
    choice = choose_grouping(specs, k3_context(8))
    assert len(choice.groups) == 5
    assert widths(choice) == [23, 23, 23, 29, 3]


def test_rates_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    specs, context = k3_layers(1, "window"), k3_context(1)
    assert len(choose_grouping(specs, context).groups) == 13
    monkeypatch.setenv("K3BACKEND_GROUP_COST", "0.02")
    assert len(choose_grouping(specs, context).groups) == 5
    monkeypatch.setenv("K3BACKEND_GROUP_COST", "0")
    assert len(choose_grouping(specs, context).groups) == 98
    monkeypatch.setenv("K3BACKEND_GROUP_COST", "much")
    with pytest.raises(InputError, match="K3BACKEND_GROUP_COST"):
        choose_grouping(specs, context)


def test_split_gain_bounds_more_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3BACKEND_GROUP_COST", "0")
    specs, context = k3_layers(8, "mla"), k3_context(8)
    assert len(choose_grouping(specs, context).groups) == 4
    monkeypatch.setenv("K3BACKEND_SPLIT_GAIN", "1")
    assert len(choose_grouping(specs, context).groups) == 98


def test_a_draft_that_cannot_fit_is_one_error_with_its_page() -> None:
    specs = k3_layers(8, "full", num_kv_heads=4096)
    for policy in ("k3", "isolate"):
        with pytest.raises(ValueError, match=r"draft layer draft\.0") as caught:
            choose_grouping(specs, k3_context(8), policy)
        page = specs["draft.0"].page_size_bytes
        assert f"{page} B" in str(caught.value)
        assert "FullAttentionSpec(" in str(caught.value)
        assert caught.value.layer_name == "draft.0"  # type: ignore[attr-defined]


def test_planning_is_fast_and_repeats_itself() -> None:
    specs, context = k3_layers(8, "full"), k3_context(8)
    first = choose_grouping(specs, context)
    times = []
    for _ in range(9):
        # Processor time: other work on the machine is no part of the planner's.
        start = time.process_time()
        again = choose_grouping(specs, context)
        times.append(time.process_time() - start)
        assert again == first
    assert statistics.median(times) < 0.020


def test_every_group_suits_its_backends() -> None:
    """No chosen group mixes a padded draft page with a kernel block that cannot take it."""
    for mla_blocks in ("any", "64", "32,64", "multiple:128"):
        for draft in ("full", "window"):
            specs, context = k3_layers(8, draft), k3_context(8, mla_kernel_block=mla_blocks)
            for group in choose_grouping(specs, context).groups:
                spec = group.kv_cache_spec
                layers = (
                    list(spec.kv_cache_specs.values())
                    if isinstance(spec, UniformTypeKVCacheSpecs)
                    else [replace(spec, is_draft=specs[group.layer_names[0]].is_draft)]
                )
                assert group_kernel_problem(layers, context) is None
