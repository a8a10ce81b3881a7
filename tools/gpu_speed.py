"""Speed of the decode on a device: bandwidth and TFLOP/s per shape. For gpu_check.py.

Useful KV bytes are those of one read of every key; a second row tile reads them again and shows as
less. A decode is captured in a graph with its combine, as an engine runs it, and replayed; its plan
is timed alone. Where capture fails the time is that of eager launches, and the row says why.

Before every timed replay the caches are swept, because a layer's keys have been pushed out of them
by the other layers' since the step before; ``warm_us`` is the mean of replays without that. What a
shape computes is compared with float32 before its rates are told: a wrong one has no rates.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3backend.common.balanced_mla import BalancedMla
from tools.gpu_correctness import BF16, Device, captured
from tools.gpu_workers import failure

LENGTHS = Path(__file__).resolve().parents[1] / "tests/data/mooncake_conversation_lengths.csv"
HEADS = 96
SCALE = 192**-0.5
FLOP_PER_ROW_AND_KEY = 2 * (576 + 512)
MAX_TOKENS = 4 * 2**20
"""KV tokens of one case: 2.25 GiB of fp8."""
MAX_REQUESTS = 256
BLOCK_SIZES = {1: 12288, 2: 6144, 4: 3072, 8: 1536, 16: 768}
"""Of Kimi-K3 with 7 drafted tokens and an fp8 cache, by TP."""
REPEATS = 20
WARM_REPLAYS = 10
SWEEP_CACHES = 4
"""Last-level caches that a sweep reads: enough for whatever replacement."""
CHECKED_REQUESTS, CHECKED_ROWS = 3, 16
CHUNK_TOKENS = 65536
ROW_ERROR = {"fp8": 0.08, "bf16": 0.012}
"""|out - float32| / |float32| of a row. Keys have no mean, so neither has the error of a sum of
them: rounding a probability moves it by at most half a step, 2**-4 in e4m3 and 2**-8 in bfloat16,
and the output is rounded by as much as 2**-8: 0.066 and 0.008 if all of them went one way. A piece
that is left out of n shows as about n**-0.5, a zero output as 1."""


@dataclass(frozen=True, slots=True)
class SpeedCase:
    """One decode to time.

    Attributes:
        tp: tensor-parallel ranks: 96 / tp heads. q_len: query tokens.
        dtype: "fp8" or "bf16", of query and cache.
        lens_name: what the lengths are. lens: KV tokens of each request.
    """

    tp: int
    q_len: int
    dtype: str
    lens_name: str
    lens: tuple[int, ...]

    @property
    def heads(self) -> int:
        """Query heads of a rank."""
        return HEADS // self.tp

    @property
    def name(self) -> str:
        """For people."""
        return f"TP{self.tp} {self.q_len} tokens {self.dtype} {self.lens_name}"

    @property
    def kv_bytes(self) -> int:
        """One read of all keys."""
        return sum(self.lens) * 576 * (1 if self.dtype == "fp8" else 2)

    @property
    def flop(self) -> int:
        """Of all rows with all keys."""
        return sum(self.lens) * self.heads * self.q_len * FLOP_PER_ROW_AND_KEY


def compared_cases() -> list[SpeedCase]:
    """What peers decode too: bf16, which every peer takes."""
    sets = dict(_length_sets())
    return [
        SpeedCase(8, q_len, "bf16", name, sets[name])
        for name in ("128k x 32", "8k x 256")
        for q_len in (1, 4)
    ]


def cases() -> list[SpeedCase]:
    """What to time, the most telling first, so that a short budget still answers."""
    sets = dict(_length_sets())
    found = [SpeedCase(8, q_len, "fp8", "128k x 32", sets["128k x 32"]) for q_len in (1, 8)]
    found += compared_cases()
    found += [
        SpeedCase(8, q_len, dtype, name, sets[name])
        for name in (
            "128k x 32",
            "8k x 256",
            "ragged trace x 64",
            "1M x 4",
            "one long",
            "tiny x 64",
        )
        for q_len in (1, 8)
        for dtype in ("fp8", "bf16")
    ]
    for name in ("128k x 32", "8k x 256", "32k x 128", "1M x 4", "ragged trace x 64"):
        found += [
            SpeedCase(tp, q_len, "fp8", name, sets[name])
            for tp in (8, 1, 4, 16, 2)
            for q_len in (1, 8, 4)
        ]
    return list(dict.fromkeys(found))


def _length_sets() -> Iterator[tuple[str, tuple[int, ...]]]:
    for tokens, name in ((8192, "8k"), (32768, "32k"), (131072, "128k"), (1048576, "1M")):
        requests = min(MAX_TOKENS // tokens, MAX_REQUESTS)
        yield f"{name} x {requests}", (tokens,) * requests
    with LENGTHS.open(newline="", encoding="utf-8") as file:
        prompts = [int(row["input_tokens"]) for row in csv.DictReader(file)]
    yield "ragged trace x 64", tuple(prompts[:64])
    yield "one long", (524288, *([2048] * 63))
    yield "tiny x 64", tuple(1 + 37 * i % 300 for i in range(64))


class KvPool:
    """KV caches of random keys, one per dtype, shared by all cases."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._caches: dict[str, torch.Tensor] = {}

    def cache(self, dtype: str, block_size: int) -> torch.Tensor:
        """[blocks, block_size, 576] of ``dtype``."""
        if dtype not in self._caches:
            tokens = MAX_TOKENS + MAX_REQUESTS * max(BLOCK_SIZES.values())
            flat = torch.empty((tokens, 576), dtype=self.kind(dtype), device=self.device.name)
            part = torch.randn((2**16, 576), device=self.device.name).to(flat.dtype)
            for start in range(0, tokens, len(part)):
                piece = flat[start : start + len(part)]
                piece.copy_(part[: len(piece)])
            self._caches[dtype] = flat
        flat = self._caches[dtype]
        blocks = flat.shape[0] // block_size
        return flat[: blocks * block_size].view(blocks, block_size, 576)

    def kind(self, dtype: str) -> torch.dtype:
        """torch's "fp8" or "bf16" of the device."""
        return self.device.fp8 if dtype == "fp8" else BF16


