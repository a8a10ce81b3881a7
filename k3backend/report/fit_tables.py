"""What a byte budget holds, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3backend.report.layout_tables import print_warnings
from k3backend.report.tables import facts_table, gib, whole

if TYPE_CHECKING:
    from rich.console import Console

Document = Mapping[str, Any]


def print_fit(console: Console, document: Document, heading: str) -> None:
    """Print one answer under a heading."""
    request = document["request"]
    tokens = whole(document["max_model_len"])
    console.print(heading, style="bold")
    rows = [("budget", f"{gib(document['available_bytes'])} on each rank")]
    if document["longest_max_model_len"] is not None:
        if document["fits"]:
            reason = "the budget" if document["limited_by"] == "memory" else "the model"
            rows.append(("longest request", f"{tokens} tokens, limited by {reason}"))
        else:
            rows.append(("longest request", "none fits"))
    concurrency = document["max_concurrency"]
    rows += [
        ("at once", f"{_times(concurrency)} requests of {tokens} tokens"),
        (
            "one request",
            f"{whole(request['blocks'])} blocks of {whole(document['block_bytes'])} B "
            f"= {whole(request['bytes'])} B, in {document['groups']} groups",
        ),
        ("usable blocks", _usable(document)),
        ("policy", f"{document['policy']}, layout {document['layout']}"),
    ]
    if not document["fits"]:
        rows.append(("missing", f"{whole(document['missing_bytes'])} B for one such request"))
    console.print(facts_table(rows))
    print_warnings(console, document["warnings"])


def print_fit_set(console: Console, documents: Mapping[str, Document], equal: bool) -> None:
    """Print the answers of several platforms: once where they are equal."""
    if equal:
        print_fit(console, next(iter(documents.values())), f"{' = '.join(documents)}")
        return
    for name, document in documents.items():
        print_fit(console, document, name)
        console.print()


def _times(concurrency: float | None) -> str:
    return "any number of" if concurrency is None else f"{concurrency:.2f}"


def _usable(document: Document) -> str:
    if document["num_blocks"] is None:
        return "none needed"
    return f"{whole(document['usable_blocks'])} of {whole(document['num_blocks'])}, one is null"
