"""Fields that say the same in two ways: "fp8" and "fp8_e4m3", an alignment that holds anyway, a
sharding over one DCP rank.

vLLM compares such labels as text and splits groups over them. Here they are recognised, brought
to one form before layers are grouped under policy "k3", and reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3backend.common.kv_dtype import DType, KVQuantMode, MultipleOf
from k3backend.common.kv_spec import (
    AttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    KVCacheSpecRegistry,
    MambaSpec,
)

LABEL_FIELDS = (
    "cache_dtype_str",
    "block_stride_alignment",
    "alignment",
    "page_size_padded",
    "num_head_slots",
    "state_content_bytes",
)
"""Fields of which two values can mean the same."""

_FP8_NAMES = ("fp8", "fp8_e4m3")
_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}


@dataclass(frozen=True, slots=True)
class LabelReport:
    """One label that was brought to the form of other layers.

    Attributes:
        field: the field.
        left, right: its value before and after.
        layer_names: the layers whose spec was changed.
    """

    field: str
    left: object
    right: object
    layer_names: tuple[str, ...]

    @property
    def message(self) -> str:
        """One line for people."""
        count = len(self.layer_names)
        layers = self.layer_names[0] if count == 1 else f"{count} layers ({self.layer_names[0]}, …)"
        return (
            f"{self.field} {self.left!r} of {layers} means {self.sameness} as {self.right!r} of "
            "the other layers and was taken for it; declare one of them to have vLLM group them too"
        )

    @property
    def sameness(self) -> str:
        """What the two values have in common."""
        return "the same with one DCP rank" if self.field == "dcp_sharded" else "the same bytes"


def same_meaning(left: KVCacheSpec, right: KVCacheSpec, field: str) -> bool:
    """Whether the specs' two values of ``field`` are labels of the same bytes."""
    if field not in LABEL_FIELDS or type(left) is not type(right):
        return False
    same = _meaning(left, field) == _meaning(right, field)
    return same and bool(_one_label([left, right], field))


def settle_dcp_sharding(
    specs: Mapping[str, KVCacheSpec], dcp_size: int
) -> tuple[dict[str, KVCacheSpec], list[LabelReport]]:
    """With one DCP rank, give layers that could share a group one ``dcp_sharded``, the first's.

    Nothing is dealt out over one rank, so sizes, block tables and replicas do not depend on the
    field; only vLLM's comparison of specs does.

    Returns:
        The specs in the same order, and what was changed: nothing with more DCP ranks.
    """
    if dcp_size != 1:
        return dict(specs), []
    first_of_base: dict[type[KVCacheSpec], bool] = {}
    changed: dict[tuple[KVCacheSpec, bool], KVCacheSpec] = {}
    layers: dict[bool, list[str]] = {}
    result = dict(specs)
    for name, spec in specs.items():
        base = KVCacheSpecRegistry.get_uniform_type_base_spec(spec)
        if base is None or isinstance(spec, HiddenStateCacheSpec):
            continue
        sharded = first_of_base.setdefault(base, spec.dcp_sharded)
        if spec.dcp_sharded != sharded:
            key = (spec, spec.is_draft)
            if key not in changed:
                changed[key] = replace(spec, dcp_sharded=sharded)
            result[name] = changed[key]
            layers.setdefault(spec.dcp_sharded, []).append(name)
    return result, [
        LabelReport("dcp_sharded", value, not value, tuple(names))
        for value, names in layers.items()
    ]


