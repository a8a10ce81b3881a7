"""Correctness of the kernels on a device, on hostile inputs, against float64. For gpu_check.py.

The cases and both error bounds are those of tests/helpers/decode_cases.py: what must not be read is
NaN or -1, scratch and outputs start full of NaN. One bound is wider on a GPU, see `lse_slack`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from k3backend.common import attention_reference as reference
from k3backend.common.balanced_mla import BalancedMla
from k3backend.common.split_plan import SplitCost, max_items, plan_splits
from tests.helpers.decode_cases import BF16, Case, Inputs, build, check, pairwise
from tools.gpu_workers import failure

GIB = 2**30
LONG_TOKENS = 65536
REPEATED_LENS = (4000, 70, 0, 9000)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: it raises AssertionError where the device is wrong."""

    name: str
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Device:
    """Where and with what to check.

    Attributes:
        name: torch's name of the device; "cpu" under the interpreter.
        core: the vendor's subclass of BalancedMla.
        fp8: the fp8 format of the device.
        exact_fp8: its products of fp8 are added in float32; not so on Hopper.
    """

    name: str
    core: Callable[..., BalancedMla]
    fp8: torch.dtype
    exact_fp8: bool = True

    @property
    def is_gpu(self) -> bool:
        """Not the interpreter."""
        return self.name != "cpu"


def checks(device: Device) -> Iterator[Check]:
    """Every check of a device, the most telling first; a few tiny ones under the interpreter."""
    if device.is_gpu:
        for dtype, kind in (("fp8", device.fp8), ("bf16", BF16)):
            case = Case((5, 4000, 333), 12, 8, 1536, kind, kind)
            yield _decode_check(device, f"decode {dtype}, 12 x 8, blocks of 1536", case)
        yield Check("graph of length 1 replayed at 100,000", lambda: _check_graph(device))
        yield Check("two runs give the same bits", lambda: _check_repeat(device))
        yield Check("cache above 4 GiB", lambda: _check_far_blocks(device))
        yield Check(
            f"one worker, {LONG_TOKENS:,} keys of fp8",
            lambda: _check_long_piece(device, device.fp8),
        )
        yield Check(
            f"one worker, {LONG_TOKENS:,} keys of bf16", lambda: _check_long_piece(device, BF16)
        )
        yield _decode_check(device, "decode 100,000 tokens", _long_case(device))
    yield Check("plan: device equals host", lambda: _check_plans(device))
    yield from (_decode_check(device, name, case) for name, case in _cases(device))


def outcome(item: Check) -> dict[str, Any]:
    """Run one check; JSON values."""
    start = time.monotonic()
    message = ""
    try:
        item.run()
    except AssertionError as error:
        message = str(error).split("\n")[0] or "wrong"
    # A kernel that does not compile or launch is a finding, too; the next check goes on.
    except Exception as error:
        message = failure(error)
    return {
        "name": item.name,
        "ok": not message,
        "message": message,
        "seconds": round(time.monotonic() - start, 2),
    }


def _cases(device: Device) -> Iterator[tuple[str, Case]]:
    fp8 = device.fp8
    dtypes = {"fp8": (fp8, fp8), "bf16": (BF16, BF16), "bf16 over fp8": (BF16, fp8)}
    if not device.is_gpu:
        for index, (name, (q_dtype, kv_dtype)) in enumerate(dtypes.items()):
            case = Case((0, 1, 65), heads=6, q_len=2, q_dtype=q_dtype, kv_dtype=kv_dtype)
            yield f"decode {name}, tiny", replace(case, seed=index)
        yield (
            "decode fp8, tiny, DCP",
            Case((0, 3, 130), heads=4, q_len=2, q_dtype=fp8, kv_dtype=fp8, cp=(2, 1, 1)),
        )
        return
    axes = {
        "lens": (
            (0, 1, 2, 7),
            (63, 64, 65, 0),
            (127, 128, 129),
            (5, 4000, 333),
            (1535, 1536, 1537),
        ),
        "shape": ((1, 1), (6, 8), (12, 1), (12, 4), (12, 7), (12, 8), (24, 4), (96, 1), (128, 2)),
        "block_size": (48, 96, 384, 1536, 3072),
        "dtype": tuple(dtypes),
        "mode": (
            (True, (1, 0, 1)),
            (False, (1, 0, 1)),
            (True, (2, 1, 1)),
            (True, (8, 3, 1)),
            (True, (4, 2, 64)),
            (False, (8, 7, 1)),
        ),
    }
    for seed, point in enumerate(pairwise(axes, seed=5)):
        (heads, q_len), (causal, cp) = point["shape"], point["mode"]
        q_dtype, kv_dtype = dtypes[point["dtype"]]
        case = Case(
            point["lens"], heads, q_len, point["block_size"], q_dtype, kv_dtype, causal, cp, seed
        )
        mode = f"{'causal' if causal else 'all keys'}{', DCP ' + str(cp) if cp[0] > 1 else ''}"
        yield (
            f"decode {point['dtype']} {heads} x {q_len}, blocks of {case.block_size}, "
            f"lengths {case.lens}, {mode}",
            case,
        )


