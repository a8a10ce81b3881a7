"""Why layers of a plan do not share a group, and what would join them.

Layers with equal specs form one format (a draft's are kept apart from a target's). Two formats are
explained when no group holds layers of both. A remedy is not only named: the model is planned again
with it, and the answer says what that plan needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3backend.common.errors import InputError, K3Error
from k3backend.common.kv_merge import (
    DifferenceKind,
    FieldDifference,
    explain_difference,
    vllm_mergeable,
)
from k3backend.common.kv_plan import KvPlan
from k3backend.common.kv_spec import KVCacheSpec, spec_kind_name
from k3backend.common.spec_file import spec_field_to_json
from k3backend.report.schemas import EXPLAIN_SCHEMA

MAX_FORMATS = 200
"""Every two formats are compared; a model has two to about ten."""
REPLANNED_FORMATS = 600
"""Pairs for which the joined model is planned, times the formats that each such plan weighs; pairs
that differ in fewest fields come first. A model of ten formats, 45 pairs, has all of them."""

_MODEL_FACTS = frozenset(
    {
        "attention_chunk_size",
        "head_size",
        "head_size_v",
        "num_heads",
        "num_kv_heads",
        "rswa_window",
        "shapes",
        "sink_len",
        "sliding_window",
        "tokens_per_state",
    }
)
"""Fields that follow from the model's weights; no setting changes them."""

_SETTINGS = {
    "block_size": "give both one block size",
    "block_stride_alignment": "run both on the same attention backend, which then asks for one "
    "alignment",
    "cache_dtype_str": "store both in one cache dtype (--kv-dtype, --draft-kv-dtype)",
    "dcp_sharded": "shard both over the DCP ranks, or neither",
    "dtype": "store both in one cache dtype (--kv-dtype, --draft-kv-dtype)",
    "kv_quant_mode": "store both in one cache dtype (--kv-dtype, --draft-kv-dtype)",
    "max_tp_shards": "declare the shards that the cache has, 1 for an MLA latent, which every "
    "rank holds whole",
    "num_speculative_blocks": "keep as many speculative states in both",
}


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """The layers that have one spec.

    Attributes:
        id: number, in order of first appearance.
        spec: their spec.
        layer_names: in layer order.
        group_ids: the groups that hold them.
    """

    id: int
    spec: KVCacheSpec
    layer_names: tuple[str, ...]
    group_ids: tuple[int, ...]


def explain_plan(
    specs: Mapping[str, KVCacheSpec],
    plan: KvPlan,
    platform: str | None,
    replan: Callable[[Mapping[str, KVCacheSpec]], KvPlan],
) -> dict[str, Any]:
    """Explain every two formats that share no group, or only because the policy reconciles them.

    A group that keeps a spec per layer, or a policy that repairs a label or an undeclared
    replication, puts layers together whose specs do not merge: those pairs are ``reconciled``.

    Args:
        specs: spec per layer, as they were planned.
        plan: their plan.
        platform: vendor, None for a spec file.
        replan: plans changed specs in the same way.
    Raises:
        InputError: the layers have more than MAX_FORMATS different specs.
    """
    formats = layer_formats(specs, plan)
    apart, reconciled = [], []
    for first, second in itertools.combinations(formats, 2):
        pair = _Pair.of(first, second, plan.context.dcp_size)
        if not set(first.group_ids) & set(second.group_ids):
            apart.append(pair)
        elif pair.blocking:
            reconciled.append(pair)
    apart.sort(key=lambda pair: (pair.agreed is None, len(pair.differences)))
    replans = REPLANNED_FORMATS // len(formats)
    pairs = []
    for index, pair in enumerate(apart):
        joined = _join(pair, specs, replan) if index < replans else None
        pairs.append(_pair_document(pair, joined))
    return {
        "schema": EXPLAIN_SCHEMA,
        "platform": platform,
        "policy": plan.policy,
        "groups": len(plan.groups),
        "block_bytes": plan.block_bytes,
        "request_bytes": plan.request.bytes,
        "formats": [_format(item) for item in formats],
        "apart": pairs,
        "reconciled": [_pair_document(pair, None) for pair in reconciled],
    }


