"""Which specs vLLM 0.33.0 merges, what it makes of them, and how it fails: quirks included.

vLLM asks its specs to merge in two places, and the places catch different exceptions:

- the uniform probe (do all layers merge?) catches AssertionError only, so that a ValueError ends
  the planning: ``vllm_uniform``;
- the bucket probe (does this spec merge with that bucket?) catches both: ``vllm_mergeable``.

The first spec's class decides the rule, so the answer depends on order. The quirks, each tested:

1. Full attention checks no subclass but MLA: full + RSWA gives full and loses the window; full +
   sink loses the sink's length; sink + RSWA loses the window, sinks of two lengths keep the first.
   RSWA + full refuses.
2. Two windows (or two chunk sizes) on full attention raise ValueError, before any other field is
   compared; everything else raises AssertionError.
3. A window together with a chunk size refuses, even on a single layer.
4. Sink's merge forgets tokens_per_state, so a sink layer with another value than 1 never merges,
   not even alone.
5. MLA's merge forgets head_size_v, so MLA with another value than 0 never merges, not even alone.
6. MLA compares neither sliding_window, attention_chunk_size, non_causal nor alignment, and drops
   them. A hidden-state layer merges with MLA, and the first one's class wins.
7. SlidingWindowMLA compares neither dtype, head sizes, heads, block size, quantisation nor page
   padding; the first spec's win, and quantisation, head_size_v and alignment fall back to their
   defaults. (alignment is not compared either, although the formats differ.)
8. KVQuantMode.CUSTOM and OCTAVE_K3V4 are one value, so they count as equal.
9. is_draft is not compared. Rules that rebuild the spec reset it to False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from k3backend.common.errors import InputError, KvMergeError
from k3backend.common.kv_dtype import KVQuantMode
from k3backend.common.kv_spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    compared_field_names,
    replace_as,
    spec_kind_name,
)


class _Refusal(NamedTuple):
    """Why vLLM's merge raises: the exception, the field, and the spec that differs from another."""

    exception: str
    field: str
    left: object
    right: object
    left_spec: KVCacheSpec
    right_spec: KVCacheSpec


_Check = Callable[[Sequence[Any]], _Refusal | None]
_ATTENTION_FIELDS = compared_field_names(AttentionSpec)


def vllm_mergeable(specs: Iterable[KVCacheSpec]) -> bool:
    """Whether vLLM's bucket probe finds that these specs merge, in this order.

    Raises:
        InputError: there is no spec.
    """
    return _refusal(_distinct(specs)) is None


def vllm_uniform(specs: Iterable[KVCacheSpec]) -> bool:
    """Whether vLLM's uniform probe finds that all these specs merge, in this order.

    Raises:
        InputError: there is no spec.
        KvMergeError: where vLLM's probe ends in a ValueError.
    """
    distinct = _distinct(specs)
    refusal = _refusal(distinct)
    if refusal is not None and refusal.exception == "ValueError":
        raise _error(refusal, (), ())
    return refusal is None


def vllm_merge(specs: Iterable[KVCacheSpec], layer_names: Sequence[str] = ()) -> KVCacheSpec:
    """The merged spec as 0.33.0 makes it: it may have lost fields, see the module's list.

    Args:
        layer_names: the layers of ``specs``, for the error.

    Raises:
        InputError: there is no spec.
        KvMergeError: where vLLM raises; ``vllm_exception`` names what.
    """
    all_specs = list(specs)
    distinct = _distinct(all_specs)
    refusal = _refusal(distinct)
    if refusal is not None:
        raise _error(refusal, all_specs, layer_names)
    first = distinct[0]
    for base, (_, rebuild) in _RULES.items():
        if isinstance(first, base):
            return rebuild(distinct)
    return first