def _long_case(device: Device) -> Case:
    return Case(
        (100_000, 1, 0, 7000), heads=12, q_len=8, block_size=1536,
        q_dtype=device.fp8, kv_dtype=device.fp8, seed=99,
    )  # fmt: skip


def _decode_check(device: Device, name: str, case: Case) -> Check:
    def run() -> None:
        inputs = build(case)
        out, lse = decode(device, core_of(device, case), inputs)
        check(inputs, out, lse, lse_slack(device, inputs))

    return Check(name, run)


def lse_slack(device: Device, inputs: Inputs) -> float:
    """What a GPU's scores may be off, in log2 units, beyond what torch's float32 is; 0 on the CPU.

    A matrix unit adds some products to the sum so far in one step and may cut the result to float32
    instead of rounding it: a unit of the last of 24 places of the largest sum per step, of 16
    products or more. Hopper's fp8 unit shifts the 32 products of a step and the sum so far to the
    largest of these 33 and keeps 13 bits behind its leading one (reported by SageAttention2 and
    DeepSeek-V3): each of them loses up to one unit of that place.

    Whichever way they are cut, the mean is at most half a unit each, and six deviations (a unit /
    sqrt(12) each, all together) beyond it are not reached. exp2 and log2 of the GPU add 2**-20.
    Outputs need no such slack: rounding of the probabilities is larger, and it is bounded.
    """
    if not device.is_gpu:
        return 0.0
    narrow = not device.exact_fp8 and inputs.case.q_dtype != BF16
    width, cut, bits = (32, 33, 13) if narrow else (16, 1, 23)
    largest = _largest_sum(inputs, width)
    if not largest:
        return 0.0
    unit = 2.0 ** (math.floor(math.log2(largest)) - bits)
    cuts = 576 // width * cut
    off = unit * (cuts / 2 + 6 * math.sqrt(cuts / 12))
    return off * inputs.score_scale * reference.LOG2_E + 2.0**-20


def _largest_sum(inputs: Inputs, width: int) -> float:
    """The largest magnitude of a query's products with keys, and of their sums by ``width``."""
    q_len, largest = inputs.case.q_len, 0.0
    for request, length in enumerate(inputs.seq_lens.tolist()):
        if length == 0:
            continue
        keys = reference.gather_keys(inputs.kv_cache, inputs.block_table[request], 0, length)
        keys = keys.float()
        q = inputs.q[request * q_len : (request + 1) * q_len].float().reshape(-1, 576)
        sums = torch.zeros(q.shape[0], length)
        for start in range(0, 576, width):
            part = slice(start, start + width)
            sums += q[:, part] @ keys[:, part].T
            product = float(q[:, part].abs().max() * keys[:, part].abs().max())
            largest = max(largest, product, float(sums.abs().max()))
    return largest


def core_of(device: Device, case: Case, workers: int | None = None) -> BalancedMla:
    """The vendor's core for a case."""
    return device.core(
        case.heads, case.q_len, len(case.lens), case.causal, device.name,
        workers=workers, q_dtype="bf16" if case.q_dtype == BF16 else "fp8",
    )  # fmt: skip