def normalize_labels(
    specs: Mapping[str, KVCacheSpec],
) -> tuple[dict[str, KVCacheSpec], list[LabelReport]]:
    """Give layers that differ in labels alone one label each.

    A dtype name becomes the first layer's; of two alignments that the page satisfies the stricter
    stays, so that nothing a backend relies on is lost; a size that repeats what holds anyway is
    dropped. Bytes do not change.

    Returns:
        The specs in the same order, and what was changed.
    """
    families: dict[KVCacheSpec, list[KVCacheSpec]] = {}
    for spec in dict.fromkeys(specs.values()):
        families.setdefault(_family(spec), []).append(spec)
    changes: dict[KVCacheSpec, dict[str, Any]] = {}
    for members in families.values():
        for field in LABEL_FIELDS:
            if len({getattr(spec, field, None) for spec in members}) < 2:
                continue
            for label in _one_label(members, field):
                for spec in members:
                    if getattr(spec, field) != label:
                        changes.setdefault(spec, {})[field] = label
    if not changes:
        return dict(specs), []
    changed_layers: dict[tuple[str, object, object], list[str]] = {}
    changed: dict[int, KVCacheSpec] = {}
    result: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        fields = changes.get(spec)
        if fields is not None and id(spec) not in changed:
            changed[id(spec)] = replace(spec, **fields)
        result[name] = changed.get(id(spec), spec)
        for field, label in (fields or {}).items():
            key = (field, getattr(spec, field), label)
            changed_layers.setdefault(key, []).append(name)
    reports = [LabelReport(*key, tuple(names)) for key, names in changed_layers.items()]
    return result, reports


def _family(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec without labels and without what a merge reconciles: equal ones may join."""
    changes: dict[str, Any] = {
        field: meaning
        for field in LABEL_FIELDS
        if hasattr(spec, field) and (meaning := _meaning(spec, field)) != getattr(spec, field)
    }
    if isinstance(spec, FullAttentionSpec):
        changes.update(sliding_window=None, attention_chunk_size=None, non_causal=False)
        if hasattr(spec, "non_causal_multi_token_decode"):
            changes["non_causal_multi_token_decode"] = False
    return replace(spec, **changes) if changes else spec


def _meaning(spec: KVCacheSpec, field: str) -> object:
    """The value of a label with all its synonyms brought to one; None where it asks nothing."""
    value = getattr(spec, field, None)
    if isinstance(spec, AttentionSpec) and field == "cache_dtype_str":
        return cache_dtype_meaning(value, spec.dtype, spec.kv_quant_mode)
    if value is None or not _asks_nothing(spec, field, value):
        return value
    return None


def cache_dtype_meaning(label: str | None, dtype: DType, mode: KVQuantMode) -> str | None:
    """One name for a cache dtype's synonyms; None and "auto" are the plain element type."""
    if label in _FP8_NAMES:
        return _FP8_NAMES[-1]
    if mode is KVQuantMode.NONE and label in (None, "auto"):
        return dtype.name
    return label if label is None else _SHORT_NAMES.get(label, label)


def _asks_nothing(spec: KVCacheSpec, field: str, value: Any) -> bool:
    """Whether the page is the same without the value."""
    if field == "block_stride_alignment":
        return spec.page_size_bytes % spec.get_block_stride_alignment() == 0
    if field == "page_size_padded":
        return isinstance(spec, AttentionSpec | MambaSpec) and value == spec.real_page_size_bytes
    if not isinstance(spec, AttentionSpec):
        return False
    if field == "alignment":
        return bool(spec.real_page_size_bytes % value == 0)
    if field == "num_head_slots":
        return bool(value == spec.num_kv_heads)
    return bool(value == (spec.head_size + spec.head_size_v) * spec.dtype.itemsize)


def _one_label(specs: Sequence[KVCacheSpec], field: str) -> tuple[Any, ...]:
    """The label that serves all specs of a family, in a tuple; empty where there is none."""
    values = [getattr(spec, field) for spec in specs]
    if field == "cache_dtype_str":
        return (values[0],)
    if field not in ("block_stride_alignment", "alignment"):
        return (None,)
    asked = [value for value in values if value is not None]
    if all(isinstance(value, int) for value in asked):
        return (math.lcm(*asked),)
    if any(isinstance(value, int) for value in asked):
        return ()
    strictest = MultipleOf(math.lcm(*(value.base for value in asked)))
    fits = all(
        _asks_nothing(replace(spec, block_stride_alignment=strictest), field, strictest)
        for spec in specs
    )
    return (strictest,) if fits else ()
