"""Merging the specs of a group, and explaining why two do not merge.

``merge_specs`` does not depend on order and loses no field: every compared field of the dataclass
has a rule, "equal" unless it is listed here, and the result is a copy of a spec in which only the
listed fields may change. ``vllm_merge`` and its probes answer as vLLM 0.33.0 does; see
``kv_merge_vllm``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3backend.common.errors import InputError, KvMergeError
from k3backend.common.kv_labels import LabelReport, normalize_labels, same_meaning
from k3backend.common.kv_merge_vllm import (
    vllm_merge,
    vllm_mergeable,
    vllm_same_key,
    vllm_uniform,
)
from k3backend.common.kv_spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    compared_field_names,
    spec_kind_name,
)

__all__ = [
    "DifferenceKind",
    "FieldDifference",
    "LabelReport",
    "explain_difference",
    "merge_specs",
    "mergeable",
    "normalize_labels",
    "vllm_merge",
    "vllm_mergeable",
    "vllm_same_key",
    "vllm_uniform",
]

# Full attention and its family only: there, a window says how a layer computes, not what is kept.
_ANY_OF = ("non_causal", "non_causal_multi_token_decode")
_ONE_OF = ("sliding_window", "attention_chunk_size")


class DifferenceKind(str, enum.Enum):
    """What a differing field means for sharing a group."""

    FORMAT = "format"
    SHARING = "sharing"
    POLICY = "policy"
    LABEL = "label"

    def __str__(self) -> str:
        return self.value


_SHARING_FIELDS = ("max_tp_shards", "dcp_sharded", "tp_replicated")
_FORMAT_FIELDS = (
    "block_size",
    "block_stride_alignment",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "kv_quant_mode",
    "page_size_padded",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
    "cache_dtype_str",
    "alignment",
    "model_version",
    "storage_block_size",
    "shapes",
    "dtypes",
    "num_heads",
    "page_size",
)


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which two specs differ.

    Attributes:
        field: its name; "kind" where the classes differ.
        left, right: the two values.
        kind: *format* (the bytes differ), *sharing* (replication, DCP), *policy* (window,
            cacheability and the like) or *label* (the same bytes under two names).
        blocks: whether it keeps the two from merging; a merge reconciles the others.
    """

    field: str
    left: object
    right: object
    kind: DifferenceKind
    blocks: bool = True


def merge_specs(specs: Iterable[KVCacheSpec], layer_names: Sequence[str] = ()) -> KVCacheSpec:
    """One spec that stands for all of these, whatever their order.

    All fields must be equal, except in the full-attention family: of windows and of chunk sizes at
    most one value among the layers that have one, and not one of each; non-causality is any
    layer's. ``is_draft`` is any layer's too.

    Args:
        specs: at least one.
        layer_names: the layers of ``specs``, for the error.

    Raises:
        InputError: there is no spec.
        KvMergeError: names the field, both values and their layers.
    """
    all_specs = list(specs)
    distinct = list(dict.fromkeys(all_specs))
    if not distinct:
        raise InputError("specs is empty, expected at least one spec; merge the specs of a group")
    conflict = _conflict(distinct)
    if conflict is not None:
        field, left, right, left_spec, right_spec = conflict
        names: list[str] = []
        if len(layer_names) == len(all_specs):
            names = [layer_names[all_specs.index(spec)] for spec in (left_spec, right_spec)]
        raise KvMergeError(field, left, right, names)
    first = distinct[0]
    changes: dict[str, Any] = {}
    if len(distinct) > 1:
        for name in compared_field_names(type(first)):
            value = _merged_value(distinct, name)
            if value != getattr(first, name):
                changes[name] = value
    is_draft = any(spec.is_draft for spec in all_specs)
    if is_draft != first.is_draft:
        changes["is_draft"] = is_draft
    return replace(first, **changes) if changes else first


def mergeable(specs: Iterable[KVCacheSpec]) -> bool:
    """Whether :func:`merge_specs` merges them. Does not depend on order.

    Raises:
        InputError: there is no spec.
    """
    distinct = list(dict.fromkeys(specs))
    if not distinct:
        raise InputError("specs is empty, expected at least one spec; ask about a group's specs")
    return _conflict(distinct) is None