def decode(device: Device, core: BalancedMla, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and decode on the device with every buffer full of garbage; out and lse2 on the CPU."""
    buffers = core.new_buffers()
    for buffer, garbage in zip(buffers, (-7, -7, 0xFF), strict=True):
        buffer.fill_(garbage)
    tensors = [_moved(t, device) for t in (inputs.q, inputs.kv_cache, inputs.block_table)]
    out = torch.full((*inputs.q.shape[:2], 512), math.nan, dtype=BF16, device=device.name)
    lse = torch.full(inputs.q.shape[:2], math.nan, device=device.name)
    _plan_and_decode(core, inputs, tensors, _moved(inputs.seq_lens, device), buffers, out, lse)
    return out.cpu(), lse.cpu()


def _plan_and_decode(
    core: BalancedMla,
    inputs: Inputs,
    tensors: list[torch.Tensor],
    seq_lens: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    counts, work, workspace = buffers
    causal_lens = inputs.causal_lens
    core.plan(seq_lens, counts, work)
    core.decode(
        *tensors,
        seq_lens,
        inputs.score_scale,
        inputs.case.k_scale,
        counts,
        work,
        workspace,
        out=out,
        lse=lse,
        causal_lens=None if causal_lens is None else causal_lens.to(seq_lens.device),
        cp=inputs.case.cp,
    )


def _moved(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    return tensor.to(device.name)


def _check_plans(device: Device) -> None:
    """The device planner's work list is the host planner's, from 1 to 1,024 requests."""
    from k3backend.common.kernels.split_plan_device import SCRATCH_INTS, plan_splits_device

    random = np.random.default_rng(3)
    sizes, tops, workers = ((1, 2, 17, 256, 1024), (130, 8_000, 130_000), 256)
    if not device.is_gpu:
        sizes, tops, workers = ((3,), (900,), 4)
    for requests in sizes:
        for top in tops:
            lens = random.integers(0, top, requests).tolist()
            shapes = ((max_items(requests, 2, workers), 6), (workers + 1,), (requests * 2,))
            work, indptr, counts = (
                torch.full(shape, 77, dtype=torch.int32, device=device.name) for shape in shapes
            )
            plan_splits_device(
                torch.tensor(lens, dtype=torch.int32, device=device.name), work, indptr, counts,
                torch.zeros(SCRATCH_INTS, dtype=torch.int32, device=device.name),
                row_tiles=2, num_workers=workers, cost=SplitCost(),
            )  # fmt: skip
            host = plan_splits(lens, row_tiles=2, num_workers=workers, cost=SplitCost())
            said = f"{requests} requests up to {top} tokens"
            assert counts.tolist() == host.counts.tolist(), f"counts differ: {said}"
            assert indptr.tolist() == host.worker_indptr.tolist(), f"worker_indptr differs: {said}"
            assert work[: len(host.work)].tolist() == host.work.tolist(), f"work differs: {said}"


def _check_repeat(device: Device) -> None:
    case = Case(REPEATED_LENS, 12, 8, 384, device.fp8, device.fp8)
    inputs, core = build(case), core_of(device, case)
    first, second = decode(device, core, inputs), decode(device, core, inputs)
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right), "two runs of one plan differ"


def _check_far_blocks(device: Device) -> None:
    """The used blocks lie beyond 4 GiB of cache; all before them is NaN."""
    case = Case((1000, 65), 12, 2, 1536, device.fp8, device.fp8)
    near = build(case)
    block_bytes = case.block_size * 576
    offset = 4 * GIB // block_bytes + 1
    used = near.kv_cache.shape[0]
    shape = (offset + used, case.block_size, 576)
    nan = 0x7F if device.fp8 == torch.float8_e4m3fn else 0x80
    far = torch.full(shape, nan, dtype=torch.uint8, device=device.name)
    far[offset:] = near.kv_cache.view(torch.uint8).to(device.name)
    table = torch.where(near.block_table >= 0, near.block_table + offset, near.block_table)
    inputs = replace(near, kv_cache=far.view(device.fp8), block_table=table)
    out, lse = decode(device, core_of(device, case), inputs)
    check(near, out, lse, lse_slack(device, near))


def _check_long_piece(device: Device, kind: torch.dtype) -> None:
    """One worker adds up so many keys that sums of too few bits would lose them."""
    case = Case((LONG_TOKENS,), 12, 1, 1536, kind, kind, seed=7)
    inputs = build(case)
    out, lse = decode(device, core_of(device, case, workers=1), inputs)
    check(inputs, out, lse, lse_slack(device, inputs))


def _check_graph(device: Device) -> None:
    """Plan and decode captured at length 1 give at 100,000 what they give when launched there."""
    case = _long_case(device)
    inputs, core = build(case), core_of(device, case)
    want = decode(device, core, inputs)
    tensors = [_moved(t, device) for t in (inputs.q, inputs.kv_cache, inputs.block_table)]
    # A request without keys stays so: its row of the table names no block.
    seq_lens = inputs.seq_lens.clamp(max=1).to(device.name)
    buffers = core.new_buffers()
    out = torch.empty((*inputs.q.shape[:2], 512), dtype=BF16, device=device.name)
    lse = torch.empty(inputs.q.shape[:2], device=device.name)

    def step() -> None:
        _plan_and_decode(core, inputs, tensors, seq_lens, buffers, out, lse)

    graph = captured(step)
    seq_lens.copy_(inputs.seq_lens)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), want[0]), "out of the replay differs"
    assert torch.equal(lse.cpu(), want[1]), "lse2 of the replay differs"


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``step`` warmed up and captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
