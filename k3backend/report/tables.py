"""Tables for people: how plans, differences and facts look on a console of 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns without lines: a name and its value; long values wrap under themselves."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def data_table(
    columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], title: str | None = None
) -> Table:
    """A table with a header rule.

    Args:
        columns: header of each column, and "right" for numbers and "left" for words, which keep
            their line; "cut" for what may end in an ellipsis; "text" for what wraps.
        rows: cells as text, one per column.
        title: a line above the table.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        show_edge=False,
    )
    for header, side in columns:
        table.add_column(
            header,
            justify="right" if side == "right" else "left",
            overflow="fold" if side == "text" else "ellipsis",
            no_wrap=side != "text",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def short_kind(kind: str) -> str:
    """A spec kind without the words that a column has no room for."""
    return kind.replace("_attention", "").replace("sliding_", "")


def whole(number: int) -> str:
    """An integer with thousands separators."""
    return f"{number:,}"


def gib(size_bytes: int) -> str:
    """Bytes as GiB with as many digits as a reader compares."""
    return f"{size_bytes / 2**30:,.3f} GiB"
