"""Replay documents for people: two layouts side by side, then the groups that hold the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3backend.report.tables import data_table, gib, short_kind, whole

if TYPE_CHECKING:
    from rich.console import Console

Document = Mapping[str, Any]


def print_replay(console: Console, document: Document) -> None:
    """Print one replay document."""
    console.print(
        f"{whole(document['requests'])} requests of {document['trace']} through vLLM "
        f"{document['vllm']}'s scheduler, {gib(document['memory_bytes'])} of KV cache; model "
        "output is made up, no model is run"
    )
    console.print()
    console.print(_comparison(document["layouts"]))
    for layout in document["layouts"]:
        console.print()
        console.print(f"policy {layout['name']}: blocks by group", style="bold")
        console.print(_groups(layout["groups"]))


def _comparison(layouts: Sequence[Document]) -> Any:
    columns = [("", "left"), *((f"policy {layout['name']}", "right") for layout in layouts)]
    rows = [
        (name, *(read(layout) for layout in layouts))
        for name, read in (
            ("groups", lambda at: whole(at["num_groups"])),
            ("blocks in the pool", lambda at: whole(at["num_blocks"])),
            ("bytes of a block", lambda at: whole(at["block_bytes"])),
            ("requests finished", lambda at: whole(at["requests"]["finished"])),
            ("requests that can never run", lambda at: whole(at["requests"]["skipped"])),
            ("steps", lambda at: whole(at["steps"])),
            ("running at once, most", lambda at: whole(at["admitted"]["peak"])),
            ("running while others wait, mean", lambda at: f"{at['admitted']['mean']:.1f}"),
            ("preemptions", lambda at: whole(at["preemptions"])),
            ("pool in use, most", lambda at: f"{at['pool_usage_peak']:.1%}"),
            ("prefix hits end at multiples of", lambda at: whole(at["prefix_hit_tokens"])),
            ("prompt tokens found in the cache", lambda at: whole(_hits(at))),
            ("host us per step: schedule", lambda at: _median(at, "schedule")),
            ("host us per step: update", lambda at: _median(at, "update")),
            ("host us per allocate_slots", lambda at: _median(at, "allocate_slots")),
        )
    ]
    return data_table(columns, rows)


def _hits(layout: Document) -> int:
    hits: int = layout["prefix_cache"]["hit_tokens"]
    return hits


def _median(layout: Document, what: str) -> str:
    times = layout["host_us"][what]
    return f"{times['median']:.0f}" if times else "-"


def _groups(groups: Sequence[Document]) -> Any:
    columns = [
        ("group", "right"),
        ("kind", "left"),
        ("layers", "right"),
        ("block\ntokens", "right"),
        ("blocks,\nmost", "right"),
        ("blocks per\nrequest", "right"),
    ]
    rows: list[tuple[str, ...]] = []
    for first, last in _runs(groups):
        group = groups[first]
        rows.append(
            (
                str(first) if first == last else f"{first}-{last}",
                short_kind(group["kind"]),
                str(group["num_layers"]),
                whole(group["block_size"]),
                whole(group["blocks_peak"]),
                f"{group['blocks_per_request']:.2f}",
            )
        )
    return data_table(columns, rows)


def _runs(groups: Sequence[Document]) -> list[tuple[int, int]]:
    """First and last position of neighbours that are alike in everything shown."""
    runs: list[tuple[int, int]] = []
    for index, group in enumerate(groups):
        alike = {**group, "id": 0}
        if runs and {**groups[runs[-1][0]], "id": 0} == alike:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs
