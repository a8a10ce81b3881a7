"""The kernels in Triton's interpreter against float64: hostile inputs, and bitwise claims."""

from __future__ import annotations

import itertools
import math
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import k3backend
from k3backend.common import balanced_mla, split_plan
from k3backend.common.balanced_mla import BalancedMla
from k3backend.common.kernels.folded_decode import worker_of_program
from k3backend.common.kernels.launch import launch_combine, launch_decode
from k3backend.common.kernels.rounding import round_to
from k3backend.common.launch_config import DtypeName, LaunchConfig
from k3backend.common.layer_config import DecodeConfig
from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla
from k3backend.nvidia.kv_balanced_mla.decode import KvBalancedDecode
from k3backend.rocm.launch_config import decode_launch as rocm_launch
from tests.helpers.decode_cases import BF16, FP8, SCALE, Case, Inputs, build, check, pairwise, run

pytestmark = pytest.mark.interpreter

WORKERS = 5


@triton.jit
def order_kernel(out_ptr: Any, NUM_XCDS: tl.constexpr, ROW_TILES: tl.constexpr) -> None:
    tl.store(out_ptr + tl.program_id(0), worker_of_program(NUM_XCDS, ROW_TILES))


@triton.jit
def round_kernel(x_ptr: Any, out_ptr: Any, N: tl.constexpr, FORMAT: tl.constexpr) -> None:
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    if FORMAT == 0:
        rounded = round_to(x, tl.bfloat16, True)
    elif FORMAT == 1:
        rounded = round_to(x, tl.float8e4nv, True)
    else:
        rounded = round_to(x, tl.float8e4b8, True)
    tl.store(out_ptr + at, rounded.to(tl.float32))


class RocmShaped(BalancedMla):
    """The core with gfx950's launch choices: row groups, prefetch, XCD order."""

    platform = "rocm"

    def launch_config(self, q_dtype: DtypeName, kv_dtype: DtypeName) -> LaunchConfig:
        return rocm_launch(self.rows, q_dtype=q_dtype, kv_dtype=kv_dtype)


def core_of(vendor: str, case: Case, workers: int = WORKERS) -> BalancedMla:
    kind = {"nvidia": KvBalancedMla, "rocm": RocmShaped}[vendor]
    core: BalancedMla = kind(
        case.heads, case.q_len, len(case.lens), case.causal, "cpu",
        workers=workers, q_dtype="fp8" if case.q_dtype == FP8 else "bf16",
    )  # fmt: skip
    # Cheap pieces, so that lengths which an interpreter can afford are split.
    core.cost = split_plan.SplitCost(0.25, 0.25)
    return core


def around(size: int) -> tuple[int, ...]:
    return (size - 1, size, size + 1)


LENGTHS = {
    "tiny": (0, 1, 2, 7),
    "tile": (0, *around(64)),
    "two tiles": (*around(128), 0, 0),
    "ragged": (5, 400, 33),
    "block": (0, 1),  # and block - 1, block, block + 1
}
SHAPES = ((1, 1), (6, 8), (12, 1), (12, 7), (12, 8), (24, 4), (96, 1), (128, 2))
PARALLEL = (
    ("causal", (1, 0, 1)),
    ("all", (1, 0, 1)),
    ("causal", (2, 1, 1)),
    ("causal", (8, 3, 1)),
    ("causal", (4, 2, 64)),
    ("causal", (16, 15, "block")),
    ("all", (8, 7, 1)),
)
AXES: dict[str, Any] = {
    "lengths": tuple(LENGTHS),
    "shape": SHAPES,
    "block_size": (64, 96, 384, 3072),
    "dtypes": ((FP8, FP8), (BF16, BF16), (BF16, FP8)),
    "parallel": PARALLEL,
    "vendor": ("nvidia", "rocm"),
}


def case_of(point: dict[str, Any], seed: int) -> tuple[str, Case]:
    heads, q_len = point["shape"]
    block_size = point["block_size"]
    mode, (world, rank, interleave) = point["parallel"]
    lens = LENGTHS[point["lengths"]]
    if point["lengths"] == "block":
        # The interpreter takes seconds per 100,000 rows x keys: wide shapes stay on short blocks.
        short = block_size if heads * q_len <= 24 else min(block_size, 384)
        lens = (*lens, *around(short))
    if world > 1:
        lens = (*(min(n * min(world, 4), 1600) for n in lens), 5, 9)
    q_dtype, kv_dtype = point["dtypes"]
    return point["vendor"], Case(
        lens=lens, heads=heads, q_len=q_len, block_size=block_size, q_dtype=q_dtype,
        kv_dtype=kv_dtype, causal=mode == "causal",
        cp=(world, rank, block_size if interleave == "block" else interleave), seed=seed,
    )  # fmt: skip


