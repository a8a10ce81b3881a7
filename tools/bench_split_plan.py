#!/usr/bin/env python3
"""Split plans compared: how far from the lower bound, and how many pieces.

    python tools/bench_split_plan.py                 tables
    python tools/bench_split_plan.py --json          every number as one JSON document
    python tools/bench_split_plan.py --write-docs    renew docs/split_plan.md and its picture

Ours is the plan of k3backend.common.split_plan; the others are rules of other projects, restated in
tools/peer_planners.py. All are costed alike: tiles of 64 tokens, 1.25 tiles per piece and 1.25 more
per split piece. Nothing is run: caches, kernels and combines are not modelled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import track

from k3backend.common.split_plan import plan_splits
from k3backend.report.tables import data_table
from tests.helpers.split_plans import (
    ROW_TILES,
    WORKERS,
    floor_pieces,
    item_tiles,
    lower_bound,
    mooncake_sets,
    named_sets,
    wrap_around,
)
from tools.peer_planners import PEERS, Batch, makespan_and_pieces

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "k3backend.split-plans/1"
OURS = "k3backend"
PLANNERS = (OURS, *PEERS)
MOONCAKE = ("Mooncake, batch 1 to 4", "Mooncake, batch 6 to 256")
"""Small batches stand apart: a bound of two or three tiles knows no forced split."""
DOCUMENT = ROOT / "docs" / "split_plan.md"
PICTURE = ROOT / "docs" / "img" / "split_plan.png"
START_MARK, END_MARK = "<!-- tables: start -->", "<!-- tables: end -->"


@dataclass(frozen=True, slots=True)
class Row:
    """One planner on one batch.

    Attributes:
        ratio: makespan over the lower bound.
        pieces: of all items. extra: those above max(items, workers).
    """

    planner: str
    batch: str
    workers: int
    row_tiles: int
    ratio: float
    pieces: int
    extra: int


def compare(workers: int, row_tiles: int, name: str, lens: list[int]) -> list[Row]:
    """All planners and the wrap-around on one batch."""
    tiles = item_tiles(lens, row_tiles)
    bound = lower_bound(tiles, workers)
    floor = floor_pieces(tiles, workers)
    plan = plan_splits(lens, row_tiles, workers)
    results = {OURS: (plan.makespan_tiles, len(plan.work))}
    batch = Batch([-(-length // 64) for length in lens], row_tiles, workers)
    for peer, rule in PEERS.items():
        results[peer] = makespan_and_pieces(rule(batch), batch.items)
    results["wrap-around"] = wrap_around(tiles, workers)
    return [
        Row(planner, name, workers, row_tiles, cost / bound, pieces, max(0, pieces - floor))
        for planner, (cost, pieces) in results.items()
    ]


def all_rows() -> list[Row]:
    """Every batch, number of workers and number of row tiles."""
    batches = named_sets() | mooncake_sets()
    cases = [(w, r, name) for w in WORKERS for r in ROW_TILES for name in batches]
    shown = track(cases, "planning", console=Console(stderr=True), transient=True)
    return [row for w, r, name in shown for row in compare(w, r, name, batches[name])]


def host_times_us() -> dict[str, float]:
    """Median processor time of `plan_splits`, for Mooncake batches on 256 workers."""
    times = {}
    for name, lens in mooncake_sets(windows=1).items():
        runs = []
        for _ in range(5):
            start = time.process_time_ns()
            plan_splits(lens)
            runs.append((time.process_time_ns() - start) / 1000)
        times[name.split()[1]] = statistics.median(runs)
    return times


def batch_label(name: str) -> str:
    """The line of a table that a batch belongs to."""
    if not name.startswith("Mooncake"):
        return name
    return MOONCAKE[int(name.split()[1]) > 4]


def worst_ratio(rows: Iterable[Row], planner: str) -> str:
    return f"{max(row.ratio for row in rows if row.planner == planner):.2f}"


def ratio_table(rows: list[Row], workers: int) -> list[list[str]]:
    """Per batch, the worst ratio over row tiles of each planner."""
    here = [row for row in rows if row.workers == workers]
    labels = list(dict.fromkeys(batch_label(row.batch) for row in here))
    table = []
    for label in labels:
        own = [row for row in here if batch_label(row.batch) == label]
        table.append([label, *(worst_ratio(own, planner) for planner in PLANNERS)])
    return table


def pieces_table(rows: list[Row]) -> list[list[str]]:
    """Extra pieces above the floor, as a part of the wrap-around's, summed over all batches."""
    table = []
    for workers in WORKERS:
        for row_tiles in ROW_TILES:
            here = [r for r in rows if (r.workers, r.row_tiles) == (workers, row_tiles)]
            extra = {
                planner: sum(row.extra for row in here if row.planner == planner)
                for planner in (*PLANNERS, "wrap-around")
            }
            wrapped = extra["wrap-around"]
            table.append(
                [str(workers), str(row_tiles), f"{wrapped:,}"]
                + [f"{extra[planner] / wrapped:.2f}" for planner in PLANNERS]
            )
    return table