@dataclass(frozen=True, slots=True)
class Problem:
    """Tensors of one case on the device."""

    case: SpeedCase
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor


def make_problem(case: SpeedCase, pool: KvPool, block_size: int | None = None) -> Problem:
    """Random queries, and a random block table over the front of the pool."""
    size = block_size or BLOCK_SIZES[case.tp]
    cache = pool.cache(case.dtype, size)
    columns = [-(-tokens // size) for tokens in case.lens]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(sum(columns), generator=generator).to(torch.int32)
    table = torch.zeros((len(columns), max(columns)), dtype=torch.int32)
    start = 0
    for request, count in enumerate(columns):
        table[request, :count] = order[start : start + count]
        start += count
    name = pool.device.name
    q = torch.randn((len(case.lens) * case.q_len, case.heads, 576), generator=generator)
    return Problem(
        case,
        q.to(cache.dtype).to(name),
        cache,
        table.to(name),
        torch.tensor(case.lens, dtype=torch.int32, device=name),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A problem with what decodes it."""

    problem: Problem
    core: BalancedMla
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, device: Device, problem: Problem) -> Step:
        """With an output full of NaN."""
        case, shape = problem.case, problem.q.shape[:2]
        core = device.core(
            case.heads, case.q_len, len(case.lens), True, device.name, q_dtype=case.dtype
        )
        out = torch.full((*shape, 512), math.nan, dtype=BF16, device=device.name)
        lse = torch.full(shape, math.nan, device=device.name)
        return cls(problem, core, core.new_buffers(), out, lse)

    def plan(self) -> None:
        """Plan the lengths of now."""
        counts, work, _ = self.buffers
        self.core.plan(self.problem.seq_lens, counts, work)

    def decode(self) -> None:
        """Decode and combine."""
        problem = self.problem
        self.core.decode(
            problem.q, problem.cache, problem.table, problem.seq_lens, SCALE, 1.0, *self.buffers,
            out=self.out, lse=self.lse,
        )  # fmt: skip


def compile_case(device: Device, case: SpeedCase) -> dict[str, Any]:
    """Run a case once on one key per request, so that its kernels lie in Triton's cache; JSON.

    Kernels are compiled per shape, type, stride and alignment: those of the case, not its lengths.
    """
    size = BLOCK_SIZES[case.tp]
    kind = device.fp8 if case.dtype == "fp8" else BF16
    columns = -(-max(case.lens) // size)
    requests = len(case.lens)
    step = Step.of(
        device,
        Problem(
            case,
            torch.zeros((requests * case.q_len, case.heads, 576), device=device.name).to(kind),
            torch.zeros((1, size, 576), device=device.name).to(kind),
            torch.zeros((requests, columns), dtype=torch.int32, device=device.name),
            torch.ones(requests, dtype=torch.int32, device=device.name),
        ),
    )
    step.plan()
    step.decode()
    return {"nan": bool(step.out.isnan().any())}


def time_case(device: Device, pool: KvPool, case: SpeedCase, watch: Watch) -> dict[str, Any]:
    """Check and time one case; JSON values."""
    step = Step.of(device, make_problem(case, pool))
    plan = watch.time(step.plan)
    step.plan()
    decode = watch.time(step.decode)
    return timed_row(case, decode, wrong_output(step.problem, step.out)) | {
        "plan_us": round(plan.cold_us, 2),
        "row_tiles": step.core.row_tiles,
        "block_size": step.problem.cache.shape[1],
    }


def wrong_output(problem: Problem, out: torch.Tensor) -> str:
    """What is wrong with the output of the longest, the first and the last request, or ""."""
    lens, q_len = problem.case.lens, problem.case.q_len
    requests = dict.fromkeys((max(range(len(lens)), key=lens.__getitem__), 0, len(lens) - 1))
    worst = 0.0
    for request in list(requests)[:CHECKED_REQUESTS]:
        tokens = slice(request * q_len, (request + 1) * q_len)
        got = out[tokens].reshape(-1, 512)
        rows = torch.linspace(0, len(got) - 1, min(CHECKED_ROWS, len(got))).long().to(out.device)
        q = problem.q[tokens].reshape(-1, 576).float()[rows]
        ahead = q_len - 1 - rows // problem.case.heads
        want = _float32_rows(problem, request, q, lens[request] - ahead)
        error = (got[rows].float() - want).norm(dim=1)
        # A row without a key is zero: any other value is wrong by infinity.
        relative = torch.where(error == 0, 0, error / want.norm(dim=1))
        worst = max(worst, float(relative.nan_to_num(math.inf).max()))
    bound = ROW_ERROR[problem.case.dtype]
    return "" if worst <= bound else f"a row is {worst:.3g} off float32, expected at most {bound}"


def _float32_rows(
    problem: Problem, request: int, q: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """float32 attention of ``q`` [rows, 576] over the first ``seen`` [rows] keys of a request."""
    cache = problem.cache
    length, size = problem.case.lens[request], cache.shape[1]
    starts = range(0, length, CHUNK_TOKENS)
    # As bytes, because not every torch picks rows of fp8 on every device.
    flat = cache.view(torch.uint8 if cache.dtype.itemsize == 1 else cache.dtype).view(-1, 576)

    def keys(start: int) -> torch.Tensor:
        token = torch.arange(start, min(start + CHUNK_TOKENS, length), device=q.device)
        blocks = problem.table[request][token // size].long()
        return flat[blocks * size + token % size].view(cache.dtype).float()

    scores = torch.cat([q @ keys(start).T for start in starts], dim=1) * SCALE
    hidden = torch.arange(length, device=q.device)[None] >= seen[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(1).nan_to_num(0.0)
    parts = (weights[:, start : start + CHUNK_TOKENS] @ keys(start)[:, :512] for start in starts)
    return torch.stack(list(parts)).sum(0)


def timed_row(case: SpeedCase, time: Time, wrong: str) -> dict[str, Any]:
    """A row of the result: rates where the output is right, else what is wrong with it."""
    row = {
        "name": case.name,
        "heads": case.heads,
        "q_len": case.q_len,
        "dtype": case.dtype,
        "requests": len(case.lens),
        "kv_tokens": sum(case.lens),
        "decode_us": round(time.cold_us, 2),
        "warm_us": round(time.warm_us, 2),
        "timed": f"eager launches: {time.eager}" if time.eager else "graph",
    }
    return row | ({"wrong": wrong} if wrong else rates(case, time.cold_us))


def rates(case: SpeedCase, microseconds: float) -> dict[str, Any]:
    """Of one decode in that time; JSON values."""
    seconds = microseconds / 1e6
    return {
        "gb_s": round(case.kv_bytes / seconds / 1e9, 1),
        "tflop_s": round(case.flop / seconds / 1e12, 2),
    }


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds of one call.

    Attributes:
        cold_us: median with swept caches. warm_us: mean of calls in a row.
        eager: why it was not replayed from a graph, or "".
    """

    cold_us: float
    warm_us: float
    eager: str = ""


class Watch:
    """Times calls on a device's current stream.

    Args:
        l2_bytes: the last-level cache that a sweep replaces.
    """

    def __init__(self, device: Device, l2_bytes: int) -> None:
        words = SWEEP_CACHES * l2_bytes // 4
        self._swept = torch.zeros(words, dtype=torch.float32, device=device.name)
        self._sum = torch.zeros((), dtype=torch.float32, device=device.name)

    def sweep(self) -> None:
        """Read other memory through the caches, which leaves nothing to be written back."""
        torch.sum(self._swept, 0, out=self._sum)

    def time(self, call: Callable[[], object]) -> Time:
        """The times of one call, from a graph where it can be captured."""
        eager = ""
        run = call
        try:
            run = captured(call).replay
        except RuntimeError as error:
            torch.cuda.synchronize()
            eager = failure(error)
        for _ in range(3):
            run()
        # The sweep keeps the device busy while the host queues what follows it.
        spans = []
        for _ in range(REPEATS):
            self.sweep()
            spans.append(_span(run))
        warm = _span(*([run] * WARM_REPLAYS))
        torch.cuda.synchronize()
        cold_us = statistics.median(start.elapsed_time(stop) * 1000 for start, stop in spans)
        warm_us = warm[0].elapsed_time(warm[1]) * 1000 / WARM_REPLAYS
        return Time(cold_us, warm_us, eager)


def _span(*calls: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in calls:
        call()
    stop.record()
    return start, stop


def copy_bandwidth(device: Device, watch: Watch, copied_bytes: int = 2**30) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.randint(0, 255, (copied_bytes,), dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    time = watch.time(lambda: target.copy_(source))
    if not torch.equal(source, target):
        raise AssertionError("the copy differs from its source")
    return 2 * copied_bytes / (time.cold_us / 1e6)
