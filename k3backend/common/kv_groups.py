"""Layers to groups, as the default planner of vLLM 0.33.0 forms them.

The result equals vLLM's in partition, order, block sizes and page sizes. The way there differs:
equal specs are counted once, so that the work follows the number of different specs, not of layers.

Where vLLM loses layers or falls over, this planner refuses: layers of one local kind with pages of
two sizes in unequal numbers in a block-outermost layout (vLLM drops some, or meets an empty group),
hidden-state layers of several formats alone, windowed MLA with the hybrid manager disabled, padded
pages that would have to grow by a factor. It also refuses blocks too short for one stored state,
which vLLM counts as pages without content. ``kv_merge_vllm`` lists what vLLM's merge does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from k3backend.common.errors import K3Error, KvMergeError, PlanError
from k3backend.common.kv_distinct_specs import DistinctSpecs
from k3backend.common.kv_layout import KVCacheLayout
from k3backend.common.kv_merge import vllm_merge, vllm_mergeable, vllm_same_key
from k3backend.common.kv_packed_groups import pack_groups, uniform_group
from k3backend.common.kv_page_sizes import (
    PageSizeError,
    all_merge,
    full_allocation_fallback,
    is_uniform_type,
    name_misfit,
    promote_local_specs,
    unify_page_sizes,
)
from k3backend.common.kv_spec import (
    AttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    cdiv,
    iter_layer_specs,
)
from k3backend.common.plan_context import PlanContext

WIDEST_WITHIN = 1.5
"""Below this ratio of the largest to the smallest bucket, groups are as wide as the largest."""


def plan_groups(specs: Mapping[str, KVCacheSpec], context: PlanContext) -> list[KVCacheGroupSpec]:
    """Group the layers as vLLM 0.33.0's ``get_kv_cache_groups`` does. Pure; O(layers).

    Args:
        specs: spec per layer, in layer order. Not changed.
        context: layout and sizes of the deployment.

    Returns:
        The groups in vLLM's order; no group for no layers. Those with a draft layer are marked, see
        ``mark_draft_groups``.

    Raises:
        PlanError: the layers cannot be grouped, or vLLM's planner fails on them. Names the layer
            that does not fit.
    """
    if not specs:
        return []
    groups = _plan(dict(specs), context)
    check_partition(groups, specs)
    return mark_draft_groups(groups, specs)


def _plan(specs: dict[str, KVCacheSpec], context: PlanContext) -> list[KVCacheGroupSpec]:
    distinct = _distinct(specs)
    if context.disable_hybrid_kv_cache_manager:
        specs = _with_local_promoted(specs)
        distinct = _distinct(specs)

    if all_merge(distinct):
        return [KVCacheGroupSpec(list(specs), vllm_merge(distinct.specs))]
    if is_uniform_type(distinct):
        return [uniform_group(list(specs), specs)]

    hidden = {name: spec for name, spec in specs.items() if isinstance(spec, HiddenStateCacheSpec)}
    shared = distinct
    if hidden:
        if len(hidden) == len(specs):
            layer = next(iter(hidden))
            raise PlanError(
                f"layer {layer}: hidden-state layers of different formats need at least one "
                "attention layer whose block size they follow; give them one format",
                layer,
            )
        shared = _distinct({n: s for n, s in specs.items() if n not in hidden})

    pages = {spec.page_size_bytes for spec in shared.specs}
    if len(pages) > 1 and KVCacheLayout[context.layout].is_block_outermost:
        groups = pack_groups(shared, specs)
        # A block is as wide as the widest group, so hidden-state pages need no common size.
        return groups + [KVCacheGroupSpec([name], spec) for name, spec in hidden.items()]

    try:
        unified = unify_page_sizes(shared)
    except PageSizeError as error:
        promoted = full_allocation_fallback(distinct)
        if promoted is None:
            raise name_misfit(error, shared, specs) from None
        return [uniform_group(list(specs), _layer_specs(promoted, specs))]
    groups = _equal_width_groups(unified)
    return _with_hidden_states(groups, hidden) if hidden else groups


def _distinct(specs: Mapping[str, KVCacheSpec]) -> DistinctSpecs:
    """The different specs as vLLM's dictionaries see them."""
    return DistinctSpecs.of(specs).joined(vllm_same_key)


