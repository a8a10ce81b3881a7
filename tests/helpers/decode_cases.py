"""Hostile decode inputs, their float64 answer, and the error that their precision allows.

Everything that a decode must not read is NaN (page tails, unused blocks) or -1 (unused block-table
entries). Outputs and scratch are handed over full of NaN.

Two bounds on the output, both derived:

* every element: rounding a probability to the query's format moves it by at most half a step,
  relative 2**-4 for e4m3 and 2**-8 for bfloat16, and by an absolute half step below the smallest
  normal number; so |error| <= step * sum(p |v|) / sum(p) + the subnormal part + rounding of the
  bfloat16 output + float32 accumulation;
* root mean square over the tensor: at most twice that of a torch run at the same precision, plus
  the rounding of the output.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from k3backend.common import attention_reference as reference
from k3backend.common.balanced_mla import BalancedMla

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
P_EXP = {FP8: 8, torch.float8_e4m3fnuz: 7}
"""Power of two by which fp8 probabilities are scaled; the smallest step of fnuz is half as wide."""
SCALE = 192**-0.5


@dataclass(frozen=True)
class Case:
    """One decode. ``lens`` are global lengths under DCP. Scales are not powers of two."""

    lens: tuple[int, ...]
    heads: int = 12
    q_len: int = 1
    block_size: int = 64
    q_dtype: torch.dtype = FP8
    kv_dtype: torch.dtype = FP8
    causal: bool = True
    cp: tuple[int, int, int] = (1, 0, 1)
    seed: int = 0
    q_scale: float = 0.9
    k_scale: float = 0.6

    @property
    def rows(self) -> int:
        return self.heads * self.q_len


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case. ``q`` holds q / q_scale and ``kv_cache`` key / k_scale, rounded."""

    case: Case
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    causal_lens: torch.Tensor | None

    @property
    def score_scale(self) -> float:
        return SCALE * self.case.q_scale * self.case.k_scale