def describe(point: dict[str, Any]) -> str:
    heads, q_len = point["shape"]
    dtypes = "-".join(str(d).removeprefix("torch.").removeprefix("float") for d in point["dtypes"])
    mode, cp = point["parallel"]
    parts = [point["vendor"], f"{heads}x{q_len}", point["lengths"], f"b{point['block_size']}"]
    return "-".join([*parts, dtypes, mode, "_".join(map(str, cp))]).replace(" ", "_")


def check_point(point: dict[str, Any], seed: int) -> None:
    vendor, case = case_of(point, seed)
    inputs = build(case)
    check(inputs, *run(core_of(vendor, case), inputs))


SAMPLE = pairwise(AXES, seed=20)


@pytest.mark.parametrize(
    ("index", "point"), enumerate(SAMPLE), ids=[describe(point) for point in SAMPLE]
)
def test_sample_of_the_grid(index: int, point: dict[str, Any]) -> None:
    check_point(point, seed=index)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("block_size", AXES["block_size"])
def test_whole_grid(shape: tuple[int, int], block_size: int) -> None:
    """Every input of the grid; the vendors, who launch the same kernel, take turns."""
    names = ("lengths", "dtypes", "parallel")
    turn = AXES["block_size"].index(block_size)
    for index, values in enumerate(itertools.product(*(AXES[name] for name in names))):
        vendor = AXES["vendor"][(index + turn) % 2]
        point = dict(zip(names, values, strict=True))
        point |= {"shape": shape, "block_size": block_size, "vendor": vendor}
        try:
            check_point(point, seed=index)
        except AssertionError as error:
            raise AssertionError(f"{describe(point)}: {error}") from error


MIXED = Case(lens=(0, 1, 37, 270, 0, 65), heads=12, q_len=8, block_size=96)


def splits(core: BalancedMla, inputs: Inputs) -> list[int]:
    counts, work, _ = core.new_buffers()
    core.plan(inputs.seq_lens, counts, work)
    return counts.tolist()


@pytest.mark.parametrize("vendor", ["nvidia", "rocm"])
def test_same_plan_twice_is_the_same_bit_for_bit(vendor: str) -> None:
    inputs = build(MIXED)
    core = core_of(vendor, MIXED)
    assert max(splits(core, inputs)) > 1
    first, second = run(core, inputs), run(core, inputs)
    for left, right in zip(first, second, strict=True):
        assert left is not None
        assert right is not None
        assert torch.equal(left, right)


def test_scratch_and_buffers_may_hold_anything() -> None:
    inputs = build(MIXED)
    core = core_of("rocm", MIXED)
    dirty = run(core, inputs)
    counts, work, workspace = core.new_buffers()
    for buffer in (counts, work, workspace):
        buffer.zero_()
    core.plan(inputs.seq_lens, counts, work)
    lse = torch.zeros(inputs.q.shape[:2])
    out = core.decode(
        inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, inputs.score_scale,
        MIXED.k_scale, counts, work, workspace, lse=lse,
    )  # fmt: skip
    assert torch.equal(out, dirty[0])
    assert dirty[1] is not None
    assert torch.equal(lse, dirty[1])


@pytest.mark.parametrize("vendor", ["nvidia", "rocm"])
def test_padding_requests_change_no_bit_of_the_real_ones(vendor: str) -> None:
    inputs = build(MIXED)
    padded = build(Case(**{**vars(MIXED), "lens": (*MIXED.lens, 0, 0, 0)}))
    # The same first requests, and padding whose table and query are garbage.
    table = torch.full((9, inputs.block_table.shape[1]), -1, dtype=torch.int32)
    table[:6] = inputs.block_table
    q = padded.q.clone()
    q[:48] = inputs.q
    q.view(torch.uint8)[48:] = 0x7F
    wide = Inputs(padded.case, q, inputs.kv_cache, table, padded.seq_lens, None)
    plain, plain_lse = run(core_of(vendor, MIXED), inputs)
    out, lse = run(core_of(vendor, padded.case), wide)
    assert torch.equal(out[:48], plain)
    assert plain_lse is not None
    assert lse is not None
    assert torch.equal(lse[:48], plain_lse)
    assert out[48:].eq(0).all()
    assert lse[48:].eq(-math.inf).all()


