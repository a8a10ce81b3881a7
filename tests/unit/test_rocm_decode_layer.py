"""The decode layer on ROCm: AITER (the contract double) and the folded kernel, equal to float64."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3backend.common.decode_counters import read_stats
from k3backend.common.errors import PlatformError, UnsupportedDecodeError, WorkspaceError
from k3backend.common.layer_config import DecodeConfig
from k3backend.common.workspace import OwnWorkspace
from k3backend.nvidia.kv_balanced_mla.decode import KvBalancedDecode as NvidiaDecode
from k3backend.rocm import aiter_ops, token_indices
from k3backend.rocm.kv_balanced_mla.core import (
    KvBalancedMla,
    max_planned_requests,
    supports,
    work_list_len,
    workspace_bytes,
)
from k3backend.rocm.kv_balanced_mla.decode import KvBalancedDecode
from tests.helpers.aiter_contract_double import AiterContractDouble
from tests.helpers.decode_cases import BF16, FP8, SCALE, Case, Inputs, answer, build, check
from tests.helpers.decode_layers import Host
from tests.helpers.hardware_checks import check_aiter, check_layer, require_gpu

pytestmark = pytest.mark.interpreter
LENS = (130, 9, 70)
TARGET = Case(lens=LENS, heads=12, q_len=8)
DRAFT = Case(lens=LENS, heads=12, q_len=7, causal=False)


@pytest.fixture(autouse=True)
def _fresh_and_quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(token_indices, "PROGRAMS_PER_REQUEST", 2)
    monkeypatch.setattr(token_indices, "CHUNK_TOKENS", 64)
    aiter_ops.load_aiter.cache_clear()
    yield
    aiter_ops.load_aiter.cache_clear()


def config(case: Case, **changes: Any) -> DecodeConfig:
    base = DecodeConfig(
        max_requests=4,
        max_q_len=8,
        device="cpu",
        dcp_size=case.cp[0],
        q_dtype="fp8" if case.q_dtype == FP8 else "bf16",
        max_kv_tokens=512,
        interleave=lambda: case.cp[2],
        capturing=lambda: False,
    )
    return replace(base, **changes)


def run(layer: Any, inputs: Inputs, host: Host | None = None) -> tuple[Any, Any]:
    case = inputs.case
    host = host or Host(dcp_world=case.cp[0], dcp_rank=case.cp[1])
    step = host.forward(inputs)
    out, lse2 = layer.decode(step.impl, inputs.q, inputs.kv_cache, step.metadata, step.layer)
    return out, lse2


def check_close(inputs: Inputs, out: torch.Tensor, lse2: torch.Tensor) -> None:
    """Against float64: the double rounds its output to bfloat16 once and computes in float32."""
    want, want_lse2 = answer(inputs)
    assert bool(((out.double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all())
    hidden = want_lse2 == -torch.inf
    assert torch.equal(lse2 == -torch.inf, hidden)
    assert torch.allclose(lse2[~hidden].double(), want_lse2[~hidden], atol=1e-4)


@pytest.mark.parametrize("draft_heads", [12, 8])
def test_k3_tp8_with_dspark_decodes_in_one_pass_with_one_read(draft_heads: int) -> None:
    for case in (TARGET, replace(DRAFT, heads=draft_heads)):
        layer = KvBalancedDecode(case.heads, config=config(case))
        inputs = build(case)
        check(inputs, *run(layer, inputs))
        core = layer.make_core(case.q_len, case.causal)
        assert core.row_tiles == 1  # one row tile: the KV is read once
        assert layer.plans == 1


@pytest.mark.parametrize("draft_heads", [12, 8])
def test_k3_tp8_with_dspark_is_one_aiter_call_each(
    monkeypatch: pytest.MonkeyPatch, draft_heads: int
) -> None:
    double = AiterContractDouble()
    double.install(monkeypatch)
    before = read_stats().calls
    for calls, case in enumerate((TARGET, replace(DRAFT, heads=draft_heads)), start=1):
        layer = KvBalancedDecode(case.heads, config=config(case))
        inputs = build(case)
        check_close(inputs, *run(layer, inputs))
        assert (double.plans, double.decodes) == (calls, calls)
        (route,) = layer.routes.values()
        assert (route.name, route.padded_heads, route.kv_reads) == ("aiter_persistent", 16, 1)
        assert read_stats().calls == before + calls


def test_bf16_draft_reads_once_although_aiter_would_read_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double = AiterContractDouble()
    double.install(monkeypatch)
    case = replace(DRAFT, q_dtype=BF16, kv_dtype=BF16, q_scale=1.0, k_scale=1.0)
    layer = KvBalancedDecode(12, config=config(case))
    inputs = build(case)
    check(inputs, *run(layer, inputs))
    (route,) = layer.routes.values()
    assert (route.name, route.kv_reads, double.decodes) == ("folded", 1, 0)


def test_layers_of_a_forward_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    double = AiterContractDouble()
    double.install(monkeypatch)
    workspace = OwnWorkspace("cpu")
    shared = config(TARGET, workspace=workspace)
    layers = [KvBalancedDecode(12, config=shared) for _ in range(3)]
    workspace.lock()
    inputs = build(TARGET)
    step = Host().forward(inputs)
    for layer in layers:
        out, lse2 = layer.decode(step.impl, inputs.q, inputs.kv_cache, step.metadata, step.layer)
        check_close(inputs, out, lse2)
    assert (double.plans, double.decodes) == (1, 3)
    again = Host().forward(inputs)
    layers[0].decode(again.impl, inputs.q, inputs.kv_cache, again.metadata, again.layer)
    assert double.plans == 2  # another forward plans anew


def test_layers_of_another_kv_group_get_their_own_token_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    AiterContractDouble().install(monkeypatch)
    inputs = build(TARGET)
    other = build(replace(TARGET, seed=5))
    # One forward, one lengths buffer, two groups: each has its blocks and its table.
    other = replace(other, seq_lens=inputs.seq_lens, causal_lens=inputs.causal_lens)
    assert not torch.equal(inputs.block_table, other.block_table)
    context = object()
    layer = KvBalancedDecode(12, config=config(TARGET, forward_context=lambda: context))
    for found in (inputs, other, inputs):
        out, lse2 = run(layer, found)
        check_close(found, out, lse2)
    assert all(route.calls_aiter for route in layer.routes.values())
    assert layer.plans == 3


def test_shapes_alternate_on_one_index_list(monkeypatch: pytest.MonkeyPatch) -> None:
    AiterContractDouble().install(monkeypatch)
    layer = KvBalancedDecode(12, config=config(TARGET))
    verify, one = build(TARGET), build(Case(lens=(77, 1), heads=12, seed=3))
    for inputs in (verify, one, verify, one):
        check_close(inputs, *run(layer, inputs))


@pytest.mark.parametrize("rank", [0, 5])
def test_dcp_verify_masks_on_global_positions(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    double = AiterContractDouble()
    double.install(monkeypatch)
    # 12 heads over 8 ranks: 96 gathered, padded to 128. Global length 9: most ranks hold one key.
    case = Case(lens=(300, 9), heads=96, q_len=4, cp=(8, rank, 1))
    layer = KvBalancedDecode(12, config=config(case))
    inputs = build(case)
    check_close(inputs, *run(layer, inputs))
    (route,) = layer.routes.values()
    assert (route.name, route.padded_heads, double.decodes) == ("aiter_persistent_cprr", 128, 1)


def test_an_interleave_that_aiter_has_no_mask_for_is_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double = AiterContractDouble()
    double.install(monkeypatch)
    case = Case(lens=(90, 9), heads=12, q_len=2, cp=(2, 1, 16))
    layer = KvBalancedDecode(6, config=config(case))
    inputs = build(case)
    check(inputs, *run(layer, inputs))
    assert double.decodes == 0


def test_caches_that_tokens_cannot_count_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    double = AiterContractDouble()
    double.install(monkeypatch)
    case = Case(lens=(40,), heads=12)
    layer = KvBalancedDecode(12, config=config(case))
    inputs = build(case, token_stride=640)
    check(inputs, *run(layer, inputs))
    (route,) = layer.routes.values()
    assert "strides" in route.reason
    assert double.decodes == 0


def test_without_a_longest_length_aiter_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    double = AiterContractDouble()
    double.install(monkeypatch)
    case = Case(lens=(40,), heads=12)
    layer = KvBalancedDecode(12, config=config(case, max_kv_tokens=0))
    inputs = build(case)
    check(inputs, *run(layer, inputs))
    (route,) = layer.routes.values()
    assert "max_kv_tokens" in route.reason


def test_an_interleave_beyond_the_index_list_is_not_aiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """AITER would drop the keys that have no room; the folded kernel needs no list."""
    double = AiterContractDouble()
    double.install(monkeypatch)
    case = Case(lens=(300, 280), heads=96, causal=False, cp=(8, 1, 64))
    layer = KvBalancedDecode(
        12, config=config(case, max_kv_tokens=39, max_interleave=1)
    )  # ceil(300 / 8) + 1
    inputs = build(case)
    check(inputs, *run(layer, inputs))
    (route,) = layer.routes.values()
    assert "sized for at most 1; start with --cp-kv-cache-interleave-size 64" in route.reason
    assert double.decodes == 0
    fitting = KvBalancedDecode(12, config=config(case, max_kv_tokens=102, max_interleave=64))
    check_close(inputs, *run(fitting, inputs))
    assert double.decodes == 1


def test_each_route_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    layer = KvBalancedDecode(12, config=config(TARGET))
    inputs = build(TARGET)
    with caplog.at_level(logging.INFO, logger="k3backend"):
        run(layer, inputs)
        run(layer, inputs)
    lines = [record.message for record in caplog.records if "12 heads x 8" in record.message]
    assert lines == ["k3backend: 12 heads x 8 tokens, causal: folded (AITER is not installed)"]


def test_an_installed_aiter_that_cannot_be_called_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    AiterContractDouble().install(monkeypatch)
    monkeypatch.setenv("AITER_MLA_USE_OPUS", "1")
    with pytest.raises(PlatformError, match="AITER_MLA_USE_OPUS"):
        KvBalancedDecode(12, config=config(TARGET))


def limits(kind: Any) -> list[str]:
    """The messages of everything that a layer refuses, at construction and per step."""
    said = []
    for heads, changes in (
        (0, {}),
        (129, {}),
        (12, {"max_requests": 1025}),
        (12, {"dcp_size": 16}),
    ):
        with pytest.raises(UnsupportedDecodeError) as error:
            kind(heads, config=config(TARGET, **changes))
        said.append(str(error.value))
    inputs = build(TARGET)
    layer = kind(12, config=config(TARGET))
    uneven = Host().forward(inputs)
    uneven.metadata.query_start_loc_cpu = torch.tensor([0, 8, 14, 24])
    for step, q in (
        (uneven, inputs.q),
        (Host().forward(inputs), inputs.q[:-1]),
        (Host().forward(inputs), (inputs.q, inputs.q)),
        (Host(dcp_world=2).forward(inputs), inputs.q),
        (Host().forward(build(replace(TARGET, q_len=9))), build(replace(TARGET, q_len=9)).q),
    ):
        with pytest.raises(UnsupportedDecodeError) as error:
            layer.decode(step.impl, q, inputs.kv_cache, step.metadata, step.layer)
        said.append(str(error.value))
    capturing = kind(12, config=config(TARGET, capturing=lambda: True))
    with pytest.raises(WorkspaceError) as graph:
        run(capturing, inputs)
    said.append(str(graph.value))
    return said


def test_limits_and_messages_are_those_of_nvidia() -> None:
    assert limits(KvBalancedDecode) == limits(NvidiaDecode)


def test_sizes_follow_the_shape() -> None:
    core = KvBalancedMla(12, 8, 64, True, "cpu", workers=256, q_dtype="bf16")
    assert core.work_len <= work_list_len(12, 8, 64, workers=256)
    assert core.workspace_bytes <= workspace_bytes(12, 8, 64, workers=256)
    assert supports(12, 8, "cpu")  # under the interpreter
    assert not supports(129, 1, "cpu")
    assert (max_planned_requests(12, 8), max_planned_requests(0, 8)) == (1024, 0)


def test_gfx942_takes_its_own_fp8_format() -> None:
    fnuz = torch.float8_e4m3fnuz
    case = Case(lens=(70, 0, 5), heads=12, q_len=2, q_dtype=FP8, kv_dtype=FP8)
    inputs = build(case)
    # fnuz holds half of what e4m3fn does per bit pattern, up to 240: halve what exceeds it.
    q, cache = inputs.q.float(), inputs.kv_cache.float()
    core = KvBalancedMla(12, 2, 3, True, "cpu", workers=4, arch="gfx942")
    refused = core.decode_problems(
        inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, SCALE, 1.0
    )
    assert any("float8_e4m3fn," in reason and "fnuz" in reason for reason in refused)
    q_fnuz, cache_fnuz = q.clamp(-240, 240).to(fnuz), cache.clamp(-240, 240).to(fnuz)
    out, lse2 = core.run(
        q_fnuz,
        cache_fnuz,
        inputs.block_table,
        inputs.seq_lens,
        scale=inputs.score_scale,
        k_scale=case.k_scale,
    )
    same = replace(inputs, q=q_fnuz, kv_cache=cache_fnuz)
    check(same, out, lse2)


def test_the_hardware_checks_work_on_the_double(monkeypatch: pytest.MonkeyPatch) -> None:
    AiterContractDouble().install(monkeypatch)
    for case in (TARGET, Case(lens=(90, 3), heads=96, q_len=2, cp=(8, 3, 1))):
        layer = check_layer(KvBalancedDecode, case, torch.device("cpu"), FP8)
        assert all(route.calls_aiter for route in layer.routes.values())
    folded = replace(DRAFT, lens=(40,), q_dtype=BF16, kv_dtype=BF16)
    layer = check_layer(KvBalancedDecode, folded, torch.device("cpu"), FP8)
    assert not any(route.calls_aiter for route in layer.routes.values())


def test_the_hardware_checks_notice_one_wrong_query_position() -> None:
    inputs = build(TARGET)
    want, lse2 = answer(inputs)
    right = want.to(torch.bfloat16)
    check_aiter(inputs, right, lse2.float())
    wrong = right.clone()
    wrong[7] = wrong[6]
    with pytest.raises(AssertionError, match="token 7"):
        check_aiter(inputs, wrong, lse2.float())


def test_a_required_gpu_that_is_missing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("K3BACKEND_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no rocm GPU"):
        require_gpu("rocm")
    monkeypatch.setenv("K3BACKEND_REQUIRE", "rocm")
    with pytest.raises(pytest.fail.Exception, match="K3BACKEND_REQUIRE=rocm"):
        require_gpu("rocm")
