"""Split plan: which worker decodes which part of which request's KV cache.

Coordinates
-----------
- A *request* has ``kv_len`` KV tokens (local ones under DCP). Its query rows are processed in
  ``row_tiles`` *row tiles*, each of which reads all of the request's KV.
- A *tile* is ``tile_tokens`` KV tokens, counted from the request's first token. Only the last
  tile of a request may be short. Pieces are cut at tile borders alone.
- An *item* is a (request, row tile), numbered ``request * row_tiles + row_tile``.
- A *piece* is a run of tiles of one item on one worker: one row of ``work``. Item ``i`` has
  ``counts[i]`` pieces; its *split index* 0, 1, ... follows the KV order.
- A *worker* is a persistent workgroup. It runs rows ``worker_indptr[w] : worker_indptr[w + 1]``.
- A *slot* is the place of one partial result (output and lse2 of a row tile). An item with one
  piece writes the final output and has slot -1. Of the other items, slots are numbered in the
  order of items and split indices: item ``i`` owns ``slot_base[i] : slot_base[i] + counts[i]``,
  where ``slot_base`` is the exclusive running sum of the counts that are above 1. A combine can
  work from ``counts`` alone.
- A request of length 0 has no piece and counts 0: the combine writes its empty result.

Cost
----
In tiles: a piece costs its tiles + ``piece_tiles``, and ``split_tiles`` more if its item is cut.
The defaults are derived, not measured, for 64 tokens of fp8 KV (36,864 B per tile) and 12 rows
(K3 at TP 8, one token) on MI355X, where a CU's share of the bandwidth, 8 TB/s / 256, moves a tile
in 1.18 us:

- ``piece_tiles`` 1.25: 12 x 576 B of query and 12 x 512 x 2 B of bf16 output are 0.52 tiles; a trip
  to HBM (about 0.8 us) before the first tile arrives is 0.68; together 1.20.
- ``split_tiles`` 1.25: a partial is 12 x (512 + 1) x 4 B = 0.67 tiles, written once and read once
  by the combine: 1.34, rounded to the quarter below because partials mostly stay in cache. The
  output is then written by the combine instead of the piece, which moves its cost but keeps it.

More rows cost more: `SplitCost.derived` does the same arithmetic for any shape. Costs are held in
quarters of a tile, so that host and device planner add integers.

Worked example
--------------
Lengths 1000, 130, 0 and 64 tokens, one row tile, 4 workers: 16, 3, 0 and 1 tiles. Whole, the items
cost 17.25, 4.25, 0 and 2.25, in all 23.75. No plan is shorter than the lower bound
max(23.75 / 4, 20 / 4 + 1.25) = 6.25 tiles. The bisection finds payload 8.5. There the first item
does not fit, so it becomes heads of 8.5 - 2.5 = 6 tiles, two of them, and a rest of 4 tiles that
costs 6.5; heads and rest with the two whole items take 2 x 8.5 + 6.5 + 6.5 of 4 x 8.5. (At 8.25 a
head holds 5 tiles, so three heads and what is left take 34.75 of 33.) Largest first: the rest goes
to the third worker, the item of 4.25 does not fit beside it and takes the fourth, and the item of
2.25 fits that one exactly::

    worker  request, row_tile, kv_start, kv_end, slot, split index
    0       0, 0,   0,  384,  0, 0
    1       0, 0, 384,  768,  1, 1
    2       0, 0, 768, 1000,  2, 2
    3       1, 0,   0,  130, -1, 0
    3       3, 0,   0,   64, -1, 0
    counts 3, 1, 0, 1; worker_indptr 0, 1, 2, 3, 5; workers cost 8.5, 8.5, 6.5, 6.5

Capacity
--------
At most ``requests * row_tiles + workers - 1`` pieces. Proof, with the steps of
`k3backend.common.split_packing`: every piece is (a) a head, alone on its worker; (b) an item or
rest that lies whole in one worker, or the first piece of one that the fill cuts: at most one per
item; or (c) a piece with which the fill starts a worker's free space, because the line came over
from the worker before: at most one per worker without a head, and none for the line's first.
With h heads and a worker left, (a) + (b) + (c) <= h + items + (workers - h - 1). With no worker
left there is no rest, so (b) and (c) are empty: h = workers pieces, and there is an item.

At most ``2 * (workers - 1)`` slots: an item of c > 1 pieces adds c - 1 >= c / 2 to the pieces
beyond one per item, and those are at most workers - 1. That is under two slots per worker, and
none for requests that stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from k3backend.common.errors import InputError, ShapeError
from k3backend.common.split_packing import QUARTERS, IntArray, Problem, pack_best

WORK_FIELDS = 6
"""Columns of ``work``: request, row_tile, kv_start, kv_end, slot, split index."""
MAX_KV_TOKENS = 2**31 - 1
MAX_COST_TILES = 1024
MAX_TOTAL_TILES = 2**28
"""Tiles of all items together, so that the device planner's sums of quarters fit 32 bits."""
MAX_TILE_TOKENS = 2**31 - 1
MAX_WORKERS = 2**16
MAX_ROW_TILES = 2**16
MAX_ITEMS = 2**17
"""Requests x row tiles of one plan, empty requests included: 1,024 requests of 128 heads and 64
tokens in tiles of 64 rows, the largest shape that any decode here takes."""


