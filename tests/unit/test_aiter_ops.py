"""The AITER boundary against a contract double: padding, slices, indices, masks, scales and LSE.

Tolerances: the double and the reference compute the same products in float32; the double's output
is rounded to bfloat16 once, which is at most 2**-8 of the value, and the order of float32 sums
differs, which is at most a few times 2**-23 of the largest value (1e-5 covers it).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from k3backend.common.attention_reference import decode as reference_decode
from k3backend.common.attention_reference import local_length
from k3backend.common.errors import InputError, PlatformError, ShapeError
from k3backend.rocm import aiter_ops, token_indices
from k3backend.rocm.aiter_capabilities import ARCHS, DTYPES
from k3backend.rocm.aiter_plan import AiterPlan, AiterShape
from k3backend.rocm.mla_decode import Route, choose_route
from k3backend.rocm.token_view import block_stride_tokens, token_view
from tests.helpers.aiter_contract_double import (
    FP8,
    AiterContractDouble,
    ContractError,
    ProcessAbort,
)

SCALE = 192**-0.5
CPU = torch.device("cpu")
OLD = "0.1.7.post2.dev18"
LENGTHS = (41, 0, 9, 70)
BLOCK = 12
pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def _fresh_and_quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No AITER from another test; few interpreted programs that still take several chunks each."""
    monkeypatch.setattr(token_indices, "PROGRAMS_PER_REQUEST", 2)
    monkeypatch.setattr(token_indices, "CHUNK_TOKENS", 32)
    aiter_ops.load_aiter.cache_clear()
    yield
    aiter_ops.load_aiter.cache_clear()


@dataclass(frozen=True)
class Case:
    """One decode: random tensors in a shuffled paged cache with hostile tails."""

    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    global_lens: torch.Tensor
    cp: tuple[int, int, int]
    q_len: int
    causal: bool