RATIO_COLUMNS = ("batch", *PLANNERS)
PIECE_COLUMNS = ("workers", "row tiles", "wrap-around", *PLANNERS)


def print_tables(rows: list[Row], times: dict[str, float]) -> None:
    console = Console(width=max(Console().width, 110))
    for workers in WORKERS:
        console.print(
            data_table(
                [(RATIO_COLUMNS[0], "left"), *((name, "right") for name in PLANNERS)],
                ratio_table(rows, workers),
                f"Makespan over the lower bound, worst of 1, 2 and 6 row tiles: {workers} workers",
            )
        )
    console.print(
        data_table(
            [(name, "right") for name in PIECE_COLUMNS],
            pieces_table(rows),
            "Extra pieces above the floor, as a part of the in-order wrap-around's",
        )
    )
    console.print(
        data_table(
            [("requests", "right"), ("processor us", "right")],
            [[batch, f"{us:,.0f}"] for batch, us in times.items()],
            "Time of plan_splits, 256 workers, Mooncake lengths",
        )
    )


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def write_documents(rows: list[Row]) -> None:
    """Renew the tables between the marks of the document, and the picture."""
    parts = ["Made by `python tools/bench_split_plan.py --write-docs`."]
    for workers in WORKERS:
        parts.append(f"Makespan over the lower bound, {workers} workers:")
        parts.append(markdown(RATIO_COLUMNS, ratio_table(rows, workers)))
    parts.append("Extra pieces above the floor, as a part of the wrap-around's:")
    parts.append(markdown(PIECE_COLUMNS, pieces_table(rows)))
    text = DOCUMENT.read_text()
    head, rest = text.split(START_MARK)
    tail = rest.split(END_MARK)[1]
    DOCUMENT.write_text(head + START_MARK + "\n\n" + "\n\n".join(parts) + "\n\n" + END_MARK + tail)
    draw(rows)


def draw(rows: list[Row], workers: int = 256) -> None:
    """Each batch a place, each planner a mark: makespan over the bound, and pieces over items."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    here = [row for row in rows if (row.workers, row.row_tiles) == (workers, 1)]
    names = [name for name in dict.fromkeys(row.batch for row in here) if "Mooncake" not in name]
    names += [f"Mooncake {batch} from 0" for batch in (1, 8, 32, 128, 256)]
    figure, axes = plt.subplots(1, 2, figsize=(11, 5.5), sharey=True)
    marks = dict(zip(PLANNERS, "osDv^P", strict=True))
    for planner, mark in marks.items():
        of = {row.batch: row for row in here if row.planner == planner}
        places = range(len(names))
        style = {"s": 60 if planner == OURS else 30, "zorder": 3 if planner == OURS else 2}
        axes[0].scatter([of[n].ratio for n in names], places, marker=mark, label=planner, **style)
        axes[1].scatter([of[n].extra for n in names], places, marker=mark, **style)
    labels = [name.removesuffix(" from 0") for name in names]
    axes[0].set_yticks(range(len(names)), labels)
    axes[0].invert_yaxis()
    axes[0].set_xscale("log")
    axes[0].set_xticks([1, 1.5, 2, 4, 10, 30, 100], ["1", "1.5", "2", "4", "10", "30", "100"])
    axes[0].set_xlabel("makespan / lower bound")
    axes[1].set_xlabel("pieces above max(requests, workers)")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"Split plans on {workers} workers, one row tile")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/split_plan.md")
    options = parser.parse_args()
    rows = all_rows()
    if options.write_docs:
        write_documents(rows)
        return 0
    times = host_times_us()
    if options.json:
        document = {
            "schema": SCHEMA,
            "rows": [asdict(row) for row in rows],
            "host_us": times,
        }
        print(json.dumps(document, indent=1))
    else:
        print_tables(rows, times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
