"""Specs and groups in both directions between this package and the installed vLLM.

Class and field names are the same on both sides, so a spec is translated field by field; enums go
by member name, never by value (vLLM 0.33.0 gives two quantisation modes one value). A field that
only one side knows is dropped where it holds its default. Where it holds anything else: one that
vLLM added is kept beside the spec and put back into the groups; one that vLLM lacks is an error,
because dropping it would change what is cached. Pages must have the same bytes on both sides.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from k3backend.common import envs, kv_spec
from k3backend.common.errors import KvMergeError, PluginError, SpecError
from k3backend.common.kv_dtype import DType, KVQuantMode, MultipleOf
from k3backend.common.kv_merge import merge_specs
from k3backend.common.kv_spec import (
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaType,
    SparseCacheRole,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec as VllmGroup
    from vllm.v1.kv_cache_interface import KVCacheSpec as VllmSpec

KEEP_VLLMS = f"set {envs.GROUPING.name}=vllm to group with vLLM's own planner"
_OUR_ENUMS: dict[str, type[enum.Enum]] = {
    "KVQuantMode": KVQuantMode,
    "SparseCacheRole": SparseCacheRole,
    "MambaAttentionBackendEnum": MambaType,
}


def from_vllm_spec(spec: VllmSpec) -> KVCacheSpec:
    """The cache format of one of vLLM's layers as this package's object.

    Fields that only the installed vLLM knows are left behind; see :func:`unknown_fields`.

    Raises:
        PluginError: the class, or the value of a field, is not known here, or a page has another
            size here, so that an unknown field changes what is cached.
    """
    name = type(spec).__name__
    target = getattr(kv_spec, name, None)
    if not (isinstance(target, type) and issubclass(target, KVCacheSpec)):
        raise PluginError(
            f"vLLM's {name} is a cache format that k3backend does not know; {KEEP_VLLMS}"
        )
    values: dict[str, Any] = {}
    known = {f.name for f in fields(target) if f.init}
    for f in fields(spec):
        if f.init and f.name in known:
            values[f.name] = _from_vllm_value(getattr(spec, f.name), f"{name}.{f.name}")
    try:
        built = target(**values)
        page_bytes = built.page_size_bytes
    except SpecError as error:
        raise PluginError(
            f"vLLM's {name} cannot be described here ({error}); {KEEP_VLLMS}"
        ) from error
    if page_bytes != spec.page_size_bytes:
        unknown = ", ".join(f"{k}={v!r}" for k, v in unknown_fields(spec).items())
        raise PluginError(
            f"{name}: a page is {spec.page_size_bytes} B in the installed vLLM and {page_bytes} B "
            f"here ({unknown or 'no unknown field'}); this version counts pages in another way, "
            f"{KEEP_VLLMS}"
        )
    return built


def unknown_fields(spec: VllmSpec) -> dict[str, Any]:
    """Compared fields of a vLLM spec that this package does not know, where not at the default."""
    target: Any = getattr(kv_spec, type(spec).__name__, None)
    known = {f.name for f in fields(target)} if target is not None else set()
    return {
        f.name: getattr(spec, f.name)
        for f in fields(spec)
        if f.init
        and f.compare
        and f.name not in known
        and not _is_default(getattr(spec, f.name), f)
    }


def to_vllm_spec(spec: KVCacheSpec) -> VllmSpec:
    """The same cache format as an object of the installed vLLM.

    Raises:
        PluginError: vLLM lacks the class, or a field that is not at its default.
    """
    from vllm.v1 import kv_cache_interface

    name = type(spec).__name__
    target = getattr(kv_cache_interface, name, None)
    if target is None:
        raise PluginError(
            f"the installed vLLM has no {name}; install a vLLM that has it, or plan without such "
            "layers"
        )
    known = {f.name: f for f in fields(target) if f.init}
    values = {}
    for own in fields(spec):
        if not own.init:
            continue
        value = getattr(spec, own.name)
        if own.name in known:
            values[own.name] = _to_vllm_value(value, known[own.name])
        elif own.compare and not _is_default(value, own):
            raise PluginError(
                f"{name}.{own.name} is {value!r}, and the installed vLLM's {name} has no such "
                "field; install a vLLM that has it, or leave the field at its default"
            )
    translated: VllmSpec = target(**values)
    if translated.page_size_bytes != spec.page_size_bytes:
        raise PluginError(
            f"{name}: a page is {spec.page_size_bytes} B here and {translated.page_size_bytes} B "
            "in the installed vLLM; this version counts pages in another way, use a supported one"
        )
    return translated


def to_vllm_groups(
    groups: Sequence[KVCacheGroupSpec],
    specs: Mapping[str, KVCacheSpec] | None = None,
    originals: Mapping[str, VllmSpec] | None = None,
) -> list[VllmGroup]:
    """The groups as vLLM's, in the same order, drafts marked.

    Args:
        specs: spec per layer; where given, a group with a draft layer is marked as vLLM's core
            marks it (``is_eagle_group``).
        originals: vLLM's own spec per layer; where given, fields that only vLLM knows are put back.
    Raises:
        PluginError: as :func:`to_vllm_spec`; or layers of one group differ in a field that only
            vLLM knows.
    """
    from vllm.v1 import kv_cache_interface

    translated: dict[int, VllmSpec] = {}
    result = []
    for group in groups:
        key = id(group.kv_cache_spec)
        if key not in translated:
            translated[key] = to_vllm_spec(group.kv_cache_spec)
        spec = translated[key]
        if originals is not None:
            spec = _with_unknown_fields(spec, {name: originals[name] for name in group.layer_names})
        has_draft = specs is not None and any(specs[name].is_draft for name in group.layer_names)
        result.append(
            kv_cache_interface.KVCacheGroupSpec(
                list(group.layer_names),
                spec,
                is_eagle_group=group.is_eagle_group or has_draft,
                host_resident=group.host_resident,
                enable_kv_transfer=group.enable_kv_transfer,
                role=kv_cache_interface.KVCacheGroupRole[group.role.name],
            )
        )
    return result


@contextmanager
def refusing_as_vllm() -> Iterator[None]:
    """Turn a refused merge into the AssertionError that vLLM's grouping probes catch."""
    try:
        yield
    except KvMergeError as error:
        raise AssertionError(str(error)) from error


