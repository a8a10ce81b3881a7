"""Length sets, bounds and checks for split plans, written from the specification alone.

Nothing here uses the planner: costs, bounds and coverage are recomputed from ``work``.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from k3backend.common.split_plan import SplitPlan

KIB = 1024
MOONCAKE = Path(__file__).resolve().parents[1] / "data" / "mooncake_conversation_lengths.csv"
WORKERS = (132, 148, 256, 304)
ROW_TILES = (1, 2, 6)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def named_sets() -> dict[str, list[int]]:
    """The ragged batches on which planners are compared; the random ones are seeded."""
    random = np.random.default_rng(20260915)
    middling = random.integers(8 * KIB, 16 * KIB + 1, 56).tolist()
    lognormal = np.exp(random.normal(np.log(32 * KIB), 1.2, 48))
    return {
        "75 x 64K": [64 * KIB] * 75,
        "67 x 64K": [64 * KIB] * 67,
        "256K, 128K, .. 2K": [256 * KIB >> step for step in range(8)],
        "1M + 31 x 8K": [KIB * KIB] + [8 * KIB] * 31,
        "127 x 4K + 1M": [4 * KIB] * 127 + [KIB * KIB],
        "8 x 128K + 56 x 8-16K": [128 * KIB] * 8 + middling,
        "skew to 128K": [step * 128 * KIB // 63 for step in range(64)],
        "lognormal, median 32K": np.minimum(lognormal, KIB * KIB).astype(int).tolist(),
        "24 x 68,430": [68430 + step % 5 for step in range(24)],
        "1 x 1M": [KIB * KIB],
        "512 x up to 600": random.integers(1, 601, 512).tolist(),
    }


def mooncake_lengths() -> list[int]:
    """Tokens of the whole conversations of the Mooncake trace, input and output."""
    with MOONCAKE.open() as file:
        return [
            int(row["input_tokens"]) + int(row["output_tokens"]) for row in csv.DictReader(file)
        ]


def mooncake_sets(windows: int = 2) -> dict[str, list[int]]:
    """Whole conversations of the Mooncake trace, in windows of each batch size."""
    lens = mooncake_lengths()
    return {
        f"Mooncake {batch} from {start}": lens[start : start + batch]
        for batch in BATCHES
        for start in range(0, windows * 1000, 1000)
    }


def item_tiles(lens: list[int], row_tiles: int, tile_tokens: int = 64) -> list[int]:
    """Tiles of each (request, row tile) that has any."""
    return [-(-length // tile_tokens) for length in lens if length for _ in range(row_tiles)]


def lower_bound(tiles: list[int], workers: int, piece: float = 1.25) -> float:
    """max(mean cost with nothing split, the fullest worker's tiles + one start-up), in tiles."""
    if not tiles:
        return 0.0
    total = sum(tiles)
    return max((total + piece * len(tiles)) / workers, -(-total // workers) + piece)


def forced_split_bound(
    tiles: list[int], workers: int, piece: float = 1.25, split: float = 1.25
) -> float:
    """A lower bound that counts the splits no plan can avoid, in tiles.

    At makespan T an item of t tiles is whole if t + piece <= T. Otherwise it needs at least
    t / floor(T - piece - split) pieces, and each pays piece + split. A worker holds at most
    floor(T - piece) tiles if one of its pieces is whole, floor(T - piece - split) if none is. T is
    the smallest multiple of a quarter at which costs and tiles both fit.
    """
    bound = lower_bound(tiles, workers, piece)
    quarters = int(-(-bound * 4 // 1))
    values = np.array(tiles, dtype=np.float64)
    while True:
        makespan = quarters / 4
        whole = values + piece <= makespan
        held = int(makespan - piece - split)
        if bool(whole.all()) or held >= 1:
            pieces = np.maximum(np.ceil(values / max(held, 1)), 2)
            cost = np.where(whole, values + piece, values + pieces * (piece + split))
            few = min(int(whole.sum()), workers)
            room = few * int(makespan - piece) + (workers - few) * max(held, 0)
            if cost.sum() <= workers * makespan and values.sum() <= room:
                return makespan
        quarters += 1


def wrap_around(
    tiles: list[int], workers: int, piece: float = 1.25, split: float = 1.25
) -> tuple[float, int]:
    """Makespan and pieces of an in-order wrap-around at its smallest payload, in tiles."""
    low, high = 1, int(4 * (sum(tiles) + (piece + split) * (len(tiles) + 1)))
    while low < high:
        middle = (low + high) // 2
        if _wrapped(tiles, workers, middle / 4, piece, split) is None:
            low = middle + 1
        else:
            high = middle
    pieces = _wrapped(tiles, workers, low / 4, piece, split)
    assert pieces is not None
    return low / 4, pieces


def _wrapped(
    tiles: list[int], workers: int, payload: float, piece: float, split: float
) -> int | None:
    worker, free, pieces = 0, payload, 0
    for item in tiles:
        left, cut = item, False
        while left:
            if worker == workers:
                return None
            if not cut and left + piece <= free:
                free -= left + piece
                left = 0
                pieces += 1
                continue
            part = min(int(free - piece - split), left)
            if part >= 1:
                free -= part + piece + split
                left -= part
                cut = True
                pieces += 1
            if left:
                worker, free = worker + 1, payload
    return pieces


def floor_pieces(tiles: list[int], workers: int) -> int:
    """Pieces that every worker's having one takes."""
    return max(len(tiles), workers)


def check_plan(plan: SplitPlan, lens: list[int]) -> None:
    """Every tile once, slots, counts, bounds: what a decode and its combine rely on."""
    rows = plan.row_tiles
    assert plan.work.dtype == plan.worker_indptr.dtype == plan.counts.dtype == np.int32
    assert plan.work.shape[1] == 6
    assert plan.worker_indptr.shape == (plan.num_workers + 1,)
    assert plan.counts.shape == (len(lens) * rows,)
    assert plan.worker_indptr[0] == 0
    assert plan.worker_indptr[-1] == len(plan.work)
    assert (np.diff(plan.worker_indptr) >= 0).all()
    items = sum(length > 0 for length in lens) * rows
    assert len(plan.work) <= items + plan.num_workers - 1 or not items

    pieces: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for request, row_tile, start, end, slot, index in plan.work.tolist():
        pieces.setdefault((request, row_tile), []).append((index, start, end, slot))
    slots = []
    for request, length in enumerate(lens):
        for row_tile in range(rows):
            own = sorted(pieces.pop((request, row_tile), []))
            assert len(own) == plan.counts[request * rows + row_tile]
            assert [index for index, *_ in own] == list(range(len(own)))
            position = 0
            for _, start, end, _ in own:
                assert start == position < end
                assert start % plan.tile_tokens == 0
                position = end
            assert position == length
            if len(own) == 1:
                assert own[0][3] == -1
            else:
                base = int(plan.slot_base[request * rows + row_tile])
                assert [slot for *_, slot in own] == list(range(base, base + len(own)))
                slots += [slot for *_, slot in own]
    assert not pieces
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) == plan.num_slots <= 2 * (plan.num_workers - 1)
