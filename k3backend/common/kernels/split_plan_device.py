# mypy: ignore-errors
# Kernel bodies are Triton's language: not typed as Python.
"""The split plan on the device: `k3backend.common.split_packing` in one launch.

One program packs one candidate. The program that finishes last reads all scores, chooses, packs the
chosen candidate again and writes the plan. Nothing is read back by the host, and every size comes
from shapes, so the launch can be captured in a graph and replayed for other lengths.

Everything lives in registers as arrays of three lengths, powers of two that cover the requests,
the items and the workers:

* Requests are sorted once per candidate by the cost of their rest; *items* are (place in that
  order, row tile).
* *Bins* (workers without a head) are re-sorted by free space before each step. Lines along bins or
  items are running sums, and a place on a line is found by binary search.

Names and steps are those of ``split_packing``, whose integers this must repeat exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3backend.common import split_packing
from k3backend.common.errors import ShapeError
from k3backend.common.kernels.split_plan_steps import (
    LOW_BITS,
    NO_SCORE,
    QUARTERS,
    SCORES,
    choose_candidate,
    count_below,
    cut_heads,
    fill_level,
    find_payload,
    lay_whole,
    match_round,
    sort_bins,
    sort_keys,
    value_at,
)
from k3backend.common.split_plan import WORK_FIELDS as WORK_COLUMNS
from k3backend.common.split_plan import SplitCost, max_items

SLACK_CANDIDATES = tl.constexpr(split_packing.SLACK_CANDIDATES)
CANDIDATES = tl.constexpr(split_packing.CANDIDATES)
FIRST_ROUNDS = tl.constexpr(split_packing.FIRST_ROUNDS)
LAST_ROUNDS = tl.constexpr(split_packing.LAST_ROUNDS)
WORK_FIELDS = tl.constexpr(6)


@triton.jit
def _store_row(work_ptr, row, mask, request, row_tile, start, end, slot, index):
    at = work_ptr + row.to(tl.int64) * WORK_FIELDS
    tl.store(at, request, mask=mask)
    tl.store(at + 1, row_tile, mask=mask)
    tl.store(at + 2, start, mask=mask)
    tl.store(at + 3, end, mask=mask)
    tl.store(at + 4, slot, mask=mask)
    tl.store(at + 5, index, mask=mask)


@triton.jit
def split_plan_kernel(
    seq_lens_ptr,
    work_ptr,
    indptr_ptr,
    counts_ptr,
    scratch_ptr,
    requests,
    ROW_TILES: tl.constexpr,
    WORKERS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    PIECE: tl.constexpr,
    SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
    ITEMS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Write the plan of ``seq_lens`` int32 [requests]; grid (CANDIDATES,).

    ``scratch`` is int32 [2 * CANDIDATES + 1], zero before the first launch; every launch leaves its
    last element zero again. REQUESTS, ITEMS and BINS are powers of two of at least 16 that cover
    requests, requests * ROW_TILES and WORKERS.
    """
    START: tl.constexpr = PIECE + SPLIT
    GAP: tl.constexpr = (START + QUARTERS - 1) // QUARTERS
    request = tl.arange(0, REQUESTS)
    item = tl.arange(0, ITEMS)
    place = tl.arange(0, BINS)

    lens = tl.load(seq_lens_ptr + request, mask=request < requests, other=0)
    tiles = tl.where(lens > 0, (lens - 1) // TILE_TOKENS + 1, 0)
    bound, smallest = find_payload(tiles, ROW_TILES, WORKERS, PIECE, SPLIT)

    candidate = tl.program_id(0)
    writing = candidate < 0
    running = candidate >= 0
    while running:
        wrap = candidate == SLACK_CANDIDATES
        slack = tl.maximum(candidate.to(tl.int64), smallest * candidate // 256)
        payload = smallest + tl.where(wrap, 0, slack)

        heads, rest, request_cost = cut_heads(tiles, payload, PIECE, SPLIT)
        heads = tl.where(wrap, 0, heads)
        rest = tl.where(wrap, tiles, rest)
        request_cost = tl.where(
            wrap, tl.where(tiles > 0, tiles * QUARTERS + PIECE, 0), request_cost
        )
        per_head = tl.maximum((payload - START) // QUARTERS, 1).to(tl.int32)
        full = heads * per_head
        all_heads = tl.sum(heads.to(tl.int64), 0) * ROW_TILES
        open_bins = tl.maximum(WORKERS - all_heads, 0).to(tl.int32)
        possible = all_heads <= WORKERS
        possible = possible & ((all_heads < WORKERS) | (tl.sum(rest.to(tl.int64), 0) == 0))

        # Items, largest first, of equals the lower request first.
        key = (request_cost.to(tl.int64) << 16) | (REQUESTS - 1 - request).to(tl.int64)
        key = sort_keys(key, REQUESTS, True)
        sorted_cost = (key >> 16).to(tl.int32)
        sorted_request = REQUESTS - 1 - (key & LOW_BITS).to(tl.int32)
        source = tl.minimum(item // ROW_TILES, REQUESTS - 1)
        real = item < REQUESTS * ROW_TILES
        item_request = tl.gather(sorted_request, source, 0)
        cost = tl.where(real, tl.gather(sorted_cost, source, 0), 0)
        item_tiles = tl.where(real, tl.gather(rest, item_request, 0), 0)

        bin_of = tl.full([ITEMS], -1, tl.int32)
        rank_of = tl.zeros([ITEMS], tl.int32)
        free = tl.where(place < open_bins, payload.to(tl.int32), -1)
        number = place
        pieces = tl.zeros([BINS], tl.int32)
        rounds = tl.where(wrap, 0, FIRST_ROUNDS + 1 + LAST_ROUNDS)
        for step in range(rounds):
            if step == FIRST_ROUNDS:
                bin_of, rank_of, free, number, pieces = lay_whole(
                    cost, bin_of, rank_of, free, number, pieces, ITEMS, BINS
                )
            else:
                bin_of, rank_of, free, number, pieces = match_round(
                    cost, bin_of, rank_of, free, number, pieces, open_bins, ITEMS, BINS
                )

        # What is left lies along the bins, raised to the level that holds it.
        free, number, pieces = sort_bins(free, number, pieces, BINS)
        fullest = tl.max(tl.where(place < open_bins, payload.to(tl.int32) - free, 0), 0)
        left = (bin_of < 0) & (cost > 0)
        order = tl.cumsum(left.to(tl.int32), 0)
        lefts = tl.sum(left.to(tl.int32), 0)
        length = tl.where(left, item_tiles + GAP, 0)
        need = tl.maximum(tl.sum(length.to(tl.int64), 0) - GAP, 0)
        level = fill_level(free, payload, need, START)
        room = tl.maximum(free + (level - payload).to(tl.int32) - START, 0) // QUARTERS
        room = tl.where((place < open_bins) & (lefts > 0), room, 0)
        ends = tl.cumsum(room, 0)
        begins = ends - room
        begin = tl.cumsum(length, 0) - length
        end = begin + item_tiles
        first = tl.minimum(count_below(ends, begin, BINS, False), BINS - 1)
        last = tl.minimum(count_below(ends, end, BINS, True), BINS - 1)
        rest_pieces = tl.where(left, last - first + 1, (bin_of >= 0).to(tl.int32))

        # Per bin: items that begin in it, and the one whose line comes over from the bin before.
        begun_before = value_at(order, count_below(begin, begins, ITEMS, True) - 1)
        begun = value_at(order, count_below(begin, ends, ITEMS, True) - 1) - begun_before
        over = tl.minimum(count_below(order, begun_before - 1, ITEMS, False), ITEMS - 1)
        carried = (begun_before > 0) & (tl.gather(end, over, 0) > begins) & (room > 0)
        carried = carried.to(tl.int32)
        bin_pieces = pieces + carried + begun

        # Idle workers join the heads.
        used = (place < open_bins) & (bin_pieces > 0)
        used_bins = tl.sum(used.to(tl.int32), 0)
        columns = (open_bins - used_bins) // ROW_TILES
        running_heads = tl.cumsum(heads, 0)
        total_heads = tl.sum(heads, 0)
        widened = running_heads + (
            running_heads.to(tl.int64) * columns // tl.maximum(total_heads, 1)
        ).to(tl.int32)
        before = tl.where(request > 0, tl.gather(widened, tl.maximum(request - 1, 0), 0), 0)
        spread = tl.minimum(widened - before, full)
        divisor = tl.maximum(spread, 1)
        longest = tl.max((full + divisor - 1) // divisor, 0)
        head_rows = tl.sum(spread, 0) * ROW_TILES

        makespan = tl.maximum(fullest, tl.where(lefts > 0, level, 0).to(tl.int32))
        makespan = tl.where(
            total_heads > 0, tl.maximum(makespan, longest * QUARTERS + START), makespan
        )
        total = head_rows + tl.sum(rest_pieces, 0)

        if writing:
            # Items in the order of requests: pieces and first slots.
            request_key = (sorted_request.to(tl.int64) << 16) | request.to(tl.int64)
            found = (sort_keys(request_key, REQUESTS, False) & LOW_BITS).to(tl.int32)
            own = tl.minimum(item // ROW_TILES, REQUESTS - 1)
            at = tl.gather(found, own, 0) * ROW_TILES + item % ROW_TILES
            counts = tl.gather(rest_pieces, tl.minimum(at, ITEMS - 1), 0)
            counts = counts + tl.gather(spread, own, 0)
            counts = tl.where(item < requests * ROW_TILES, counts, 0)
            tl.store(counts_ptr + item, counts, mask=item < requests * ROW_TILES)
            slots = tl.where(counts > 1, counts, 0)
            slot_base = tl.where(counts > 1, tl.cumsum(slots, 0) - slots, -1)

            # Workers: heads first, then the used bins in the order of their numbers.
            tl.store(indptr_ptr + place, place, mask=place <= head_rows)
            bin_key = (number.to(tl.int64) << 16) | place.to(tl.int64)
            by_number = (sort_keys(bin_key, BINS, False) & LOW_BITS).to(tl.int32)
            bin_rows = tl.gather(tl.where(used, bin_pieces, 0), by_number, 0)
            row_of = head_rows + tl.cumsum(bin_rows, 0) - bin_rows
            worker_of = head_rows + tl.cumsum((bin_rows > 0).to(tl.int32), 0) - 1
            tl.store(indptr_ptr + worker_of + 1, row_of + bin_rows, mask=bin_rows > 0)
            idle = (place > head_rows + used_bins) & (place < WORKERS)
            tl.store(indptr_ptr + place, total, mask=idle)
            tl.store(indptr_ptr + WORKERS, total)

            # Rows of heads.
            ends_of = tl.cumsum(spread, 0) * ROW_TILES
            owner = tl.minimum(count_below(ends_of, place, REQUESTS, False), REQUESTS - 1)
            count = tl.maximum(tl.gather(spread, owner, 0), 1)
            within = place - (tl.gather(ends_of, owner, 0) - count * ROW_TILES)
            head = within // ROW_TILES
            owned = tl.gather(full, owner, 0).to(tl.int64)
            start = (head * owned // count).to(tl.int32)
            stop = ((head + 1) * owned // count).to(tl.int32)
            slot = value_at(
                slot_base, tl.minimum(owner * ROW_TILES + within % ROW_TILES, ITEMS - 1)
            )
            _store_row(
                work_ptr,
                place,
                place < head_rows,
                owner,
                within % ROW_TILES,
                start * TILE_TOKENS,
                tl.minimum(stop.to(tl.int64) * TILE_TOKENS, tl.gather(lens, owner, 0)).to(tl.int32),
                slot + head,
                head,
            )

            # Rows of items: whole in one bin, or the first piece of a cut.
            length_of = tl.gather(lens, item_request, 0)
            skip = tl.gather(full, item_request, 0)
            index = tl.gather(spread, item_request, 0)
            at = tl.minimum(item_request * ROW_TILES + item % ROW_TILES, ITEMS - 1)
            slot = tl.gather(slot_base, at, 0)
            slot = tl.where(slot >= 0, slot + index, -1)
            line_rank = (pieces + carried) - begun_before
            target = tl.where(left, tl.gather(number, first, 0), tl.maximum(bin_of, 0))
            rank = tl.where(left, tl.gather(line_rank, first, 0) + order - 1, rank_of)
            row = tl.gather(row_of, target, 0) + rank
            stop = tl.where(left, tl.minimum(end, tl.gather(ends, first, 0)) - begin, item_tiles)
            stop = (skip + stop).to(tl.int64) * TILE_TOKENS
            _store_row(
                work_ptr,
                row,
                cost > 0,
                item_request,
                item % ROW_TILES,
                skip * TILE_TOKENS,
                tl.minimum(stop, length_of).to(tl.int32),
                slot,
                index,
            )

            # Rows of bins that a cut item comes over to.
            over_request = tl.gather(item_request, over, 0)
            offset = tl.gather(skip, over, 0) - tl.gather(begin, over, 0)
            index = tl.gather(index, over, 0) + place - tl.gather(first, over, 0)
            slot = tl.gather(slot, over, 0) + place - tl.gather(first, over, 0)
            stop = (tl.minimum(tl.gather(end, over, 0), ends) + offset).to(tl.int64) * TILE_TOKENS
            _store_row(
                work_ptr,
                tl.gather(row_of, number, 0) + pieces,
                carried > 0,
                over_request,
                over % ROW_TILES,
                (begins + offset) * TILE_TOKENS,
                tl.minimum(stop, tl.gather(lens, over_request, 0)).to(tl.int32),
                slot,
                index,
            )

            # Unused rows.
            rows = requests * ROW_TILES + WORKERS - 1
            none = item * 0
            _store_row(
                work_ptr,
                item,
                (item >= total) & (item < rows),
                none - 1,
                none,
                none,
                none,
                none - 1,
                none,
            )
            beyond = ITEMS + place
            none = place * 0
            _store_row(
                work_ptr,
                beyond,
                (beyond >= total) & (beyond < rows),
                none - 1,
                none,
                none,
                none,
                none - 1,
                none,
            )
            running = False
        else:
            makespan = tl.where(possible, makespan, NO_SCORE)
            tl.atomic_xchg(scratch_ptr + 2 * candidate, makespan)
            idle_bit = (head_rows + used_bins < WORKERS).to(tl.int32)
            tl.atomic_xchg(scratch_ptr + 2 * candidate + 1, 2 * total + idle_bit)
            ticket = tl.atomic_add(scratch_ptr + CANDIDATES * 2, 1)
            running = ticket == CANDIDATES - 1
            if running:
                entry = tl.arange(0, SCORES)
                scored = entry < CANDIDATES
                zero = entry * 0
                makespans = tl.atomic_add(scratch_ptr + 2 * entry, zero, mask=scored)
                totals = tl.atomic_add(scratch_ptr + 2 * entry + 1, zero, mask=scored)
                candidate = choose_candidate(
                    tl.where(scored, makespans, NO_SCORE),
                    totals // 2,
                    (totals & 1) > 0,
                    bound,
                    WORKERS,
                )
                tl.atomic_xchg(scratch_ptr + CANDIDATES * 2, 0)
                writing = True


SCRATCH_INTS = 2 * split_packing.CANDIDATES + 1
"""int32 elements of ``scratch``."""
MAX_REQUESTS = 2**15


def plan_splits_device(
    seq_lens: torch.Tensor,
    work: torch.Tensor,
    worker_indptr: torch.Tensor,
    counts: torch.Tensor,
    scratch: torch.Tensor,
    *,
    row_tiles: int,
    num_workers: int,
    tile_tokens: int = 64,
    cost: SplitCost | None = None,
) -> None:
    """Write the plan that `k3backend.common.split_plan.plan_splits` makes for the same lengths.

    One launch, no synchronisation; may be captured in a graph. Launches that share ``scratch`` must
    not overlap.

    Args:
        seq_lens: int32 [requests], 1 to MAX_REQUESTS lengths, 0 for padding; not negative.
        work: int32 [max_items(requests, row_tiles, num_workers) or more, 6]. Rows that the plan
            does not use, up to that many, become (-1, 0, 0, 0, -1, 0).
        worker_indptr: int32 [num_workers + 1].
        counts: int32 [requests * row_tiles].
        scratch: int32 [SCRATCH_INTS], zeroed once before its first use.

    Raises:
        ShapeError: names the buffer, what it must be and what it is.
    """
    cost = SplitCost() if cost is None else cost
    requests = seq_lens.shape[0] if seq_lens.dim() == 1 else 0
    if not 1 <= requests <= MAX_REQUESTS:
        raise ShapeError(
            f"seq_lens: expected shape [requests] with 1 to {MAX_REQUESTS} requests, got "
            f"{list(seq_lens.shape)}; plan a batch of 0 requests by not decoding"
        )
    rows = max_items(requests, row_tiles, num_workers)
    for name, tensor, size in (
        ("seq_lens", seq_lens, requests),
        ("work", work, rows * WORK_COLUMNS),
        ("worker_indptr", worker_indptr, num_workers + 1),
        ("counts", counts, requests * row_tiles),
        ("scratch", scratch, SCRATCH_INTS),
    ):
        good = tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.numel() >= size
        if not good or tensor.device != seq_lens.device:
            raise ShapeError(
                f"{name}: expected a contiguous int32 tensor of at least {size} elements on "
                f"{seq_lens.device}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
    constants, num_warps = launch_constants(
        requests, row_tiles=row_tiles, num_workers=num_workers, tile_tokens=tile_tokens, cost=cost
    )
    split_plan_kernel[(split_packing.CANDIDATES,)](
        seq_lens, work, worker_indptr, counts, scratch, requests, **constants, num_warps=num_warps
    )


def launch_constants(
    requests: int, *, row_tiles: int, num_workers: int, tile_tokens: int, cost: SplitCost
) -> tuple[dict[str, int], int]:
    """Compile-time constants of `split_plan_kernel` for a shape, and its number of warps.

    Eight warps from 1,024 items on keep the arrays of that length in registers.
    """
    items = max(16, triton.next_power_of_2(requests * row_tiles))
    constants = {
        "ROW_TILES": row_tiles,
        "WORKERS": num_workers,
        "TILE_TOKENS": tile_tokens,
        "PIECE": cost.piece_quarters,
        "SPLIT": cost.split_quarters,
        "REQUESTS": max(16, triton.next_power_of_2(requests)),
        "ITEMS": items,
        "BINS": max(16, triton.next_power_of_2(num_workers)),
    }
    return constants, 4 if items < 1024 else 8