def build(case: Case, token_stride: int = 576) -> Inputs:
    """Random tensors of the case; rows of the cache ``token_stride`` elements apart."""
    generator = torch.Generator().manual_seed(case.seed)
    total = torch.tensor(case.lens, dtype=torch.int32)
    world, rank, interleave = case.cp
    local = reference.local_length(total, world, rank, interleave).to(torch.int32)
    needed = [-(-int(n) // case.block_size) for n in local]
    blocks = sum(needed) + 1
    order = torch.randperm(blocks, generator=generator).tolist()
    nan = torch.full((blocks, case.block_size, token_stride), math.nan).to(case.kv_dtype)
    cache = nan[:, :, :576]
    table = torch.full((len(case.lens), max(needed, default=0) + 2), -1, dtype=torch.int32)
    for request, count in enumerate(needed):
        for column in range(count):
            block = order.pop()
            table[request, column] = block
            tokens = min(case.block_size, int(local[request]) - column * case.block_size)
            # A mean in the values keeps wrong weights visible; loud keys make softmax peaked.
            keys = torch.randn(tokens, 576, generator=generator) * 1.5 + 0.25
            cache[block, :tokens] = keys.to(case.kv_dtype)
    q = torch.randn(len(case.lens) * case.q_len, case.heads, 576, generator=generator)
    return Inputs(case, q.to(case.q_dtype), cache, table, local, total if world > 1 else None)


def answer(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse2 in float64."""
    case = inputs.case
    return reference.decode(
        inputs.q,
        inputs.kv_cache,
        inputs.block_table,
        inputs.seq_lens,
        scale=SCALE,
        q_scale=case.q_scale,
        k_scale=case.k_scale,
        q_len=case.q_len,
        causal=case.causal,
        causal_lens=inputs.causal_lens,
        cp=case.cp,
        compute_dtype=torch.float64,
    )


def same_precision(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A plain torch run at the kernel's precision: out, lse2, and the bound on every element."""
    case = inputs.case
    seen = reference.visible_keys(
        inputs.seq_lens,
        case.q_len,
        causal=case.causal,
        causal_lens=inputs.causal_lens,
        cp=case.cp,
    )
    out = torch.zeros(inputs.q.shape[0], case.heads, 512)
    bound = torch.zeros_like(out, dtype=torch.float64)
    lse2 = torch.full(inputs.q.shape[:2], -math.inf)
    exponent = P_EXP.get(case.q_dtype, 0)
    # Half a step of the format, relative; half of its smallest step, on the scale of p <= 1.
    step, floor = (2.0**-4, 2.0**-18) if case.q_dtype in P_EXP else (2.0**-8, 0.0)
    for request, length in enumerate(inputs.seq_lens.tolist()):
        if length == 0:
            continue
        keys = reference.gather_keys(inputs.kv_cache, inputs.block_table[request], 0, length)
        keys = keys.float()
        for token in range(case.q_len):
            count = int(seen[request, token])
            row = request * case.q_len + token
            if count <= 0:
                continue
            scores = inputs.q[row].float() @ keys[:count].T
            scores = scores * (inputs.score_scale * reference.LOG2_E)
            top = scores.amax(1, keepdim=True)
            p = torch.exp2(scores - top + exponent)
            total = p.sum(1, keepdim=True)
            values = keys[:count, :512]
            rounded = p.to(case.q_dtype).float()
            out[row] = ((rounded @ values) / total * case.k_scale).to(BF16).float()
            lse2[row] = (top - exponent + torch.log2(total))[:, 0]
            spread = (p.double() * step + floor * 2.0**exponent) @ values.double().abs()
            bound[row] = spread / total.double() * case.k_scale
    return out, lse2, bound


def check(
    inputs: Inputs, out: torch.Tensor, lse2: torch.Tensor | None, lse_slack: float = 0.0
) -> None:
    """Assert both bounds, -inf exactly where no key is visible, and no NaN.

    Args:
        lse_slack: what a device's scores may be off beyond float32's rounding, in units of lse2.
    """
    want, want_lse = answer(inputs)
    plain, plain_lse, bound = same_precision(inputs)
    assert not out.isnan().any(), "NaN in the output"
    empty = want_lse == -math.inf
    assert out[empty].eq(0).all(), "rows without a key must be 0"
    error = (out.double() - want).abs()
    # bfloat16 output: half a step, relative 2**-8. float32 accumulation of n terms: n * 2**-24 of
    # the sum of magnitudes, which the probabilities' bound exceeds by 2**15 or more.
    bound = bound * 1.02 + want.abs() * 2.0**-7.97 + 1e-30
    worst = (error / bound).max().item() if error.numel() else 0.0
    assert worst <= 1, f"an element is {worst:.3f} of its error bound"
    # Uniform rounding of the output: half a step / sqrt(3), and half a step is 2**-9 to 2**-8.
    rounding = want.abs().square().mean().sqrt() * 2.0**-9
    rms = error.square().mean().sqrt()
    plain_rms = (plain.double() - want).square().mean().sqrt()
    assert rms <= 2 * plain_rms + rounding, f"rms {rms:.3e} against torch's {plain_rms:.3e}"
    if lse2 is not None:
        assert torch.equal(lse2 == -math.inf, empty), "-inf exactly where no key is visible"
        seen = ~empty
        lse_error = (lse2.double() - want_lse)[seen].abs()
        plain_error = (plain_lse.double() - want_lse)[seen].abs().max() if seen.any() else 0.0
        # A float32 lse2 is rounded to 2**-24 of its size; sums in other orders differ as much
        # again per step, of which a piece has a handful.
        rounding_lse = 2.0**-21 * max(1.0, float(want_lse[seen].abs().max()) if seen.any() else 0)
        if seen.any():
            bound_lse = float(2 * plain_error + rounding_lse) + lse_slack
            most = float(lse_error.max())
            assert most <= bound_lse, f"an lse2 is {most:.3e} off, expected at most {bound_lse:.3e}"
        assert not lse2.isnan().any()
        assert not (lse2 == math.inf).any()


def run(
    core: BalancedMla, inputs: Inputs, *, want_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Plan and decode with every buffer full of garbage beforehand."""
    case = inputs.case
    counts, work, workspace = core.new_buffers()
    counts.fill_(-7)
    work.fill_(-7)
    workspace.fill_(0xFF)
    device = inputs.q.device
    out = torch.full((*inputs.q.shape[:2], 512), math.nan, dtype=BF16, device=device)
    lse = torch.full(inputs.q.shape[:2], math.nan, device=device) if want_lse else None
    core.plan(inputs.seq_lens, counts, work)
    core.decode(
        inputs.q,
        inputs.kv_cache,
        inputs.block_table,
        inputs.seq_lens,
        inputs.score_scale,
        case.k_scale,
        counts,
        work,
        workspace,
        out=out,
        lse=lse,
        causal_lens=inputs.causal_lens,
        cp=case.cp,
    )
    return out, lse


def pairwise(axes: dict[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Few combinations that contain every pair of values of any two axes; seeded, greedy."""
    generator = random.Random(seed)
    names = list(axes)
    indices = {name: range(len(axes[name])) for name in names}
    missing = {
        (left, i, right, j)
        for left, right in itertools.combinations(names, 2)
        for i in indices[left]
        for j in indices[right]
    }

    def covered(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {
            (left, row[left], right, row[right]) for left, right in itertools.combinations(names, 2)
        }

    rows = []
    while missing:
        left, i, right, j = min(missing)
        best: dict[str, int] = {}
        for _ in range(60):
            row = {name: generator.choice(indices[name]) for name in names}
            row[left], row[right] = i, j
            if not best or len(covered(row) & missing) > len(covered(best) & missing):
                best = row
        missing -= covered(best)
        rows.append({name: axes[name][best[name]] for name in names})
    return rows
