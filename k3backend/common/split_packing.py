"""Packing of split-KV decode work onto workers: the integer algorithm behind a split plan.

Everything here is integer arithmetic on *tiles* and *quarters* (a quarter of the time of one
tile), because the device planner (`k3backend.common.kernels.split_plan_device`) repeats it step by
step and must come to the identical plan. A change here is a change there.

An item costs ``4 * tiles + piece`` quarters whole, and each of its pieces ``4 * tiles + piece +
split`` once it is cut. The steps:

1. `find_payload`: bisect the smallest payload ``T`` (quarters per worker) at which the workers
   could hold all items if leftovers packed without loss. An item that fits in ``T`` stays whole; a
   larger one becomes *heads* that fill one worker each and a *rest*.
2. `pack`: rests and whole items go, largest first, to the worker they fit most tightly, in rounds
   in which a worker takes at most one item and which a device can match at once. What the first
   rounds leave (many small items) is laid along the free space in one pass, and items that
   straddle two workers get two more rounds.
3. `_fill`: items that fit nowhere whole are laid along the free space, raised to the lowest level
   that holds them, and cut where the line passes from one worker to the next.
4. `_spread_heads`: workers that are still idle take a share of the heads.

Steps 2 to 4 run for a few payloads from ``T`` up (more slack needs fewer cuts) and once with no
packing at all, which is a plain wrap-around. `choose` takes the fewest pieces among the candidates
that are about as short as the best one.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

QUARTERS = 4
"""Cost units per tile."""
SLACK_CANDIDATES = 6
"""Payloads tried: candidate c adds max(c, T * c // 256) quarters, that is up to 2 %."""
CANDIDATES = SLACK_CANDIDATES + 1
"""The last candidate is the wrap-around."""
FIRST_ROUNDS = 10
LAST_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be packed.

    Attributes:
        tiles: int64 [requests], KV tiles of each request; 0 costs nothing.
        row_tiles: row tiles per request, each of which reads all KV tiles of its request.
        workers: number of workers.
        piece: quarters that every piece costs beside its tiles.
        split: quarters that a piece costs more when its item is cut.
    """

    tiles: IntArray
    row_tiles: int
    workers: int
    piece: int
    split: int

    @property
    def total_tiles(self) -> int:
        return int(self.tiles.sum()) * self.row_tiles

    @property
    def items(self) -> int:
        """Items that cost anything."""
        return int(np.count_nonzero(self.tiles)) * self.row_tiles

    @property
    def lower_bound(self) -> int:
        """Quarters that no plan can beat: the mean cost, and the fullest worker's tiles."""
        cost = QUARTERS * self.total_tiles + self.piece * self.items
        fullest = QUARTERS * -(-self.total_tiles // self.workers) + self.piece
        return max(-(-cost // self.workers), fullest)


def head_tiles(problem: Problem, payload: int) -> int:
    """Tiles of one head: a split piece that fills a worker up to ``payload`` quarters."""
    return (payload - problem.piece - problem.split) // QUARTERS


def cut_heads(problem: Problem, payload: int) -> tuple[IntArray, IntArray]:
    """Heads per item and tiles of the rest, both int64 [requests], at one payload.

    The rest of an item without heads is the whole item. ``head_tiles`` must be at least 1 when an
    item does not fit.
    """
    tiles = problem.tiles
    whole = QUARTERS * tiles + problem.piece <= payload
    per_head = max(head_tiles(problem, payload), 1)
    heads = np.where(whole, 0, tiles // per_head)
    return heads, tiles - heads * per_head


def rest_costs(problem: Problem, heads: IntArray, rest: IntArray) -> IntArray:
    """Quarters of each rest as one piece, int64 [requests]; 0 where there is none."""
    cost = QUARTERS * rest + problem.piece + np.where(heads > 0, problem.split, 0)
    return np.where(rest > 0, cost, 0)


def payload_fits(problem: Problem, payload: int) -> bool:
    """Whether heads and rests at this payload take no more than all workers hold."""
    whole = QUARTERS * problem.tiles + problem.piece <= payload
    if head_tiles(problem, payload) < 1 and not bool(whole.all()):
        return False
    heads, rest = cut_heads(problem, payload)
    demand = int(heads.sum()) * payload + int(rest_costs(problem, heads, rest).sum())
    return demand * problem.row_tiles <= problem.workers * payload


def find_payload(problem: Problem) -> int:
    """Smallest payload in quarters that a bisection between the bounds finds to fit."""
    low = problem.lower_bound
    high = max(low, QUARTERS * int(problem.tiles.max()) + problem.piece)
    while low < high:
        middle = (low + high) // 2
        if payload_fits(problem, middle):
            high = middle
        else:
            low = middle + 1
    return low


def candidate_payload(payload: int, candidate: int) -> int:
    """Quarters per worker that a candidate packs for; the wrap-around starts from the smallest."""
    if candidate == SLACK_CANDIDATES:
        return payload
    return payload + max(candidate, payload * candidate // 256)


@dataclass(slots=True)
class _Item:
    """One (request, row tile) whose rest is to be placed."""

    request: int
    row_tile: int
    cost: int
    tiles: int


@dataclass(slots=True)
class _Bin:
    """One worker that is not filled by a head: free quarters, and its pieces in order."""

    free: int
    placed: list[tuple[_Item, int, int, int]] = field(default_factory=list)


class Piece(NamedTuple):
    """Tiles [start, end) of one item on one worker; ``split_index`` counts the item's pieces."""

    worker: int
    request: int
    row_tile: int
    start: int
    end: int
    split_index: int


@dataclass(frozen=True, slots=True)
class Packed:
    """One candidate.

    Attributes:
        makespan: quarters of the fullest worker, at most.
        num_pieces: pieces of all workers.
        idle: whether some worker has no piece.
        heads: int64 [requests], heads per item. full: int64 [requests], tiles that they share.
        bins: the workers without a head.
    """

    makespan: int
    num_pieces: int
    idle: bool
    heads: IntArray
    full: IntArray
    bins: list[_Bin]

    def pieces(self, row_tiles: int) -> list[Piece]:
        """All pieces in order of worker: heads by request, then the bins that hold anything."""
        pieces: list[Piece] = []
        for request in np.flatnonzero(self.heads).tolist():
            count, tiles = int(self.heads[request]), int(self.full[request])
            for head in range(count):
                start, end = head * tiles // count, (head + 1) * tiles // count
                for row_tile in range(row_tiles):
                    pieces.append(Piece(len(pieces), request, row_tile, start, end, head))
        worker = len(pieces)
        for bin_ in self.bins:
            for item, start, end, cut in bin_.placed:
                first = int(self.full[item.request])
                index = int(self.heads[item.request]) + cut
                pieces.append(
                    Piece(worker, item.request, item.row_tile, first + start, first + end, index)
                )
            worker += bool(bin_.placed)
        return pieces


def _match_rounds(pending: list[_Item], bins: list[_Bin], rounds: int) -> list[_Item]:
    """Best-fit rounds; returns the items that stay unplaced, in their order.

    In a round the bins stand in order of free space, widest first, and an item fits the first few
    of them. Items that fit equally many take turns at the tightest of these, and stop before the
    bins that a larger item fits. So no two items ever want the same bin, and a round can be matched
    in parallel.
    """
    for _ in range(rounds):
        line = sorted(((item.free, number) for number, item in enumerate(bins)), reverse=True)
        if not line or not pending or pending[-1].cost > line[0][0]:
            break
        keys = [-free for free, _ in line]
        unplaced = []
        floor, fitting, turn = 0, 0, 0
        for item in pending:
            fits = bisect.bisect_right(keys, -item.cost)
            if fits == fitting:
                turn += 1
            else:
                floor, fitting, turn = fitting, fits, 0
            at = fitting - 1 - turn
            if at < floor:
                unplaced.append(item)
                continue
            bin_ = bins[line[at][1]]
            bin_.free -= item.cost
            bin_.placed.append((item, 0, item.tiles, 0))
        pending = unplaced
    return pending


def _lay_whole(pending: list[_Item], bins: list[_Bin]) -> list[_Item]:
    """Lay items along the free space, widest bin first; keep those that straddle no border."""
    line = sorted(((item.free, number) for number, item in enumerate(bins)), reverse=True)
    if not line:
        return pending
    widest = line[0][0]
    ends = np.cumsum([free for free, _ in line]).tolist()
    unplaced = []
    position = 0
    for item in pending:
        if item.cost > widest:
            unplaced.append(item)
            continue
        at = bisect.bisect_right(ends, position)
        position += item.cost
        if at < len(ends) and position <= ends[at]:
            bin_ = bins[line[at][1]]
            bin_.free -= item.cost
            bin_.placed.append((item, 0, item.tiles, 0))
        else:
            unplaced.append(item)
    return unplaced


def _fill(problem: Problem, payload: int, rest: list[_Item], bins: list[_Bin]) -> int:
    """Cut the remaining items into the free space; returns the level in quarters it rises to.

    On the line every item but the first takes ``gap`` tiles for its start-up before its tiles; a
    bin pays for the piece it starts with out of its own room. The level is the lowest at which the
    line ends within the last bin.
    """
    start = problem.piece + problem.split
    gap = -(-start // QUARTERS)
    need = sum(item.tiles + gap for item in rest) - gap
    line = sorted(((item.free, number) for number, item in enumerate(bins)), reverse=True)
    free = np.array([room for room, _ in line], dtype=np.int64)

    def rooms(level: int) -> IntArray:
        return np.maximum((free + (level - payload) - start) // QUARTERS, 0)

    low, high = payload, payload + QUARTERS * need + start
    while low < high:
        middle = (low + high) // 2
        if int(rooms(middle).sum()) >= need:
            high = middle
        else:
            low = middle + 1
    ends = np.cumsum(rooms(low)).tolist()
    position = 0
    for item in rest:
        begin, end = position, position + item.tiles
        first = bisect.bisect_right(ends, begin)
        last = bisect.bisect_left(ends, end)
        for at in range(first, last + 1):
            left = max(begin, ends[at - 1] if at else 0)
            right = min(end, ends[at])
            bins[line[at][1]].placed.append((item, left - begin, right - begin, at - first))
        position = end + gap
    return low


def _spread_heads(problem: Problem, heads: IntArray, full: IntArray, idle: int) -> IntArray:
    """Heads per item after idle workers joined in, int64 [requests].

    ``full`` holds the tiles that the heads of an item share. Shares follow the running sum of
    heads, a worker for every row tile at a time, and no head is left without a tile.
    """
    columns = idle // problem.row_tiles
    running = np.cumsum(heads)
    total = int(running[-1])
    if total == 0:
        return heads
    widened = running + running * columns // total
    return np.minimum(np.diff(widened, prepend=0), full)


def pack(problem: Problem, payload: int, *, wrap: bool) -> Packed | None:
    """Pack at one payload in quarters; None if heads alone need more workers than there are.

    ``wrap`` leaves out heads and best fit: every item is laid along the workers and cut.
    """
    if wrap:
        heads, rest = np.zeros_like(problem.tiles), problem.tiles
    else:
        heads, rest = cut_heads(problem, payload)
    costs = rest_costs(problem, heads, rest)
    free_bins = problem.workers - int(heads.sum()) * problem.row_tiles
    if free_bins < 0 or (free_bins == 0 and bool(rest.any())):
        return None

    order = np.argsort(-costs, kind="stable")
    pending = [
        _Item(int(request), row_tile, int(costs[request]), int(rest[request]))
        for request in order[: np.count_nonzero(costs)]
        for row_tile in range(problem.row_tiles)
    ]
    bins = [_Bin(payload) for _ in range(free_bins)]
    if not wrap:
        pending = _match_rounds(pending, bins, FIRST_ROUNDS)
        pending = _lay_whole(pending, bins)
        pending = _match_rounds(pending, bins, LAST_ROUNDS)
    makespan = max((payload - bin_.free for bin_ in bins), default=0)
    if pending:
        makespan = max(makespan, _fill(problem, payload, pending, bins))

    full = heads * max(head_tiles(problem, payload), 1)
    idle = sum(not bin_.placed for bin_ in bins)
    spread = _spread_heads(problem, heads, full, idle)
    if bool(heads.any()):
        longest = int((-(-full[heads > 0] // spread[heads > 0])).max())
        makespan = max(makespan, QUARTERS * longest + problem.piece + problem.split)

    head_pieces = int(spread.sum()) * problem.row_tiles
    return Packed(
        makespan=makespan,
        num_pieces=head_pieces + sum(len(bin_.placed) for bin_ in bins),
        idle=head_pieces + len(bins) - idle < problem.workers,
        heads=spread,
        full=full,
        bins=bins,
    )


def choose(problem: Problem, packed: list[Packed | None]) -> Packed:
    """The candidate to use, of the packings of all candidates in order.

    The fewest pieces among the candidates within 1/64 of the best makespan, as far as that stays
    within 3 % of the lower bound; then the shorter makespan, then the smaller slack. Fewer pieces
    than workers are no gain, and a candidate that leaves a worker idle must match the best one.
    """
    possible = [entry for entry in packed if entry is not None]
    best = min(entry.makespan for entry in possible)
    bound = problem.lower_bound
    limit = max(best, min(best + best // 64, bound + 3 * bound // 100))
    good = [entry for entry in possible if entry.makespan <= (best if entry.idle else limit)]
    return min(good, key=lambda entry: (max(entry.num_pieces, problem.workers), entry.makespan))


def pack_best(problem: Problem) -> Packed:
    """The chosen candidate's packing. The problem must have at least one tile."""
    payload = find_payload(problem)
    return choose(
        problem,
        [
            pack(problem, candidate_payload(payload, candidate), wrap=candidate == SLACK_CANDIDATES)
            for candidate in range(CANDIDATES)
        ],
    )
