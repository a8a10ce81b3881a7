"""Split rules of other projects, restated from what they do, for comparison alone.

Each rule returns the pieces of every worker as (item, tiles), where an item is one (request, row
tile) of a batch given as tiles per item, in request order. A peer decides in its own units and with
its own constants; what it decides is then costed like our plan, in tiles of 64 tokens. Rules that
give no assignment to workers (a grid of equal splits) are run as the hardware runs a grid: each
workgroup goes to the worker that is free first.

Sources: FlashMLA 9241ae3 (get_decoding_sched_meta), FlashInfer fb28d724 (scheduler.cuh, MLAPlan),
tokenspeed-mla 2.0.4, FlashAttention 3 0251105a (flash_prepare_scheduler), AITER e4048607 (metadata
v1.2). Their caches, kernels and combines are not modelled.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

TILE_TOKENS = 64
Assignment = list[list[tuple[int, float]]]
"""Per worker: (item, tiles) of each piece; AITER cuts between our tiles."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rule may look at.

    Attributes:
        requests: tiles of 64 tokens of each request.
        row_tiles: row tiles of each request.
        workers: workgroups that run at a time.
    """

    requests: list[int]
    row_tiles: int
    workers: int

    @property
    def items(self) -> list[int]:
        """Tiles of each (request, row tile), request by request."""
        return [tiles for tiles in self.requests for _ in range(self.row_tiles)]


def flash_mla(batch: Batch) -> Assignment:
    """In-order wrap-around over workers // row_tiles parts; a visit costs 5 blocks, so does a part.

    A part is one worker for each row tile; the remainder of workers stays idle. A request of length
    zero counts as one block.
    """
    parts = max(batch.workers // batch.row_tiles, 1)
    blocks = [max(tiles, 1) for tiles in batch.requests]
    payload = -(-sum(count + 5 for count in blocks) // parts) + 5
    plan: Assignment = [[] for _ in range(batch.workers)]
    request, left = 0, blocks[0]
    for part in range(parts):
        room = payload
        while request < len(blocks) and room > 5:
            taken = min(left, room - 5)
            _place_columns(plan, batch, part, request, min(taken, batch.requests[request]))
            room -= taken + 5
            left -= taken
            if left:
                break
            request += 1
            left = blocks[request] if request < len(blocks) else 0
    return plan


def aiter_v1_2(batch: Batch) -> Assignment:
    """Greedy fill, worker by worker, batches in order; 16 blocks of one token per piece.

    At page 1 a unit is 16 tokens and a piece's overhead is 16 units, 4 of our tiles. A worker is
    closed when no more than the overhead is left.
    """
    units_per_tile, overhead = TILE_TOKENS // 16, 16
    items = [tiles * units_per_tile for tiles in batch.items]
    payload = -(-sum(units + overhead for units in items if units) // batch.workers) + overhead
    plan: Assignment = [[] for _ in range(batch.workers)]
    worker, room = 0, payload
    for item, units in enumerate(items):
        left = units
        while left:
            if room <= overhead and worker < batch.workers - 1:
                worker, room = worker + 1, payload
            taken = left if worker == batch.workers - 1 else min(left, room - overhead)
            plan[worker].append((item, taken / units_per_tile))
            room -= taken + overhead
            left -= taken
    return plan


def flash_infer(batch: Batch) -> Assignment:
    """Chunks of a rounded limit in request order, each to the worker of least cost (a min-heap).

    The limit is the mean of KV tokens per worker, rounded up to 32, 64, 128, 192 or a multiple of
    256; cost is 2 x rows of the tile + KV tokens, with 64 rows.
    """
    rows = 64
    mean = -(-sum(batch.items) * TILE_TOKENS // batch.workers)
    steps = ((8, 32), (16, 64), (32, 128), (64, 192))
    limit = next((limit for most, limit in steps if mean <= most), -(-mean // 256) * 256)
    chunk = max(-(-limit // TILE_TOKENS), 1)
    plan: Assignment = [[] for _ in range(batch.workers)]
    heap = [(0, worker) for worker in range(batch.workers)]
    for item, tiles in enumerate(batch.items):
        left = tiles
        while left:
            taken = min(left, chunk)
            cost, worker = heapq.heappop(heap)
            plan[worker].append((item, taken))
            heapq.heappush(heap, (cost + 2 * rows + taken * TILE_TOKENS, worker))
            left -= taken
    return plan


def token_speed(batch: Batch) -> Assignment:
    """One split for the whole batch from its size alone: workers / (batch x row tiles), 1 to 32.

    The rule of the 128-row kernel, a worker standing for its cluster; 128-token tiles.
    """
    split = min(max(batch.workers // (len(batch.requests) * batch.row_tiles), 1), 32)
    return _run_grid(batch, [split] * len(batch.requests), granule=2)


def flash_attention_3(batch: Batch) -> Assignment:
    """Splits per request: its blocks / (1.1 x mean blocks per worker), at most 32, equal chunks.

    More than 992 requests are not split. Longest first, as its optional sort does.
    """
    items = batch.items
    per_worker = max(-(-int(1.1 * sum(items)) // batch.workers), 1)
    cap = 32 if len(batch.requests) <= 992 else 1
    splits = [min(max(-(-tiles // per_worker), 1), cap) for tiles in batch.requests]
    return _run_grid(batch, splits, granule=1, longest_first=True)


def _run_grid(
    batch: Batch, splits: list[int], *, granule: int, longest_first: bool = False
) -> Assignment:
    """Equal chunks of whole granules; each workgroup goes to the worker that is free first."""
    chunks = []
    for request, tiles in enumerate(batch.requests):
        granules = math.ceil(tiles / granule)
        size = max(math.ceil(granules / splits[request]) * granule, 1)
        for row_tile in range(batch.row_tiles):
            for start in range(0, tiles, size):
                item = request * batch.row_tiles + row_tile
                chunks.append((item, min(size, tiles - start), -(-tiles // size)))
    if longest_first:
        chunks.sort(key=lambda chunk: -chunk[1])
    plan: Assignment = [[] for _ in range(batch.workers)]
    heap = [(0.0, worker) for worker in range(batch.workers)]
    for item, tiles, pieces in chunks:
        busy, worker = heapq.heappop(heap)
        plan[worker].append((item, tiles))
        heapq.heappush(heap, (busy + tiles + (2.5 if pieces > 1 else 1.25), worker))
    return plan


def _place_columns(plan: Assignment, batch: Batch, part: int, request: int, tiles: int) -> None:
    """The same tiles of every row tile of a request, on the workers of one part."""
    if not tiles:
        return
    for row_tile in range(batch.row_tiles):
        worker = (part * batch.row_tiles + row_tile) % batch.workers
        plan[worker].append((request * batch.row_tiles + row_tile, tiles))


PEERS: dict[str, Callable[[Batch], Assignment]] = {
    "FlashMLA": flash_mla,
    "AITER v1.2": aiter_v1_2,
    "FlashInfer": flash_infer,
    "TokenSpeed": token_speed,
    "FA3": flash_attention_3,
}


def makespan_and_pieces(
    assignment: Assignment, items: list[int], piece: float = 1.25, split: float = 1.25
) -> tuple[float, int]:
    """Cost of the fullest worker in tiles, a begun tile counted whole, and pieces.

    Raises ValueError if some tile is not covered once.
    """
    counts = [0] * len(items)
    covered = [0.0] * len(items)
    for pieces in assignment:
        for item, tiles in pieces:
            counts[item] += 1
            covered[item] += tiles
    if covered != items:
        raise ValueError("the assignment does not cover every tile once")
    makespan = max(
        sum(math.ceil(tiles) + piece + (split if counts[item] > 1 else 0) for item, tiles in pieces)
        for pieces in assignment
    )
    return makespan, sum(counts)
