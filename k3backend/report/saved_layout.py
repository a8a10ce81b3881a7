"""Reading Layout JSON back: every key that a report uses is there and of the right type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3backend.common.errors import InputError
from k3backend.common.spec_file import SCHEMA as SPECS_SCHEMA
from k3backend.report.schemas import LAYOUT_SCHEMA, LAYOUT_SET_SCHEMA

_LAYOUT: dict[str, type | tuple[type, ...]] = {
    "platform": (str, type(None)),
    "policy": str,
    "layout": str,
    "tp_size": int,
    "dcp_size": int,
    "pp_size": int,
    "max_model_len": int,
    "block_bytes": int,
    "groups": list,
    "request": dict,
    "capacity": (dict, type(None)),
    "kv_tp_replicas": int,
    "prefix_hit_tokens": int,
    "warnings": list,
}
_GROUP: dict[str, type | tuple[type, ...]] = {
    "id": int,
    "kind": str,
    "num_layers": int,
    "layer_names": list,
    "block_size": int,
    "page_size_bytes": int,
    "blocks_per_request": int,
    "idle_bytes_per_block": int,
    "is_draft": bool,
    "spec": dict,
}
_REQUEST: dict[str, type | tuple[type, ...]] = {
    "blocks": int,
    "bytes": int,
    "real_bytes": int,
    "padding_bytes": int,
}
_CAPACITY: dict[str, type | tuple[type, ...]] = {
    "num_blocks": int,
    "usable_blocks": int,
    "max_concurrency": (int, float),
    "max_model_len_that_fits": (int, type(None)),
}


def layout_documents(document: Mapping[str, Any], where: str) -> dict[str, Mapping[str, Any]]:
    """The layout documents in a saved file, by platform.

    Args:
        document: the file's JSON object, a layout or a layout set.
        where: how a message names the file.
    Raises:
        InputError: another schema, or a key that is missing or of the wrong type.
    """
    schema = document.get("schema")
    if schema == LAYOUT_SCHEMA:
        _check_layout(document, where)
        return {str(document["platform"]): document}
    if schema == LAYOUT_SET_SCHEMA:
        _check(document, {"platforms": dict}, where)
        if not document["platforms"]:
            raise InputError(f"{where}: platforms is empty; save the plan again")
        for name, layout in document["platforms"].items():
            if not isinstance(layout, dict):
                raise InputError(f"{where}: platforms.{name} is no object; save the plan again")
            _check_layout(layout, f"{where}: platforms.{name}")
        return dict(document["platforms"])
    raise InputError(
        f"{where}: schema is {str(schema)[:60]!r}, expected {LAYOUT_SCHEMA}, {LAYOUT_SET_SCHEMA} "
        f"or {SPECS_SCHEMA}; give what `k3backend layout --json` printed, or a spec file"
    )


def _check_layout(layout: Mapping[str, Any], where: str) -> None:
    _check(layout, _LAYOUT, where)
    for index, group in enumerate(layout["groups"]):
        place = f"{where}: groups[{index}]"
        if not isinstance(group, dict):
            raise InputError(f"{place} is no object; save the plan again")
        _check(group, _GROUP, place)
        if not all(isinstance(name, str) for name in group["layer_names"]):
            raise InputError(f"{place}: layer_names holds more than names; save the plan again")
    _check(layout["request"], _REQUEST, f"{where}: request")
    if layout["capacity"] is not None:
        _check(layout["capacity"], _CAPACITY, f"{where}: capacity")
    for index, warning in enumerate(layout["warnings"]):
        if not isinstance(warning, dict):
            raise InputError(f"{where}: warnings[{index}] is no object; save the plan again")
        _check(warning, {"code": str, "message": str}, f"{where}: warnings[{index}]")


def _check(
    document: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]], where: str
) -> None:
    for name, expected in fields.items():
        kinds = expected if isinstance(expected, tuple) else (expected,)
        if name not in document:
            raise InputError(f"{where}: {name} is missing; save the plan again")
        value = document[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise InputError(
                f"{where}: {name} is {str(value)[:40]!r}, expected {names}; save the plan again"
            )
