"""Bytes of a block, placement, the null block, stages, and the longest request."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from k3backend.common.errors import InputError, LayoutError, PlanError
from k3backend.common.kv_capacity import (
    longest_model_len,
    plan_capacity,
    plan_stages,
    stage_groups,
    usable_blocks,
)
from k3backend.common.kv_config import (
    build_kv_cache_config,
    check_placement,
    num_blocks,
    pool_block_bytes,
    request_blocks,
    request_bytes,
)
from k3backend.common.kv_groups import plan_groups
from k3backend.common.kv_plan import make_plan
from k3backend.common.kv_spec import (
    SPEC_CLASSES,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MultipleOf,
)
from k3backend.common.plan_context import LAYOUT_NAMES, PlanContext
from k3backend.common.spec_file import parse_spec_document
from tests.unit.test_kv_groups import full, layers, mla, window

CONTEXT = PlanContext(max_model_len=4096)
PLANNING = Path(__file__).parents[1] / "data" / "planning"


def case(name: str) -> Any:
    """The spec file of a public case."""
    return parse_spec_document(json.loads((PLANNING / f"{name}.json").read_text())["specs"], name)


def single(spec: KVCacheSpec, count: int = 1) -> list[KVCacheGroupSpec]:
    """One group."""
    return [KVCacheGroupSpec([f"a.{i}" for i in range(count)], spec)]


def test_null_block_is_not_usable() -> None:
    """vllm#48724: eight blocks hold seven blocks of requests, 896 tokens and not 1,024."""
    file = case("null-block")
    plan = make_plan(file.specs, file.context, "vllm", available_bytes=file.available_bytes)
    assert plan.capacity is not None
    assert plan.capacity.num_blocks == 8
    assert plan.capacity.usable_blocks == 7
    assert plan.capacity.max_model_len_that_fits == 7 * 128
    assert plan.capacity.max_concurrency == 7 / 8


def test_no_block_and_the_null_block_alone_serve_nothing() -> None:
    groups = single(full())
    for available in (0, 8191, 8192, 16383):
        stages = plan_stages(groups, CONTEXT, available_bytes=available)
        assert longest_model_len(stages, CONTEXT) == 0
    stages = plan_stages(groups, CONTEXT, available_bytes=16384)
    assert longest_model_len(stages, CONTEXT) == 16
    assert usable_blocks(0) == 0


@pytest.mark.parametrize("name", ["k3-mla-draft", "k3-gqa-window-tp8", "mimo-9-39-5"])
def test_longest_length_is_exact(name: str) -> None:
    """The longest length fits and one token more does not, at budgets that end inside a block."""
    file = case(name)
    groups = plan_groups(file.specs, file.context)
    block = pool_block_bytes(groups, file.context)
    for share in (0.05, 0.3, 0.8, 1.0):
        available = int(request_bytes(groups, file.context) * share) + block - 1
        stages = plan_stages(groups, file.context, available_bytes=available)
        longest = longest_model_len(stages, file.context)
        usable = available // block - 1
        assert sum(request_blocks(groups, file.context, longest)) <= usable
        assert sum(request_blocks(groups, file.context, longest + 1)) > usable


def test_longest_length_may_pass_the_model_length() -> None:
    stages = plan_stages(single(full()), CONTEXT, available_bytes=8192 * 1001)
    assert longest_model_len(stages, CONTEXT) == 4096
    assert longest_model_len(stages, CONTEXT, limit=1 << 20) == 16000


def test_the_smallest_stage_decides() -> None:
    """PP 2 with three of four layers on the second stage: its block is three pages wide."""
    groups = single(full(), 4)
    stages = plan_stages(groups, CONTEXT, {"a.0": 0, "a.1": 1, "a.2": 1, "a.3": 1}, 8192 * 30)
    assert [(s.layers, s.block_bytes, s.num_blocks) for s in stages] == [
        (1, 8192, 30),
        (3, 3 * 8192, 10),
    ]
    capacity = plan_capacity(stages, CONTEXT, 8192 * 30)
    assert capacity is not None
    assert (capacity.num_blocks, capacity.usable_blocks) == (10, 9)
    assert capacity.max_model_len_that_fits == 9 * 16


def test_a_stage_keeps_a_group_that_it_has_no_layer_of() -> None:
    groups = plan_groups(layers(f=(2, full()), s=(2, window())), CONTEXT)
    cut = stage_groups(groups, {"f.0", "f.1"})
    assert [group.layer_names for group in cut] == [["f.0", "f.1"], []]
    assert request_blocks(cut, CONTEXT) == request_blocks(groups, CONTEXT)
    config = build_kv_cache_config(cut, CONTEXT, 4)
    assert [tensor.layers for tensor in config.kv_cache_tensors] == [["f.0", "f.1"]]


def test_a_uniform_group_is_cut_with_its_specs() -> None:
    groups = plan_groups(layers(f=(2, full()), m=(2, full(num_kv_heads=1))), CONTEXT)
    (cut,) = stage_groups(groups, {"f.1", "m.0"})
    assert cut.layer_names == ["f.1", "m.0"]
    assert pool_block_bytes([cut], CONTEXT) == 8192 + 4096
    assert pool_block_bytes(groups, CONTEXT) == 2 * (8192 + 4096)
    (empty,) = stage_groups(groups, {"other"})
    assert pool_block_bytes([empty], CONTEXT) == 0