def make_case(
    heads: int,
    q_len: int,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    cp: tuple[int, int, int] = (1, 0, 1),
    gap_tokens: int = 0,
    seed: int = 0,
) -> Case:
    """Keys of every request in shuffled blocks; unwritten keys are NaN, unused entries -1."""
    generator = torch.Generator().manual_seed(seed)
    global_lens = torch.tensor(lengths, dtype=torch.int32)
    lens = local_length(global_lens, *cp).to(torch.int32)
    columns = int((lens.max() + BLOCK - 1) // BLOCK) + 2
    blocks = len(lengths) * columns + 1
    stored = torch.full((blocks, BLOCK + gap_tokens, 576), math.nan)
    order = torch.randperm(blocks - 1, generator=generator) + 1
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32)
    taken = 0
    for request, length in enumerate(lens.tolist()):
        for column in range(-(-length // BLOCK)):
            block = int(order[taken])
            taken += 1
            table[request, column] = block
            filled = min(BLOCK, length - column * BLOCK)
            stored[block, :filled] = torch.randn(filled, 576, generator=generator)
    q = torch.randn(len(lengths) * q_len, heads, 576, generator=generator)
    cache = stored.to(kv_dtype)[:, :BLOCK]
    return Case(q.to(q_dtype), cache, table, lens, global_lens, cp, q_len, causal)


def make_plan(case: Case, route: Route) -> AiterPlan:
    shape = AiterShape(
        heads=case.q.shape[1],
        padded_heads=route.padded_heads,
        q_len=case.q_len,
        causal=case.causal,
        cp_round_robin=route.name.endswith("cprr"),
        q_dtype=case.q.dtype,
        kv_dtype=case.cache.dtype,
        max_requests=len(case.lens) + 1,
        max_kv_tokens=int(case.table.shape[1]) * BLOCK,
        kv_granularity=route.kv_granularity,
    )
    return AiterPlan(aiter_ops.load_aiter(), shape, CPU)


def update(plan: AiterPlan, case: Case) -> None:
    plan.update(
        case.table,
        case.lens,
        block_size=BLOCK,
        block_stride_tokens=block_stride_tokens(case.cache),
        causal_lens=case.global_lens if case.cp[0] > 1 else None,
        cp=case.cp,
    )


def check(case: Case, out: torch.Tensor, lse2: torch.Tensor | None, **scales: float) -> None:
    want, want_lse2 = reference_decode(
        case.q.float(),
        case.cache,
        case.table,
        case.lens,
        scale=SCALE,
        q_len=case.q_len,
        causal=case.causal,
        causal_lens=case.global_lens,
        cp=case.cp,
        **scales,
    )
    assert out.shape == want.shape
    assert out.dtype == torch.bfloat16
    assert not out.isnan().any()
    error = (out.float() - want).abs()
    assert bool((error <= 2**-8 * want.abs() + 1e-5).all()), error.max()
    hidden = want_lse2 == -math.inf
    assert bool((out[hidden] == 0).all())
    if lse2 is not None:
        assert lse2.dtype == torch.float32
        assert torch.equal(lse2 == -math.inf, hidden)
        assert torch.allclose(lse2[~hidden], want_lse2[~hidden], atol=1e-5, rtol=1e-6)


def torch_dtype(name: str, arch: str) -> torch.dtype:
    return FP8[arch] if name == "fp8" else torch.bfloat16


HEADS = (1, 6, 8, 9, 12, 16, 17, 32, 33, 48, 64, 65, 96, 128)
"""Kimi-K3's head counts and both ends of every padding."""
QUICK_LENGTHS = (1, 2, 4, 7, 8)
"""Query tokens of the quick tier: each kernel row at an end of its range, and DSpark's 7."""


def routes(version: str, *, quick: bool) -> list[Any]:
    """Every AITER route by kernel, mask, context parallelism and padding, once.

    With the LSE where the kernel has one (without it is the same call less one output). The quick
    ones have the fewest heads that are padded to the kernel's head count, the others the most.
    """
    found: dict[tuple[object, ...], tuple[bool, list[int]]] = {}
    for arch, q, kv, q_len, causal, dcp, lse, heads in product(
        ARCHS, DTYPES, DTYPES, range(1, 9), (True, False), (1, 8), (False, True), HEADS
    ):
        if (dcp > 1 and not lse) or (q_len == 1 and not causal):
            continue
        if quick and q_len not in QUICK_LENGTHS:
            continue
        route = choose_route(
            heads=heads,
            q_len=q_len,
            q_dtype=q,
            kv_dtype=kv,
            causal=causal,
            dcp=dcp,
            arch=arch,
            need_lse=lse,
            aiter_version=version,
        )
        if route.calls_aiter:
            key = (arch, q, kv, q_len, causal, dcp, route.padded_heads)
            if key not in found or found[key][0] != lse:
                found[key] = (lse, [])
            found[key][1].append(heads)
    return [
        pytest.param(*key[:-1], lse, many[0 if quick else -1], id="-".join(map(str, key)))
        for key, (lse, many) in found.items()
    ]


NAMES = ("arch", "q", "kv", "q_len", "causal", "dcp", "lse", "heads")


@pytest.mark.parametrize(NAMES, routes("0.1.20", quick=True))
def test_every_route_of_0_1_20_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    q: str,
    kv: str,
    q_len: int,
    causal: bool,
    dcp: int,
    lse: bool,
    heads: int,
) -> None:
    run_route(monkeypatch, "0.1.20", arch, q, kv, q_len, causal, dcp, lse, heads)


@pytest.mark.long
@pytest.mark.parametrize(NAMES, routes("0.1.20", quick=False))
def test_every_route_of_0_1_20_with_the_most_heads(
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    q: str,
    kv: str,
    q_len: int,
    causal: bool,
    dcp: int,
    lse: bool,
    heads: int,
) -> None:
    run_route(monkeypatch, "0.1.20", arch, q, kv, q_len, causal, dcp, lse, heads)


@pytest.mark.parametrize(NAMES, routes("0.1.7", quick=True))
def test_every_route_of_0_1_7_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    q: str,
    kv: str,
    q_len: int,
    causal: bool,
    dcp: int,
    lse: bool,
    heads: int,
) -> None:
    run_route(monkeypatch, OLD, arch, q, kv, q_len, causal, dcp, lse, heads)


def run_route(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    arch: str,
    q: str,
    kv: str,
    q_len: int,
    causal: bool,
    dcp: int,
    lse: bool,
    heads: int,
) -> None:
    double = AiterContractDouble(version, arch)
    double.install(monkeypatch)
    route = choose_route(
        heads=heads,
        q_len=q_len,
        q_dtype=q,
        kv_dtype=kv,
        causal=causal,
        dcp=dcp,
        arch=arch,
        need_lse=lse,
        aiter_version=version,
    )
    case = make_case(
        heads,
        q_len,
        q_dtype=torch_dtype(q, arch),
        kv_dtype=torch_dtype(kv, arch),
        causal=causal,
        cp=(dcp, 3, 1) if dcp > 1 else (1, 0, 1),
        seed=heads * 100 + q_len,
    )
    plan = make_plan(case, route)
    update(plan, case)
    out, lse2 = plan.decode(
        case.q, case.cache, scale=SCALE, q_scale=0.5, k_scale=0.25, need_lse=lse or dcp > 1
    )
    check(case, out, lse2, q_scale=0.5, k_scale=0.25)
    assert (lse2 is not None) == (lse or dcp > 1)
    assert (double.plans, double.decodes) == (1, 1)