def test_one_split_is_bit_for_bit_the_unsplit_path() -> None:
    case = Case(lens=(130, 77), heads=12, q_len=8, seed=3)
    inputs = build(case)
    core = core_of("rocm", case, workers=1)
    plain, plain_lse = run(core, inputs)
    plan = split_plan.plan_splits(inputs.seq_lens, core.row_tiles, 1)
    assert plan.num_slots == 0
    work = torch.from_numpy(plan.work).clone()
    work[:, 4] = torch.arange(work.shape[0])
    config = core.launch_config("fp8", "fp8")
    rows = work.shape[0] * core.slot_rows
    partial, partial_lse = torch.full((rows * 512,), math.nan), torch.full((rows,), math.nan)
    out = torch.full_like(plain, math.nan)
    lse = torch.full(inputs.q.shape[:2], math.nan)
    counter = torch.zeros(2, dtype=torch.int64)
    launch_decode(
        config, q=inputs.q, kv_cache=inputs.kv_cache, block_table=inputs.block_table,
        seq_lens=inputs.seq_lens, causal_lens=None,
        worker_indptr=torch.from_numpy(plan.worker_indptr), work=work, out=out, lse2=lse,
        partial=partial, partial_lse=partial_lse, score_scale=inputs.score_scale,
        out_scale=case.k_scale, q_len=8, causal=True, cp=(1, 0, 1),
    )  # fmt: skip
    assert out.isnan().all()
    launch_combine(
        config, counts=torch.from_numpy(plan.counts), partial=partial, partial_lse=partial_lse,
        out=out, lse2=lse, counter=counter, out_scale=case.k_scale, rows=core.rows, min_splits=1,
    )  # fmt: skip
    assert torch.equal(out, plain)
    assert plain_lse is not None
    assert torch.equal(lse, plain_lse)


def test_splits_agree_within_the_error_of_the_format() -> None:
    case = Case(lens=(500,), heads=12, q_len=8, seed=5)
    inputs = build(case)
    for workers in (1, 9):
        core = core_of("nvidia", case, workers=workers)
        assert (max(splits(core, inputs)) > 1) == (workers > core.row_tiles)
        check(inputs, *run(core, inputs))


def test_device_planner_and_decode_together_replan_a_longer_batch() -> None:
    """What a captured graph does: the same buffers, planned at length 1, replayed longer."""
    short = build(Case(lens=(1, 1, 0), heads=12, q_len=2, block_size=64))
    case = Case(lens=(600, 3, 64), heads=12, q_len=2, block_size=64, seed=9)
    long = build(case)
    core = core_of("rocm", case)
    core.interpret_planner = True
    counts, work, workspace = core.new_buffers()
    results = []
    for inputs in (short, long):
        core.plan(inputs.seq_lens, counts, work)
        lse = torch.full(inputs.q.shape[:2], math.nan)
        out = core.decode(
            inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, inputs.score_scale,
            case.k_scale, counts, work, workspace, lse=lse,
        )  # fmt: skip
        results.append((out, lse))
        check(inputs, out, lse)
    fresh, fresh_lse = run(core_of("rocm", case), long)
    assert torch.equal(results[1][0], fresh)
    assert fresh_lse is not None
    assert torch.equal(results[1][1], fresh_lse)


def test_strided_cache_is_read_in_place() -> None:
    case = Case(lens=(70, 5), heads=6, q_len=2, block_size=32, q_dtype=BF16, kv_dtype=BF16)
    inputs = build(case, token_stride=640)
    assert not inputs.kv_cache.is_contiguous()
    check(inputs, *run(core_of("nvidia", case), inputs))


