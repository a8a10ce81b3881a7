"""Layout documents for people: groups, one request, capacity, candidates, warnings.

Everything is read from the Layout JSON, so a plan that was saved looks as it did when it was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3backend.report.tables import data_table, facts_table, gib, short_kind, whole

if TYPE_CHECKING:
    from rich.console import Console

Document = Mapping[str, Any]

MAX_CANDIDATES = 8
"""Groupings that a table shows: the chosen one, vLLM's own, and those of fewest bytes."""


def print_layout(console: Console, document: Document, heading: str) -> None:
    """Print one layout document under a heading."""
    console.print(heading, style="bold", soft_wrap=False)
    console.print(
        f"policy {document['policy']}, layout {document['layout']}: {widths(document['groups'])}"
    )
    console.print()
    console.print(group_table(document["groups"]))
    console.print()
    console.print(facts_table(_facts(document)))
    if len(document["stages"]) > 1:
        console.print()
        console.print(_stage_table(document["stages"]))
    candidates = document["candidates"]
    if len(candidates) > 1:
        shown = sorted(candidates, key=_candidate_order)[:MAX_CANDIDATES]
        console.print()
        console.print(candidate_table(shown))
        if len(candidates) > len(shown):
            console.print(f"and {len(candidates) - len(shown)} more, all of them in --json")
    print_warnings(console, document["warnings"])


def print_layout_set(console: Console, documents: Mapping[str, Document], equal: bool) -> None:
    """Print the plans of several platforms: once where they are equal, else one after the other."""
    names = list(documents)
    if equal:
        print_layout(console, documents[names[0]], f"{' = '.join(names)}: the same plan")
        return
    console.print("The platforms plan different groups.", style="bold")
    console.print(platform_table(documents))
    for name in names:
        console.print()
        print_layout(console, documents[name], name)


def print_side_by_side(console: Console, documents: Mapping[str, Document], equal: bool) -> None:
    """Print the groups of several platforms in one table, a column for each."""
    names = list(documents)
    plans = [documents[name] for name in names]
    columns = [("", "left"), *((name, "right") for name in names)]
    rows = [
        ("groups", *(str(len(plan["groups"])) for plan in plans)),
    ]
    for index in range(max(len(plan["groups"]) for plan in plans)):
        rows.append((f"group {index}", *(_group_cell(plan["groups"], index) for plan in plans)))
    rows += [
        ("one block ID", *(f"{whole(plan['block_bytes'])} B" for plan in plans)),
        ("blocks a request", *(whole(plan["request"]["blocks"]) for plan in plans)),
        ("bytes a request", *(f"{whole(plan['request']['bytes'])} B" for plan in plans)),
        ("padding", *(f"{plan['request']['padding_fraction']:.1%}" for plan in plans)),
        ("prefix hits", *(f"{whole(plan['prefix_hit_tokens'])} tokens" for plan in plans)),
    ]
    console.print(data_table(columns, rows))
    console.print()
    console.print("A group: kind, layers (d: with the draft's), block tokens x page bytes.")
    console.print(
        "All platforms plan the same." if equal else "The platforms plan different groups.",
        style="bold",
    )


def _group_cell(groups: Sequence[Document], index: int) -> str:
    if index >= len(groups):
        return ""
    group = groups[index]
    mark = "d" if group["is_draft"] else ""
    return (
        f"{short_kind(group['kind'])} {group['num_layers']}{mark} "
        f"{group['block_size']}x{group['page_size_bytes']}"
    )


def group_table(groups: Sequence[Document]) -> Any:
    """One row per group."""
    columns = [
        ("group", "right"),
        ("kind", "left"),
        ("layers", "right"),
        ("draft", "left"),
        ("block\ntokens", "right"),
        ("page\nbytes", "right"),
        ("blocks per\nrequest", "right"),
        ("idle bytes\nper block", "right"),
    ]
    rows = [
        (
            str(group["id"]),
            short_kind(group["kind"]),
            str(group["num_layers"]),
            _draft_mark(group),
            whole(group["block_size"]),
            whole(group["page_size_bytes"]),
            whole(group["blocks_per_request"]),
            whole(group["idle_bytes_per_block"]),
        )
        for group in groups
    ]
    return data_table(columns, rows)


