"""An explanation for people: the formats of the layers, then what keeps each two apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3backend.report.tables import data_table, short_kind, whole

if TYPE_CHECKING:
    from rich.console import Console

Document = Mapping[str, Any]

MAX_PAIRS = 20
"""Explanations that are printed for people."""


def print_explanation(console: Console, document: Document, heading: str) -> None:
    """Print one explanation under a heading."""
    formats = {item["id"]: item for item in document["formats"]}
    console.print(heading, style="bold")
    console.print(
        f"policy {document['policy']}: {_groups(document['groups'])}, "
        f"{whole(document['request_bytes'])} B per request"
    )
    console.print()
    console.print(_format_table(document["formats"]))
    console.print()
    for item in document["formats"]:
        if len(item["groups"]) > 1:
            console.print(
                f"[{item['id']}] fills {len(item['groups'])} groups: one format, dealt into groups "
                "of one width."
            )
    for pairs in _alike(document["reconciled"])[:MAX_PAIRS]:
        lefts = ", ".join(_name(formats[p["left"]]) for p in pairs)
        right = _name(formats[pairs[0]["right"]])
        console.print()
        console.print(
            f"{lefts}: one group with {right} by policy {document['policy']}, "
            "though their specs do not merge",
            style="bold",
        )
        console.print(_difference_table(pairs[0]["differences"]))
        if pairs[0]["joinable"]:
            console.print(f"To have them merge: {pairs[0]['remedy']}.")
    if not document["apart"]:
        console.print("Every two formats share a group.")
    told = _alike(document["apart"])
    for pairs in told[:MAX_PAIRS]:
        pair = pairs[0]
        lefts = ", ".join(_name(formats[p["left"]]) for p in pairs)
        console.print()
        right = _name(formats[pair["right"]])
        console.print(f"{lefts}: no group with {right}", style="bold")
        console.print(_difference_table(pair["differences"]))
        console.print(f"{pair['remedy'][0].upper()}{pair['remedy'][1:]}.")
        joined = pair["joined"]
        if joined is not None:
            console.print(
                f"Then: {_groups(joined['groups'])}, pool block {whole(joined['block_bytes'])} B, "
                f"{whole(joined['request_bytes'])} B per request "
                f"({joined['request_bytes'] - document['request_bytes']:+,} B)."
            )
    if len(told) > MAX_PAIRS:
        console.print()
        console.print(f"and {len(told) - MAX_PAIRS} more, all of them in --json")


def _alike(pairs: Sequence[Document]) -> list[list[Document]]:
    """Pairs that differ in the same way from the same format, together."""
    alike: dict[str, list[Document]] = {}
    for pair in pairs:
        said = json.dumps({key: value for key, value in pair.items() if key != "left"})
        alike.setdefault(said, []).append(pair)
    return list(alike.values())


def _groups(count: int) -> str:
    return f"{count} group{'' if count == 1 else 's'}"


def _name(item: Document) -> str:
    draft = " draft" if item["is_draft"] else ""
    plural = "" if item["num_layers"] == 1 else "s"
    return f"[{item['id']}] {item['num_layers']}{draft} {item['kind']} layer{plural}"


def _format_table(formats: Sequence[Document]) -> Any:
    columns = [
        ("format", "right"),
        ("kind", "left"),
        ("layers", "right"),
        ("draft", "left"),
        ("page bytes", "right"),
        ("groups", "left"),
        ("first layer", "cut"),
    ]
    rows = [
        (
            f"[{item['id']}]",
            short_kind(item["kind"]),
            str(item["num_layers"]),
            "draft" if item["is_draft"] else "",
            whole(item["page_size_bytes"]),
            number_ranges(item["groups"]),
            item["layer_names"][0],
        )
        for item in formats
    ]
    return data_table(columns, rows)


def _difference_table(differences: Sequence[Document]) -> Any:
    columns = [("field", "left"), ("values", "text"), ("kind", "left"), ("", "left")]
    rows = [
        (
            difference["field"],
            f"{difference['left']} against {difference['right']}",
            difference["kind"],
            "" if difference["blocks"] else "merges",
        )
        for difference in differences
    ]
    return data_table(columns, rows)


def number_ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers with neighbours joined, as in "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