@pytest.mark.parametrize("vendor", ["nvidia", "rocm"])
def test_blocks_beyond_four_gib(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the table names lies outside of the tensor here, which would be refused.
    monkeypatch.setattr(balanced_mla, "content_problems", lambda *_: [])
    case = Case(lens=(100,), heads=4, q_len=1, block_size=64)
    small = build(case)
    block_bytes = 64 * 576
    blocks = 2**32 // block_bytes + 3
    # Pages that are not touched take no memory. The tensor covers block 0 alone, because the
    # interpreter copies a whole storage back; what the table names lies behind it.
    memory = np.frombuffer(mmap.mmap(-1, blocks * block_bytes), dtype=np.uint8)
    huge = torch.from_numpy(memory[:block_bytes]).view(FP8).reshape(1, 64, 576)
    table = small.block_table.clone()
    for column in range(2):
        target = blocks - 1 - column
        block = small.kv_cache[table[0, column]].view(torch.uint8).numpy().reshape(-1)
        memory[target * block_bytes : (target + 1) * block_bytes] = block
        table[0, column] = target
    assert int(table[0, 0]) * block_bytes > 2**32
    moved = Inputs(case, small.q, huge, table, small.seq_lens, None)
    expected = run(core_of(vendor, case), small)
    out, lse = run(core_of(vendor, case), moved)
    assert torch.equal(out, expected[0])
    assert lse is not None
    assert expected[1] is not None
    assert torch.equal(lse, expected[1])


def test_without_lse() -> None:
    inputs = build(MIXED)
    core = core_of("rocm", MIXED)
    out, lse = run(core, inputs, want_lse=False)
    assert lse is None
    assert torch.equal(out, run(core, inputs)[0])


@pytest.mark.parametrize("backend", ["nvidia", "rocm"])
def test_the_public_function_counts_and_is_right(backend: str) -> None:
    case = Case(lens=(0, 1500, 65), heads=6, q_len=2, block_size=96)
    inputs = build(case)
    before = k3backend.stats()
    out, lse2 = k3backend.mla_decode(
        inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, scale=SCALE,
        q_scale=case.q_scale, k_scale=case.k_scale, q_len=2, backend=backend,
    )  # fmt: skip
    after = k3backend.stats()
    check(inputs, out, lse2)
    assert after.calls == before.calls + 1
    assert after.splits > before.splits
    assert backend in after.platforms


def test_a_layer_decodes_through_the_kernels() -> None:
    case = Case(lens=(300, 65), heads=12, q_len=2, block_size=96)
    inputs = build(case)
    layer = KvBalancedDecode(12, config=DecodeConfig(max_requests=4, max_q_len=2, device="cpu"))
    step = SimpleNamespace(
        num_decodes=2, num_decode_tokens=4, num_prefills=0, max_query_len=2, causal=True,
        decode=SimpleNamespace(
            block_table=inputs.block_table, seq_lens=inputs.seq_lens, dcp_tot_seq_lens=None
        ),
    )  # fmt: skip
    impl = SimpleNamespace(scale=SCALE, need_to_return_lse_for_decode=True)
    scales = SimpleNamespace(_q_scale_float=case.q_scale, _k_scale_float=case.k_scale)
    check(inputs, *layer.decode(impl, inputs.q, inputs.kv_cache, step, scales))
    assert layer.plans == 1


@pytest.mark.parametrize("num_xcds", [1, 8])
def test_programs_run_workers_in_the_order_of_the_plan(num_xcds: int) -> None:
    for workers, row_tiles in itertools.product((1, 5, 8, 13, 61), (1, 2, 3, 6)):
        found = torch.full((workers,), -1, dtype=torch.int32)
        order_kernel[(workers,)](found, num_xcds, row_tiles)
        if num_xcds == 1:
            assert found.tolist() == list(range(workers))
        else:
            assert found.tolist() == split_plan.xcd_order(workers, num_xcds, row_tiles).tolist()


@pytest.mark.parametrize(
    ("dtype", "top"), [(BF16, 300.0), (FP8, 256.0), (torch.float8_e4m3fnuz, 128.0)]
)
def test_interpreted_kernels_round_as_torch_does(dtype: torch.dtype, top: float) -> None:
    sweep = torch.exp2(torch.linspace(-14, math.log2(top), 4093))
    values = torch.cat([torch.tensor([0.0, top, top / 2]), sweep])
    found = torch.empty_like(values)
    order = (BF16, FP8, torch.float8_e4m3fnuz)
    round_kernel[(1,)](values, found, 4096, order.index(dtype))
    assert torch.equal(found, values.to(dtype).float())
