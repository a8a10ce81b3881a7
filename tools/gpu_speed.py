"""Speed of the decode on a device: bandwidth and TFLOP/s per shape, and peers. For gpu_check.py.

Useful KV bytes are those of one read of every key; a second row tile reads them again and shows as
less. A decode is captured in a graph with its combine, as an engine runs it, and replayed; its plan
is timed alone. Where capture fails the time is that of eager launches, and the row says so.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.gpu_correctness import BF16, Device, captured

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


def cases() -> list[SpeedCase]:
    """What to time, the most telling first, so that a short budget still answers."""
    sets = dict(_length_sets())
    found = [
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


class Pool:
    """KV caches of random keys, one per dtype, shared by all cases."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._caches: dict[str, torch.Tensor] = {}

    def cache(self, dtype: str, block_size: int) -> torch.Tensor:
        """[blocks, block_size, 576] of ``dtype``."""
        if dtype not in self._caches:
            kind = self.device.fp8 if dtype == "fp8" else BF16
            tokens = MAX_TOKENS + MAX_REQUESTS * max(BLOCK_SIZES.values())
            flat = torch.empty((tokens, 576), dtype=kind, device=self.device.name)
            part = torch.randn((2**16, 576), device=self.device.name).to(kind)
            for start in range(0, tokens, len(part)):
                piece = flat[start : start + len(part)]
                piece.copy_(part[: len(piece)])
            self._caches[dtype] = flat
        flat = self._caches[dtype]
        blocks = flat.shape[0] // block_size
        return flat[: blocks * block_size].view(blocks, block_size, 576)


@dataclass(frozen=True, slots=True)
class Problem:
    """Tensors of one case on the device."""

    case: SpeedCase
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor


def make_problem(case: SpeedCase, pool: Pool, block_size: int | None = None) -> Problem:
    """Random queries, and a random block table over the pool."""
    size = block_size or BLOCK_SIZES[case.tp]
    cache = pool.cache(case.dtype, size)
    columns = [-(-tokens // size) for tokens in case.lens]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(cache.shape[0], generator=generator)[: sum(columns)].to(torch.int32)
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


def time_case(device: Device, pool: Pool, case: SpeedCase, copy_bytes_s: float) -> dict[str, Any]:
    """Time one case; JSON values."""
    problem = make_problem(case, pool)
    core = device.core(
        case.heads, case.q_len, len(case.lens), True, device.name, q_dtype=case.dtype
    )
    counts, work, workspace = core.new_buffers()
    out = torch.empty((*problem.q.shape[:2], 512), dtype=BF16, device=device.name)
    lse = torch.empty(problem.q.shape[:2], device=device.name)

    def plan() -> None:
        core.plan(problem.seq_lens, counts, work)

    def decode() -> None:
        core.decode(
            problem.q, problem.cache, problem.table, problem.seq_lens, SCALE, 1.0,
            counts, work, workspace, out=out, lse=lse,
        )  # fmt: skip

    plan_us, _ = time_us(plan)
    decode_us, how = time_us(decode)
    return result(case, decode_us, copy_bytes_s) | {
        "plan_us": round(plan_us, 2),
        "timed": how,
        "row_tiles": core.row_tiles,
        "block_size": problem.cache.shape[1],
    }


def result(case: SpeedCase, microseconds: float, copy_bytes_s: float) -> dict[str, Any]:
    """Rates of a time; JSON values."""
    seconds = microseconds / 1e6
    return {
        "name": case.name,
        "heads": case.heads,
        "q_len": case.q_len,
        "dtype": case.dtype,
        "requests": len(case.lens),
        "kv_tokens": sum(case.lens),
        "decode_us": round(microseconds, 2),
        "gb_s": round(case.kv_bytes / seconds / 1e9, 1),
        "of_copy": round(case.kv_bytes / seconds / copy_bytes_s, 4),
        "tflop_s": round(case.flop / seconds / 1e12, 2),
    }


def time_us(step: Callable[[], object]) -> tuple[float, str]:
    """Median microseconds of one call, and "graph" or "eager"."""
    how = "graph"
    try:
        call: Callable[[], object] = captured(step).replay
    except RuntimeError:
        torch.cuda.synchronize()
        call, how = step, "eager"
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000)
    return statistics.median(times), how


def copy_bandwidth(device: Device) -> float:
    """Bytes per second that a copy of 1 GiB reads and writes."""
    source = torch.zeros(2**30, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    microseconds, _ = time_us(lambda: target.copy_(source))
    return 2 * source.numel() / (microseconds / 1e6)
