"""Replication that a layer does not declare, and what may be concluded about it.

An MLA cache holds one latent vector per token and no heads to deal out, so every tensor-parallel
rank holds the same one: ``max_tp_shards`` is 1 whether a layer says so or not. A layer that leaves
it out beside layers that declare it splits groups for no reason. Of other caches nothing can be
concluded: how many heads a layer has in all is not in its spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from k3backend.common.block_forms import is_mla
from k3backend.common.kv_merge import mergeable, normalize_labels
from k3backend.common.kv_spec import AttentionSpec, KVCacheSpec


@dataclass(frozen=True, slots=True)
class ShardRepair:
    """One kind of layer whose ``max_tp_shards`` is missing, or was filled in.

    Attributes:
        is_draft: which side the layers are on.
        layer_names: the layers.
        declared_by: a layer that declares the value.
    """

    is_draft: bool
    layer_names: tuple[str, ...]
    declared_by: str


def declare_shards(
    specs: Mapping[str, KVCacheSpec],
) -> tuple[dict[str, KVCacheSpec], list[ShardRepair]]:
    """Fill in ``max_tp_shards`` of MLA layers that other MLA layers of the same format declare.

    Returns:
        The specs in the same order, and what was filled in.
    """
    first_layer: dict[KVCacheSpec, str] = {}
    for name, spec in specs.items():
        first_layer.setdefault(spec, name)
    declared = [spec for spec in first_layer if _is_latent(spec) and _shards(spec) == 1]
    filled: dict[KVCacheSpec, tuple[KVCacheSpec, str]] = {}
    for spec in first_layer:
        if not _is_latent(spec) or _shards(spec) is not None:
            continue
        repaired = replace(spec, max_tp_shards=1)  # type: ignore[call-arg]
        partner = next(
            (other for other in declared if _merge_but_for_labels(repaired, other)), None
        )
        if partner is not None:
            filled[spec] = (repaired, first_layer[partner])
    if not filled:
        return dict(specs), []
    layers: dict[tuple[KVCacheSpec, bool], list[str]] = {}
    result = {}
    for name, spec in specs.items():
        if spec in filled:
            layers.setdefault((spec, spec.is_draft), []).append(name)
            spec = replace(filled[spec][0], is_draft=spec.is_draft)
        result[name] = spec
    repairs = [
        ShardRepair(is_draft, tuple(names), filled[spec][1])
        for (spec, is_draft), names in layers.items()
    ]
    return result, repairs


def undeclared_shards(specs: Mapping[str, KVCacheSpec]) -> list[ShardRepair]:
    """Layers that differ from others only in leaving ``max_tp_shards`` out, MLA or not.

    What :func:`declare_shards` fills in is among them.
    """
    first_layer: dict[KVCacheSpec, str] = {}
    for name, spec in specs.items():
        first_layer.setdefault(spec, name)
    declared = [spec for spec in first_layer if _shards(spec) is not None]
    partner_of: dict[KVCacheSpec, str] = {}
    for spec in first_layer:
        if not isinstance(spec, AttentionSpec) or spec.max_tp_shards is not None:
            continue
        for other in declared:
            filled = replace(spec, max_tp_shards=_shards(other))
            if type(other) is type(spec) and _merge_but_for_labels(filled, other):
                partner_of[spec] = first_layer[other]
                break
    layers: dict[tuple[KVCacheSpec, bool], list[str]] = {}
    for name, spec in specs.items():
        if spec in partner_of:
            layers.setdefault((spec, spec.is_draft), []).append(name)
    return [
        ShardRepair(is_draft, tuple(names), partner_of[spec])
        for (spec, is_draft), names in layers.items()
    ]


def _merge_but_for_labels(left: KVCacheSpec, right: KVCacheSpec) -> bool:
    if mergeable([left, right]):
        return True
    named, _ = normalize_labels({"left": left, "right": right})
    return mergeable(named.values())


def _is_latent(spec: KVCacheSpec) -> bool:
    return is_mla(spec) and isinstance(spec, AttentionSpec) and spec.num_kv_heads == 1


def _shards(spec: KVCacheSpec) -> int | None:
    return spec.max_tp_shards if isinstance(spec, AttentionSpec) else None
