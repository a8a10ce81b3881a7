"""Layout JSON (``k3backend.layout/1``): one plan as plain dicts, lists, strings and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from k3backend.common.kv_capacity import Capacity
from k3backend.common.kv_plan import GroupPlan, KvPlan
from k3backend.common.kv_spec import (
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    spec_kind_name,
)
from k3backend.common.spec_file import spec_field_to_json
from k3backend.report.schemas import LAYOUT_SCHEMA, LAYOUT_SET_SCHEMA

PER_PLATFORM = ("platform",)
"""Keys that say which platform a plan is for and nothing about the plan."""


def layout_document(
    plan: KvPlan, platform: str | None, notes: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """The Layout JSON of a plan.

    Args:
        plan: what make_plan gave.
        platform: vendor whose specs were planned; None for a spec file, which has none.
        notes: (code, message) to add to the plan's warnings.
    """
    context = plan.context
    return {
        "schema": LAYOUT_SCHEMA,
        "platform": platform,
        "policy": plan.policy,
        "layout": context.layout,
        "tp_size": context.tp_size,
        "dcp_size": context.dcp_size,
        "pp_size": context.pp_size,
        "max_model_len": context.max_model_len,
        "context": context.planning_tokens,
        "block_bytes": plan.block_bytes,
        "groups": [
            _group(group, spec) for group, spec in zip(plan.groups, plan.group_specs, strict=True)
        ],
        "request": {
            "blocks": plan.request.blocks,
            "bytes": plan.request.bytes,
            "real_bytes": plan.request.real_bytes,
            "padding_bytes": plan.request.padding_bytes,
            "padding_fraction": plan.request.padding_fraction,
        },
        "capacity": None if plan.capacity is None else _capacity(plan.capacity),
        "kv_tp_replicas": plan.kv_tp_replicas,
        "block_table_columns": list(plan.block_table_columns),
        "prefix_hit_tokens": plan.prefix_hit_tokens,
        "stages": [
            {
                "stage": stage.stage,
                "layers": stage.layers,
                "block_bytes": stage.block_bytes,
                "num_blocks": stage.num_blocks,
            }
            for stage in plan.stages
        ],
        "candidates": [
            {
                "name": candidate.name,
                "groups": candidate.groups,
                "block_bytes": candidate.block_bytes,
                "request_bytes": candidate.request_bytes,
                "chosen": candidate.chosen,
                "why_not": candidate.why_not,
            }
            for candidate in plan.candidates
        ],
        "reason": plan.reason,
        "warnings": [
            *({"code": w.code, "message": w.message} for w in plan.warnings),
            *({"code": code, "message": message} for code, message in notes),
        ],
    }


def layout_set_document(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Layout documents by platform, and whether all plans are the same."""
    return {
        "schema": LAYOUT_SET_SCHEMA,
        "platforms": dict(documents),
        "equal": same_plan(list(documents.values())),
    }


def same_plan(documents: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all documents differ in nothing but the platform."""
    plans = [
        {key: value for key, value in document.items() if key not in PER_PLATFORM}
        for document in documents
    ]
    return all(plan == plans[0] for plan in plans)


def spec_fields(spec: KVCacheSpec) -> dict[str, Any]:
    """The fields of a spec as JSON values, its kind first.

    A group that keeps a spec per layer lists each different one once, with its layers.
    """
    document: dict[str, Any] = {"kind": spec_kind_name(spec), "block_size": spec.block_size}
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers: dict[tuple[KVCacheSpec, bool], list[str]] = {}
        for name, own in spec.kv_cache_specs.items():
            layers.setdefault((own, own.is_draft), []).append(name)
        document["is_draft"] = spec.is_draft
        document["layer_specs"] = [
            {"layers": names, **spec_fields(own)} for (own, _), names in layers.items()
        ]
        return document
    document.update(
        {field.name: spec_field_to_json(getattr(spec, field.name)) for field in fields(spec)}
    )
    return document


def _group(group: GroupPlan, group_spec: KVCacheGroupSpec) -> dict[str, Any]:
    return {
        "id": group.id,
        "kind": group.kind,
        "num_layers": group.num_layers,
        "layer_names": list(group.layer_names),
        "block_size": group.block_size,
        "page_size_bytes": group.page_size_bytes,
        "blocks_per_request": group.blocks_per_request,
        "idle_bytes_per_block": group.idle_bytes_per_block,
        "is_draft": group.is_draft,
        "num_draft_layers": group.draft_layers,
        "spec": spec_fields(group_spec.kv_cache_spec),
    }


def _capacity(capacity: Capacity) -> dict[str, Any]:
    return {
        "available_bytes": capacity.available_bytes,
        "num_blocks": capacity.num_blocks,
        "usable_blocks": capacity.usable_blocks,
        "max_concurrency": capacity.max_concurrency,
        "max_model_len_that_fits": capacity.max_model_len_that_fits,
    }
