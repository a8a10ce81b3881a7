#!/usr/bin/env python3
"""How many split plans keep the bounds on their makespan, and what is provable of the others.

    python tools/check_split_plan_bounds.py                  the length sets of the tests
    python tools/check_split_plan_bounds.py --windows 20000  random windows of the Mooncake trace
    python tools/check_split_plan_bounds.py --random 5000    random batches of any kind

LB is max(cost of all items whole / workers, whole tiles of the fullest worker + one start-up). A
plan should keep max(1.03 LB, LB + one tile + start-up), and 1.03 LB from 16 tiles per worker. Where
requests are fewer than workers no plan can reach the latter: a second bound counts the splits and
the part of a tile that no plan can avoid losing (tests/helpers/split_plans.py). Exit code 1: a plan
misses the first figure.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import track

from k3backend.common.split_plan import plan_splits
from k3backend.report.tables import data_table
from tests.helpers.split_plans import (
    BATCHES,
    ROW_TILES,
    WORKERS,
    forced_split_bound,
    item_tiles,
    lower_bound,
    mooncake_lengths,
    mooncake_sets,
    named_sets,
)

SCHEMA = "k3backend.split-plan-bounds/1"
START_UP_TILES = 1.25
EPSILON = 1e-9
MANY_WORKERS = 128
"""As many as a whole GPU has, about."""
Batch = tuple[str, list[int], int, int]
"""Name, lengths, row tiles, workers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One plan against its bounds, in tiles.

    Attributes:
        bound: LB. over: makespan above max(1.03 LB, LB + one tile + start-up); negative: kept.
        provable: the bound that counts forced splits; LB where the plan is within 1.03 LB anyway.
        long: 16 tiles per worker or more.
    """

    batch: str
    workers: int
    row_tiles: int
    makespan: float
    bound: float
    over: float
    provable: float
    long: bool

    @property
    def within(self) -> bool:
        """Whether the plan is within 1.03 LB."""
        return self.makespan <= 1.03 * self.bound + EPSILON

    @property
    def many(self) -> bool:
        """Whether the plan is for as many workers as a whole GPU has."""
        return self.workers >= MANY_WORKERS

    @property
    def impossible(self) -> bool:
        """Whether no plan is within 1.03 LB, provably."""
        return self.provable > 1.03 * self.bound + EPSILON

    @property
    def optimal(self) -> bool:
        """Whether no plan is shorter, provably."""
        return self.makespan <= self.provable + EPSILON


def outcome(name: str, lens: list[int], row_tiles: int, workers: int) -> Outcome:
    """Plan one batch and hold it to its bounds."""
    tiles = item_tiles(lens, row_tiles)
    bound = provable = lower_bound(tiles, workers)
    makespan = plan_splits(lens, row_tiles, workers).makespan_tiles
    if makespan > 1.03 * bound + EPSILON:
        provable = forced_split_bound(tiles, workers)
    over = makespan - max(1.03 * bound, bound + 1 + START_UP_TILES)
    long = sum(tiles) >= 16 * workers
    return Outcome(name, workers, row_tiles, makespan, bound, over, provable, long)


def listed_batches() -> list[Batch]:
    """What the tests hold to the bounds."""
    sets = named_sets() | mooncake_sets()
    return [(name, sets[name], r, w) for w in WORKERS for r in ROW_TILES for name in sets]


def random_windows(count: int, seed: int = 1) -> Iterator[Batch]:
    """Windows of the trace: batch size, start, row tiles and workers at random."""
    generator = random.Random(seed)
    lens = mooncake_lengths()
    for _ in range(count):
        batch = generator.choice(BATCHES)
        start = generator.randrange(len(lens) - batch)
        window = lens[start : start + batch]
        name = f"Mooncake {batch} from {start}"
        yield name, window, generator.choice(ROW_TILES), generator.choice(WORKERS)


def random_batches(count: int, seed: int = 1) -> Iterator[Batch]:
    """Batches that resemble no trace: a seed always gives the same ones.

    1 to 256 requests and 1 to 512 workers, small and large ones alike (log-uniform), with 1 to 8
    row tiles (uniform). The longest length allowed is log-uniform from 64 to 2^20 tokens; in half
    of the batches lengths are uniform up to it, in the other half log-uniform.
    """
    generator = random.Random(seed)
    for number in range(count):
        requests = _log_uniform(generator, 1, 256)
        longest = _log_uniform(generator, 64, 2**20)
        kind = generator.choice(("uniform", "log-uniform"))
        draw = generator.randint if kind == "uniform" else partial(_log_uniform, generator)
        lens = [draw(1, longest) for _ in range(requests)]
        name = f"no. {number}: {requests} {kind} to {longest}"
        yield name, lens, generator.randint(1, 8), _log_uniform(generator, 1, 512)


def _log_uniform(generator: random.Random, low: int, high: int) -> int:
    """An integer from ``low`` to ``high`` whose logarithm is uniform."""
    return min(high, int(low * ((high + 1) / low) ** generator.random()))


def summary(outcomes: list[Outcome]) -> str:
    """The counts, in words."""
    missed = [o for o in outcomes if o.over > EPSILON]
    long = [o for o in outcomes if o.long]
    beyond = [o for o in long if not o.within]
    open_ = [o for o in beyond if not o.impossible and not o.optimal]
    worst = max((o.makespan / o.provable for o in open_), default=1.0)
    tiles = max((o.over for o in missed), default=0.0)
    part = max((o.over / (o.makespan - o.over) for o in missed), default=0.0)
    return "\n".join(
        (
            f"plans: {len(outcomes)}, of which above max(1.03 LB, LB + 2.25 tiles): {len(missed)}",
            f"  by at most: {tiles:.2f} tiles, {100 * part:.1f} %",
            f"  on {MANY_WORKERS} workers or more: {sum(o.many for o in missed)} of "
            f"{sum(o.many for o in outcomes)}",
            f"with 16 tiles per worker or more: {len(long)}",
            f"  within 1.03 LB: {len(long) - len(beyond)}",
            f"  above it, and no plan can be within: {sum(o.impossible for o in beyond)}",
            f"  above it, and no plan is shorter: {sum(o.optimal for o in beyond)}",
            f"  above it, and neither is proven: {len(open_)}, at most {worst:.3f} of the bound "
            "that counts forced splits",
        )
    )


def print_outcomes(outcomes: list[Outcome]) -> None:
    console = Console(width=max(Console().width, 110), highlight=False)
    console.print(summary(outcomes))
    missed = sorted((o for o in outcomes if o.over > EPSILON), key=lambda o: -o.over)
    if missed:
        names = ("workers", "row tiles", "makespan", "LB", "above", "provable bound")
        rows = [
            [o.batch, str(o.workers), str(o.row_tiles)]
            + [f"{value:.2f}" for value in (o.makespan, o.bound, o.over, o.provable)]
            for o in missed[:10]
        ]
        columns = [("batch", "left"), *((name, "right") for name in names)]
        console.print(data_table(columns, rows, "Most above the first figure, in tiles"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    drawn = parser.add_mutually_exclusive_group()
    drawn.add_argument("--windows", type=int, metavar="N", help="plan N random windows instead")
    drawn.add_argument("--random", type=int, metavar="N", help="plan N random batches instead")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(argv)
    for name, count in (("--windows", options.windows), ("--random", options.random)):
        if count is not None and count < 1:
            parser.error(f"{name} is {count}, expected at least 1")
    if options.windows:
        batches = list(random_windows(options.windows))
    elif options.random:
        batches = list(random_batches(options.random))
    else:
        batches = listed_batches()
    shown = track(batches, "planning", console=Console(stderr=True), transient=True)
    outcomes = [outcome(*batch) for batch in shown]
    if options.json:
        print(json.dumps({"schema": SCHEMA, "plans": [asdict(o) for o in outcomes]}, indent=1))
    else:
        print_outcomes(outcomes)
    return int(any(o.over > EPSILON for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