def vllm_same_key(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec as vLLM's buckets hash it: CUSTOM is OCTAVE_K3V4 there (quirk 8)."""
    if isinstance(spec, AttentionSpec) and spec.kv_quant_mode is KVQuantMode.CUSTOM:
        return replace(spec, kv_quant_mode=KVQuantMode.OCTAVE_K3V4)
    return spec


def _distinct(specs: Iterable[KVCacheSpec]) -> list[KVCacheSpec]:
    distinct = list(dict.fromkeys(specs))
    if not distinct:
        raise InputError("specs is empty, expected at least one spec; merge the specs of a group")
    return distinct


def _refusal(specs: Sequence[KVCacheSpec]) -> _Refusal | None:
    for base, (check, _) in _RULES.items():
        if isinstance(specs[0], base):
            return check(specs)
    return _check_equal(specs)


def _error(
    refusal: _Refusal, specs: Sequence[KVCacheSpec], layer_names: Sequence[str]
) -> KvMergeError:
    names: list[str] = []
    if len(layer_names) == len(specs):
        for spec in (refusal.left_spec, refusal.right_spec):
            name = layer_names[specs.index(spec)] if spec in specs else ""
            if name and name not in names:
                names.append(name)
    return KvMergeError(
        refusal.field,
        refusal.left,
        refusal.right,
        names,
        vllm_exception=refusal.exception,
    )


def _value(spec: KVCacheSpec, name: str) -> object:
    """A field as vLLM compares it: CUSTOM is an alias there."""
    value: object = getattr(spec, name)
    return KVQuantMode.OCTAVE_K3V4 if value is KVQuantMode.CUSTOM else value


def _compare(
    specs: Sequence[KVCacheSpec], names: Iterable[str], exception: str = "AssertionError"
) -> _Refusal | None:
    """The first field in which a spec differs from the first spec."""
    first = specs[0]
    for name in names:
        left = _value(first, name)
        for spec in specs[1:]:
            right = _value(spec, name)
            if left != right:
                return _Refusal(exception, name, left, right, first, spec)
    return None


def _require_class(specs: Sequence[KVCacheSpec], cls: type[KVCacheSpec]) -> _Refusal | None:
    for spec in specs:
        if not isinstance(spec, cls):
            return _class_refusal(specs[0], spec)
    return None


def _class_refusal(left: KVCacheSpec, right: KVCacheSpec) -> _Refusal:
    kinds = spec_kind_name(left), spec_kind_name(right)
    return _Refusal("AssertionError", "kind", *kinds, left, right)


def _check_equal(specs: Sequence[KVCacheSpec]) -> _Refusal | None:
    first = specs[0]
    for spec in specs[1:]:
        if type(spec) is not type(first):
            return _class_refusal(first, spec)
    return _compare(specs, compared_field_names(type(first)))


def _only(specs: Sequence[Any], name: str) -> Any:
    """The one value that is not None, or None."""
    return next((v for spec in specs if (v := getattr(spec, name)) is not None), None)


def _check_one_of(specs: Sequence[KVCacheSpec], name: str) -> _Refusal | None:
    having = [spec for spec in specs if getattr(spec, name) is not None]
    return _compare(having, (name,), "ValueError") if having else None


def _check_full(specs: Sequence[Any]) -> _Refusal | None:
    refusal = _require_class(specs, FullAttentionSpec)
    if refusal is not None:
        return refusal
    for spec in specs:
        if isinstance(spec, MLAAttentionSpec):
            return _class_refusal(specs[0], spec)
    refusal = (
        _check_one_of(specs, "sliding_window")
        or _check_one_of(specs, "attention_chunk_size")
        or _compare(specs, _ATTENTION_FIELDS)
    )
    if refusal is not None:
        return refusal
    window, chunk = _only(specs, "sliding_window"), _only(specs, "attention_chunk_size")
    if window is None or chunk is None:
        return None
    having_window = next(spec for spec in specs if spec.sliding_window is not None)
    having_chunk = next(spec for spec in specs if spec.attention_chunk_size is not None)
    return _Refusal(
        "AssertionError",
        "sliding_window",
        f"sliding_window {window}",
        f"attention_chunk_size {chunk}",
        having_window,
        having_chunk,
    )


def _check_sink(specs: Sequence[Any]) -> _Refusal | None:
    refusal = _check_full(specs)
    if refusal is None and specs[0].tokens_per_state != 1:
        return _reset(specs[0], "tokens_per_state", 1)
    return refusal


def _check_mla(specs: Sequence[Any]) -> _Refusal | None:
    refusal = (
        _require_class(specs, MLAAttentionSpec)
        or _compare(specs, _MLA_FIELDS)
        or _compare(specs, _ATTENTION_FIELDS)
    )
    if refusal is None and specs[0].head_size_v != 0:
        return _reset(specs[0], "head_size_v", 0)
    return refusal


def _reset(spec: KVCacheSpec, name: str, default: object) -> _Refusal:
    """vLLM's merge resets a field and then refuses because it differs."""
    return _Refusal("AssertionError", name, getattr(spec, name), default, spec, spec)


def _check_rswa(specs: Sequence[Any]) -> _Refusal | None:
    return (
        _require_class(specs, RSWASpec) or _compare(specs, ("rswa_window",)) or _check_full(specs)
    )


def _check_window_mla(specs: Sequence[Any]) -> _Refusal | None:
    return _require_class(specs, SlidingWindowMLASpec) or _compare(specs, _WINDOW_MLA_FIELDS)


# storage_block_size is the older interface's; 0.33 has no such field.
_MLA_FIELDS = (
    "cache_dtype_str",
    "topk_buffer_width",
    "tokens_per_state",
    "model_version",
    "storage_block_size",
    "cache_role",
    "is_index_group_leader",
    "block_stride_alignment",
)
_WINDOW_MLA_FIELDS = (
    "dcp_sharded",
    "max_tp_shards",
    "cache_dtype_str",
    "tokens_per_state",
    "model_version",
    "sliding_window",
    "extra_retained_tokens",
    "bounded_replay",
    "block_stride_alignment",
)


def _full_changes(specs: Sequence[Any]) -> dict[str, Any]:
    return {
        "sliding_window": _only(specs, "sliding_window"),
        "attention_chunk_size": _only(specs, "attention_chunk_size"),
        "non_causal": any(spec.non_causal for spec in specs),
        "is_draft": False,
    }


def _rebuild_full(specs: Sequence[Any]) -> KVCacheSpec:
    first: KVCacheSpec = specs[0]
    return replace_as(first, type(first), **_full_changes(specs))


def _rebuild_mla(specs: Sequence[Any]) -> KVCacheSpec:
    first: KVCacheSpec = specs[0]
    return replace_as(
        first,
        type(first),
        drop=("sliding_window", "attention_chunk_size", "non_causal", "alignment", "is_draft"),
        non_causal_multi_token_decode=any(s.non_causal_multi_token_decode for s in specs),
    )


def _rebuild_window_mla(specs: Sequence[Any]) -> KVCacheSpec:
    first: KVCacheSpec = specs[0]
    return replace_as(
        first,
        type(first),
        drop=("kv_quant_mode", "head_size_v", "alignment", "is_draft"),
    )


# The first class that the first spec is an instance of gives the rule. A class that is not here
# merges equal specs only, into the first of them.
_RULES: dict[type[KVCacheSpec], tuple[_Check, Callable[[Sequence[Any]], KVCacheSpec]]] = {
    SlidingWindowMLASpec: (_check_window_mla, _rebuild_window_mla),
    MLAAttentionSpec: (_check_mla, _rebuild_mla),
    RSWASpec: (_check_rswa, _rebuild_full),
    SinkFullAttentionSpec: (_check_sink, _rebuild_full),
    FullAttentionSpec: (_check_full, _rebuild_full),
}
