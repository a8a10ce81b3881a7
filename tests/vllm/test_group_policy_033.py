"""vLLM 0.33's own code takes the groups that the policy chose: checks, sizes, views, scheduler."""

from __future__ import annotations

import json
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.kv_cache_layout import KVCacheLayout

from k3backend.common.errors import K3Error
from k3backend.common.group_policy import choose_grouping
from k3backend.common.kv_config import build_kv_cache_config, pool_block_bytes, request_bytes
from k3backend.common.kv_groups import kv_tp_replicas
from k3backend.common.kv_spec import KVCacheGroupSpec, KVCacheSpec
from k3backend.common.plan_context import PlanContext
from k3backend.common.request_trace import TraceRequest
from k3backend.common.spec_file import parse_spec_document
from k3backend.vllm_plugin.replay import LayoutReplay
from k3backend.vllm_plugin.replay_report import ReplaySettings
from k3backend.vllm_plugin.translate import to_vllm_groups, to_vllm_spec
from tests.helpers.k3_layers import k3_context, k3_layers
from tests.helpers.random_specs import random_document
from tests.helpers.vllm_planner import vllm_config

pytestmark = pytest.mark.vllm

CASES = sorted((Path(__file__).parents[1] / "data" / "planning").glob("*.json"))
RANDOM_MODELS = 300
BLOCKS = 3


def config_of(context: PlanContext) -> SimpleNamespace:
    names = ("layout", "tp_size", "dcp_size", "max_model_len", "max_in_flight_tokens")
    document: dict[str, Any] = {name: getattr(context, name) for name in names}
    document["mamba_cache_mode"] = context.mamba_cache_mode
    document["max_num_encoder_input_tokens"] = context.max_num_encoder_input_tokens
    return vllm_config(document)


def accept(
    groups: list[KVCacheGroupSpec], specs: dict[str, KVCacheSpec], context: PlanContext
) -> tuple[list[interface.KVCacheGroupSpec], interface.KVCacheConfig]:
    """Run vLLM's checks and placement over the groups, and compare every number with ours."""
    config = config_of(context)
    builder = planning.DefaultKVCacheConfigBuilder()
    layers = {name: to_vllm_spec(spec) for name, spec in specs.items()}
    translated = to_vllm_groups(groups, specs)
    planning._check_exact_partition(translated, layers)
    block_bytes = planning._pool_bytes_per_block_from_builder(builder, config, translated)
    assert block_bytes == pool_block_bytes(groups, context)
    needed = planning._max_memory_usage_bytes_from_groups(builder, config, translated)
    assert needed == request_bytes(groups, context)
    assert planning.kv_cache_groups_tp_replicas(
        translated, context.tp_size, context.dcp_size
    ) == kv_tp_replicas(groups, context)
    for group in translated:
        drafts = [specs[name].is_draft for name in group.layer_names]
        assert group.is_eagle_group == any(drafts)
    placed = builder.get_kv_cache_config_from_groups(config, translated, BLOCKS)
    assert placed.num_blocks == BLOCKS
    ours = build_kv_cache_config(groups, context, BLOCKS)
    where = attrgetter("layers", "offset", "layer_stride", "block_stride")
    assert list(map(where, ours.kv_cache_tensors)) == list(map(where, placed.kv_cache_tensors))
    return translated, placed


def check_views(
    groups: list[interface.KVCacheGroupSpec],
    placed: interface.KVCacheConfig,
    layout: str,
    kernel_blocks: dict[str, int] | None = None,
) -> None:
    """Build vLLM's views over one buffer; no two layers of a group meet, none leaves the buffer.

    Pages are compared as byte ranges and by writing their first and last element.
    """
    check_ranges(groups, placed)
    raw = torch.zeros(placed.kv_cache_tensors[0].size, dtype=torch.int8)
    views: dict[str, torch.Tensor] = {}
    for tensor in placed.kv_cache_tensors:
        group = next(g for g in groups if tensor.layers[0] in g.layer_names)
        spec = planning._get_per_layer_spec(group, tensor.layers[0])
        kernel_block = (kernel_blocks or {}).get(tensor.layers[0])
        made = interface.create_kv_cache_views(
            raw, spec, placed.num_blocks, KVCacheLayout[layout], tensor, kernel_block
        )
        views.update(zip(tensor.layers, made, strict=True))
    corners = (0, -1)
    for group in groups:
        for number, name in enumerate(group.layer_names):
            for at in corners:
                views[name][:, at, at, at] = number + 1
        for number, name in enumerate(group.layer_names):
            for at in corners:
                assert bool((views[name][:, at, at, at] == number + 1).all()), name


