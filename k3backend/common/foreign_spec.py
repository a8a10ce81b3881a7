"""vLLM's spec objects without vLLM: read into this package's classes, and changed in their own.

Both sides name classes and fields alike, so a spec is told by its class's name and read field by
field: torch dtypes and enums go by name. A field that only vLLM has must hold its default.
"""

from __future__ import annotations

import enum
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, TypeVar

from k3backend.common import kv_spec
from k3backend.common.errors import InputError, SpecError
from k3backend.common.kv_dtype import DType, MultipleOf
from k3backend.common.kv_spec import KVCacheSpec

_Spec = TypeVar("_Spec")


def own_spec(spec: object, argument: str) -> KVCacheSpec:
    """The same cache format as an object of this package; itself where it is one.

    Args:
        spec: a spec of this package, or a dataclass object with the name and the fields of one.
        argument: what to call it in a message.
    Raises:
        SpecError: it is no spec, its class or the value of a field is not known here, or its page
            has another size here.
    """
    if isinstance(spec, KVCacheSpec):
        return spec
    name = type(spec).__name__
    target = getattr(kv_spec, name, None)
    known_class = isinstance(target, type) and issubclass(target, KVCacheSpec)
    if target is None or not known_class or not is_dataclass(spec) or isinstance(spec, type):
        raise SpecError(
            f"{argument} is {spec!r} ({name}), expected the KV cache spec of one layer, of "
            "k3backend or of vLLM; pass one, such as an MLAAttentionSpec"
        )
    known = {field.name for field in fields(target) if field.init}
    values: dict[str, Any] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name in known:
            values[field.name] = _own_value(value)
        elif field.init and field.compare and not _is_default(value, field):
            raise SpecError(
                f"{argument}: {name}.{field.name} is {value!r}, expected its default, because "
                "k3backend does not know what this field changes in the cache; leave it out",
                field.name,
            )
    try:
        built: KVCacheSpec = target(**values)
    except (InputError, TypeError) as error:
        raise SpecError(
            f"{argument}: {name} cannot be described here: {error}; build it with known values"
        ) from error
    page_bytes = getattr(spec, "page_size_bytes", built.page_size_bytes)
    if page_bytes != built.page_size_bytes:
        raise SpecError(
            f"{argument}: a page of {name} has {page_bytes} B where it comes from and "
            f"{built.page_size_bytes} B here; use a supported vLLM"
        )
    return built


def changed_spec(spec: _Spec, changes: dict[str, Any]) -> _Spec:
    """A copy of a spec, in its own class, with values of this package put into fields.

    Fields that its class lacks are left out (vLLM 0.32 has no ``is_draft``).

    Raises:
        SpecError: a value has no counterpart where the class comes from.
    """
    if not is_dataclass(spec) or isinstance(spec, type):
        raise SpecError(f"spec is {spec!r}, expected a KV cache spec; pass one")
    own = isinstance(spec, KVCacheSpec)
    known = {field.name for field in fields(spec)}
    values = {
        name: value if own else _foreign_value(name, value, getattr(spec, name))
        for name, value in changes.items()
        if name in known
    }
    copy: _Spec = replace(spec, **values)
    return copy


def _own_value(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if type(value).__name__ == "MultipleOf":
        return MultipleOf(value.base)
    return value


def _foreign_value(name: str, value: Any, before: Any) -> Any:
    if isinstance(value, DType):
        return value.torch
    if isinstance(value, enum.Enum) and isinstance(before, enum.Enum):
        return type(before)[value.name]
    if isinstance(value, MultipleOf):
        if type(before).__name__ != "MultipleOf":
            raise SpecError(
                f"{name} is {before!r}, expected {value!r}; build the draft's spec with it", name
            )
        return type(before)(value.base)
    return value


def _is_default(value: Any, field: Any) -> bool:
    if field.default is not MISSING:
        return bool(value == field.default)
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return value is None