def merge_vllm_specs(specs: Sequence[VllmSpec]) -> VllmSpec:
    """One spec for vLLM layers that share a group, merged by this package's rules.

    Raises:
        AssertionError: they do not merge, as vLLM's own ``merge`` says it.
        PluginError: as :func:`from_vllm_spec`.
    """
    ours = [from_vllm_spec(spec) for spec in specs]
    with refusing_as_vllm():
        merged = to_vllm_spec(merge_specs(ours))
    return _with_unknown_fields(merged, {str(i): spec for i, spec in enumerate(specs)})


def _with_unknown_fields(spec: VllmSpec, originals: Mapping[str, VllmSpec]) -> VllmSpec:
    layers = getattr(spec, "kv_cache_specs", None)
    if layers is not None:
        kept = {
            name: replace(own, **unknown_fields(originals[name])) for name, own in layers.items()
        }
        return replace(spec, kv_cache_specs=kept)  # type: ignore[call-arg]
    first_name, first = next(iter(originals.items()))
    expected = unknown_fields(first)
    for name, original in originals.items():
        found = unknown_fields(original)
        if found != expected:
            raise PluginError(
                f"layer {first_name} has {expected or 'no unknown field'} and layer {name} has "
                f"{found or 'none'}: a field of this vLLM that k3backend does not know, so it "
                f"cannot say whether they may share a group; {KEEP_VLLMS}"
            )
    return replace(spec, **expected) if expected else spec


def _from_vllm_value(value: Any, what: str) -> Any:
    import torch

    if isinstance(value, torch.dtype):
        return DType.of(value)
    if isinstance(value, tuple):
        return tuple(_from_vllm_value(item, what) for item in value)
    if isinstance(value, dict):  # a spec per layer
        return {layer: from_vllm_spec(own) for layer, own in value.items()}
    if isinstance(value, enum.Enum):
        ours = _OUR_ENUMS.get(type(value).__name__)
        if ours is None or value.name not in ours.__members__:
            raise PluginError(f"{what} is {value}, which k3backend does not know; {KEEP_VLLMS}")
        return ours[value.name]
    if type(value).__name__ == "MultipleOf":
        return MultipleOf(value.base)
    if value is None or isinstance(value, (bool, int, str, Fraction)):
        return value
    raise PluginError(f"{what} is {value!r}, which k3backend does not know; {KEEP_VLLMS}")


def _to_vllm_value(value: Any, target: Field[Any]) -> Any:
    if isinstance(value, DType):
        return value.torch
    if isinstance(value, MultipleOf):
        from vllm.v1.attention.backend import MultipleOf as VllmMultipleOf

        return VllmMultipleOf(value.base)
    if isinstance(value, tuple):
        return tuple(_to_vllm_value(item, target) for item in value)
    if isinstance(value, Mapping):  # a spec per layer
        return {layer: to_vllm_spec(own) for layer, own in value.items()}
    if target.name == "mamba_type":
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

        member = value.name if isinstance(value, enum.Enum) else str(value)
        return MambaAttentionBackendEnum[member.upper()]
    if isinstance(value, enum.Enum):
        default = target.default
        if not isinstance(default, enum.Enum):
            raise PluginError(
                f"{target.name}: {value!r} has no counterpart in the installed vLLM, whose field "
                "is no enum; use a supported version"
            )
        members = type(default).__members__
        if value.name not in members:
            raise PluginError(
                f"{target.name}: the installed vLLM does not know {value.name}; it has "
                f"{', '.join(members)}"
            )
        return members[value.name]
    return value


def _is_default(value: Any, own: Field[Any]) -> bool:
    if own.default is not MISSING:
        return bool(value == own.default)
    if own.default_factory is not MISSING:
        return bool(value == own.default_factory())
    return value is None
