"""The policy against random models, and against every grouping there is of small ones.

The exhaustive search shares no code with the policy: it walks all partitions of the layers and all
block sizes of the draft, keeps what one pool can hold, and prices it with the accounting that the
planner's parity tests check against vLLM.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from k3backend.common.errors import K3Error
from k3backend.common.group_policy import choose_grouping
from k3backend.common.kv_config import pool_block_bytes, request_bytes
from k3backend.common.kv_groups import check_partition, plan_groups
from k3backend.common.kv_plan import make_plan
from k3backend.common.kv_spec import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from k3backend.common.plan_context import PlanContext
from k3backend.common.spec_file import parse_spec_document
from tests.helpers.random_specs import random_document

GROUP_COST = 0.00225
SPLIT_GAIN = 0.95
SEEDS = 400
SEEDS_PER_BATCH = 50
SMALL_MODELS = 120
SMALL_PER_BATCH = 20


def cost_of(groups: list[KVCacheGroupSpec], context: PlanContext) -> float:
    return request_bytes(groups, context) * (1 + GROUP_COST * len(groups))


def lcm_of(groups: list[KVCacheGroupSpec]) -> int:
    return math.lcm(*(group.kv_cache_spec.block_size for group in groups))


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_BATCH))
def test_never_above_the_default_on_random_models(first: int) -> None:
    planned = 0
    for seed in range(first, first + SEEDS_PER_BATCH):
        try:
            file = parse_spec_document(random_document(seed), f"seed {seed}")
        except K3Error:
            continue
        context = file.context.with_max_model_len(file.context.planning_tokens)
        try:
            default = plan_groups(file.specs, context)
            default_cost = cost_of(default, context)
        except K3Error:
            default = None
        try:
            choice = choose_grouping(file.specs, context)
        except K3Error:
            assert default is None, f"seed {seed}: the default plans and the policy does not"
            continue
        planned += 1
        check_partition(choice.groups, file.specs)
        (chosen,) = [c for c in choice.candidates if c.chosen]
        assert chosen.groups == len(choice.groups)
        assert chosen.block_bytes == pool_block_bytes(choice.groups, context)
        assert chosen.request_bytes == request_bytes(choice.groups, context)
        assert all(c.chosen or c.why_not for c in choice.candidates)
        assert choice == choose_grouping(file.specs, context)
        for group in choice.groups:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                own = spec.kv_cache_specs
                assert all(own[n].is_draft == file.specs[n].is_draft for n in group.layer_names)
        if default is None:
            continue
        assert cost_of(choice.groups, context) <= default_cost * (1 + 1e-12), f"seed {seed}"
        if context.prefix_caching and default:
            assert lcm_of(choice.groups) <= lcm_of(default), f"seed {seed}"
    assert planned > SEEDS_PER_BATCH // 2


@pytest.mark.parametrize("first", range(0, SEEDS, 2 * SEEDS_PER_BATCH))
def test_never_above_the_default_on_two_stages(first: int) -> None:
    """A pool block is then that of the widest stage, for both policies."""
    planned = 0
    for seed in range(first, first + SEEDS_PER_BATCH):
        try:
            file = parse_spec_document(random_document(seed), f"seed {seed}")
            names = list(file.specs)
            stages = {name: int(2 * i >= len(names)) for i, name in enumerate(names)}
            context = file.context.with_max_model_len(file.context.planning_tokens)
            default = make_plan(file.specs, context, "vllm", stages)
        except K3Error:
            continue
        ours = make_plan(file.specs, context, "k3", stages)
        (chosen,) = [c for c in ours.candidates if c.chosen]
        assert chosen.block_bytes == ours.block_bytes
        assert chosen.request_bytes == ours.request.bytes
        costs = [
            plan.request.bytes * (1 + GROUP_COST * len(plan.groups)) for plan in (ours, default)
        ]
        assert costs[0] <= costs[1] * (1 + 1e-12), f"seed {seed}"
        planned += 1
    assert planned > SEEDS_PER_BATCH // 3


def small_model(seed: int) -> tuple[dict[str, KVCacheSpec], PlanContext]:
    """At most six layers of two or three kinds, one of them perhaps a draft."""
    rng = random.Random(seed)
    block = rng.choice((64, 96, 128))
    bytes_per_token = rng.choice((512, 576, 1024))
    kinds: list[Any] = []
    mla = MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=bytes_per_token,
        dtype="uint8",  # type: ignore[arg-type]
        max_tp_shards=1,
    )
    full = FullAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=bytes_per_token // 4,
        dtype="bfloat16",  # type: ignore[arg-type]
    )
    kinds.append(rng.choice((mla, full)))
    page = block * bytes_per_token
    if rng.random() < 0.7:
        kinds.append(
            MambaSpec(
                block_size=block,
                shapes=((page - rng.choice((0, 64, 4096)),),),
                dtypes=("uint8",),  # type: ignore[arg-type]
                page_size_padded=page,
                mamba_cache_mode="align",
                num_speculative_blocks=rng.choice((0, 3)),
            )
        )
    if rng.random() < 0.5:
        kinds.append(
            SlidingWindowSpec(
                block_size=block,
                num_kv_heads=1,
                head_size=bytes_per_token // 4,
                dtype="bfloat16",  # type: ignore[arg-type]
                sliding_window=rng.choice((128, 512)),
            )
        )
    if rng.random() < 0.8:
        heads = rng.choice((1, 2, 3, 4, 8))
        fields: dict[str, Any] = {
            "block_size": block,
            "num_kv_heads": heads,
            "head_size": rng.choice((32, 64)),
            "dtype": "bfloat16",
            "is_draft": True,
        }
        if rng.random() < 0.5:
            kinds.append(SlidingWindowSpec(sliding_window=256, **fields))
        else:
            kinds.append(FullAttentionSpec(**fields))
    layers: dict[str, KVCacheSpec] = {}
    for number, kind in enumerate(kinds[:4]):
        for index in range(rng.choice((1, 1, 2, 3) if number else (1, 2))):
            if len(layers) < 6:
                layers[f"kind{number}.{index}"] = kind
    context = PlanContext(
        max_model_len=rng.choice((300, 5_000, 60_000)),
        max_in_flight_tokens=rng.choice((64, 1024)),
        prefix_caching=rng.random() < 0.8,
    )
    return layers, context


def partitions(items: list[str]) -> Iterator[list[list[str]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        for index in range(len(smaller)):
            yield [*smaller[:index], [first, *smaller[index]], *smaller[index + 1 :]]
        yield [[first], *smaller]


def at_page(spec: KVCacheSpec, block: int, page: int) -> KVCacheSpec | None:
    """``spec`` in blocks of ``block`` tokens at a page of ``page`` bytes."""
    if isinstance(spec, MambaSpec):
        if block != spec.block_size or spec.real_page_size_bytes > page:
            return None
        return replace(spec, page_size_padded=page)
    assert isinstance(spec, FullAttentionSpec | SlidingWindowSpec)
    real = block * spec.num_kv_heads * (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    if real == page:
        return replace(spec, block_size=block, page_size_padded=None)
    if real > page or isinstance(spec, MLAAttentionSpec):
        return None
    return replace(spec, block_size=block, page_size_padded=page)


def one_group(layers: dict[str, KVCacheSpec]) -> KVCacheGroupSpec | None:
    specs = list(layers.values())
    if all(spec == specs[0] for spec in specs):
        return KVCacheGroupSpec(list(layers), specs[0])
    classes = {MLAAttentionSpec: FullAttentionSpec}
    if len({classes.get(type(spec), type(spec)) for spec in specs}) > 1:
        return None
    if not UniformTypeKVCacheSpecs.is_uniform_type(layers):
        return None
    spec = UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=layers)
    return KVCacheGroupSpec(list(layers), spec)


def every_grouping(
    specs: dict[str, KVCacheSpec], context: PlanContext, lcm_tokens: int | None
) -> Iterator[list[KVCacheGroupSpec]]:
    kinds = list(dict.fromkeys((spec, spec.is_draft) for spec in specs.values()))
    sides = ([s for s, _ in kinds], [s for s, draft in kinds if not draft])
    pages = {max(spec.page_size_bytes for spec in side) for side in sides if side}
    for page in pages:
        options = []
        for spec, draft in kinds:
            if draft:
                blocks = range(16, page, 16)
            else:
                factor = page // spec.page_size_bytes
                blocks = range(spec.block_size, spec.block_size * factor + 1, spec.block_size)
            forms = [form for block in blocks if (form := at_page(spec, block, page)) is not None]
            options.append([form for form in forms if _keeps(form, lcm_tokens)])
        for forms in itertools.product(*options):
            if lcm_tokens is not None and math.lcm(*(f.block_size for f in forms)) > lcm_tokens:
                continue
            form_of = dict(zip(kinds, forms, strict=True))
            placed = {name: form_of[spec, spec.is_draft] for name, spec in specs.items()}
            for partition in partitions(list(specs)):
                groups = [one_group({name: placed[name] for name in part}) for part in partition]
                if all(group is not None for group in groups):
                    yield [group for group in groups if group is not None]


def _keeps(form: KVCacheSpec, lcm_tokens: int | None) -> bool:
    return lcm_tokens is None or form.block_size <= lcm_tokens


@pytest.mark.parametrize("first", range(0, SMALL_MODELS, SMALL_PER_BATCH))
def test_no_grouping_of_a_small_model_is_cheaper(first: int) -> None:
    compared = 0
    for seed in range(first, first + SMALL_PER_BATCH):
        specs, context = small_model(seed)
        try:
            default: list[KVCacheGroupSpec] | None = plan_groups(specs, context)
        except K3Error:
            default = None
        target = {name: spec for name, spec in specs.items() if not spec.is_draft}
        try:
            bound = lcm_of(default if default is not None else plan_groups(target, context))
        except K3Error:
            continue
        lcm_tokens = bound if context.prefix_caching else None
        priced = [
            (len(groups), request_bytes(groups, context))
            for groups in every_grouping(specs, context, lcm_tokens)
        ]
        if default is not None:
            priced.append((len(default), request_bytes(default, context)))
        if not priced:
            continue
        yard_groups, yard_bytes = (
            (len(default), request_bytes(default, context)) if default else min(priced)
        )
        best = min(
            size * (1 + GROUP_COST * count)
            for count, size in priced
            if count <= yard_groups or size <= SPLIT_GAIN * yard_bytes
        )
        choice = choose_grouping(specs, context)
        assert cost_of(choice.groups, context) <= best * (1 + 1e-12), f"seed {seed}"
        compared += 1
    assert compared > SMALL_PER_BATCH // 2
