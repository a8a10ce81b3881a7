"""This package's specs and groups as vLLM's own objects.

Class and field names are the same on both sides, so a spec is translated field by field; enums go
by member name, never by value (vLLM 0.33.0 gives two quantisation modes one value). A field that
the installed vLLM does not know is left out only where it holds its default, because dropping
anything else would change what is cached.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any

from k3backend.common.errors import PluginError
from k3backend.common.kv_dtype import DType, MultipleOf
from k3backend.common.kv_spec import KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec as VllmGroup
    from vllm.v1.kv_cache_interface import KVCacheSpec as VllmSpec


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
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers = {layer: to_vllm_spec(own) for layer, own in spec.kv_cache_specs.items()}
        built: VllmSpec = target(block_size=spec.block_size, kv_cache_specs=layers)
        return built
    known = {f.name: f for f in fields(target) if f.init}
    values = {}
    for own in fields(spec):
        if not own.init:
            continue
        value = getattr(spec, own.name)
        if own.name in known:
            values[own.name] = _to_vllm_value(value, known[own.name])
        elif not _is_default(value, own):
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
    groups: Sequence[KVCacheGroupSpec], specs: Mapping[str, KVCacheSpec] | None = None
) -> list[VllmGroup]:
    """The groups as vLLM's, in the same order, drafts marked.

    Args:
        specs: spec per layer; where given, a group with a draft layer is marked as vLLM's core
            marks it (``is_eagle_group``).
    Raises:
        PluginError: as :func:`to_vllm_spec`.
    """
    from vllm.v1 import kv_cache_interface

    translated: dict[int, VllmSpec] = {}
    result = []
    for group in groups:
        key = id(group.kv_cache_spec)
        if key not in translated:
            translated[key] = to_vllm_spec(group.kv_cache_spec)
        has_draft = specs is not None and any(specs[name].is_draft for name in group.layer_names)
        result.append(
            kv_cache_interface.KVCacheGroupSpec(
                list(group.layer_names),
                translated[key],
                is_eagle_group=group.is_eagle_group or has_draft,
                host_resident=group.host_resident,
                enable_kv_transfer=group.enable_kv_transfer,
                role=kv_cache_interface.KVCacheGroupRole[group.role.name],
            )
        )
    return result


def _to_vllm_value(value: Any, target: Field[Any]) -> Any:
    if isinstance(value, DType):
        return value.torch
    if isinstance(value, MultipleOf):
        from vllm.v1.attention.backend import MultipleOf as VllmMultipleOf

        return VllmMultipleOf(value.base)
    if isinstance(value, tuple):
        return tuple(_to_vllm_value(item, target) for item in value)
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