def route_12(**changes: Any) -> Route:
    shape: dict[str, Any] = {
        "heads": 12,
        "q_len": 8,
        "q_dtype": "bf16",
        "kv_dtype": "bf16",
        "causal": True,
        "dcp": 1,
        "arch": "gfx950",
        "need_lse": True,
        "aiter_version": "0.1.20",
    }
    return choose_route(**{**shape, **changes})


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> AiterContractDouble:
    made = AiterContractDouble()
    made.install(monkeypatch)
    return made


def test_head_padding_case_of_the_shared_data(double: AiterContractDouble) -> None:
    cases = json.loads((Path(__file__).resolve().parents[1] / "data" / "decode.json").read_text())
    assert any(case["id"] == "head-padding" for case in cases)
    case = make_case(12, 1, lengths=(1000,))
    plan = make_plan(case, route_12(q_len=1))
    update(plan, case)
    out, lse2 = plan.decode(case.q, case.cache, scale=SCALE, need_lse=True)
    assert double.last_lse is not None
    assert torch.allclose(double.last_lse[:, 12:], torch.full((1, 4), math.log(1000)))
    assert lse2 is not None
    assert (out.shape[1], lse2.shape[1]) == (12, 12)
    check(case, out, lse2)


def test_one_plan_serves_all_layers_of_a_forward(double: AiterContractDouble) -> None:
    first, second = make_case(12, 8), make_case(12, 8, seed=1)
    plan = make_plan(first, route_12())
    update(plan, first)
    for case in (first, second):
        other_layer = Case(
            case.q, case.cache, first.table, first.lens, first.lens, (1, 0, 1), 8, True
        )
        if case is second:
            # Another layer: same table, other keys.
            values = torch.randn(first.cache.shape, generator=torch.Generator().manual_seed(2))
            other_layer = Case(
                case.q,
                values.to(torch.bfloat16),
                first.table,
                first.lens,
                first.lens,
                (1, 0, 1),
                8,
                True,
            )
        out, lse2 = plan.decode(other_layer.q, other_layer.cache, scale=SCALE, need_lse=True)
        check(other_layer, out, lse2)
    assert (double.plans, double.decodes) == (1, 2)


def test_a_plan_made_at_one_length_serves_another(double: AiterContractDouble) -> None:
    short, long = make_case(12, 1, lengths=(1, 1)), make_case(12, 1, lengths=(500, 77))
    plan = make_plan(long, route_12(q_len=1))
    for case in (short, long, short):
        update(plan, case)
        out, lse2 = plan.decode(case.q, case.cache, scale=SCALE, need_lse=True)
        check(case, out, lse2)


def test_the_index_list_is_not_filled_to_its_capacity(double: AiterContractDouble) -> None:
    case = make_case(12, 1)
    plan = make_plan(case, route_12(q_len=1))
    plan.kv_indices.fill_(-7)
    update(plan, case)
    used = sum(max(length, 1) for length in LENGTHS)
    assert bool((plan.kv_indices[:used] >= 0).all())
    assert bool((plan.kv_indices[used:] == -7).all())
    assert plan.kv_indices.dtype == torch.int32


def test_padded_pages_are_addressed_in_tokens(double: AiterContractDouble) -> None:
    case = make_case(12, 1, gap_tokens=3)
    assert block_stride_tokens(case.cache) == BLOCK + 3
    plan = make_plan(case, route_12(q_len=1))
    update(plan, case)
    check(case, *plan.decode(case.q, case.cache, scale=SCALE, need_lse=True))


def test_layouts_that_tokens_cannot_count_are_refused() -> None:
    wide = torch.zeros(4, BLOCK, 2 * 576)[..., :576]
    odd = torch.zeros(4 * (BLOCK * 576 + 1)).as_strided((4, BLOCK, 576), (BLOCK * 576 + 1, 576, 1))
    for cache in (wide, odd):
        with pytest.raises(ShapeError, match="kv_cache has strides"):
            token_view(cache, torch.float32, CPU)


def test_more_requests_or_other_dtypes_are_refused(double: AiterContractDouble) -> None:
    case = make_case(12, 1)
    plan = make_plan(case, route_12(q_len=1))
    with pytest.raises(ShapeError, match="seq_lens has shape"):
        plan.update(case.table, torch.ones(9, dtype=torch.int32), block_size=BLOCK)
    with pytest.raises(ShapeError, match=r"seq_lens is torch\.int64"):
        plan.update(case.table, case.lens.long(), block_size=BLOCK)
    with pytest.raises(ShapeError, match=r"block_table is torch\.int64"):
        plan.update(case.table.long(), case.lens, block_size=BLOCK)
    update(plan, case)
    with pytest.raises(ShapeError, match=r"q is torch\.float32"):
        plan.decode(case.q.float(), case.cache, scale=SCALE)
    with pytest.raises(ShapeError, match=r"kv_cache is torch\.float32"):
        plan.decode(case.q, case.cache.float(), scale=SCALE)
    with pytest.raises(ShapeError, match="q has strides"):
        plan.decode(case.q.transpose(0, 1).contiguous().transpose(0, 1), case.cache, scale=SCALE)
    with pytest.raises(InputError, match="int32"):
        AiterShape(12, 16, 1, True, False, torch.bfloat16, torch.bfloat16, 4096, 1 << 20)


