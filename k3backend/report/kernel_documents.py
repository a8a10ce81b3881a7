"""Markdown tables of docs/kernels.md, and the comparison with other projects' decodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from k3backend.common.errors import InputError
from k3backend.report.chips import CHIPS
from k3backend.report.kernel_checks import HEAD_DIM, kv_reads, matrix_work
from k3backend.report.kernel_facts import KernelFacts
from k3backend.report.kernel_report import KernelRow
from k3backend.report.roofline import ridge_rows, tile_times
from k3backend.report.tables import data_table

if TYPE_CHECKING:
    from rich.console import Console


def kernel_tables(rows: Sequence[KernelRow]) -> str:
    """One markdown table per target."""
    header = (
        "kernel",
        "registers",
        "spilled",
        "LDS bytes",
        "workgroups per CU",
        "loop",
        "matrix / LDS / global",
        "KV reads",
        "matrix work",
    )
    parts = []
    for target in dict.fromkeys(row.subject.target for row in rows):
        mine = [row for row in rows if row.subject.target == target]
        parts.append(f"### {target} ({CHIPS[target].device})\n")
        parts.append(_markdown(header, map(_kernel_cells, mine)))
        names = sorted({name for row in mine for name, _ in row.facts.matrix_instructions})
        parts.append(f"Matrix instructions: {', '.join(f'`{name}`' for name in names)}.\n")
    return "\n".join(parts)


def _kernel_cells(row: KernelRow) -> list[str]:
    facts, shape, launch = row.facts, row.subject.shape, row.subject.launch
    reads = work = ""
    if row.subject.kind == "decode" and shape is not None and launch is not None:
        reads = f"{kv_reads(shape, launch, facts):.2f}"
        ratio = matrix_work(launch, facts)
        work = "" if ratio is None else f"{ratio:.2f}"
    loop = facts.loop
    spilled = [f"{facts.spilled_registers}"]
    if facts.scalar_spills:
        spilled.append(f"{facts.scalar_spills} scalar")
    return [
        row.subject.name,
        f"{facts.registers}",
        " + ".join(spilled),
        f"{facts.lds_bytes:,}",
        f"{CHIPS[row.subject.target].workgroups_per_unit(facts)}",
        f"{loop.instructions}" if loop.instructions else "",
        f"{loop.matrix} / {loop.lds} / {loop.global_}" if loop.instructions else "",
        reads,
        work,
    ]


def roofline_table(rows: Sequence[KernelRow]) -> str:
    """Ridge rows of the chips, and the times of one tile of every decode."""
    chips = _markdown(
        ("target", "device", "bandwidth", "fp8 peak", "ridge rows fp8", "ridge rows bf16"),
        (
            (
                target,
                chip.device,
                f"{chip.bandwidth_bytes_s / 1e12:.1f} TB/s",
                f"{chip.fp8_flop_s / 1e15:.2f} PFLOP/s",
                f"{ridge_rows(chip, 'fp8'):.0f}",
                f"{ridge_rows(chip, 'bf16'):.0f}",
            )
            for target, chip in CHIPS.items()
        ),
    )
    cells = []
    for row in rows:
        shape, launch = row.subject.shape, row.subject.launch
        if row.subject.kind != "decode" or shape is None or launch is None:
            continue
        times = tile_times(row.subject.target, shape, launch, row.facts)
        cells.append(
            (
                row.subject.target,
                shape.name,
                f"{shape.heads * shape.q_len}",
                f"{times.row_tiles}",
                f"{launch.tile_tokens}",
                f"{times.memory_ns:.0f}",
                f"{times.matrix_ns:.0f}",
                f"{times.issue_ns:.0f}",
                f"{times.bandwidth_share:.0%}",
            )
        )
    header = ("target", "shape", "rows", "row tiles", "keys per tile")
    header += ("memory ns", "matrix ns", "issue ns", "of bandwidth")
    return chips + "\n" + _markdown(header, cells)


def peer_document(
    project: str,
    name: str,
    target: str,
    facts: KernelFacts,
    *,
    tile_tokens: int,
    rows: float,
    reads: int,
    kv_element_bytes: int,
) -> dict[str, Any]:
    """One decode in numbers that kernels of different tiles share.

    Args:
        rows: real query rows that share one pass of the main loop, on average over the row tiles of
            a request. tile_tokens: its keys.
        reads: KV reads of a request of 12 heads x 8 tokens.
    """
    waves = facts.lanes // CHIPS[target].wave_lanes
    tile_bytes = tile_tokens * HEAD_DIM * kv_element_bytes
    return {
        "project": project,
        "name": name,
        "target": target,
        "registers": facts.registers,
        "spilled_registers": facts.spilled_registers,
        "lds_bytes": facts.lds_bytes,
        "workgroups_per_cu": CHIPS[target].workgroups_per_unit(facts),
        "loop_instructions": facts.loop.instructions,
        "tile_tokens": tile_tokens,
        "tile_rows": round(rows, 1),
        "wave_instructions_per_row_and_key": round(
            facts.loop.instructions * waves / (rows * tile_tokens), 2
        ),
        "loads_over_tile_bytes": round(facts.loop_load_bytes(8) / tile_bytes, 2),
        "kv_bytes_per_key": reads * HEAD_DIM * kv_element_bytes,
        "matrix_instructions": dict(facts.matrix_instructions),
    }


PEER_COLUMNS = (
    ("target", "target"),
    ("project", "project"),
    ("tokens x heads, query / KV", "name"),
    ("registers", "registers"),
    ("spilled", "spilled_registers"),
    ("LDS bytes", "lds_bytes"),
    ("loop", "loop_instructions"),
    ("keys", "tile_tokens"),
    ("rows", "tile_rows"),
    ("instructions per row and key", "wave_instructions_per_row_and_key"),
    ("loads of 8 bytes and more / tile", "loads_over_tile_bytes"),
    ("KV bytes per key, 8 tokens", "kv_bytes_per_key"),
)


def peer_table(documents: Sequence[dict[str, Any]]) -> str:
    """Decodes side by side, by target."""
    headers, keys = zip(*PEER_COLUMNS, strict=True)
    return _markdown(headers, _peer_cells(documents, keys))


def print_peers(console: Console, documents: Sequence[dict[str, Any]]) -> None:
    """The same on a console, with the columns that fit."""
    columns = [
        ("target", "left"),
        ("project", "left"),
        ("kernel", "left"),
        ("regs", "right"),
        ("spilled", "right"),
        ("loop", "right"),
        ("keys", "right"),
        ("rows", "right"),
        ("per rk", "right"),
        ("B/key", "right"),
    ]
    left_out = {"lds_bytes", "loads_over_tile_bytes"}
    keys = [key for _, key in PEER_COLUMNS if key not in left_out]
    console.print(data_table(columns, _peer_cells(documents, keys)))
    console.print(
        "kernel: tokens x heads, query / KV; per rk: wave instructions of the main loop per query "
        "row and key; B/key: KV bytes that 8 query tokens of a request read per key."
    )


def _peer_cells(documents: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[list[str]]:
    order = list(CHIPS)
    ordered = sorted(documents, key=lambda document: order.index(document["target"]))
    return [[_cell(document[key]) for key in keys] for document in ordered]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _markdown(header: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def with_section(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of a section replaced.

    Raises:
        InputError: the markers are not there.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise InputError(f"the document has no section {begin} ... {end}; put the markers back")
    return pattern.sub(lambda _: f"{begin}\n\n{content}\n{end}", text)
