"""What changed between two plans: per group and in total.

Works on Layout JSON, whatever made it. Groups are paired by the layers they have in common; groups
without a common layer (another model, other layer names) by kind, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = "k3backend.diff/1"

Document = Mapping[str, Any]

SETTINGS = (
    "platform",
    "policy",
    "layout",
    "tp_size",
    "dcp_size",
    "pp_size",
    "max_model_len",
)
GROUP_FIELDS = (
    "kind",
    "num_layers",
    "block_size",
    "page_size_bytes",
    "blocks_per_request",
    "idle_bytes_per_block",
    "is_draft",
)
TOTALS = ("block_bytes", "kv_tp_replicas", "prefix_hit_tokens")
REQUEST_TOTALS = ("blocks", "bytes", "real_bytes", "padding_bytes")
CAPACITY_TOTALS = ("num_blocks", "usable_blocks", "max_concurrency", "max_model_len_that_fits")


def plan_difference(left: Document, right: Document) -> dict[str, Any]:
    """Compare two layout documents.

    Returns:
        ``{equal, settings, groups, totals, warnings}``. ``equal`` speaks of the plans: groups,
        pages, blocks and bytes; another platform, policy or length alone does not change it.
    """
    groups = [_group_difference(a, b) for a, b in _paired_groups(left["groups"], right["groups"])]
    totals = _totals(left, right)
    return {
        "equal": all(group["change"] == "same" for group in groups)
        and all(total["a"] == total["b"] for total in totals),
        "settings": _changes(left, right, SETTINGS),
        "groups": groups,
        "totals": totals,
        "warnings": _warning_changes(left["warnings"], right["warnings"]),
    }


def _paired_groups(
    left: Sequence[Document], right: Sequence[Document]
) -> list[tuple[Document | None, Document | None]]:
    shared = [
        (len(set(a["layer_names"]) & set(b["layer_names"])), i, j)
        for i, a in enumerate(left)
        for j, b in enumerate(right)
    ]
    partner: dict[int, int] = {}
    taken: set[int] = set()
    by_layers = sorted(shared, key=lambda match: (-match[0], match[1], match[2]))
    same_kind = [(1, i, j) for _, i, j in shared if left[i]["kind"] == right[j]["kind"]]
    for count, i, j in [*by_layers, *same_kind]:
        if count and i not in partner and j not in taken:
            partner[i] = j
            taken.add(j)
    pairs: list[tuple[Document | None, Document | None]] = [
        (a, right[partner[i]] if i in partner else None) for i, a in enumerate(left)
    ]
    pairs += [(None, b) for j, b in enumerate(right) if j not in taken]
    return pairs


def _group_difference(left: Document | None, right: Document | None) -> dict[str, Any]:
    if left is None or right is None:
        group = right if left is None else left
        return {
            "change": "added" if left is None else "removed",
            "a": None if left is None else left["id"],
            "b": None if right is None else right["id"],
            "fields": [],
            "layers_added": list(group["layer_names"]) if left is None and group else [],
            "layers_removed": list(group["layer_names"]) if right is None and group else [],
        }
    fields = _changes(left, right, GROUP_FIELDS)
    specs = (left["spec"], right["spec"])
    names = [name for name in {**specs[0], **specs[1]} if name not in GROUP_FIELDS]
    fields += [{**change, "field": f"spec.{change['field']}"} for change in _changes(*specs, names)]
    before, after = set(left["layer_names"]), set(right["layer_names"])
    added = [name for name in right["layer_names"] if name not in before]
    removed = [name for name in left["layer_names"] if name not in after]
    return {
        "change": "changed" if fields or added or removed else "same",
        "a": left["id"],
        "b": right["id"],
        "fields": fields,
        "layers_added": added,
        "layers_removed": removed,
    }


def _changes(left: Document, right: Document, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"field": name, "a": left.get(name), "b": right.get(name)}
        for name in names
        if left.get(name) != right.get(name)
    ]


def _totals(left: Document, right: Document) -> list[dict[str, Any]]:
    pairs = [("groups", len(left["groups"]), len(right["groups"]))]
    pairs += [(name, left[name], right[name]) for name in TOTALS]
    pairs += [
        (f"request.{name}", left["request"][name], right["request"][name])
        for name in REQUEST_TOTALS
    ]
    if left["capacity"] is not None and right["capacity"] is not None:
        pairs += [
            (f"capacity.{name}", left["capacity"][name], right["capacity"][name])
            for name in CAPACITY_TOTALS
        ]
    return [
        {
            "field": name,
            "a": a,
            "b": b,
            "difference": None if a is None or b is None else b - a,
            "ratio": b / a if a and b is not None else None,
        }
        for name, a, b in pairs
    ]


def _warning_changes(left: Sequence[Document], right: Sequence[Document]) -> dict[str, Any]:
    before = [warning["code"] for warning in left]
    after = [warning["code"] for warning in right]
    return {
        "added": [code for code in after if code not in before],
        "removed": [code for code in before if code not in after],
    }
