"""Kimi-K3 with random drafts, backends, layouts and stages: what the policy must never do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from k3backend.common.block_forms import group_kernel_problem
from k3backend.common.errors import K3Error
from k3backend.common.kv_groups import check_partition
from k3backend.common.kv_plan import KvPlan, make_plan
from k3backend.common.kv_spec import (
    KVCacheSpec,
    MLAAttentionSpec,
    MultipleOf,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from k3backend.common.plan_context import PlanContext
from tests.helpers.k3_layers import draft_spec, k3_context, k3_layers

SEEDS = 200
SEEDS_PER_BATCH = 50
GROUP_COST = 0.00225


def random_draft(rng: random.Random, mla: MLAAttentionSpec, tp: int) -> KVCacheSpec:
    kind = rng.choice(("mla", "full", "window", "latent_window"))
    if kind == "latent_window":
        return SlidingWindowMLASpec(
            block_size=mla.block_size,
            num_kv_heads=1,
            head_size=576,
            dtype=mla.dtype,
            cache_dtype_str=mla.cache_dtype_str,
            sliding_window=2048,
            dcp_sharded=False,
            is_draft=True,
        )
    fields: dict[str, Any] = {}
    if kind == "mla":
        if rng.random() < 0.5:
            fields = rng.choice(
                (
                    {"max_tp_shards": None},
                    {"cache_dtype_str": "fp8_e4m3"},
                    {"block_stride_alignment": MultipleOf(64)},
                    {"dcp_sharded": False},
                )
            )
        return draft_spec(kind, mla, tp, **fields)
    fields = {
        "num_kv_heads": rng.choice((1, 2, 4, 8, 16)),
        "head_size": rng.choice((64, 128)),
        "dtype": rng.choice(("bfloat16", "float8_e4m3fn")),
    }
    if rng.random() < 0.3:
        fields["block_size"] = rng.choice((16, 64, mla.block_size // 2))
    if kind == "window":
        fields["sliding_window"] = rng.choice((512, 2048, 100_000))
    return draft_spec(kind, mla, tp, **fields)


def random_deployment(
    seed: int,
) -> tuple[dict[str, KVCacheSpec], PlanContext, dict[str, int] | None]:
    rng = random.Random(seed)
    tp = rng.choice((1, 2, 4, 8, 16))
    specs = k3_layers(tp, None, rng.random() < 0.5)
    mla = specs["model.layers.3"]
    assert isinstance(mla, MLAAttentionSpec)
    for number in range(rng.choice((0, 1, 1, 1, 2, 3))):
        draft = random_draft(rng, mla, tp)
        specs |= {f"draft{number}.{i}": draft for i in range(rng.choice((1, 3, 5, 8)))}
    context = k3_context(
        tp,
        dcp_size=rng.choice([size for size in (1, 1, 8) if tp % size == 0]),
        max_model_len=rng.choice((4096, 131_072, 1_048_576)),
        prefix_caching=rng.random() < 0.8,
        mla_kernel_block=rng.choice(("any", "any", "64", "32,64", "16,32", "multiple:128")),
        draft_kernel_block=rng.choice(("multiple:16", "multiple:16", "any", "64", "16,32")),
        layout=rng.choice(("LBNHC", "LBNHC", "LBHNC", "BLHNC", "LHBNC")),
    )
    stages = None
    if rng.random() < 0.3:
        stages = {name: int(index >= 47) for index, name in enumerate(specs)}
    return specs, context, stages


def unserved(plan: KvPlan, specs: dict[str, KVCacheSpec]) -> list[str]:
    """Problems of groups with a draft that no backend pair could serve."""
    problems = []
    for group in plan.group_specs:
        if not any(specs[name].is_draft for name in group.layer_names):
            continue
        spec = group.kv_cache_spec
        layers = [
            spec.kv_cache_specs[name]
            if isinstance(spec, UniformTypeKVCacheSpecs)
            else replace(spec, is_draft=specs[name].is_draft)
            for name in group.layer_names
        ]
        problem = group_kernel_problem(layers, plan.context)
        if problem is not None:
            problems.append(problem)
    return problems


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_BATCH))
def test_k3_with_any_draft(first: int) -> None:
    planned = 0
    for seed in range(first, first + SEEDS_PER_BATCH):
        specs, context, stages = random_deployment(seed)
        try:
            default: KvPlan | None = make_plan(specs, context, "vllm", stages)
        except K3Error:
            default = None
        try:
            plan = make_plan(specs, context, "k3", stages)
        except K3Error:
            # Layouts that spread heads over the pool hold no padded page, so some drafts have
            # no place there; every other layout holds them all.
            assert default is None, f"seed {seed}"
            assert context.layout == "LHBNC", f"seed {seed}"
            continue
        planned += 1
        check_partition(plan.group_specs, specs)
        codes = [warning.code for warning in plan.warnings]
        assert not unserved(plan, specs) or "kernel-blocks" in codes, f"seed {seed}"
        (chosen,) = [c for c in plan.candidates if c.chosen]
        assert chosen.request_bytes == plan.request.bytes
        if default is None:
            continue
        ours, theirs = (
            made.request.bytes * (1 + GROUP_COST * len(made.groups)) for made in (plan, default)
        )
        assert ours <= theirs * (1 + 1e-12), f"seed {seed}"
        if context.prefix_caching:
            assert plan.prefix_hit_tokens <= default.prefix_hit_tokens, f"seed {seed}"
    assert planned > SEEDS_PER_BATCH // 2
