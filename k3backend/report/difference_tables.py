"""The difference of two plans for people: settings, groups, totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3backend.report.tables import data_table, whole

if TYPE_CHECKING:
    from rich.console import Console

Document = Mapping[str, Any]


def print_difference(console: Console, difference: Document, title: str) -> None:
    """Print one comparison; only what changed."""
    console.print(title, style="bold")
    console.print("The plans are equal." if difference["equal"] else "The plans differ.")
    if difference["settings"]:
        columns = [("setting", "left"), ("A", "right"), ("B", "right")]
        rows = [(row["field"], _text(row["a"]), _text(row["b"])) for row in difference["settings"]]
        console.print()
        console.print(data_table(columns, rows))
    changed = [group for group in difference["groups"] if group["change"] != "same"]
    if changed:
        console.print()
        console.print(_group_table(changed))
    if not difference["equal"]:
        console.print()
        console.print(_total_table(difference["totals"]))
    for change in ("added", "removed"):
        codes = difference["warnings"][change]
        if codes:
            console.print(f"warnings {change} in B: {', '.join(codes)}")


def _group_table(groups: Sequence[Document]) -> Any:
    columns = [("A", "right"), ("B", "right"), ("change", "left"), ("what", "text")]
    rows = [
        (
            "-" if group["a"] is None else str(group["a"]),
            "-" if group["b"] is None else str(group["b"]),
            group["change"],
            "\n".join(_group_lines(group)),
        )
        for group in groups
    ]
    return data_table(columns, rows)


def _group_lines(group: Document) -> list[str]:
    lines = [
        f"{field['field']}: {_text(field['a'])} -> {_text(field['b'])}" for field in group["fields"]
    ]
    for sign, key in (("+", "layers_added"), ("-", "layers_removed")):
        layers = group[key]
        if layers:
            more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            lines.append(f"{sign}{len(layers)} layers: {layers[0]}{more}")
    return lines


def _total_table(totals: Sequence[Document]) -> Any:
    columns = [
        ("total", "left"),
        ("A", "right"),
        ("B", "right"),
        ("B - A", "right"),
        ("B / A", "right"),
    ]
    rows = [
        (
            row["field"],
            _text(row["a"]),
            _text(row["b"]),
            "" if not row["difference"] else f"{row['difference']:+,}",
            "" if row["ratio"] is None or not row["difference"] else f"{row['ratio']:.4f}",
        )
        for row in totals
    ]
    return data_table(columns, rows)


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return whole(value)
    if isinstance(value, float):
        return f"{value:,.3f}"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