def test_stages_need_every_layer() -> None:
    with pytest.raises(PlanError, match=r"layer a\.1 has no pipeline stage"):
        plan_stages(single(full(), 2), CONTEXT, {"a.0": 0})


def test_a_stage_without_layers_bounds_nothing() -> None:
    stages = plan_stages(single(full(), 2), CONTEXT, {"a.0": 0, "a.1": 2}, 8192 * 5)
    assert [(s.layers, s.num_blocks) for s in stages] == [(1, 5), (0, None), (1, 5)]
    assert longest_model_len(stages, CONTEXT) == 64


def test_plan_on_stages_counts_one_ranks_bytes() -> None:
    """K3 on two stages: bytes and padding are those of the stage with the widest block."""
    file = case("k3-mla-draft")
    stages = {name: i % 2 for i, name in enumerate(file.specs)}
    whole = make_plan(file.specs, file.context, "vllm")
    plan = make_plan(file.specs, file.context, "vllm", stages, 64 << 30)
    assert plan.block_bytes == max(stage.block_bytes for stage in plan.stages) < whole.block_bytes
    assert sum(stage.layers for stage in plan.stages) == 98
    assert plan.request.blocks == whole.request.blocks == 710
    assert 0 <= plan.request.padding_bytes < plan.request.bytes
    assert plan.capacity is not None
    assert plan.capacity.num_blocks == (64 << 30) // plan.block_bytes
    assert min(group.idle_bytes_per_block for group in plan.groups) == 0


def test_plan_of_k3() -> None:
    """The numbers that the project's first issue names, and what follows from them."""
    file = case("k3-mla-draft")
    plan = make_plan(file.specs, file.context, "vllm")
    assert [group.num_layers for group in plan.groups] == [23, 23, 23, 29]
    assert [group.is_draft for group in plan.groups] == [False, False, False, True]
    assert plan.groups[3].draft_layers == 5
    assert {group.page_size_bytes for group in plan.groups} == {884736}
    assert plan.groups[0].idle_bytes_per_block == 6 * 884736
    assert plan.request.bytes == 18_216_714_240
    # Nine KDA states a group (2 + 7 speculative), 683 latent blocks.
    assert [group.blocks_per_request for group in plan.groups] == [9, 9, 9, 683]
    state_bytes = 4608 * 10 * 2 + 12 * 128 * 128 * 4
    assert plan.request.real_bytes == 3 * 9 * 23 * state_bytes + 683 * 29 * 884736
    assert plan.prefix_hit_tokens == 1536
    assert plan.block_table_columns == (690, 690, 690, 683)
    assert plan.capacity is None
    assert plan.kv_tp_replicas == 1


@pytest.mark.parametrize("kind", sorted(SPEC_CLASSES))
def test_a_groups_kind_is_the_spec_files(kind: str) -> None:
    """An unmixed group, merged or with a spec per layer, is called what its layers are called."""
    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16"}
    needed: dict[str, Any] = {
        "rswa": {"rswa_window": 512},
        "chunked_local_attention": {"attention_chunk_size": 512},
        "sliding_window": {"sliding_window": 512},
        "sliding_window_mla": {"sliding_window": 512},
        "circular_buffer": {"sliding_window": 512},
        "kpool_tail": {"sliding_window": 512},
    }
    entry = {"kind": kind, "count": 2, **shape, **needed.get(kind, {})}
    if kind == "mamba":
        entry = {"kind": kind, "count": 2, "block_size": 16, "shapes": [[64]], "dtypes": ["uint8"]}
    known = {f.name for f in fields(SPEC_CLASSES[kind])} | {"kind", "count"}
    entry = {name: value for name, value in entry.items() if name in known}
    document = {
        "schema": "k3backend.specs/1",
        "max_model_len": 64,
        "layers": [{**entry, "prefix": "a"}],
    }
    file = parse_spec_document(document)
    for policy in ("vllm", "k3"):
        plan = make_plan(file.specs, file.context, policy)
        assert {group.kind for group in plan.groups} == {kind}


def test_a_mixed_group_is_full_attention() -> None:
    specs = layers(m=(1, mla(head_size=64)), f=(1, full(block_size=64)))
    assert [g.kind for g in make_plan(specs, CONTEXT, "vllm").groups] == ["full_attention"]


def test_padded_heads_that_fill_no_whole_page_cannot_be_placed() -> None:
    """Two heads of 878,592 B over a page of 884,736 B; vLLM's strides refuse it in every order."""
    state = MambaSpec(
        block_size=64, shapes=((4608, 10), (12, 128, 128)), dtypes=("bfloat16", "float32")
    )
    for order in LAYOUT_NAMES:
        for policy in ("vllm", "k3", "isolate"):
            context = replace(CONTEXT, layout=order)
            specs = layers(a=(2, replace(state, num_heads=2, page_size_padded=884_736)))
            with pytest.raises((LayoutError, PlanError), match=r"layer a\.0"):
                make_plan(specs, context, policy)
    whole = layers(a=(2, replace(state, num_heads=2, page_size_padded=2 * 884_736)))
    assert make_plan(whole, CONTEXT, "vllm").block_bytes == 2 * 2 * 884_736