def test_scales_of_fp8_must_be_positive_numbers(double: AiterContractDouble) -> None:
    case = make_case(12, 1, q_dtype=FP8["gfx950"], kv_dtype=FP8["gfx950"])
    plan = make_plan(case, route_12(q_len=1, q_dtype="fp8", kv_dtype="fp8"))
    update(plan, case)
    for scale in (0.0, -1.0, math.nan, torch.ones(1)):
        with pytest.raises(InputError, match="q_scale"):
            plan.decode(case.q, case.cache, scale=SCALE, q_scale=scale)  # type: ignore[arg-type]
    plan.decode(case.q, case.cache, scale=SCALE, q_scale=0.5, k_scale=0.5)
    plan.decode(case.q, case.cache, scale=SCALE, q_scale=0.5, k_scale=0.5)
    assert set(plan.scales) == {0.5}  # the device tensor is made once


def test_global_masks_need_global_lengths_and_interleave_one(double: AiterContractDouble) -> None:
    case = make_case(12, 4, cp=(8, 0, 1))
    plan = make_plan(case, route_12(q_len=4, dcp=8))
    with pytest.raises(InputError, match="causal_lens"):
        plan.update(case.table, case.lens, block_size=BLOCK, cp=(8, 0, 1))
    with pytest.raises(InputError, match="interleave 1"):
        plan.update(
            case.table, case.lens, block_size=BLOCK, causal_lens=case.global_lens, cp=(8, 0, 16)
        )
    local = make_plan(case, route_12(q_len=4))
    with pytest.raises(InputError, match="local positions"):
        local.update(
            case.table, case.lens, block_size=BLOCK, causal_lens=case.global_lens, cp=(8, 0, 1)
        )


@pytest.mark.parametrize("rank", range(8))
def test_rows_without_a_local_key_are_empty(double: AiterContractDouble, rank: int) -> None:
    # Global length 9 over 8 ranks: rank 0 holds two keys, the others one, row 0 sees two ranks'.
    case = make_case(12, 8, lengths=(9, 5, 200), cp=(8, rank, 1))
    plan = make_plan(case, route_12(dcp=8))
    update(plan, case)
    check(case, *plan.decode(case.q, case.cache, scale=SCALE, need_lse=True))


def test_an_empty_batch_calls_nothing(double: AiterContractDouble) -> None:
    case = make_case(12, 1)
    plan = make_plan(case, route_12(q_len=1))
    plan.update(case.table[:0], case.lens[:0], block_size=BLOCK)
    out, lse2 = plan.decode(case.q[:0], case.cache, scale=SCALE, need_lse=True)
    assert (out.shape, double.decodes) == ((0, 12, 512), 0)
    assert lse2 is not None


def test_old_versions_refuse_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    AiterContractDouble(OLD).install(monkeypatch)
    assert not aiter_ops.load_aiter().signatures.missing
    case = make_case(16, 1)
    plan = make_plan(case, route_12(heads=16, q_len=1, need_lse=False, aiter_version=OLD))
    update(plan, case)
    with pytest.raises(PlatformError, match="return_lse"):
        plan.decode(case.q, case.cache, scale=SCALE, need_lse=True)
    draft = make_case(16, 4, causal=False)
    with pytest.raises(PlatformError, match="mask-free"):
        make_plan(draft, Route("aiter_persistent", 16, "", kv_granularity=16))


def test_the_double_aborts_where_aiter_would(double: AiterContractDouble) -> None:
    fp8 = FP8["gfx950"]
    case = make_case(12, 2, q_dtype=fp8, kv_dtype=fp8, causal=False)
    plan = make_plan(case, Route("aiter_persistent", 16, "forced", kv_granularity=16))
    update(plan, case)
    with pytest.raises(ProcessAbort, match="cannot get heuristic kernel"):
        plan.decode(case.q, case.cache, scale=SCALE)


def test_the_double_notices_a_stale_plan(double: AiterContractDouble) -> None:
    case = make_case(12, 1)
    plan = make_plan(case, route_12(q_len=1))
    update(plan, case)
    plan.kv_indptr[1] += 1
    with pytest.raises(ContractError, match="other lengths"):
        plan.decode(case.q, case.cache, scale=SCALE)