def check_ranges(groups: list[interface.KVCacheGroupSpec], placed: interface.KVCacheConfig) -> None:
    for group in groups:
        ranges = []
        for tensor in placed.kv_cache_tensors:
            for number, name in enumerate(tensor.layers):
                if name in group.layer_names:
                    page = planning._get_per_layer_spec(group, name).page_size_bytes
                    first = tensor.offset + number * tensor.layer_stride
                    starts = [first + b * tensor.block_stride for b in range(placed.num_blocks)]
                    ranges += [(start, start + page) for start in starts]
        ranges.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert ranges[-1][1] <= placed.kv_cache_tensors[0].size


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_vllm_takes_the_groups_of_every_public_case(path: Path) -> None:
    file = parse_spec_document(json.loads(path.read_text())["specs"], path.name)
    groups = choose_grouping(file.specs, file.context).groups
    translated, placed = accept(groups, file.specs, file.context)
    check_views(translated, placed, file.context.layout)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("draft", ["full", "window", "mla"])
def test_vllm_takes_k3_with_every_draft(tp: int, draft: str) -> None:
    specs, context = k3_layers(tp, draft), k3_context(tp)
    groups = choose_grouping(specs, context).groups
    translated, placed = accept(groups, specs, context)
    if tp >= 8:
        check_views(translated, placed, context.layout)


def test_kernel_blocks_of_64_split_every_page_that_the_policy_leaves_unpadded() -> None:
    specs = k3_layers(8, "full")
    context = k3_context(8, mla_kernel_block="64")
    groups = choose_grouping(specs, context).groups
    translated, placed = accept(groups, specs, context)
    split = {name: 64 for name, spec in specs.items() if type(spec).__name__.startswith("MLA")}
    check_views(translated, placed, context.layout, split)


def test_without_prefix_caching_the_draft_splits_too() -> None:
    specs = k3_layers(8, "window")
    context = k3_context(8, prefix_caching=False, draft_kernel_block="64")
    groups = choose_grouping(specs, context).groups
    translated, placed = accept(groups, specs, context)
    check_views(translated, placed, context.layout, {f"draft.{i}": 64 for i in range(5)})


def test_vllm_takes_random_models() -> None:
    accepted = 0
    for seed in range(RANDOM_MODELS):
        try:
            file = parse_spec_document(random_document(seed), f"seed {seed}")
            groups = choose_grouping(file.specs, file.context).groups
        except K3Error:
            continue
        if any("kpool" in type(s).__name__.lower() for s in file.specs.values()) or not groups:
            continue
        context = file.context
        if context.disable_hybrid_kv_cache_manager:
            continue
        accept(groups, file.specs, context)
        accepted += 1
    assert accepted > RANDOM_MODELS // 2


REPLAYED = [
    (8, "full", {}, 4),
    (8, "window", {}, 5),
    (1, "window", {}, 13),
    (8, "mla", {"max_tp_shards": None}, 4),
    (8, "mla", {"dcp_sharded": False}, 20),
]


@pytest.mark.parametrize(("tp", "draft", "fields", "count"), REPLAYED)
def test_the_scheduler_runs_on_the_chosen_groups(
    tp: int, draft: str, fields: dict[str, Any], count: int
) -> None:
    dcp = 8 if fields.get("dcp_sharded") is False else 1
    specs, context = k3_layers(tp, draft, **fields), k3_context(tp, dcp_size=dcp)
    groups = choose_grouping(specs, context).groups
    assert len(groups) == count
    block = groups[0].kv_cache_spec.block_size
    settings = ReplaySettings(memory_bytes=200 * pool_block_bytes(groups, context))
    trace = [TraceRequest(0, block + 100, 30), TraceRequest(0, 50, 5), TraceRequest(0, 4000, 9)]
    replay = LayoutReplay("k3", to_vllm_groups(groups, specs), context, settings)
    report = replay.run(trace)
    assert report.requests_finished == 3
    assert report.preemptions == 0
    assert all(facts["blocks_peak"] > 0 for facts in report.groups)
