"""What the reader of a plan should know, whatever policy made it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from k3backend.common.block_forms import is_mla, real_page_bytes, side_of
from k3backend.common.grouping_choice import PlanWarning
from k3backend.common.kv_config import layer_spec_runs, pool_block_bytes, request_blocks
from k3backend.common.kv_labels import LabelReport, normalize_labels, settle_dcp_sharding
from k3backend.common.kv_spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    cdiv,
    iter_layer_specs,
)
from k3backend.common.plan_context import PlanContext
from k3backend.common.shard_repair import ShardRepair, undeclared_shards

PADDING_SHARE = 0.10
"""Above this share of a request's bytes, padding is reported."""
ISOLATION_SHARE = 0.05
"""Above this share of a request's bytes, what the draft's own groups leave idle is reported."""
FP8_GAIN_SHARE = 0.05
"""Below this saving against two-byte elements, fp8 is reported."""
COARSE_HIT_TOKENS = 256
"""Prefix hits that end at multiples above this are reported."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """The plan's numbers at the planning context."""

    context: PlanContext
    groups: Sequence[KVCacheGroupSpec]
    specs: Mapping[str, KVCacheSpec]
    blocks: Sequence[int]
    block_bytes: int

    @property
    def request_bytes(self) -> int:
        return sum(self.blocks) * self.block_bytes

    @property
    def at_length(self) -> str:
        return f"a request of {self.context.max_model_len:,} tokens"


def plan_warnings(
    groups: Sequence[KVCacheGroupSpec],
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    known: Iterable[PlanWarning] = (),
) -> list[PlanWarning]:
    """All that is to be said of a grouping.

    Args:
        groups: the plan's groups, of any policy.
        specs: spec per layer as the model declares it.
        context: deployment; shares are of one request at ``context.planning_tokens``.
        known: warnings that a policy gave already; their codes are not repeated.
    Returns:
        ``known`` first, then the others in a fixed order.
    """
    result = list(known)
    codes = {warning.code for warning in result}
    if not groups:
        return result
    at_context = context.with_max_model_len(context.planning_tokens)
    plan = _Measured(
        at_context,
        groups,
        specs,
        request_blocks(groups, at_context),
        pool_block_bytes(groups, at_context),
    )
    checks = (_labels, _shards, _padding, _isolated, _split, _fp8, _prefix_hits)
    for check in checks:
        result += [warning for warning in check(plan) if warning.code not in codes]
    return result


def label_warning(report: LabelReport, specs: Mapping[str, KVCacheSpec]) -> PlanWarning:
    """What a normalised label is to be known for."""
    return PlanWarning("label-alias", f"{side_of(specs[report.layer_names[0]])}.{report.message}")


def shard_sentence(repair: ShardRepair, specs: Mapping[str, KVCacheSpec]) -> str:
    """Which layers leave ``max_tp_shards`` out, and what is known all the same."""
    side = "draft" if repair.is_draft else "target"
    layers = repair.layer_names
    named = layers[0] if len(layers) == 1 else f"{len(layers)} layers ({layers[0]}, …)"
    declared = getattr(specs[repair.declared_by], "max_tp_shards", None)
    sentence = (
        f"{side}.max_tp_shards is not declared (None) by {named} while {repair.declared_by} "
        f"declares {declared}"
    )
    if is_mla(specs[layers[0]]):
        return f"{sentence}; an MLA cache is the same on every rank"
    return f"{sentence}; without it such layers count as not replicated"


def _labels(plan: _Measured) -> list[PlanWarning]:
    split = len(plan.groups) > 1
    settled, sharding = settle_dcp_sharding(plan.specs, plan.context.dcp_size)
    reports = [*sharding, *normalize_labels(settled)[1]] if split else []
    return [
        PlanWarning(
            "label-alias",
            f"{side_of(plan.specs[report.layer_names[0]])}.{report.field} is {report.left!r} on "
            f"{report.layer_names[0]} and {report.right!r} on other layers; both mean "
            f"{report.sameness}, but vLLM's default keeps such layers apart: declare one of them, "
            "or plan with policy k3",
        )
        for report in reports
    ]


def _shards(plan: _Measured) -> list[PlanWarning]:
    return [
        PlanWarning(
            "undeclared-shards",
            f"{shard_sentence(repair, plan.specs)}; vLLM's default keeps such layers apart, "
            "declare it in the model",
        )
        for repair in undeclared_shards(settle_dcp_sharding(plan.specs, plan.context.dcp_size)[0])
    ]