def _rule(cls: type[KVCacheSpec], name: str) -> str:
    if issubclass(cls, FullAttentionSpec):
        if name in _ANY_OF:
            return "any"
        if name in _ONE_OF:
            return "one"
    return "equal"


def _merged_value(specs: Sequence[KVCacheSpec], name: str) -> Any:
    values = [getattr(spec, name) for spec in specs]
    rule = _rule(type(specs[0]), name)
    if rule == "any":
        return any(values)
    if rule == "one":
        return next((value for value in values if value is not None), None)
    return values[0]


_Conflict = tuple[str, object, object, KVCacheSpec, KVCacheSpec]


def _conflict(specs: Sequence[KVCacheSpec]) -> _Conflict | None:
    """The first field that keeps the specs apart, with both values and their specs."""
    first = specs[0]
    if len(specs) == 1:
        return None
    for spec in specs[1:]:
        if type(spec) is not type(first):
            return "kind", spec_kind_name(first), spec_kind_name(spec), first, spec
    having: dict[str, KVCacheSpec] = {}
    for name in compared_field_names(type(first)):
        rule = _rule(type(first), name)
        if rule == "any":
            continue
        candidates = list(specs)
        if rule == "one":
            candidates = [spec for spec in specs if getattr(spec, name) is not None]
            if not candidates:
                continue
            having[name] = candidates[0]
        left = getattr(candidates[0], name)
        for spec in candidates[1:]:
            right = getattr(spec, name)
            if left != right:
                return name, left, right, candidates[0], spec
    for name in having if len(having) > 1 else ():
        # Whoever lacks one of the two kinds would get it from the others.
        lacking = next((spec for spec in specs if getattr(spec, name) is None), None)
        if lacking is not None:
            other = having[name]
            return _ONE_OF[0], _locality(lacking), _locality(other), lacking, other
    return None


def _locality(spec: Any) -> str:
    parts = [f"{name} {getattr(spec, name)}" for name in _ONE_OF if getattr(spec, name) is not None]
    return " and ".join(parts) or "no window and no chunk size"


def explain_difference(a: KVCacheSpec, b: KVCacheSpec) -> list[FieldDifference]:
    """All fields in which two specs differ, and what each difference means.

    Specs of two classes differ in "kind" first; then the fields that both have are compared.
    ``is_draft`` is never among them. Empty for equal specs.
    """
    differences: list[FieldDifference] = []
    same_class = type(a) is type(b)
    if not same_class:
        kind = DifferenceKind.FORMAT if _pages_differ(a, b) else DifferenceKind.POLICY
        differences.append(FieldDifference("kind", spec_kind_name(a), spec_kind_name(b), kind))
    of_b = set(compared_field_names(type(b)))
    for name in compared_field_names(type(a)):
        if name not in of_b:
            continue
        left, right = getattr(a, name), getattr(b, name)
        if left == right:
            continue
        blocks = not same_class or _blocks(a, left, right, name)
        differences.append(FieldDifference(name, left, right, _kind(a, b, name), blocks))
    if same_class and not any(d.blocks for d in differences) and _conflict([a, b]) is not None:
        # A window on one side and a chunk size on the other.
        differences = [replace(d, blocks=True) if d.field in _ONE_OF else d for d in differences]
    return differences


def _blocks(spec: KVCacheSpec, left: object, right: object, name: str) -> bool:
    rule = _rule(type(spec), name)
    if rule == "one":
        return left is not None and right is not None
    return rule == "equal"


def _kind(a: KVCacheSpec, b: KVCacheSpec, name: str) -> DifferenceKind:
    if same_meaning(a, b, name):
        return DifferenceKind.LABEL
    if name in _SHARING_FIELDS:
        return DifferenceKind.SHARING
    return DifferenceKind.FORMAT if name in _FORMAT_FIELDS else DifferenceKind.POLICY


def _pages_differ(a: KVCacheSpec, b: KVCacheSpec) -> bool:
    """Whether two classes store different bytes: a state against tokens, or another page."""
    if isinstance(a, MambaSpec) or isinstance(b, MambaSpec):
        return True
    return a.block_size != b.block_size or a.page_size_bytes != b.page_size_bytes
