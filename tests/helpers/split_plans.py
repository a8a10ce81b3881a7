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


def most_tiles(
    makespan: float, whole: int, split: int, workers: int, piece: float, split_piece: float
) -> float:
    """Upper bound on the tiles that workers hold with so many whole and split pieces, in tiles.

    A worker with n whole and s split pieces holds at most floor(makespan - n * piece -
    s * split_piece) tiles. For any price a of a whole piece and any b >= 0 of a split one, all
    workers together hold at most workers * max over (n, s) of (that floor + a n + b s), less
    a * whole + b * split: whole pieces are exactly ``whole``, split ones at least ``split``. The
    smallest of these bounds over a grid of prices is returned (Lagrangian duality: every price
    gives a bound, so the grid costs tightness alone). Prices stay at or below the costs, which are
    multiples of a quarter: four pieces fewer then lose the same part of a tile to the floor and
    are never worse, so that n and s up to 4 hold the maximum.
    """
    n, s = (axis.reshape(-1, 1, 1) for axis in np.indices((5, 5)))
    room = makespan - n * piece - s * split_piece
    held = np.where((n + s > 0) & (room >= 0), np.floor(room), 0.0)
    allowed = np.where((room >= 0) | (n + s == 0), 0.0, -np.inf)
    whole_price = np.arange(-4.0, piece + 0.125, 0.125)[None, :, None]
    split_price = np.arange(0.0, split_piece + 0.125, 0.125)[None, None, :]
    best = (held + allowed + whole_price * n + split_price * s).max(axis=0)
    bounds = workers * best - whole_price[0] * whole - split_price[0] * split
    return float(bounds.min())


def forced_split_bound(
    tiles: list[int], workers: int, piece: float = 1.25, split: float = 1.25
) -> float:
    """A lower bound that counts the splits no plan can avoid, in tiles.

    At makespan T an item of t tiles is whole if t + piece <= T. Otherwise it needs at least
    t / floor(T - piece - split) pieces, and each pays piece + split. T is the smallest multiple of
    a quarter at which the costs fit all workers, and the tiles what workers hold with so many
    pieces (`most_tiles`: tiles are whole, so room is lost beside the pieces).
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
            split_pieces = int(pieces[~whole].sum())
            if cost.sum() <= workers * makespan:
                most = most_tiles(
                    makespan, int(whole.sum()), split_pieces, workers, piece, piece + split
                )
                if values.sum() <= most + 1e-6:
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
