"""Spec files (``k3backend.specs/1``): any model's layers and deployment as JSON, read and written.

Reading is strict: a name, type or size that is not understood is refused with the path to it, such
as ``layers[2].block_size``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from k3backend.common.errors import InputError, SpecError
from k3backend.common.json_file import read_json_object
from k3backend.common.kv_dtype import KVQuantMode, MultipleOf
from k3backend.common.kv_spec import (
    SPEC_CLASSES,
    KVCacheSpec,
    MambaType,
    SparseCacheRole,
    spec_kind_name,
)
from k3backend.common.plan_context import PlanContext

SCHEMA = "k3backend.specs/1"
MAX_LAYERS = 100_000
"""A model with more layers is taken for a mistake."""
MAX_SIZE = 1 << 50
"""A size above this (a petabyte, or as many tokens) is taken for a mistake."""
MAX_COUNT = 1 << 20
"""More heads, shards or blocks per request than this are taken for a mistake."""

_COUNTS = (
    "num_kv_heads",
    "num_head_slots",
    "num_heads",
    "max_tp_shards",
    "num_speculative_blocks",
    "num_prefill_checkpoint_blocks",
)
_CONTEXT_FIELDS = tuple(f.name for f in fields(PlanContext) if f.name != "pp_size")
_DOCUMENT_FIELDS = ("schema", *_CONTEXT_FIELDS, "available_bytes", "layers")
_ENTRY_FIELDS = ("kind", "prefix", "count", "names", "stage")
_ENUMS: dict[str, Any] = {
    "kv_quant_mode": KVQuantMode,
    "cache_role": SparseCacheRole,
    "mamba_type": MambaType,
}


@dataclass(frozen=True, slots=True)
class SpecFile:
    """What a spec file says.

    Attributes:
        specs: layer name -> spec, in file order.
        context: the deployment; ``pp_size`` is the number of stages.
        stages: layer name -> pipeline stage, from 0.
        available_bytes: bytes for the cache of one rank, or None.
    """

    specs: dict[str, KVCacheSpec]
    context: PlanContext
    stages: dict[str, int]
    available_bytes: int | None


def load_spec_file(path: str | Path) -> SpecFile:
    """Read a spec file.

    Raises:
        InputError: the file cannot be read, is no JSON or says something that is not understood;
            one line that names the file and the field.
    """
    return parse_spec_document(read_json_object(path, "spec file"), str(path))


def parse_spec_document(obj: object, source: str = "spec document") -> SpecFile:
    """Turn a parsed spec file into specs.

    Args:
        source: what to call the document in errors.

    Raises:
        InputError: names ``source``, the field's path, what was expected and what came.
    """
    try:
        return _parse_document(obj)
    except InputError as error:
        raise InputError(f"{source}: {_one_line(error)}") from None


def _parse_document(obj: object) -> SpecFile:
    document = _object(obj, "the document")
    schema = document.get("schema")
    if schema != SCHEMA:
        raise InputError(f"schema is {_show(schema)}, expected {_show(SCHEMA)}; write it as given")
    _refuse_unknown(document, _DOCUMENT_FIELDS, "")
    if "max_model_len" not in document:
        raise InputError("max_model_len is missing; give the longest request in tokens")
    available_bytes = document.get("available_bytes")
    if available_bytes is not None:
        _check_size(available_bytes, "available_bytes")
    layers = document.get("layers")
    if not isinstance(layers, list) or not layers:
        raise InputError(
            f"layers is {_show(layers)}, expected a list of at least one entry; give the layers"
        )
    specs: dict[str, KVCacheSpec] = {}
    stages: dict[str, int] = {}
    for index, entry in enumerate(layers):
        path = f"layers[{index}]"
        names, stage, spec = _parse_entry(_object(entry, path), path, len(specs))
        for name in names:
            if name in specs:
                raise InputError(
                    f"{path}: layer name {_show(name)} is used twice; give each entry its own "
                    "prefix"
                )
            specs[name] = spec
            stages[name] = stage
    pp_size = max(stages.values()) + 1
    empty = sorted(set(range(min(pp_size, MAX_LAYERS))) - set(stages.values()))
    if empty or pp_size > MAX_LAYERS:
        raise InputError(
            f"layers: pipeline stage {empty[0] if empty else pp_size - 1} is out of line, expected "
            "layers on every stage from 0 on; number the stages without gaps"
        )
    return SpecFile(specs, _parse_context(document, pp_size), stages, available_bytes)


def _parse_context(document: Mapping[str, Any], pp_size: int) -> PlanContext:
    values = {name: document[name] for name in _CONTEXT_FIELDS if name in document}
    return PlanContext(**values, pp_size=pp_size)


def _parse_entry(
    entry: Mapping[str, Any], path: str, layers_before: int
) -> tuple[list[str], int, KVCacheSpec]:
    kind = entry.get("kind")
    cls = SPEC_CLASSES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise InputError(
            f"{path}.kind is {_show(kind)}, expected one of {', '.join(SPEC_CLASSES)}; "
            "give the layer's kind"
        )
    known = [f.name for f in fields(cls) if f.init]
    _refuse_unknown(entry, (*_ENTRY_FIELDS, *known), f"{path}.")
    for f in fields(cls):
        required = f.init and f.default is MISSING and f.default_factory is MISSING
        if required and f.name not in entry:
            raise InputError(f"{path}.{f.name} is missing; a {kind} layer needs it")
    names = _layer_names(entry, path, layers_before)
    stage = entry.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= MAX_LAYERS:
        raise InputError(
            f"{path}.stage is {_show(stage)}, expected an integer >= 0; give the pipeline stage"
        )
    values = {
        name: _field_value(name, entry[name], f"{path}.{name}") for name in known if name in entry
    }
    try:
        spec = cls(**values)
    except SpecError as error:
        message = str(error).removeprefix(f"{cls.__name__}.")
        raise InputError(f"{path}.{message}") from None
    if spec.page_size_bytes > MAX_SIZE:
        raise InputError(
            f"{path}.block_size: a page takes {spec.page_size_bytes} bytes, expected at most "
            f"{MAX_SIZE}; correct the sizes"
        )
    return names, stage, spec


def _layer_names(entry: Mapping[str, Any], path: str, layers_before: int) -> list[str]:
    if "names" in entry:
        names = entry["names"]
        valid = isinstance(names, list) and names and all(_is_name(name) for name in names)
        if not valid or "prefix" in entry or "count" in entry:
            raise InputError(
                f"{path}.names is {_show(names)}, expected a list of layer names in place of "
                "prefix and count; give one or the other"
            )
        return list(names)
    prefix, count = entry.get("prefix"), entry.get("count", 1)
    if not _is_name(prefix):
        raise InputError(
            f"{path}.prefix is {_show(prefix)}, expected a non-empty string; layer names are the "
            "prefix and an index"
        )
    if type(count) is not int or count < 1 or layers_before + count > MAX_LAYERS:
        raise InputError(
            f"{path}.count is {_show(count)}, expected an integer >= 1 (at most {MAX_LAYERS} "
            "layers in all); give the number of layers"
        )
    return [f"{prefix}{index}" for index in range(count)]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.strip() != "" and value.isprintable()


def _field_value(name: str, value: Any, path: str) -> Any:
    """A spec field from its JSON form. What needs no decoding is checked by the spec itself."""
    if name in _ENUMS:
        return _member(_ENUMS[name], value, path)
    if name == "dtype":
        return _dtype_name(value, path)
    if name == "dtypes" and isinstance(value, list):
        return tuple(_dtype_name(item, f"{path}[{i}]") for i, item in enumerate(value))
    if name == "shapes":
        for i, shape in enumerate(value if isinstance(value, list) else ()):
            for j, size in enumerate(shape if isinstance(shape, list) else ()):
                _check_size(size, f"{path}[{i}][{j}]")
        return value
    if name == "block_stride_alignment" and isinstance(value, dict):
        if set(value) != {"multiple_of"}:
            raise InputError(f'{path} is {_show(value)}, expected {{"multiple_of": tokens}}')
        _check_size(value["multiple_of"], f"{path}.multiple_of")
        return MultipleOf(value["multiple_of"])
    if name == "tokens_per_state" and isinstance(value, str):
        return _fraction(value, path)
    most = MAX_COUNT if name in _COUNTS else MAX_SIZE
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        raise InputError(f"{path} is {_show(value)}, expected at most {most}; correct it")
    if isinstance(value, (list, dict, float)):
        raise InputError(
            f"{path} is {_show(value)}, expected an integer, a string, true, false or null"
        )
    return value


def _member(enum_cls: Any, value: object, path: str) -> Any:
    members: Mapping[str, Any] = enum_cls.__members__
    found = members.get(value.upper()) if isinstance(value, str) else None
    if found is None:
        raise InputError(f"{path} is {_show(value)}, expected one of {', '.join(members)}")
    return found


def _dtype_name(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{path} is {_show(value)}, expected the name of a torch dtype")
    return value


def _fraction(text: str, path: str) -> int | Fraction:
    parts = text.split("/")
    if len(parts) == 2 and all(p.isascii() and p.isdigit() and len(p) <= 12 for p in parts):
        numerator, denominator = map(int, parts)
        if denominator:
            return Fraction(numerator, denominator)
    raise InputError(f'{path} is {_show(text)}, expected an integer or a fraction such as "1/4"')


def _object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{path} is {_show(value)}, expected a JSON object")
    return value


def _refuse_unknown(obj: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for name in obj:
        if name not in known:
            raise InputError(
                f"{prefix}{_shorten(name)} is not known here; the fields are {', '.join(known)}"
            )


def _check_size(value: object, path: str) -> None:
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise InputError(
            f"{path} is {_show(value)}, expected an integer from 1 to {MAX_SIZE}; correct it"
        )


def _show(value: object) -> str:
    """A JSON value for a message: short and on one line."""
    return _shorten(json.dumps(value, default=str))


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def dump_spec_document(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    stages: Mapping[str, int] | None = None,
    available_bytes: int | None = None,
) -> dict[str, Any]:
    """The spec file's document; :func:`parse_spec_document` gives back equal values.

    Fields that hold their default are left out, and consecutive layers with one spec become one
    entry. Layers whose names are no prefix with indices from 0 are listed under ``names``.

    Raises:
        InputError: a spec's class has no kind in the schema.
    """
    document: dict[str, Any] = {"schema": SCHEMA}
    for name in _CONTEXT_FIELDS:
        value = getattr(context, name)
        document[name] = str(value) if name.endswith("_kernel_block") else value
    document["available_bytes"] = available_bytes
    entries: list[tuple[KVCacheSpec, bool, int, list[str]]] = []
    for name, spec in specs.items():
        stage = 0 if stages is None else stages.get(name, 0)
        key = (spec, spec.is_draft, stage)
        if entries and entries[-1][:3] == key:
            entries[-1][3].append(name)
        else:
            entries.append((*key, [name]))
    document["layers"] = [_dump_entry(spec, stage, names) for spec, _, stage, names in entries]
    return document


def _dump_entry(spec: KVCacheSpec, stage: int, names: list[str]) -> dict[str, Any]:
    kind = spec_kind_name(spec)
    if SPEC_CLASSES.get(kind) is not type(spec):
        raise InputError(
            f"layer {names[0]} has a {type(spec).__name__}, expected one of the kinds "
            f"{', '.join(SPEC_CLASSES)}; a spec file cannot say it"
        )
    entry: dict[str, Any] = {"kind": kind, "count": len(names)}
    prefix = names[0].removesuffix("0")
    if prefix and names == [f"{prefix}{index}" for index in range(len(names))]:
        entry["prefix"] = prefix
    else:
        del entry["count"]
        entry["names"] = names
    if stage:
        entry["stage"] = stage
    for f in fields(spec):
        value = getattr(spec, f.name)
        default = getattr(spec, "head_size", None) if _follows_head_size(f) else f.default
        if f.init and value != default:
            entry[f.name] = spec_field_to_json(value)
    return entry


def _follows_head_size(f: Field[Any]) -> bool:
    """Whether an unset field takes the value of ``head_size``."""
    return f.name == "head_size_v" and f.default is None


def spec_field_to_json(value: Any) -> Any:
    """A spec field's value in the spec file's form."""
    if isinstance(value, (KVQuantMode, SparseCacheRole, MambaType)):
        return value.name
    if isinstance(value, MultipleOf):
        return {"multiple_of": value.base}
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if isinstance(value, tuple):
        return [spec_field_to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
