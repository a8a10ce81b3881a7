"""ROCm decode routes for people and programs: shape, route, why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from k3backend.report.tables import data_table
from k3backend.rocm.decode_routes import RouteRow

if TYPE_CHECKING:
    from rich.console import Console


def routes_document(rows: Sequence[RouteRow], taken: Sequence[RouteRow]) -> list[dict[str, Any]]:
    """The rows as JSON values, in order.

    Args:
        rows: what the AITER version that was asked about would run.
        taken: the same shapes with what is installed here.
    """
    return [
        {
            "shape": row.shape,
            "arch": row.arch,
            "kv_dtype": row.kv_dtype,
            "heads": row.heads,
            "q_len": row.q_len,
            "causal": row.causal,
            "route": row.route.name,
            "taken": here.route.name,
            "padded_heads": row.route.padded_heads,
            "kv_reads": row.route.kv_reads,
            "verified": row.route.verified,
            "reason": row.route.reason,
        }
        for row, here in zip(rows, taken, strict=True)
    ]


def print_routes(
    console: Console, rows: Sequence[RouteRow], taken: Sequence[RouteRow], heading: str
) -> None:
    """Print one table: what is decoded, by which kernel, what layers take here, and why."""
    columns = [
        ("shape", "text"),
        ("GPU", "left"),
        ("KV", "left"),
        ("heads x tokens", "right"),
        ("route", "left"),
        ("taken here", "left"),
        ("why", "text"),
    ]
    cells = [
        (
            row.shape,
            row.arch,
            row.kv_dtype,
            f"{row.heads} x {row.q_len}",
            row.route.name,
            here.route.name,
            row.route.reason,
        )
        for row, here in zip(rows, taken, strict=True)
    ]
    console.print(data_table(columns, cells, title=heading))
