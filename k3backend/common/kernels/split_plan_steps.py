# mypy: ignore-errors
# Kernel bodies are Triton's language: not typed as Python.
"""Steps of the device planner: `k3backend.common.split_packing` on arrays in registers.

Arrays have one of three lengths, powers of two: requests, items or bins (workers). Lines along bins
or items are running sums, and a place on a line is found by binary search.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3backend.common import split_packing

QUARTERS = tl.constexpr(split_packing.QUARTERS)
SCORES = tl.constexpr(triton.next_power_of_2(split_packing.CANDIDATES))
NO_SCORE = tl.constexpr(2**31 - 1)
LOW_BITS = tl.constexpr(2**16 - 1)


@triton.jit
def count_below(values, queries, N: tl.constexpr, STRICT: tl.constexpr):
    """How many of the ascending ``values`` [N] are < (STRICT) or <= each query."""
    count = queries * 0
    step = N
    while step > 0:
        at = tl.minimum(count + step - 1, N - 1).to(tl.int32)
        probe = tl.gather(values, at, 0)
        if STRICT:
            take = probe < queries
        else:
            take = probe <= queries
        count = tl.where(take & (count + step <= N), count + step, count)
        step = step // 2
    return count.to(tl.int32)


@triton.jit
def sort_keys(keys, N: tl.constexpr, DESCENDING: tl.constexpr):
    """Bitonic sort of distinct int64 keys [N].

    Written out because tl.sort reduces with a custom function, which the interpreter walks element
    by element.
    """
    place = tl.arange(0, N)
    run = 2
    while run <= N:
        stride = run // 2
        while stride > 0:
            other = tl.gather(keys, place ^ stride, 0)
            rising = ((place & run) == 0) != DESCENDING
            lower = (place & stride) == 0
            keys = tl.where(rising == lower, tl.minimum(keys, other), tl.maximum(keys, other))
            stride = stride // 2
        run = run * 2
    return keys


@triton.jit
def value_at(values, index):
    """values[index], and 0 where the index is -1."""
    return tl.where(index >= 0, tl.gather(values, tl.maximum(index, 0).to(tl.int32), 0), 0)


@triton.jit
def sort_bins(free, number, pieces, BINS: tl.constexpr):
    """Bins by free space, widest first, of equals the higher number first."""
    place = tl.arange(0, BINS)
    key = (free.to(tl.int64) << 32) | (number << 16).to(tl.int64) | place.to(tl.int64)
    key = sort_keys(key, BINS, True)
    place = (key & LOW_BITS).to(tl.int32)
    return (
        (key >> 32).to(tl.int32),
        ((key >> 16) & LOW_BITS).to(tl.int32),
        tl.gather(pieces, place, 0),
    )


@triton.jit
def cut_heads(tiles, payload, PIECE: tl.constexpr, SPLIT: tl.constexpr):
    """split_packing.cut_heads and rest_costs."""
    per_head = tl.maximum((payload - PIECE - SPLIT) // QUARTERS, 1).to(tl.int32)
    heads = tl.where(tiles * QUARTERS + PIECE <= payload, 0, tiles // per_head)
    rest = tiles - heads * per_head
    cost = rest * QUARTERS + PIECE + tl.where(heads > 0, SPLIT, 0)
    return heads, rest, tl.where(rest > 0, cost, 0)


@triton.jit
def find_payload(
    tiles,
    ROW_TILES: tl.constexpr,
    WORKERS: tl.constexpr,
    PIECE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Lower bound and payload in quarters, int64 scalars."""
    total = tl.sum(tiles.to(tl.int64), 0) * ROW_TILES
    items = tl.sum((tiles > 0).to(tl.int64), 0) * ROW_TILES
    longest = tl.max(tiles, 0).to(tl.int64)
    mean = (total * QUARTERS + items * PIECE + WORKERS - 1) // WORKERS
    bound = tl.maximum(mean, (total + WORKERS - 1) // WORKERS * QUARTERS + PIECE)
    low = bound
    high = tl.maximum(low, longest * QUARTERS + PIECE)
    while low < high:
        middle = (low + high) // 2
        heads, _, cost = cut_heads(tiles, middle, PIECE, SPLIT)
        demand = tl.sum(heads.to(tl.int64), 0) * middle + tl.sum(cost.to(tl.int64), 0)
        fits = demand * ROW_TILES <= WORKERS * middle
        cuttable = middle - PIECE - SPLIT >= QUARTERS
        fits = fits & (cuttable | (longest * QUARTERS + PIECE <= middle))
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return bound, low


@triton.jit
def match_round(
    cost,
    bin_of,
    rank_of,
    free,
    number,
    pieces,
    open_bins,
    ITEMS: tl.constexpr,
    BINS: tl.constexpr,
):
    """split_packing._match_rounds, one round."""
    widest = tl.max(free, 0)
    eligible = (bin_of < 0) & (cost > 0) & (cost <= widest)
    if tl.sum(eligible.to(tl.int32), 0) > 0:
        free, number, pieces = sort_bins(free, number, pieces, BINS)
        seen = tl.cumsum(eligible.to(tl.int32), 0)
        place = tl.arange(0, BINS)
        # larger[b]: eligible items that bin b is too narrow for; they come first.
        larger = value_at(seen, count_below(-cost, -free, ITEMS, True) - 1)
        larger = tl.where(place < open_bins, larger, NO_SCORE)

        # Bins: those with the same `larger` share one group of items, the tightest comes first.
        group_end = count_below(larger, larger, BINS, False)
        turn = larger + (group_end - 1 - place)
        after = tl.gather(larger, tl.minimum(group_end, BINS - 1), 0)
        limit = tl.where(group_end < open_bins, after, tl.sum(eligible.to(tl.int32), 0))
        takes = (place < open_bins) & (turn < limit)
        item = tl.minimum(count_below(seen, turn, ITEMS, False), ITEMS - 1)
        taken = tl.where(takes, tl.gather(cost, item, 0), 0)

        # Items: the same from the other side.
        fits = count_below(-free, -cost, BINS, False)
        first = value_at(larger, fits - 1)
        at = fits - 1 - (seen - 1 - first)
        placed = eligible & (at >= 0)
        at = tl.minimum(tl.maximum(at, 0), BINS - 1)
        placed = placed & (tl.gather(larger, at, 0) == first)
        bin_of = tl.where(placed, tl.gather(number, at, 0), bin_of)
        rank_of = tl.where(placed, tl.gather(pieces, at, 0), rank_of)

        free = free - taken
        pieces = pieces + takes.to(tl.int32)
    return bin_of, rank_of, free, number, pieces


@triton.jit
def lay_whole(
    cost,
    bin_of,
    rank_of,
    free,
    number,
    pieces,
    ITEMS: tl.constexpr,
    BINS: tl.constexpr,
):
    """split_packing._lay_whole."""
    widest = tl.max(free, 0)
    eligible = (bin_of < 0) & (cost > 0) & (cost <= widest)
    if tl.sum(eligible.to(tl.int32), 0) > 0:
        free, number, pieces = sort_bins(free, number, pieces, BINS)
        ends = tl.cumsum(tl.maximum(free, 0), 0)
        length = tl.where(eligible, cost, 0)
        position = tl.cumsum(length, 0) - length
        at = count_below(ends, position, BINS, False)
        placed = eligible & (at < BINS)
        at = tl.minimum(at, BINS - 1)
        placed = placed & (position + cost <= tl.gather(ends, at, 0))

        count = tl.cumsum(placed.to(tl.int32), 0)
        load = tl.cumsum(tl.where(placed, cost, 0), 0)
        last = count_below(position, ends, ITEMS, True) - 1
        place = tl.arange(0, BINS)
        before = tl.where(place > 0, tl.gather(last, tl.maximum(place - 1, 0), 0), -1)
        count_before = value_at(count, before)
        bin_of = tl.where(placed, tl.gather(number, at, 0), bin_of)
        rank = tl.gather(pieces, at, 0) + count - 1 - tl.gather(count_before, at, 0)
        rank_of = tl.where(placed, rank, rank_of)
        pieces = pieces + value_at(count, last) - count_before
        free = free - (value_at(load, last) - value_at(load, before))
    return bin_of, rank_of, free, number, pieces


@triton.jit
def fill_level(free, payload, need, start: tl.constexpr):
    """The level of split_packing._fill, int64 scalar."""
    low = payload
    high = payload + tl.where(need > 0, need * QUARTERS + start, 0)
    room = free.to(tl.int64)
    while low < high:
        middle = (low + high) // 2
        held = tl.maximum((room + (middle - payload) - start), 0) // QUARTERS
        enough = tl.sum(tl.where(room >= 0, held, 0), 0) >= need
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def choose_candidate(makespans, pieces, idle, bound, WORKERS: tl.constexpr):
    """split_packing.choose: the number of the candidate."""
    best = tl.min(makespans, 0).to(tl.int64)
    limit = tl.maximum(best, tl.minimum(best + best // 64, bound + 3 * bound // 100))
    candidate = tl.arange(0, SCORES)
    pieces = tl.maximum(pieces, WORKERS)
    key = (pieces.to(tl.int64) << 40) | (makespans.to(tl.int64) << 8) | candidate.to(tl.int64)
    key = tl.where(makespans.to(tl.int64) <= tl.where(idle, best, limit), key, 2**62)
    return (tl.min(key, 0) & 255).to(tl.int32)
