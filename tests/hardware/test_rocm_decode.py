"""Decode on a real AMD GPU: `K3BACKEND_REQUIRE=rocm python -m pytest tests/hardware`.

Without a GPU every test here skips; with K3BACKEND_REQUIRE=rocm that is a failure instead.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from k3backend.rocm.aiter_capabilities import ABSENT, ARCHS
from k3backend.rocm.aiter_ops import installed_version, load_aiter
from k3backend.rocm.aiter_tables import table_for
from k3backend.rocm.kv_balanced_mla.core import FP8_DTYPES, KvBalancedMla, gpu_arch
from k3backend.rocm.kv_balanced_mla.decode import KvBalancedDecode
from tests.helpers.decode_cases import BF16, FP8, Case, build, run
from tests.helpers.hardware_checks import (
    check_graph,
    check_layer,
    on_device,
    require_gpu,
    scales_of,
)

pytestmark = pytest.mark.hardware
PROBE = Path(__file__).with_name("route_probe.py")
LENS = (20_000, 3, 1, 777, 0, 4096)
K3 = (
    Case(LENS, heads=12),
    Case(LENS, heads=12, q_len=8),
    Case(LENS, heads=12, q_len=7, causal=False),
    Case(LENS, heads=8, q_len=7, causal=False),
    Case(LENS, heads=6, q_len=8),
    Case(LENS, heads=24),
    Case(LENS, heads=96),
    Case(LENS, heads=96, q_len=4, cp=(8, 3, 1)),
    Case(LENS, heads=96, cp=(8, 7, 1)),
)


@pytest.fixture
def device() -> torch.device:
    return require_gpu("rocm")


@pytest.fixture
def fp8(device: torch.device) -> torch.dtype:
    return FP8_DTYPES[gpu_arch(device)]


def without_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3backend.rocm.kv_balanced_mla.decode.installed_version", lambda: ABSENT)


def test_the_gpu_has_tables_and_launch_choices(device: torch.device) -> None:
    assert gpu_arch(device) in ARCHS


def test_an_installed_aiter_is_callable_and_known(device: torch.device) -> None:
    version = installed_version()
    if version == ABSENT:
        pytest.skip("AITER is not installed: every shape takes the folded kernel")
    assert not load_aiter().signatures.missing
    assert table_for(version, gpu_arch(device)).rows


@pytest.mark.parametrize("case", K3, ids=lambda c: f"{c.heads}x{c.q_len}-dcp{c.cp[0]}")
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_folded_kernel(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    fp8: torch.dtype,
    case: Case,
    dtype: str,
) -> None:
    without_aiter(monkeypatch)
    kind = FP8 if dtype == "fp8" else BF16
    check_layer(KvBalancedDecode, replace(case, q_dtype=kind, kv_dtype=kind), device, fp8)


@pytest.mark.parametrize("case", K3, ids=lambda c: f"{c.heads}x{c.q_len}-dcp{c.cp[0]}")
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_route_that_a_layer_takes(
    device: torch.device, fp8: torch.dtype, case: Case, dtype: str
) -> None:
    kind = FP8 if dtype == "fp8" else BF16
    check_layer(KvBalancedDecode, replace(case, q_dtype=kind, kv_dtype=kind), device, fp8)


@pytest.mark.parametrize("q_len", [1, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("aiter", [True, False], ids=["route", "folded"])
def test_a_graph_captured_short_replays_long(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, fp8: torch.dtype, q_len: int, aiter: bool
) -> None:
    if not aiter:
        without_aiter(monkeypatch)
    check_graph(KvBalancedDecode, Case((100_000, 9_000), heads=12, q_len=q_len), device, fp8)


def test_the_folded_kernel_repeats_bitwise(device: torch.device, fp8: torch.dtype) -> None:
    case = Case(LENS, heads=12, q_len=8)
    inputs = on_device(build(case), device, fp8)
    core = KvBalancedMla(12, 8, len(LENS), True, device)
    first, again = run(core, inputs), run(core, inputs)
    assert torch.equal(first[0], again[0])
    assert first[1] is not None
    assert again[1] is not None
    assert torch.equal(first[1], again[1])


def test_caches_above_4_gib(device: torch.device, fp8: torch.dtype) -> None:
    # The last blocks of a cache of 8 million tokens of 576 bytes: 4.5 GiB.
    case = scales_of(Case((5000, 70), heads=12))
    small = on_device(build(case), device, fp8)
    blocks = 8_000_000 // case.block_size
    cache = torch.zeros(blocks, case.block_size, 576, dtype=torch.uint8, device=device).view(fp8)
    used = small.kv_cache.shape[0]
    cache[-used:].copy_(small.kv_cache)
    table = torch.where(small.block_table >= 0, small.block_table + blocks - used, -1)
    inputs = replace(small, kv_cache=cache, block_table=table.to(torch.int32))
    core = KvBalancedMla(12, 1, 2, True, device)
    want, got = run(core, small), run(core, inputs)
    assert torch.equal(want[0], got[0])


def test_every_aiter_route_in_a_process_that_may_die(device: torch.device) -> None:
    if installed_version() == ABSENT:
        pytest.skip("AITER is not installed: no route calls it")
    done: Any = subprocess.run(
        [sys.executable, str(PROBE)],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        cwd=PROBE.parents[2],
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
