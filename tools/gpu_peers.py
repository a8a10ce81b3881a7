"""Other projects' MLA decodes on the same tensors, where they can be imported. For gpu_check.py.

Each peer is a function that returns a callable decoding a problem, or raises what stands in the
way. A peer that cannot run a shape is reported with its own words; nothing is timed in its place.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tools.gpu_speed import SCALE, Pool, Problem, SpeedCase, make_problem, result, time_us

Maker = Callable[[Problem], Callable[[], object]]


def peer_cases() -> list[SpeedCase]:
    """bf16, which every peer takes."""
    same = (131072,) * 32
    return [SpeedCase(8, q_len, "bf16", "128k x 32", same) for q_len in (1, 4)]


def time_peers(pool: Pool, case: SpeedCase, copy_bytes_s: float) -> list[dict[str, Any]]:
    """One row per peer: its rates, or why there are none."""
    rows = []
    for name, (package, block_size, maker) in PEERS.items():
        row: dict[str, Any] = {"peer": name, "name": case.name}
        if importlib.util.find_spec(package) is None:
            rows.append(row | {"why_not": f"{package} is not installed"})
            continue
        try:
            padded = case if package != "aiter" else replace(case, tp=6)
            problem = make_problem(padded, pool, block_size)
            microseconds, how = time_us(maker(problem))
            # Rates count the rows that were asked for, not the padding.
            rows.append(row | result(case, microseconds, copy_bytes_s) | {"timed": how})
        # Whatever another project raises is its answer.
        except Exception as error:
            last = (str(error).strip().splitlines() or [""])[-1]
            rows.append(row | {"why_not": f"{type(error).__name__}: {last[:200]}"})
    return rows


def _flash_mla(problem: Problem) -> Callable[[], object]:
    import flash_mla

    case = problem.case
    q = problem.q.view(len(case.lens), case.q_len, case.heads, 576)
    cache = problem.cache.unsqueeze(2)
    metadata, splits = flash_mla.get_mla_metadata(problem.seq_lens, case.q_len * case.heads, 1)
    return lambda: flash_mla.flash_mla_with_kvcache(
        q, cache, problem.table, problem.seq_lens, 512, metadata, splits,
        softmax_scale=SCALE, causal=True,
    )  # fmt: skip


def _flashinfer(problem: Problem) -> Callable[[], object]:
    import flashinfer

    case, size = problem.case, problem.cache.shape[1]
    device = problem.q.device
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(2**27, dtype=torch.uint8, device=device), backend="auto"
    )
    pages = [-(-tokens // size) for tokens in case.lens]
    indices = torch.cat([problem.table[i, :count] for i, count in enumerate(pages)])
    queries = torch.arange(len(pages) + 1, dtype=torch.int32, device=device) * case.q_len
    starts = torch.tensor([0, *pages], device=device).cumsum(0).to(torch.int32)
    wrapper.plan(
        queries, starts, indices, problem.seq_lens, case.heads, 512, 64, size, True, SCALE,
        problem.q.dtype, problem.cache.dtype,
    )  # fmt: skip
    nope, rope = problem.q.split([512, 64], dim=2)
    latent, rope_cache = problem.cache.split([512, 64], dim=2)
    return lambda: wrapper.run(nope, rope, latent, rope_cache)


def _vllm(problem: Problem) -> Callable[[], object]:
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    case, splits = problem.case, 64
    if case.q_len != 1:
        raise ValueError("takes one query token per request")
    device = problem.q.device
    out = torch.empty((*problem.q.shape[:2], 512), dtype=problem.q.dtype, device=device)
    lse = torch.empty(problem.q.shape[:2], dtype=problem.q.dtype, device=device)
    logits = torch.empty((*problem.q.shape[:2], splits, 513), device=device)
    keys = problem.cache.unsqueeze(2)
    return lambda: decode_attention_fwd(
        problem.q, keys, keys[..., :512], out, lse, problem.table, problem.seq_lens, logits,
        splits, SCALE, problem.cache.shape[1], is_mla=True,
    )  # fmt: skip


def _aiter(problem: Problem) -> Callable[[], object]:
    from aiter.mla import mla_decode_fwd

    case, device = problem.case, problem.q.device
    lens = torch.tensor([0, *case.lens], device=device).cumsum(0).to(torch.int32)
    queries = torch.arange(len(case.lens) + 1, dtype=torch.int32, device=device) * case.q_len
    size = problem.cache.shape[1]
    tokens = [
        (problem.table[i, :, None].long() * size + torch.arange(size, device=device)).flatten()[:n]
        for i, n in enumerate(case.lens)
    ]
    indices = torch.cat(tokens).to(torch.int32)
    out = torch.empty((*problem.q.shape[:2], 512), dtype=problem.q.dtype, device=device)
    last = torch.ones(len(case.lens), dtype=torch.int32, device=device)
    cache = problem.cache.reshape(-1, 1, 1, 576)
    return lambda: mla_decode_fwd(
        problem.q, cache, out, queries, lens, indices, last, case.q_len, sm_scale=SCALE
    )


PEERS: dict[str, tuple[str, int, Maker]] = {
    "FlashMLA": ("flash_mla", 64, _flash_mla),
    "FlashInfer": ("flashinfer", 64, _flashinfer),
    "vLLM Triton": ("vllm", 64, _vllm),
    "AITER (16 heads)": ("aiter", 64, _aiter),
}
"""Name -> package, the block size that it takes, its maker."""