def _with_local_promoted(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Local attention allocated in full, apart for layers that DCP shards and the others."""
    result = dict(specs)
    halves: dict[bool, dict[str, KVCacheSpec]] = {}
    for name, spec in specs.items():
        replicated = isinstance(spec, AttentionSpec) and not spec.dcp_sharded
        halves.setdefault(replicated, {})[name] = spec
    for half in halves.values():
        distinct = _distinct(half)
        promoted = promote_local_specs(distinct)
        if promoted is not distinct:
            result.update(_layer_specs(promoted, half))
    return result


def _layer_specs(
    distinct: DistinctSpecs, specs: Mapping[str, KVCacheSpec]
) -> dict[str, KVCacheSpec]:
    """Spec per layer of ``distinct``; a layer keeps its own draft mark and quantisation."""
    result = {}
    for name, index in distinct.index_of_layer.items():
        spec, own = distinct.specs[index], specs[name]
        if spec.is_draft != own.is_draft:
            spec = replace(spec, is_draft=own.is_draft)
        mode = getattr(own, "kv_quant_mode", None)
        if mode is not None and mode is not getattr(spec, "kv_quant_mode", None):
            spec = replace(spec, kv_quant_mode=mode)  # type: ignore[call-arg]
        result[name] = spec
    return result


def _equal_width_groups(distinct: DistinctSpecs) -> list[KVCacheGroupSpec]:
    """Buckets of mergeable specs, dealt into groups of one width; all pages are of one size."""
    buckets = _mergeable_buckets(distinct.specs)
    names = distinct.layers()
    layers = [[name for index in bucket for name in names[index]] for bucket in buckets]
    counts = [len(bucket_layers) for bucket_layers in layers]
    width, widest = min(counts), max(counts)
    if widest < width * WIDEST_WITHIN:
        width = widest
    groups = []
    merged: dict[tuple[int, ...], KVCacheSpec] = {}
    for bucket, bucket_layers in zip(buckets, layers, strict=True):
        num_groups = cdiv(len(bucket_layers), width)
        for i in range(num_groups):
            # Every num_groups-th layer: each pipeline stage gets its share of each group.
            dealt = bucket_layers[i::num_groups]
            key = tuple(bucket)
            if len(key) > 1:
                key = tuple(dict.fromkeys(distinct.index_of_layer[name] for name in dealt))
            spec = merged.get(key)
            if spec is None:
                spec = merged[key] = _merged([distinct.specs[index] for index in key], dealt)
            groups.append(KVCacheGroupSpec(dealt, spec))
    return groups


def _mergeable_buckets(specs: Sequence[KVCacheSpec]) -> list[list[int]]:
    """Each spec joins the first bucket that it merges with, as vLLM's merge judges it."""
    buckets: list[list[int]] = []
    for index, spec in enumerate(specs):
        for bucket in buckets:
            if vllm_mergeable([*(specs[i] for i in bucket), spec]):
                bucket.append(index)
                break
        else:
            buckets.append([index])
    return buckets


def _merged(specs: Sequence[KVCacheSpec], layers: Sequence[str]) -> KVCacheSpec:
    try:
        return vllm_merge(specs)
    except KvMergeError as error:
        raise PlanError(
            f"layer {layers[0]}: vLLM's merge of its group loses a field: {error.field} is "
            f"{error.left!r} against {error.right!r}; give the field its default value",
            layers[0],
        ) from error


def _with_hidden_states(
    groups: list[KVCacheGroupSpec], hidden: Mapping[str, HiddenStateCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Append one group per hidden-state layer, its page padded to the common page.

    The common page grows, with every block size, until one token's hidden state fits it.
    """
    token_bytes = {
        name: spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        for name, spec in hidden.items()
    }
    page = groups[0].kv_cache_spec.page_size_bytes
    scale = cdiv(max(token_bytes.values()), page)
    if scale > 1:
        page *= scale
        groups = [_scaled(group, scale) for group in groups]
    block_size = math.gcd(*(group.kv_cache_spec.block_size for group in groups))
    for name, spec in hidden.items():
        tokens = max(page // token_bytes[name], 1)
        try:
            aligned = replace(
                spec,
                block_size=largest_divisor(block_size, tokens),
                page_size_padded=page,
            )
        except K3Error as error:
            raise PlanError(
                f"layer {name}: its page does not fit the common page of {page} B: {error}", name
            ) from error
        groups.append(KVCacheGroupSpec([name], aligned))
    return groups


def _scaled(group: KVCacheGroupSpec, scale: int) -> KVCacheGroupSpec:
    spec = group.kv_cache_spec
    block_size = spec.block_size * scale
    if isinstance(spec, AttentionSpec | MambaSpec) and spec.page_size_padded is not None:
        padded = spec.page_size_padded * scale
        scaled: KVCacheSpec = replace(spec, block_size=block_size, page_size_padded=padded)
    else:
        scaled = replace(spec, block_size=block_size)
    return KVCacheGroupSpec(group.layer_names, scaled)


def largest_divisor(value: int, at_most: int) -> int:
    """The largest divisor of ``value`` that is at most ``at_most``; both >= 1."""
    return next(d for d in range(min(value, at_most), 0, -1) if value % d == 0)


def check_partition(groups: Sequence[KVCacheGroupSpec], layers: Collection[str]) -> None:
    """Require each layer in exactly one group, and no other layer. For own and foreign groups.

    Raises:
        PlanError: names the first layer that is missing, repeated or unknown.
    """
    expected = set(layers)
    seen: set[str] = set()
    for number, group in enumerate(groups):
        for name in group.layer_names:
            if name in seen:
                raise PlanError(
                    f"layer {name} is in more than one place of the groups (again in group "
                    f"{number}); put each layer into exactly one group",
                    name,
                )
            if name not in expected:
                raise PlanError(
                    f"layer {name} of group {number} is not a layer of the model; group only the "
                    "layers that have a spec",
                    name,
                )
            seen.add(name)
    if len(seen) != len(expected):
        name = next(name for name in layers if name not in seen)
        raise PlanError(
            f"layer {name} is in no group ({len(expected) - len(seen)} missing); put each layer "
            "into exactly one group",
            name,
        )


def mark_draft_groups(
    groups: Sequence[KVCacheGroupSpec], specs: Mapping[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """The groups with ``is_eagle_group``, and their spec's ``is_draft``, set where at least one
    layer belongs to the draft, and nowhere else. Specs that groups share stay shared."""
    drafts = {name for name, spec in specs.items() if spec.is_draft}
    changed: dict[tuple[int, bool], KVCacheSpec] = {}
    marked = []
    for group in groups:
        is_draft = not drafts.isdisjoint(group.layer_names)
        spec = group.kv_cache_spec
        if spec.is_draft != is_draft:
            key = (id(spec), is_draft)
            if key not in changed:
                changed[key] = replace(spec, is_draft=is_draft)
            spec = changed[key]
        if spec is not group.kv_cache_spec or group.is_eagle_group != is_draft:
            group = replace(group, kv_cache_spec=spec, is_eagle_group=is_draft)
        marked.append(group)
    return marked


def kv_tp_replicas(groups: Sequence[KVCacheGroupSpec], context: PlanContext) -> int:
    """Consecutive tensor-parallel ranks that hold identical KV for every layer.

    The gcd over layers of ``tp_size // max_tp_shards``; 1 for a layer that does not declare
    max_tp_shards, that DCP shards, or that is no attention.
    """
    layer_specs: set[KVCacheSpec] = set()
    for group in groups:
        layer_specs.update(iter_layer_specs(group.kv_cache_spec))
    if not layer_specs:
        return 1
    return math.gcd(context.tp_size, *(_layer_replicas(spec, context) for spec in layer_specs))


def _layer_replicas(spec: KVCacheSpec, context: PlanContext) -> int:
    if not isinstance(spec, AttentionSpec) or spec.max_tp_shards is None:
        return 1
    if spec.dcp_sharded and context.dcp_size > 1:
        return 1
    return max(1, context.tp_size // spec.max_tp_shards)