def test_plan_of_nothing() -> None:
    plan = make_plan({}, CONTEXT, "vllm", available_bytes=1 << 30)
    assert (plan.block_bytes, plan.groups, plan.request.bytes) == (0, (), 0)
    assert plan.capacity is None
    assert plan.prefix_hit_tokens == 1
    assert plan.request.padding_fraction == 0


def test_unknown_policy() -> None:
    with pytest.raises(InputError, match="policy is 'best', expected one of k3, vllm, isolate"):
        make_plan({}, CONTEXT, "best")


def test_block_bytes_follow_the_stride_alignment() -> None:
    """Elsewhere each page is rounded up; block-outermost, the sum to the lcm of all alignments."""
    one, two = full(block_stride_alignment=5000), full(num_kv_heads=1, block_stride_alignment=3000)
    groups = plan_groups({"a": one, "b": two}, CONTEXT)
    assert pool_block_bytes(groups, CONTEXT) == 10000 + 6000
    outermost = replace(CONTEXT, layout="BLHNC")
    assert pool_block_bytes(groups, outermost) == 15000
    kernel = full(block_stride_alignment=MultipleOf(8), page_size_padded=9000)
    assert kernel.get_block_stride_alignment() == 9000


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LHBNC", "BHLNC"])
def test_mixed_pages_need_a_layout_that_packs(layout: str) -> None:
    groups = [KVCacheGroupSpec(["a", "b"], full()), KVCacheGroupSpec(["c"], full(num_kv_heads=1))]
    with pytest.raises(LayoutError, match=r"layer c has a page of 4096 B"):
        check_placement(groups, replace(CONTEXT, layout=layout))
    for packing in ("BLHNC", "BLNHC"):
        check_placement(groups, replace(CONTEXT, layout=packing))


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_padding_needs_a_page_in_one_piece(layout: str) -> None:
    context = replace(CONTEXT, layout=layout)
    with pytest.raises(LayoutError, match=r"spreads the 2 heads of layer a\.0"):
        check_placement(single(full(page_size_padded=10000)), context)
    check_placement(single(full(num_kv_heads=1, page_size_padded=10000)), context)


def test_a_layout_that_cuts_pages_apart_pads_no_stride() -> None:
    context = replace(CONTEXT, layout="LHBNC")
    with pytest.raises(LayoutError, match=r"cannot pad the 8192 B page of layer a\.0"):
        check_placement(single(full(block_stride_alignment=5000)), context)


def test_a_kernel_block_without_a_state_is_refused_by_name() -> None:
    spec = mla(tokens_per_state=4, block_stride_alignment=MultipleOf(2))
    with pytest.raises(LayoutError, match=r"layer a\.0, in block_stride_alignment: .*no state"):
        pool_block_bytes(single(spec), CONTEXT)


def test_a_sharded_window_is_refused_by_name() -> None:
    context = PlanContext(max_model_len=4096, tp_size=2, dcp_size=2)
    with pytest.raises(PlanError, match=r"layer a\.0: .*dcp_sharded"):
        request_blocks(single(window()), context)


def test_blocks_in_bytes() -> None:
    assert num_blocks(100, 30) == 3
    with pytest.raises(InputError, match="available_bytes is -1"):
        num_blocks(-1, 30)
    with pytest.raises(InputError, match="block_bytes is 0"):
        num_blocks(100, 0)
    with pytest.raises(InputError, match="blocks is 0"):
        build_kv_cache_config(single(full()), CONTEXT, 0)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_pages_of_a_group_do_not_overlap(layout: str) -> None:
    """Every page starts where the tensors say and none of one group meets another."""
    context = replace(CONTEXT, layout=layout)
    groups = plan_groups(
        layers(a=(2, full(num_kv_heads=1)), s=(3, window(num_kv_heads=1))), context
    )
    blocks = 3
    config = build_kv_cache_config(groups, context, blocks)
    assert {tensor.size for tensor in config.kv_cache_tensors} == {
        blocks * pool_block_bytes(groups, context)
    }
    group_of_layer = {name: i for i, g in enumerate(groups) for name in g.layer_names}
    starts: dict[int, set[int]] = {}
    for tensor in config.kv_cache_tensors:
        for (at, name), block in itertools.product(enumerate(tensor.layers), range(blocks)):
            start = tensor.offset + at * tensor.layer_stride + block * tensor.block_stride
            assert start % 4096 == 0
            assert 0 <= start <= tensor.size - 4096
            seen = starts.setdefault(group_of_layer[name], set())
            assert start not in seen
            seen.add(start)
    assert config.kv_cache_layout == layout


def test_latent_page_of_the_helpers() -> None:
    assert (full().page_size_bytes, mla().page_size_bytes) == (8192, 36864)