def platform_table(documents: Mapping[str, Document]) -> Any:
    """One row per platform, to compare."""
    columns = [
        ("platform", "left"),
        ("groups", "text"),
        ("block\nbytes", "right"),
        ("blocks per\nrequest", "right"),
        ("bytes per\nrequest", "right"),
    ]
    rows = [
        (
            name,
            widths(document["groups"]),
            whole(document["block_bytes"]),
            whole(document["request"]["blocks"]),
            whole(document["request"]["bytes"]),
        )
        for name, document in documents.items()
    ]
    return data_table(columns, rows)


def candidate_table(candidates: Sequence[Document]) -> Any:
    """One row per grouping that was weighed."""
    columns = [
        ("candidate", "left"),
        ("groups", "right"),
        ("block\nbytes", "right"),
        ("bytes per\nrequest", "right"),
        ("why not", "text"),
    ]
    rows = [
        (
            candidate["name"],
            _or_dash(candidate["groups"]),
            _or_dash(candidate["block_bytes"]),
            _or_dash(candidate["request_bytes"]),
            "chosen" if candidate["chosen"] else candidate["why_not"] or "",
        )
        for candidate in candidates
    ]
    return data_table(columns, rows)


def print_warnings(console: Console, warnings: Sequence[Document]) -> None:
    """Print what a user should know, one paragraph each."""
    for warning in warnings:
        console.print()
        console.print(f"warning {warning['code']}: {warning['message']}", style="yellow")


def widths(groups: Sequence[Document]) -> str:
    """Layers per group: "4 groups: 23/23/23/29"; long lists count equal neighbours."""
    return f"{len(groups)} group{'' if len(groups) == 1 else 's'}: {_widths(groups)}"


def _widths(groups: Sequence[Document]) -> str:
    runs: list[list[int]] = []
    for group in groups:
        if runs and runs[-1][0] == group["num_layers"]:
            runs[-1][1] += 1
        else:
            runs.append([group["num_layers"], 1])
    if len(groups) <= 6:
        return "/".join(str(group["num_layers"]) for group in groups)
    return " + ".join(f"{n} x {width}" if n > 1 else str(width) for width, n in runs)


def _draft_mark(group: Document) -> str:
    if not group["is_draft"]:
        return ""
    count = group.get("num_draft_layers")
    if count is None or count == group["num_layers"]:
        return "draft"
    return f"{count} draft"


def _facts(document: Document) -> list[tuple[str, str]]:
    request = document["request"]
    rows = [
        ("one block ID", f"{whole(document['block_bytes'])} B"),
        (
            "one request",
            f"{whole(request['blocks'])} blocks, {whole(request['bytes'])} B "
            f"= {gib(request['bytes'])}, for {whole(document['max_model_len'])} tokens",
        ),
        (
            "padding in it",
            f"{whole(request['padding_bytes'])} B, {request['padding_fraction']:.1%}",
        ),
        ("prefix hits", f"end at multiples of {whole(document['prefix_hit_tokens'])} tokens"),
        ("KV replicas", _replicas(document["kv_tp_replicas"])),
    ]
    capacity = document["capacity"]
    if capacity is not None:
        concurrency = capacity["max_concurrency"]
        rows.append(
            (
                "capacity",
                f"{gib(capacity['available_bytes'])}: {whole(capacity['usable_blocks'])} usable "
                f"blocks, {'any number of' if concurrency is None else f'{concurrency:.2f}'} "
                "requests at once",
            )
        )
        longest = capacity["max_model_len_that_fits"]
        rows.append(("longest request", f"{whole(longest)} tokens" if longest else "none fits"))
    return rows


def _replicas(count: int) -> str:
    if count == 1:
        return "1: no two TP ranks hold the same bytes in every layer"
    return f"{count} consecutive TP ranks hold the same bytes"


def _stage_table(stages: Sequence[Document]) -> Any:
    columns = [
        ("stage", "right"),
        ("layers", "right"),
        ("block bytes", "right"),
        ("blocks", "right"),
    ]
    rows = [
        (
            str(stage["stage"]),
            str(_count(stage["layers"])),
            whole(stage["block_bytes"]),
            _or_dash(stage["num_blocks"]),
        )
        for stage in stages
    ]
    return data_table(columns, rows)


def _count(layers: int | Sequence[str]) -> int:
    return layers if isinstance(layers, int) else len(layers)


def _candidate_order(candidate: Document) -> tuple[bool, bool, float]:
    size = candidate["request_bytes"]
    return (
        not candidate["chosen"],
        candidate["name"] != "vllm",
        float("inf") if size is None else float(size),
    )


def _or_dash(number: int | None) -> str:
    return "-" if number is None else whole(number)
