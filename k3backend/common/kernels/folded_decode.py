# mypy: ignore-errors
# ruff: noqa: RUF005
# Kernel bodies are Triton's language: not typed as Python, and without starred tuples.
"""The folded split decode: all query rows of a request against its KV, one read per row tile.

One program is one worker of the plan (``common/split_plan.py``); it runs its pieces in order. A
piece is one row tile of one request over keys [kv_start, kv_end). All rows that a request has
(query tokens x heads, token-major) sit in as few row tiles as possible, because every row tile
reads the KV once.

Per tile of TILE keys and row group:
    s = q_nope . k[:512]^T + q_rope . k[512:]^T
    online softmax in base 2 on s * score_scale, where score_scale contains log2(e)
    acc += p . k[:512]                             the value is the first 512 columns of the key

Design choices:

* Row groups. Tile sizes are powers of two, Kimi-K3's rows (12 heads x 8 tokens) are not: a row
  tile is ROWS_A + ROWS_B rows (64 + 32 = 96) that use the same keys while they are in registers.
* Value chunks. Keys are loaded as 512 / CHUNK column chunks plus the 64 rope columns, and each
  chunk serves both products, which bounds what is live at once.
* One loop. Every tile applies the row bounds, which costs two vector instructions per score
  element; a second, masked copy of the body for the tail would keep its registers alive across
  both loops and spill on gfx950. Keys past the end of the piece are not loaded: their index is
  clamped to the last key, so that no unwritten token, NaN or unused table entry is ever touched,
  and their probability is zero.
* fp8 probabilities are scaled by 2**P_EXP before rounding, so that small ones do not vanish; the
  scale cancels in the division by the row sum.

Partials are normalised outputs in float32 with their lse2 (see ``combine.py``); a piece that is
not split (slot -1) writes the final output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3backend.common.kernels.rounding import round_to

HEAD_DIM = tl.constexpr(576)
VALUE_DIM = tl.constexpr(512)
ROPE_DIM = tl.constexpr(64)
WORK_FIELDS = tl.constexpr(6)


@triton.jit
def worker_of_program(NUM_XCDS: tl.constexpr, ROW_TILES: tl.constexpr):
    """Worker of this program in ``split_plan.xcd_order``: plan neighbours share an XCD and its L2.

    Workgroup g runs on XCD g % NUM_XCDS. Each XCD gets a run of neighbours, cut to whole groups of
    ROW_TILES; the workers that are over come last. NUM_XCDS = 1 is the identity.
    """
    group = tl.program_id(0)
    if NUM_XCDS == 1:
        return group
    workers = tl.num_programs(0)
    xcd = group % NUM_XCDS
    index = group // NUM_XCDS
    base = workers // NUM_XCDS
    larger = workers % NUM_XCDS
    # XCDs before ``larger`` have base + 1 workgroups, the others base.
    aligned_large = (base + 1) // ROW_TILES * ROW_TILES
    aligned_small = base // ROW_TILES * ROW_TILES
    before_large = tl.minimum(xcd, larger)
    before_small = xcd - before_large
    aligned_before = before_large * aligned_large + before_small * aligned_small
    aligned_here = tl.where(xcd < larger, aligned_large, aligned_small)
    aligned_total = larger * aligned_large + (NUM_XCDS - larger) * aligned_small
    over_before = before_large * (base + 1 - aligned_large) + before_small * (base - aligned_small)
    return tl.where(
        index < aligned_here,
        aligned_before + index,
        aligned_total + over_before + index - aligned_here,
    )


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    # The interpreter multiplies raw bits of bfloat16: products of upcast values are exact there.
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _load_columns(rows_ptr, mask, CHUNK: tl.constexpr, MASKED: tl.constexpr):
    """Columns of [rows, 1] pointers: the 512 latent ones as a tuple of chunks, the 64 rope ones."""
    chunks = ()
    for c in tl.static_range(VALUE_DIM // CHUNK):
        ptr = rows_ptr + (c * CHUNK + tl.arange(0, CHUNK))[None, :]
        if MASKED:
            chunks = chunks + (tl.load(ptr, mask=mask, other=0.0),)
        else:
            chunks = chunks + (tl.load(ptr),)
    ptr = rows_ptr + (tl.arange(0, ROPE_DIM) + VALUE_DIM)[None, :]
    if MASKED:
        rope = tl.load(ptr, mask=mask, other=0.0)
    else:
        rope = tl.load(ptr)
    return chunks, rope


@triton.jit
def _page_of(table_ptr, token, BLOCK_SIZE: tl.constexpr):
    return tl.load(table_ptr + token // BLOCK_SIZE).to(tl.int64)


@triton.jit
def _load_keys(
    kv_ptr,
    table_ptr,
    page,
    token,
    last,
    block_stride,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """Keys [token, token + TILE), indices clamped to ``last``; ``page`` serves whole-tile pages."""
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        base = kv_ptr + (page * block_stride + (token % BLOCK_SIZE).to(tl.int64) * TOKEN_STRIDE)
        rows = base + (tl.minimum(lane, last - token) * TOKEN_STRIDE)[:, None]
    else:
        key = tl.minimum(token + lane, last)
        pages = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        rows = kv_ptr + (pages * block_stride + (key % BLOCK_SIZE) * TOKEN_STRIDE)[:, None]
    return _load_columns(rows, lane, CHUNK, False)


@triton.jit
def _attend(
    q,
    q_rope,
    k,
    k_rope,
    visible,
    score_scale,
    m,
    total,
    acc,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    P_EXP: tl.constexpr,
    EXACT_SUMS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of keys for one row group. Returns (m, total, acc).

    m: running maximum of the scaled scores; total, acc: sums of probabilities and of values, both
    relative to 2**(m - P_EXP). EXACT_SUMS: the matrix unit adds up one tile's values alone, because
    its sums of fp8 products are narrower than float32 on sm_90.
    """
    dtype: tl.constexpr = q_rope.dtype
    s = tl.zeros([ROWS, TILE], tl.float32)
    for c in tl.static_range(VALUE_DIM // CHUNK):
        s = _dot(q[c], tl.trans(k[c].to(dtype)), s, UPCAST)
    s = _dot(q_rope, tl.trans(k_rope.to(dtype)), s, UPCAST)
    s = tl.where(visible, s * score_scale, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen no key yet keeps -inf; subtracting it would make NaN.
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    decay = tl.exp2(m - reference)
    p = tl.exp2(s - (reference - P_EXP)[:, None])
    total = total * decay + tl.sum(p, 1)
    p = round_to(p, dtype, UPCAST)
    out = ()
    for c in tl.static_range(VALUE_DIM // CHUNK):
        before = acc[c] * decay[:, None]
        if EXACT_SUMS:
            step = _dot(p, k[c].to(dtype), tl.zeros([ROWS, CHUNK], tl.float32), UPCAST)
            out = out + (before + step,)
        else:
            out = out + (_dot(p, k[c].to(dtype), before, UPCAST),)
    return m_new, total, out


@triton.jit
def _row_bound(
    rows,
    length,
    causal_length,
    kv_end,
    cp_world,
    cp_rank,
    cp_interleave,
    HEADS: tl.constexpr,
    Q_LEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    CP: tl.constexpr,
):
    """First key index that each row does not see, at most kv_end."""
    if not CAUSAL:
        return kv_end + rows * 0
    ahead = Q_LEN - 1 - rows // HEADS
    if not CP:
        return tl.minimum(length - ahead, kv_end)
    seen = tl.maximum(causal_length - ahead, 0)
    round_tokens = cp_world * cp_interleave
    rest = seen % round_tokens - cp_rank * cp_interleave
    local = seen // round_tokens * cp_interleave + tl.minimum(tl.maximum(rest, 0), cp_interleave)
    return tl.minimum(local, kv_end)


@triton.jit
def _store_rows(
    m,
    total,
    acc,
    rows,
    slot_rows,
    request,
    slot,
    out_scale,
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    ROWS_PER_REQUEST: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    P_EXP: tl.constexpr,
    STORE_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write one row group: final output (slot -1) or normalised partials and their lse2."""
    seen = total > 0.0
    inverse = tl.where(seen, 1.0 / total, 0.0)
    lse = tl.where(seen, m - P_EXP + tl.log2(total), float("-inf"))
    keep = rows < ROWS_PER_REQUEST
    if slot < 0:
        final = request * ROWS_PER_REQUEST + rows
        if STORE_LSE:
            tl.store(lse_ptr + final, lse, mask=keep)
        for c in tl.static_range(VALUE_DIM // CHUNK):
            cols = (c * CHUNK + tl.arange(0, CHUNK))[None, :]
            value = acc[c] * inverse[:, None] * out_scale
            rows_ptr = out_ptr + (final * VALUE_DIM)[:, None]
            tl.store(
                rows_ptr + cols,
                round_to(value, out_ptr.dtype.element_ty, UPCAST),
                mask=keep[:, None],
            )
    else:
        part = slot.to(tl.int64) * SLOT_ROWS + slot_rows
        tl.store(partial_lse_ptr + part, lse, mask=keep)
        for c in tl.static_range(VALUE_DIM // CHUNK):
            cols = (c * CHUNK + tl.arange(0, CHUNK))[None, :]
            part_ptr = partial_ptr + (part * VALUE_DIM)[:, None]
            tl.store(part_ptr + cols, acc[c] * inverse[:, None], mask=keep[:, None])


@triton.jit
def folded_decode_kernel(
    q_ptr,
    kv_ptr,
    table_ptr,
    lens_ptr,
    causal_lens_ptr,
    indptr_ptr,
    work_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    score_scale,
    out_scale,
    block_stride,
    table_stride,
    cp_world,
    cp_rank,
    cp_interleave,
    HEADS: tl.constexpr,
    Q_LEN: tl.constexpr,
    ROWS_A: tl.constexpr,
    ROWS_B: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CP: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    HOIST: tl.constexpr,
    P_EXP: tl.constexpr,
    EXACT_SUMS: tl.constexpr,
    NUM_XCDS: tl.constexpr,
    STORE_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Run one worker's pieces. Grid: (workers,).

    Args:
        q_ptr: [requests * Q_LEN, HEADS, 576], contiguous; float8_e4m3 or bfloat16.
        kv_ptr: [blocks, BLOCK_SIZE, 576]; rows of one block TOKEN_STRIDE elements apart, blocks
            block_stride (64-bit) apart; q's dtype, or fp8 under a bfloat16 q.
        table_ptr: int32 block table, rows table_stride apart; entries past the length unread.
        lens_ptr: [requests] int32 (local) KV lengths.
        causal_lens_ptr: [requests] int32 global lengths, read where CP.
        indptr_ptr, work_ptr: the plan's worker_indptr and work.
        out_ptr: [requests * Q_LEN, HEADS, 512]. lse_ptr: [requests * Q_LEN, HEADS] float32.
        partial_ptr, partial_lse_ptr: [slots, min(rows, ROWS_A + ROWS_B), 512 and nothing] float32.
        score_scale: scale * q_scale * k_scale * log2(e), above 0. out_scale: k_scale.
    """
    ROWS_PER_REQUEST: tl.constexpr = HEADS * Q_LEN
    TILE_ROWS: tl.constexpr = ROWS_A + ROWS_B
    SLOT_ROWS: tl.constexpr = TILE_ROWS if TILE_ROWS < ROWS_PER_REQUEST else ROWS_PER_REQUEST
    ROW_TILES: tl.constexpr = (ROWS_PER_REQUEST + TILE_ROWS - 1) // TILE_ROWS
    worker = worker_of_program(NUM_XCDS, ROW_TILES)
    first_item = tl.load(indptr_ptr + worker)
    last_item = tl.load(indptr_ptr + worker + 1)
    # num_stages=1: pipelining the loop over pieces would hold two pieces' queries at once.
    # disable_licm: offsets moved out of this loop stay alive through the tiles; they spill up to 54
    # registers on sm_90 and 18 on sm_100.
    for item in tl.range(first_item, last_item, num_stages=1, disable_licm=True):
        entry = work_ptr + item * WORK_FIELDS
        request = tl.load(entry)
        row_tile = tl.load(entry + 1)
        kv_start = tl.multiple_of(tl.load(entry + 2), TILE)
        kv_end = tl.load(entry + 3)
        slot = tl.load(entry + 4)
        length = tl.load(lens_ptr + request)
        causal_length = length
        if CP:
            causal_length = tl.load(causal_lens_ptr + request)
        request = request.to(tl.int64)
        table = table_ptr + request * table_stride
        q_base = q_ptr + request * (ROWS_PER_REQUEST * HEAD_DIM)
        slot_rows_a = tl.arange(0, ROWS_A)
        rows_a = row_tile * TILE_ROWS + slot_rows_a
        q_a, q_rope_a = _load_columns(
            q_base + (rows_a * HEAD_DIM)[:, None], (rows_a < ROWS_PER_REQUEST)[:, None], CHUNK, True
        )
        bound_a = _row_bound(
            rows_a, length, causal_length, kv_end, cp_world, cp_rank, cp_interleave,
            HEADS, Q_LEN, CAUSAL, CP,
        )  # fmt: skip
        m_a = tl.full([ROWS_A], float("-inf"), tl.float32)
        total_a = tl.zeros([ROWS_A], tl.float32)
        acc_a = ()
        for _ in tl.static_range(VALUE_DIM // CHUNK):
            acc_a = acc_a + (tl.zeros([ROWS_A, CHUNK], tl.float32),)
        if ROWS_B > 0:
            slot_rows_b = ROWS_A + tl.arange(0, ROWS_B)
            rows_b = row_tile * TILE_ROWS + slot_rows_b
            q_b, q_rope_b = _load_columns(
                q_base + (rows_b * HEAD_DIM)[:, None],
                (rows_b < ROWS_PER_REQUEST)[:, None], CHUNK, True,
            )  # fmt: skip
            bound_b = _row_bound(
                rows_b, length, causal_length, kv_end, cp_world, cp_rank, cp_interleave,
                HEADS, Q_LEN, CAUSAL, CP,
            )  # fmt: skip
            m_b = tl.full([ROWS_B], float("-inf"), tl.float32)
            total_b = tl.zeros([ROWS_B], tl.float32)
            acc_b = ()
            for _ in tl.static_range(VALUE_DIM // CHUNK):
                acc_b = acc_b + (tl.zeros([ROWS_B, CHUNK], tl.float32),)
        lane = tl.arange(0, TILE)
        last = kv_end - 1
        page = _page_of(table, kv_start, BLOCK_SIZE)
        if PREFETCH:
            k, k_rope = _load_keys(
                kv_ptr, table, page, kv_start, last, block_stride,
                TILE, CHUNK, BLOCK_SIZE, TOKEN_STRIDE,
            )  # fmt: skip
            final_tile = kv_start + (last - kv_start) // TILE * TILE
            page = _page_of(table, tl.minimum(kv_start + TILE, final_tile), BLOCK_SIZE)
        for token in tl.range(kv_start, kv_end, TILE, num_stages=STAGES, disable_licm=not HOIST):
            token = tl.multiple_of(token, TILE)
            if PREFETCH:
                # The keys of the next step and the page of the one after are in flight while this
                # step computes; past the end both repeat the last tile.
                k_now, k_rope_now = k, k_rope
                ahead = tl.multiple_of(tl.minimum(token + TILE, final_tile), TILE)
                k, k_rope = _load_keys(
                    kv_ptr, table, page, ahead, last, block_stride,
                    TILE, CHUNK, BLOCK_SIZE, TOKEN_STRIDE,
                )  # fmt: skip
                page = _page_of(table, tl.minimum(token + 2 * TILE, final_tile), BLOCK_SIZE)
            else:
                if BLOCK_SIZE % TILE == 0:
                    page = _page_of(table, token, BLOCK_SIZE)
                k_now, k_rope_now = _load_keys(
                    kv_ptr, table, page, token, last, block_stride,
                    TILE, CHUNK, BLOCK_SIZE, TOKEN_STRIDE,
                )  # fmt: skip
            m_a, total_a, acc_a = _attend(
                q_a, q_rope_a, k_now, k_rope_now, lane[None, :] < (bound_a - token)[:, None],
                score_scale, m_a, total_a, acc_a, ROWS_A, TILE, CHUNK, P_EXP, EXACT_SUMS,
                UPCAST,
            )  # fmt: skip
            if ROWS_B > 0:
                m_b, total_b, acc_b = _attend(
                    q_b, q_rope_b, k_now, k_rope_now, lane[None, :] < (bound_b - token)[:, None],
                    score_scale, m_b, total_b, acc_b, ROWS_B, TILE, CHUNK, P_EXP, EXACT_SUMS,
                    UPCAST,
                )  # fmt: skip
        _store_rows(
            m_a, total_a, acc_a, rows_a, slot_rows_a, request, slot, out_scale,
            out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
            ROWS_PER_REQUEST, SLOT_ROWS, CHUNK, P_EXP, STORE_LSE, UPCAST,
        )  # fmt: skip
        if ROWS_B > 0:
            _store_rows(
                m_b, total_b, acc_b, rows_b, slot_rows_b, request, slot, out_scale,
                out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                ROWS_PER_REQUEST, SLOT_ROWS, CHUNK, P_EXP, STORE_LSE, UPCAST,
            )  # fmt: skip
