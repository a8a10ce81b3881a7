"""The bounds of plans, against the best of all plans of small batches, and what is counted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.helpers import split_plans
from tools.check_split_plan_bounds import (
    Outcome,
    main,
    outcome,
    random_batches,
    random_windows,
    summary,
)

PIECE = SPLIT = 1.25


def shares(tiles: int, workers: int) -> Iterator[tuple[int, ...]]:
    """Every way to share an item's tiles among workers."""
    if workers == 1:
        yield (tiles,)
        return
    for first in range(tiles + 1):
        for others in shares(tiles - first, workers - 1):
            yield (first, *others)


def best_makespan(tiles: list[int], workers: int) -> float:
    """Makespan of the best of all plans. One item has at most one piece on a worker."""
    options = []
    for item in tiles:
        costs = []
        for share in shares(item, workers):
            pieces = sum(part > 0 for part in share)
            start = PIECE + (SPLIT if pieces > 1 else 0)
            costs.append([part + start if part else 0.0 for part in share])
        options.append(costs)
    return min(max(map(sum, zip(*chosen, strict=True))) for chosen in itertools.product(*options))


def small_batches() -> list[tuple[list[int], int]]:
    generator = random.Random(4)
    batches = []
    for workers, items, longest in ((2, 3, 14), (3, 2, 12), (3, 3, 5), (4, 2, 9)):
        for _ in range(6):
            tiles = [generator.randint(1, longest) for _ in range(items)]
            batches.append((tiles, workers))
    return batches


@pytest.mark.parametrize(("tiles", "workers"), small_batches())
def test_bounds_are_below_the_best_of_all_plans(tiles: list[int], workers: int) -> None:
    best = best_makespan(tiles, workers)
    forced = split_plans.forced_split_bound(tiles, workers)
    assert split_plans.lower_bound(tiles, workers) <= forced <= best


def test_the_bound_with_forced_splits_is_reached_where_it_should_be() -> None:
    # 30 tiles on three workers: three split pieces of 10, or nothing shorter.
    assert split_plans.forced_split_bound([30], 3) == best_makespan([30], 3) == 12.5
    # Two items of 10 on three workers: 8, 8 and 2 + 2, all of them split.
    assert split_plans.forced_split_bound([10, 10], 3) <= best_makespan([10, 10], 3) == 10.5


def test_most_tiles_counts_the_part_of_a_tile_that_is_lost() -> None:
    # 57.25 with one split piece each: 54.75 tiles, of which whole ones are 54.
    assert split_plans.most_tiles(57.25, 0, 100, 100, PIECE, PIECE + SPLIT) == pytest.approx(5400)
    # A whole piece leaves 56 exactly.
    assert split_plans.most_tiles(57.25, 100, 0, 100, PIECE, PIECE + SPLIT) == pytest.approx(5600)


def test_windows_are_counted_by_what_is_provable() -> None:
    kept = Outcome("a", 132, 1, 102.0, 100.0, -1.0, 100.0, True)
    optimal = Outcome("b", 132, 1, 21.0, 20.0, -1.25, 21.0, True)
    missed = Outcome("c", 132, 6, 106.0, 100.0, 3.0, 101.0, True)
    short = Outcome("d", 127, 6, 9.0, 8.0, -1.25, 8.5, False)
    lines = summary([kept, optimal, missed, short]).splitlines()
    assert lines[0].startswith("plans: 4, ")
    assert lines[0].endswith(": 1")
    # 106 is 3 tiles above 103; the plan on few workers keeps the first figure.
    assert lines[1:3] == ["  by at most: 3.00 tiles, 2.9 %", "  on 128 workers or more: 1 of 3"]
    counts = [int(line.split(": ")[1].split(",")[0]) for line in lines[3:]]
    assert counts == [3, 1, 1, 1, 1]
    assert "1.050" in lines[-1]


def test_random_windows_are_seeded_and_stay_near_the_first_figure() -> None:
    """Of 20,000 windows 14 miss it, by 0.75 of a tile at most; docs/split_plan.md has the run."""
    windows = list(random_windows(150))
    assert windows == list(random_windows(150))
    assert all(outcome(*window).over <= 0.75 for window in windows)


def test_random_batches_are_seeded() -> None:
    batches = list(random_batches(150))
    assert batches == list(random_batches(150))
    assert batches != list(random_batches(150, seed=2))


def test_random_batches_cover_what_they_say() -> None:
    batches = list(random_batches(400))
    assert {row_tiles for _, _, row_tiles, _ in batches} == set(range(1, 9))
    workers = [workers for *_, workers in batches]
    assert min(workers) == 1
    assert 400 < max(workers) <= 512
    requests = [len(lens) for _, lens, *_ in batches]
    assert min(requests) == 1
    assert 200 < max(requests) <= 256
    assert all(length >= 1 for _, lens, *_ in batches for length in lens)
    assert 2**19 < max(length for _, lens, *_ in batches for length in lens) <= 2**20
    # Half of a uniform batch is above half its longest; of a log-uniform one much less is.
    medians: dict[str, list[float]] = {"uniform": [], "log-uniform": []}
    for name, lens, *_ in batches:
        if len(lens) > 30:
            kind, longest = name.split()[3], int(name.split()[-1])
            medians[kind].append(sorted(lens)[len(lens) // 2] / longest)
    assert min(medians["uniform"]) > 0.25
    assert sorted(medians["log-uniform"])[len(medians["log-uniform"]) // 2] < 0.125


def test_the_random_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--random", "0"], "--random is 0, expected at least 1"),
        (["--windows", "-2"], "--windows is -2, expected at least 1"),
        (["--random", "3", "--windows", "3"], "not allowed with argument"),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_a_random_batch_that_misses_is_shown_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The first of the 139 among 5,000; docs/split_plan.md has the run."""
    assert main(["--random", "5"]) == 0
    assert capsys.readouterr().out.startswith("plans: 5, of which above")
    assert main(["--random", "214"]) == 1
    text = capsys.readouterr().out
    assert "LB + 2.25 tiles): 1\n" in text
    assert "no. 213: 2 uniform to 87844" in text
