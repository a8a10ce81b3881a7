# mypy: ignore-errors
# Kernel bodies are Triton's language: not typed as Python.
"""Merge of the partials of split row tiles, in split order: bitwise repeatable.

Slots of one (request, row tile) pair follow each other in split order, and pairs follow each other:
the first slot of a pair is the number of split pieces of the pairs before it (``first_slot``). Only
pairs with more than one split have slots and are read here; pairs with one split were written by
their piece; pairs with none (length 0) get output 0 and lse2 -inf, so that every output row is
written by exactly one kernel, whatever the scratch held before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3backend.common.kernels.rounding import round_to

VALUE_DIM = tl.constexpr(512)


@triton.jit
def first_slot(counts_ptr, pair, MIN_SPLITS: tl.constexpr, SCAN: tl.constexpr):
    """First slot of a pair: the splits of all split pairs before it."""
    slot = 0
    for start in tl.range(0, pair, SCAN):
        index = start + tl.arange(0, SCAN)
        count = tl.load(counts_ptr + index, mask=index < pair, other=0)
        slot += tl.sum(tl.where(count >= MIN_SPLITS, count, 0))
    return slot


@triton.jit
def combine_kernel(
    counts_ptr,
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    counter_ptr,
    out_scale,
    ROWS_PER_REQUEST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MIN_SPLITS: tl.constexpr,
    SCAN: tl.constexpr,
    STORE_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Merge COLUMNS columns of one row. Grid: (requests * row tiles, slot rows, 512 / COLUMNS).

    SPLITS splits are read at a time: one long request is cut for every worker, and reading its
    partials one after the other would take longer than the decode. Lane i of SPLITS adds up the
    splits i, i + SPLITS, ... and the lanes are added last: the order depends on the count alone.

    Args:
        counts_ptr: [requests * row tiles] int32 splits.
        partial_ptr, partial_lse_ptr: [slots, min(ROWS_PER_REQUEST, TILE_ROWS), 512 and nothing]
            float32, normalised, and their lse2.
        out_ptr: [requests * ROWS_PER_REQUEST, 512]. lse_ptr: [requests * ROWS_PER_REQUEST] float32.
        counter_ptr: int64 [2], to which this call and its split pieces are added.
        out_scale: factor of the output (k_scale).
        MIN_SPLITS: pairs with fewer splits have no slots: 2.
    """
    SLOT_ROWS: tl.constexpr = TILE_ROWS if TILE_ROWS < ROWS_PER_REQUEST else ROWS_PER_REQUEST
    ROW_TILES: tl.constexpr = (ROWS_PER_REQUEST + TILE_ROWS - 1) // TILE_ROWS
    pair = tl.program_id(0)
    slot_row = tl.program_id(1)
    count = tl.load(counts_ptr + pair)
    if (slot_row == 0) & (tl.program_id(2) == 0):
        if pair == 0:
            tl.atomic_add(counter_ptr, 1, sem="relaxed")
        if count > 1:
            tl.atomic_add(counter_ptr + 1, count.to(tl.int64), sem="relaxed")
    row = pair % ROW_TILES * TILE_ROWS + slot_row
    if ((count == 0) | (count >= MIN_SPLITS)) & (row < ROWS_PER_REQUEST):
        first = 0
        if count > 0:
            first = first_slot(counts_ptr, pair, MIN_SPLITS, SCAN)
        lane = tl.arange(0, SPLITS)
        part = (first + lane).to(tl.int64) * SLOT_ROWS + slot_row
        tops = tl.full([SPLITS], float("-inf"), tl.float32)
        for start in tl.range(0, count, SPLITS):
            lse_at = partial_lse_ptr + part + start * SLOT_ROWS
            lse = tl.load(lse_at, mask=start + lane < count, other=float("-inf"))
            tops = tl.maximum(tops, lse)
        top = tl.max(tops, 0)
        empty = top == float("-inf")
        reference = tl.where(empty, 0.0, top)
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        totals = tl.zeros([SPLITS], tl.float32)
        # -0.0 is the neutral element of addition: one split comes out bit for bit.
        acc = tl.full([SPLITS, COLUMNS], -0.0, tl.float32)
        for start in tl.range(0, count, SPLITS):
            at = part + start * SLOT_ROWS
            lse = tl.load(partial_lse_ptr + at, mask=start + lane < count, other=float("-inf"))
            present = lse != float("-inf")
            weight = tl.exp2(lse - reference)
            value = tl.load(
                partial_ptr + (at * VALUE_DIM)[:, None] + columns[None, :],
                mask=present[:, None],
                other=-0.0,
            )
            totals += weight
            acc += value * weight[:, None]
        total = tl.where(empty, 1.0, tl.sum(totals, 0))
        final = (pair // ROW_TILES).to(tl.int64) * ROWS_PER_REQUEST + row
        if STORE_LSE:
            lse = tl.where(empty, float("-inf"), reference + tl.log2(total))
            tl.store(lse_ptr + final, lse, mask=tl.program_id(2) == 0)
        out = tl.where(empty, 0.0, tl.sum(acc, 0) / total * out_scale)
        tl.store(
            out_ptr + final * VALUE_DIM + columns, round_to(out, out_ptr.dtype.element_ty, UPCAST)
        )