@dataclass(frozen=True, slots=True)
class SplitCost:
    """Cost of a piece beside its tiles, in tiles; multiples of a quarter.

    Attributes:
        piece_tiles: start-up of every piece.
        split_tiles: what a piece costs more when it writes a partial that the combine reads.
    """

    piece_tiles: float = 1.25
    split_tiles: float = 1.25

    def __post_init__(self) -> None:
        for name in ("piece_tiles", "split_tiles"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value <= MAX_COST_TILES:
                raise InputError(
                    f"{name}: expected tiles from 0 to {MAX_COST_TILES}, got {value!r}"
                )
            if value * QUARTERS != int(value * QUARTERS):
                raise InputError(
                    f"{name}: expected a multiple of 1/{QUARTERS} tile, got {value!r}; round it, "
                    "as SplitCost.derived does"
                )

    @property
    def piece_quarters(self) -> int:
        return int(self.piece_tiles * QUARTERS)

    @property
    def split_quarters(self) -> int:
        return int(self.split_tiles * QUARTERS)

    @classmethod
    def derived(
        cls,
        rows: int,
        *,
        kv_token_bytes: int = 576,
        query_element_bytes: int = 1,
        tile_tokens: int = 64,
        latency_tiles: float = 0.75,
    ) -> SplitCost:
        """Costs of a shape from the bytes that a piece moves beside its KV.

        Args:
            rows: query rows of one row tile (heads x tokens).
            kv_token_bytes: bytes of one KV token, 576 for fp8, 1,152 for bf16.
            query_element_bytes: bytes of one of the 576 query elements of a row.
            tile_tokens: KV tokens of a tile.
            latency_tiles: time before the first tile arrives, in tiles; 0 to MAX_COST_TILES.

        Raises:
            InputError: an argument other than ``latency_tiles`` is no integer from 1 to 2^31 - 1,
                or the costs are above MAX_COST_TILES.
        """
        rows = _integer("rows", rows, 2**31 - 1)
        kv_token_bytes = _integer("kv_token_bytes", kv_token_bytes, 2**31 - 1)
        query_element_bytes = _integer("query_element_bytes", query_element_bytes, 2**31 - 1)
        tile_tokens = _integer("tile_tokens", tile_tokens, MAX_TILE_TOKENS)
        if (
            isinstance(latency_tiles, bool)
            or not isinstance(latency_tiles, Real)
            or not 0 <= latency_tiles <= MAX_COST_TILES
        ):
            raise InputError(
                f"latency_tiles: expected a number from 0 to {MAX_COST_TILES}, got "
                f"{latency_tiles!r}; give the latency in times of one tile"
            )
        tile_bytes = kv_token_bytes * tile_tokens
        output = rows * 512 * 2 / tile_bytes
        partial = rows * 513 * 4 / tile_bytes
        query = rows * 576 * query_element_bytes / tile_bytes
        piece_tiles = round((query + output + float(latency_tiles)) * QUARTERS) / QUARTERS
        split_tiles = round(2 * partial * QUARTERS) / QUARTERS
        if max(piece_tiles, split_tiles) > MAX_COST_TILES:
            raise InputError(
                f"rows: expected a piece to cost at most {MAX_COST_TILES} tiles, got {rows} rows "
                f"that cost {max(piece_tiles, split_tiles):.0f} ({query_element_bytes} bytes per "
                f"query element, tiles of {tile_bytes} bytes); use more row tiles of fewer rows"
            )
        return cls(piece_tiles=piece_tiles, split_tiles=split_tiles)


def max_items(requests: int, row_tiles: int, workers: int) -> int:
    """Rows that ``work`` needs for any lengths of this shape (proof in the module docstring).

    Raises:
        InputError: ``requests`` is no integer of at least 0, or another one of at least 1.
    """
    requests = _integer("requests", requests, least=0)
    row_tiles = _integer("row_tiles", row_tiles)
    workers = _integer("workers", workers)
    return requests * row_tiles + workers - 1 if requests else 0


def max_slots(requests: int, row_tiles: int, workers: int) -> int:
    """Partial slots that any lengths of this shape need. Raises what `max_items` raises."""
    items = max_items(requests, row_tiles, workers)
    return min(2 * (int(workers) - 1), items)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A plan and what it was made for. See the module docstring for the coordinates.

    Attributes:
        work: int32 [items, 6], rows (request, row_tile, kv_start, kv_end, slot or -1, split index),
            grouped by worker.
        worker_indptr: int32 [num_workers + 1], first row of each worker.
        counts: int32 [requests * row_tiles], pieces of each item.
        row_tiles, num_workers, tile_tokens, cost: the arguments of `plan_splits`.
    """

    work: npt.NDArray[np.int32]
    worker_indptr: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    row_tiles: int
    num_workers: int
    tile_tokens: int
    cost: SplitCost

    @property
    def slot_base(self) -> npt.NDArray[np.int32]:
        """First slot of each item, int32 [requests * row_tiles]; meaningless where counts < 2."""
        return slot_base(self.counts)

    @property
    def num_slots(self) -> int:
        """Partial slots in use."""
        return int(self.counts[self.counts > 1].sum())

    @property
    def extra_pieces(self) -> int:
        """Pieces beyond one per item that has any KV."""
        return len(self.work) - int(np.count_nonzero(self.counts))

    def worker_cost_tiles(self) -> npt.NDArray[np.float64]:
        """Cost of each worker in tiles, float64 [num_workers]."""
        tiles = -(-(self.work[:, 3] - self.work[:, 2]) // self.tile_tokens)
        split = self.work[:, 4] >= 0
        cost = tiles + self.cost.piece_tiles + split * self.cost.split_tiles
        total = np.concatenate([[0.0], np.cumsum(cost)])
        return np.asarray(np.diff(total[self.worker_indptr]), dtype=np.float64)

    @property
    def makespan_tiles(self) -> float:
        """Cost of the fullest worker in tiles."""
        return float(self.worker_cost_tiles().max())

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        """(work, worker_indptr, counts)"""
        return iter((self.work, self.worker_indptr, self.counts))


def plan_splits(
    kv_lens: Any,
    row_tiles: int = 1,
    num_workers: int = 256,
    tile_tokens: int = 64,
    cost: SplitCost | None = None,
) -> SplitPlan:
    """Plan one decode step. Pure, deterministic, on the host; lengths on a device are copied.

    Args:
        kv_lens: integers [requests], KV tokens of each request: a sequence, numpy array or tensor.
            0 to MAX_KV_TOKENS each; at most MAX_TOTAL_TILES tiles over all items.
        row_tiles: row tiles of each request, 1 to MAX_ROW_TILES; at most MAX_ITEMS over all
            requests, empty ones included.
        num_workers: persistent workgroups that will run the plan, 1 to MAX_WORKERS.
        tile_tokens: KV tokens of a tile, 1 to MAX_TILE_TOKENS.
        cost: cost of pieces; None is ``SplitCost()``.

    Raises:
        ShapeError: ``kv_lens`` is not one-dimensional or not of integers, or a tensor without
            plain memory.
        InputError: an argument is out of range.
    """
    lens = _lengths(kv_lens)
    row_tiles = _integer("row_tiles", row_tiles, MAX_ROW_TILES)
    num_workers = _integer("num_workers", num_workers, MAX_WORKERS)
    tile_tokens = _integer("tile_tokens", tile_tokens, MAX_TILE_TOKENS)
    if len(lens) * row_tiles > MAX_ITEMS:
        raise InputError(
            f"row_tiles: expected at most {MAX_ITEMS} row tiles over all requests, got "
            f"{row_tiles} for each of {len(lens)} requests; plan fewer requests at a time"
        )
    tiles = -(-lens // tile_tokens)
    if int(tiles.sum()) * row_tiles > MAX_TOTAL_TILES:
        raise InputError(
            f"kv_lens: expected at most {MAX_TOTAL_TILES} tiles in all, got "
            f"{int(tiles.sum()) * row_tiles} ({row_tiles} row tiles); plan fewer requests at a time"
        )
    cost = SplitCost() if cost is None else cost
    if not isinstance(cost, SplitCost):
        raise InputError(f"cost: expected a SplitCost, got {cost!r}")
    problem = Problem(
        tiles=tiles,
        row_tiles=row_tiles,
        workers=num_workers,
        piece=cost.piece_quarters,
        split=cost.split_quarters,
    )
    pieces = pack_best(problem).pieces(row_tiles) if lens.any() else []
    rows = [
        (piece.request, piece.row_tile, piece.start, piece.end, piece.worker, piece.split_index)
        for piece in pieces
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, WORK_FIELDS)
    item = table[:, 0] * row_tiles + table[:, 1]
    counts = np.bincount(item, minlength=len(lens) * row_tiles).astype(np.int32)
    slot = np.where(counts[item] > 1, slot_base(counts)[item] + table[:, 5], -1)
    end = np.minimum(table[:, 3] * tile_tokens, lens[table[:, 0]])
    work = np.stack(
        [table[:, 0], table[:, 1], table[:, 2] * tile_tokens, end, slot, table[:, 5]], axis=1
    )
    per_worker = np.bincount(table[:, 4], minlength=num_workers)
    return SplitPlan(
        work=work.astype(np.int32),
        worker_indptr=np.concatenate([[0], np.cumsum(per_worker)]).astype(np.int32),
        counts=counts,
        row_tiles=row_tiles,
        num_workers=num_workers,
        tile_tokens=tile_tokens,
        cost=cost,
    )


def slot_base(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """First slot of each item from the pieces of each item, both int32 [items]."""
    slots = np.where(counts > 1, counts, 0)
    return np.asarray(np.cumsum(slots) - slots, dtype=np.int32)


def xcd_order(num_workers: int, num_xcds: int = 8, row_tiles: int = 1) -> npt.NDArray[np.int32]:
    """Worker that each workgroup runs, int32 [num_workers], so that neighbours share an L2 cache.

    The hardware deals workgroups to its XCDs in turn: workgroup g runs on XCD ``g % num_xcds``. A
    plan puts pieces that read the same KV (the row tiles of one request) on neighbouring workers,
    heads in whole groups of ``row_tiles`` from worker 0 on. This order gives every XCD a run of
    neighbours, cut to whole groups; the workers that are over come last.

    Raises:
        InputError: ``num_workers`` or ``num_xcds`` is no integer from 1 to MAX_WORKERS, or
            ``row_tiles`` none from 1 to MAX_ROW_TILES.
    """
    num_workers = _integer("num_workers", num_workers, MAX_WORKERS)
    num_xcds = _integer("num_xcds", num_xcds, MAX_WORKERS)
    row_tiles = _integer("row_tiles", row_tiles, MAX_ROW_TILES)
    order = np.empty(num_workers, dtype=np.int32)
    over = []
    worker = 0
    for xcd in range(min(num_xcds, num_workers)):
        groups = np.arange(xcd, num_workers, num_xcds)
        aligned = len(groups) // row_tiles * row_tiles
        order[groups[:aligned]] = np.arange(worker, worker + aligned)
        worker += aligned
        over.extend(groups[aligned:].tolist())
    order[over] = np.arange(worker, num_workers)
    return order


_REMEDIES = {
    "requests": "give the number of requests of a step",
    "row_tiles": "give the row tiles of one request",
    "num_workers": "give the persistent workgroups of one launch",
    "workers": "give the persistent workgroups of one launch",
    "num_xcds": "give the XCDs of one GPU",
    "tile_tokens": "give the KV tokens of one tile",
    "rows": "give the query rows of one row tile",
    "kv_token_bytes": "give the bytes of one KV token, such as 576",
    "query_element_bytes": "give the bytes of one query element, such as 1 or 2",
}
_TENSOR_TYPES = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_WHAT_LENGTHS_ARE = "kv_lens: expected integers of shape [requests]"
_ONE_EACH = "pass one KV length per request"


def _integer(name: str, value: object, most: int | None = None, least: int = 1) -> int:
    """``value`` as a plain int: numpy's integers have few bits and would wrap or overflow."""
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = int(value)
        if least <= number and (most is None or number <= most):
            return number
    span = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise InputError(f"{name}: expected an integer {span}, got {value!r}; {_REMEDIES[name]}")


def _lengths(kv_lens: Any) -> IntArray:
    """The lengths as int64 [requests], without importing torch: a tensor is asked for its copy."""
    values = _tensor_array(kv_lens) if hasattr(kv_lens, "detach") else _plain_array(kv_lens)
    if values.size == 0:
        values = values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ShapeError(
            f"{_WHAT_LENGTHS_ARE}, got shape {list(values.shape)} of {values.dtype}; {_ONE_EACH}"
        )
    if values.size and (values.min() < 0 or values.max() > MAX_KV_TOKENS):
        bad = int(np.flatnonzero((values < 0) | (values > MAX_KV_TOKENS))[0])
        raise _out_of_range(bad, int(values[bad]))
    return values.astype(np.int64)


def _tensor_array(tensor: Any) -> npt.NDArray[Any]:
    """A tensor's copy on the host. Asked for before torch fails in its own words."""
    if tensor.is_meta or tensor.is_nested or str(tensor.layout) != "torch.strided":
        kind = "nested" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
        raise ShapeError(
            f"{_WHAT_LENGTHS_ARE}, got a tensor without plain memory ({kind}); pass a dense tensor "
            "that holds the lengths"
        )
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return np.zeros(shape, dtype=np.int64)
    if str(tensor.dtype) not in _TENSOR_TYPES:
        raise ShapeError(
            f"{_WHAT_LENGTHS_ARE}, got shape {list(shape)} of {tensor.dtype}; convert the lengths "
            "to int32"
        )
    return np.asarray(tensor.detach().cpu().numpy())


def _plain_array(values: Any) -> npt.NDArray[Any]:
    """A sequence or array as numpy sees it."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ShapeError(
            f"{_WHAT_LENGTHS_ARE}, got a {type(values).__name__} that is no array ({error}); "
            f"{_ONE_EACH}"
        ) from error
    if array.dtype.kind not in "iu" and isinstance(values, (list, tuple)):
        # Integers beyond 64 bits become objects, or floats beside a negative one.
        for request, value in enumerate(values):
            if isinstance(value, Integral) and not -(2**63) <= int(value) < 2**63:
                raise _out_of_range(request, int(value))
    return array


def _out_of_range(request: int, length: int) -> InputError:
    return InputError(
        f"kv_lens: expected 0 to {MAX_KV_TOKENS} tokens, got {length} for request {request}; pass "
        "the KV tokens that the request has"
    )
