"""Other projects' MLA decodes on the same tensors, where they can be imported. For gpu_check.py.

Each peer is a function that returns a `Decode` of a problem, or raises what stands in the way. A
peer that is not there or cannot run a shape is reported with its own words, and one whose output is
wrong without rates; nothing is timed in its place.

The calls are those of FlashMLA 9241ae3, FlashInfer fb28d72, vLLM 0.33.0 and AITER e404860.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tools.gpu_speed import (
    HEADS,
    SCALE,
    KvPool,
    Problem,
    SpeedCase,
    Watch,
    make_problem,
    timed_row,
    wrong_output,
)
from tools.gpu_workers import failure

PAGE_TOKENS = 64
"""FlashMLA takes no other page; the others take this one."""


@dataclass(frozen=True, slots=True)
class Decode:
    """A peer's decode of one problem.

    Attributes:
        step: decodes once and returns what ``output`` reads. Its plan was made before.
        output: step's result -> [tokens, heads, 512].
    """

    step: Callable[[], Any]
    output: Callable[[Any], torch.Tensor]


def time_peer(name: str, pool: KvPool, case: SpeedCase, watch: Watch) -> dict[str, Any]:
    """Check and time one peer; JSON values with its rates, or "why_not"."""
    package, heads, maker = PEERS[name]
    row: dict[str, Any] = {"peer": name, "name": case.name}
    # Rates count the rows that were asked for, not the padding.
    padded = case if case.heads >= heads else replace(case, tp=HEADS // heads)
    try:
        if importlib.util.find_spec(package) is None:
            return row | {"why_not": f"left out, because {package} is not installed"}
        problem = make_problem(padded, pool, PAGE_TOKENS)
        decode = maker(problem)
        wrong = wrong_output(problem, decode.output(decode.step()))
        return row | timed_row(case, watch.time(decode.step), wrong)
    # Whatever another project raises is its answer.
    except Exception as error:
        return row | {"why_not": f"left out, because of {failure(error)}"}


def _flash_mla(problem: Problem) -> Decode:
    import flash_mla

    case = problem.case
    q = problem.q.view(len(case.lens), case.q_len, case.heads, 576)
    cache = problem.cache.unsqueeze(2)
    # Current versions plan in the first call and keep the plan here; older ones plan now.
    metadata, splits = flash_mla.get_mla_metadata(problem.seq_lens, case.q_len * case.heads, 1)

    def step() -> Any:
        return flash_mla.flash_mla_with_kvcache(
            q, cache, problem.table, problem.seq_lens, 512, metadata, splits,
            softmax_scale=SCALE, causal=True,
        )  # fmt: skip

    return Decode(step, lambda found: found[0].reshape(-1, case.heads, 512))


def _flashinfer(problem: Problem) -> Decode:
    import flashinfer.mla

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
    return Decode(lambda: wrapper.run(nope, rope, latent, rope_cache), lambda out: out)


def _vllm(problem: Problem) -> Decode:
    from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    case, q = problem.case, problem.q
    units = torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = _compute_num_kv_splits(max(case.lens), units)
    out = torch.empty((*q.shape[:2], 512), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=q.dtype, device=q.device)
    logits = torch.empty((*q.shape[:2], splits, 513), device=q.device)
    keys = problem.cache.unsqueeze(2)
    # A scale that is not given is copied from the host in every call, which a graph cannot do.
    one = torch.ones((), device=q.device)
    # As its backend does: one row of the table per query token, each with its own length.
    table = problem.table.repeat_interleave(case.q_len, dim=0)
    ahead = torch.arange(1 - case.q_len, 1, dtype=torch.int32, device=q.device)
    lens = (problem.seq_lens[:, None] + ahead).flatten().clamp(min=0)

    def step() -> torch.Tensor:
        decode_attention_fwd(
            q, keys, keys[..., :512], out, lse, table, lens, logits, splits, SCALE,
            problem.cache.shape[1], k_scale=one, v_scale=one, is_mla=True,
        )  # fmt: skip
        return out

    return Decode(step, lambda found: found)


def _aiter(problem: Problem) -> Decode:
    from aiter.mla import mla_decode_fwd

    case, device = problem.case, problem.q.device
    lens = torch.tensor([0, *case.lens], device=device).cumsum(0).to(torch.int32)
    queries = torch.arange(len(case.lens) + 1, dtype=torch.int32, device=device) * case.q_len
    size = problem.cache.shape[1]
    tokens = [
        (problem.table[i, :, None].long() * size + torch.arange(size, device=device)).flatten()[:n]
        for i, n in enumerate(case.lens)
    ]
    # A page of one token: the index list names every token.
    indices = torch.cat(tokens).to(torch.int32)
    out = torch.empty((*problem.q.shape[:2], 512), dtype=problem.q.dtype, device=device)
    last = torch.ones(len(case.lens), dtype=torch.int32, device=device)
    cache = problem.cache.view(-1, 1, 1, 576)

    def step() -> torch.Tensor:
        mla_decode_fwd(
            problem.q, cache, out, queries, lens, indices, last, case.q_len, sm_scale=SCALE
        )
        return out

    return Decode(step, lambda found: found)


PEERS: dict[str, tuple[str, int, Callable[[Problem], Decode]]] = {
    "FlashMLA": ("flash_mla", 1, _flash_mla),
    "FlashInfer": ("flashinfer", 1, _flashinfer),
    "vLLM Triton": ("vllm", 1, _vllm),
    "AITER (16 heads)": ("aiter", 16, _aiter),
}
"""Name -> package, the fewest heads that it takes, its maker."""