def layer_formats(specs: Mapping[str, KVCacheSpec], plan: KvPlan) -> list[LayerFormat]:
    """The formats of a model, in layer order. Raises InputError above MAX_FORMATS."""
    names: dict[tuple[KVCacheSpec, bool], list[str]] = {}
    for name, spec in specs.items():
        names.setdefault((spec, spec.is_draft), []).append(name)
    if len(names) > MAX_FORMATS:
        raise InputError(
            f"the layers have {len(names)} different specs, and explain compares every two of at "
            f"most {MAX_FORMATS}; give it fewer layers"
        )
    group_of = {name: group.id for group in plan.groups for name in group.layer_names}
    return [
        LayerFormat(number, spec, tuple(layers), tuple(sorted({group_of[name] for name in layers})))
        for number, ((spec, _), layers) in enumerate(names.items())
    ]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two formats that share no group.

    Attributes:
        left: the draft, or else the format of fewer layers: the one that would change.
        right: the other.
        differences: all of them.
        agreed: field -> value with which the two merge; None where no setting makes them.
    """

    left: LayerFormat
    right: LayerFormat
    differences: tuple[FieldDifference, ...]
    agreed: dict[str, Any] | None

    @classmethod
    def of(cls, first: LayerFormat, second: LayerFormat, dcp_size: int) -> _Pair:
        left, right = sorted((first, second), key=_rank)
        differences = tuple(
            # Over one rank nothing is sharded, whatever the field says.
            replace(d, kind=DifferenceKind.LABEL)
            if dcp_size == 1 and d.field == "dcp_sharded"
            else d
            for d in explain_difference(left.spec, right.spec)
        )
        return cls(left, right, differences, _agreed(left.spec, right.spec, differences))

    @property
    def blocking(self) -> list[FieldDifference]:
        return [d for d in self.differences if d.blocks]


def _rank(item: LayerFormat) -> tuple[bool, int, int]:
    return (not item.spec.is_draft, len(item.layer_names), item.id)


def _agreed(
    left: KVCacheSpec, right: KVCacheSpec, differences: Sequence[FieldDifference]
) -> dict[str, Any] | None:
    blocking = [d for d in differences if d.blocks]
    if any(d.field == "kind" or d.field in _MODEL_FACTS for d in blocking):
        return None
    agreed = {d.field: d.right if d.right is not None else d.left for d in blocking}
    try:
        joins = vllm_mergeable([_with(right, agreed), _with(left, agreed)])
    except K3Error:
        return None
    return agreed if joins else None


def _with(spec: KVCacheSpec, agreed: Mapping[str, Any]) -> KVCacheSpec:
    changes = {name: value for name, value in agreed.items() if getattr(spec, name) != value}
    return replace(spec, **changes) if changes else spec


def _join(
    pair: _Pair,
    specs: Mapping[str, KVCacheSpec],
    replan: Callable[[Mapping[str, KVCacheSpec]], KvPlan],
) -> dict[str, Any] | None:
    """What the model needs once the two agree; None where it cannot be planned or they part."""
    if not pair.agreed:
        return None
    new_specs = dict(specs)
    for item in (pair.left, pair.right):
        new_specs.update(dict.fromkeys(item.layer_names, _with(item.spec, pair.agreed)))
    try:
        plan = replan(new_specs)
    except K3Error:
        return None
    group_of = {name: group.id for group in plan.groups for name in group.layer_names}
    left, right = (
        {group_of[name] for name in item.layer_names} for item in (pair.left, pair.right)
    )
    if not left & right:
        return None
    return {
        "changes": [
            {"format": item.id, "field": name, "value": spec_field_to_json(value)}
            for item in (pair.left, pair.right)
            for name, value in pair.agreed.items()
            if getattr(item.spec, name) != value
        ],
        "groups": len(plan.groups),
        "block_bytes": plan.block_bytes,
        "request_bytes": plan.request.bytes,
    }


def _pair_document(pair: _Pair, joined: Mapping[str, Any] | None) -> dict[str, Any]:
    remedy = _remedy(pair)
    if joined is not None:
        changes = [
            f"{change['field']} = {change['value']} in [{change['format']}]"
            for change in joined["changes"]
        ]
        remedy = f"to join them, set {', '.join(changes)}: {remedy}"
    return {
        "left": pair.left.id,
        "right": pair.right.id,
        "differences": [
            {
                "field": d.field,
                "left": spec_field_to_json(d.left),
                "right": spec_field_to_json(d.right),
                "kind": str(d.kind),
                "blocks": d.blocks,
            }
            for d in pair.differences
        ],
        "joinable": bool(pair.agreed),
        "remedy": remedy,
        "joined": joined,
    }


def _remedy(pair: _Pair) -> str:
    """One sentence: what to do, or why nothing can be done."""
    if not pair.blocking:
        return "nothing keeps them from merging; the policy found two groups cheaper"
    for d in pair.blocking:
        if d.field == "kind":
            return f"nothing joins them: {d.left} and {d.right} keep different things"
        if d.field in _MODEL_FACTS:
            return f"nothing joins them: {d.field} follows from the model"
    steps = dict.fromkeys(_SETTINGS.get(d.field, f"give both one {d.field}") for d in pair.blocking)
    text = "; ".join(steps)
    if all(d.kind is DifferenceKind.LABEL for d in pair.blocking):
        return f"{text} (the bytes are the same, and policy k3 takes them for one)"
    return text if pair.agreed else f"{text}; by itself this does not join them"


def _format(item: LayerFormat) -> dict[str, Any]:
    return {
        "id": item.id,
        "kind": spec_kind_name(item.spec),
        "num_layers": len(item.layer_names),
        "layer_names": list(item.layer_names),
        "is_draft": item.spec.is_draft,
        "page_size_bytes": item.spec.page_size_bytes,
        "groups": list(item.group_ids),
    }