def _padding(plan: _Measured) -> list[PlanWarning]:
    real = [
        sum(len(names) * real_page_bytes(spec) for spec, names in layer_spec_runs(group))
        for group in plan.groups
    ]
    wasted = [
        count * (plan.block_bytes - own) for count, own in zip(plan.blocks, real, strict=True)
    ]
    total = plan.request_bytes
    if not total or sum(wasted) <= PADDING_SHARE * total:
        return []
    worst = max(range(len(wasted)), key=wasted.__getitem__)
    group = plan.groups[worst]
    return [
        PlanWarning(
            "padding",
            f"{sum(wasted) / total:.1%} of the bytes of {plan.at_length} hold nothing; most of it "
            f"in group {worst} ({len(group.layer_names)} layers, {group.layer_names[0]} first), "
            f"which leaves {1 - real[worst] / plan.block_bytes:.1%} of each block empty",
        )
    ]


def _isolated(plan: _Measured) -> list[PlanWarning]:
    idle = 0
    layers: list[str] = []
    for group, count in zip(plan.groups, plan.blocks, strict=True):
        if all(plan.specs[name].is_draft for name in group.layer_names):
            used = sum(len(n) * spec.page_size_bytes for spec, n in layer_spec_runs(group))
            idle += count * (plan.block_bytes - used)
            layers += group.layer_names
    mixed = any(not spec.is_draft for spec in plan.specs.values())
    total = plan.request_bytes
    if not mixed or not total or idle <= ISOLATION_SHARE * total:
        return []
    return [
        PlanWarning(
            "draft-isolated",
            f"the draft's {len(layers)} layers stand in groups of their own and leave {idle:,} B "
            f"({idle / total:.1%}) of {plan.at_length} unused; a block is as wide as the target's "
            "groups",
        )
    ]


def _split(plan: _Measured) -> list[PlanWarning]:
    """Draft layers of one kind in several groups; not every drafter of vLLM takes that."""
    groups_of_kind: dict[KVCacheSpec, list[int]] = {}
    for number, group in enumerate(plan.groups):
        kinds = {plan.specs[name] for name in group.layer_names if plan.specs[name].is_draft}
        for kind in kinds:
            groups_of_kind.setdefault(kind, []).append(number)
    spread = [numbers for numbers in groups_of_kind.values() if len(numbers) > 1]
    if not spread:
        return []
    return [
        PlanWarning(
            "draft-split",
            f"the draft's layers are spread over groups {', '.join(map(str, spread[0]))}; DSpark "
            "and DFlash drafts run so, vLLM's EAGLE and MTP proposers refuse it and need policy "
            "isolate",
        )
    ]


def _fp8(plan: _Measured) -> list[PlanWarning]:
    """Fewer bytes per element make blocks longer where a recurrent state fixes the page."""
    if not any(
        isinstance(spec, MambaSpec)
        for group in plan.groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    ):
        return []
    wide = 0
    narrow = 0
    for group, count in zip(plan.groups, plan.blocks, strict=True):
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        narrow += count
        halves = isinstance(spec, FullAttentionSpec) and _is_one_byte(group.kv_cache_spec)
        wide += _blocks_of_half_size(spec, plan.context) if halves else count
    if wide == narrow and not _has_one_byte_group(plan.groups):
        return []
    saved = 1 - narrow / wide if wide else 0.0
    if saved >= FP8_GAIN_SHARE:
        return []
    return [
        PlanWarning(
            "fp8-no-gain",
            f"fp8 saves {saved:.1%} of the bytes of {plan.at_length}: the recurrent state fixes "
            "the page, so one byte per element only makes blocks twice as long",
        )
    ]


def _is_one_byte(spec: KVCacheSpec) -> bool:
    layers = iter_layer_specs(spec)
    return all(
        isinstance(own, AttentionSpec)
        and own.dtype.itemsize == 1
        and own.kv_quant_mode.is_quantized
        for own in layers
    )


def _has_one_byte_group(groups: Sequence[KVCacheGroupSpec]) -> bool:
    return any(
        _is_one_byte(group.kv_cache_spec)
        and isinstance(next(iter(iter_layer_specs(group.kv_cache_spec))), FullAttentionSpec)
        for group in groups
    )


def _blocks_of_half_size(spec: KVCacheSpec, context: PlanContext) -> int:
    tokens = context.max_model_len
    if spec.dcp_sharded and context.dcp_size > 1:
        tokens = cdiv(tokens, context.dcp_size)
    return cdiv(tokens, max(1, spec.block_size // 2))


def _prefix_hits(plan: _Measured) -> list[PlanWarning]:
    if not plan.context.prefix_caching:
        return []
    tokens = math.lcm(*(group.kv_cache_spec.block_size for group in plan.groups))
    if tokens <= COARSE_HIT_TOKENS:
        return []
    return [
        PlanWarning(
            "prefix-hit-granularity",
            f"prefix hits end at multiples of {tokens:,} tokens, the lcm of the groups' block "
            "sizes; of a shared prefix, what lies beyond the last multiple is computed again",
        )
    ]
