"""ROCm and NVIDIA decode to the same numbers, for the heads of every bundled config at every TP.

Both are held to float64 by `decode_cases.check`, whose bounds are the rounding of one run; two runs
then differ by at most twice that bound, which is checked as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from k3backend.common.balanced_mla import BalancedMla
from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla as NvidiaMla
from k3backend.rocm.kv_balanced_mla.core import KvBalancedMla as RocmMla
from tests.helpers.decode_cases import BF16, FP8, Case, build, check, run, same_precision

pytestmark = pytest.mark.interpreter
CONFIGS = Path(__file__).resolve().parents[2] / "k3backend" / "data" / "configs"
TP_SIZES = (1, 2, 4, 8, 16)
SPEC_TOKENS = 7
LENS = (70, 5, 0)


def mla_heads() -> dict[int, str]:
    """Local heads -> a config and TP that have them."""
    found: dict[int, str] = {}
    for path in sorted(CONFIGS.glob("*.json")):
        config = json.loads(path.read_text())
        heads = config.get("num_attention_heads") or config["text_config"]["num_attention_heads"]
        for tp in TP_SIZES:
            if heads % tp == 0:
                found.setdefault(heads // tp, f"{path.stem}-tp{tp}")
    return dict(sorted(found.items()))


HEADS = mla_heads()


def cases() -> list[Any]:
    """Heads x (one token, verify, draft) x dtypes; rows above 128 are slow to interpret: long."""
    made = []
    for heads, where in HEADS.items():
        for q_len, causal in ((1, True), (1 + SPEC_TOKENS, True), (SPEC_TOKENS, False)):
            for name, dtype in (("fp8", FP8), ("bf16", BF16)):
                quick = heads * q_len <= 128 and (q_len == 1 or heads in (8, 12))
                made.append(
                    pytest.param(
                        Case(LENS, heads, q_len, q_dtype=dtype, kv_dtype=dtype, causal=causal),
                        marks=[] if quick else [pytest.mark.long],
                        id=f"{where}-{heads}x{q_len}-{'causal' if causal else 'all'}-{name}",
                    )
                )
    return made


def core_of(kind: type[BalancedMla], case: Case) -> BalancedMla:
    return kind(  # type: ignore[call-arg]
        case.heads, case.q_len, len(case.lens), case.causal, "cpu",
        workers=5, q_dtype="fp8" if case.q_dtype == FP8 else "bf16",
    )  # fmt: skip


def test_the_bundled_configs_have_kimi_k3s_heads() -> None:
    assert {96, 48, 24, 12, 6, 64, 32, 16, 8, 4} <= set(HEADS)


@pytest.mark.parametrize("case", cases())
def test_rocm_equals_nvidia_within_twice_the_rounding(case: Case) -> None:
    inputs = build(case)
    outputs = []
    for kind in (NvidiaMla, RocmMla):
        out, lse2 = run(core_of(kind, case), inputs)
        check(inputs, out, lse2)
        outputs.append((out, lse2))
    (nvidia, nvidia_lse2), (rocm, rocm_lse2) = outputs
    assert nvidia_lse2 is not None
    assert rocm_lse2 is not None
    _, _, bound = same_precision(inputs)
    rounding = bound * 1.02 + nvidia.double().abs() * 2.0**-8.9 + 1e-30
    assert bool(((nvidia.double() - rocm.double()).abs() <= 2 * rounding).all())
    empty = nvidia_lse2 == -torch.inf
    assert torch.equal(rocm_lse2 == -torch.inf, empty)
    largest = max(1.0, float(nvidia_lse2[~empty].abs().max()))
    assert torch.allclose(
        nvidia_lse2[~empty], rocm_lse2[~empty], rtol=0, atol=2 * 2.0**-21 * largest
    )


@pytest.mark.parametrize("kind", [NvidiaMla, RocmMla])
@pytest.mark.parametrize("heads", [12, 128])
def test_one_object_without_a_query_dtype_decodes_both(kind: type[BalancedMla], heads: int) -> None:
    # 128 rows: AMD reads the KV of an fp8 query once and that of a bfloat16 one twice.
    core = kind(heads, 1, 3, True, "cpu")  # type: ignore[call-arg]
    buffers = core.new_buffers()
    for dtypes in ((BF16, BF16), (FP8, FP8), (BF16, FP8)):
        case = Case((700, 5, 0), heads, 1, q_dtype=dtypes[0], kv_dtype=dtypes[1])
        inputs = build(case)
        core.plan(inputs.seq_lens, *buffers[:2])
        lse2 = torch.empty(inputs.q.shape[:2])
        out = core.decode(
            inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, inputs.score_scale,
            case.k_scale, *buffers, lse=lse2,
        )  # fmt: skip
        check(inputs, out, lse2)
