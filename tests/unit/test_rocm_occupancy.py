"""How many workgroups a compute unit is given: what the compiler's registers allow, no more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from k3backend.report.kernel_report import choose, compile_subject
from k3backend.rocm.kv_balanced_mla import core
from k3backend.rocm.launch_config import workgroups_per_cu


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize(
    "name", ["decode TP8 1 token", "decode TP4 1 token", "decode TP8 4 tokens"]
)
def test_workgroups_fit_the_registers(arch: str, name: str) -> None:
    (subject,) = choose([arch], name)
    outcome = compile_subject(subject)
    assert outcome.facts is not None
    registers = outcome.facts.registers
    shape = {"TP8 1": 12, "TP4 1": 24, "TP8 4": 48}[name.removeprefix("decode ")[:5]]
    # 512 registers of a lane per SIMD, and one wave of each of the four warps on every SIMD.
    assert workgroups_per_cu(shape, arch=arch) == (2 if registers <= 256 else 1)


@pytest.mark.parametrize(
    ("arch", "units", "rows", "q_dtype", "workers"),
    [
        ("gfx950", 256, 12, "fp8", 512),
        ("gfx950", 256, 24, "fp8", 512),
        ("gfx950", 256, 48, "fp8", 256),
        ("gfx950", 256, 96, "fp8", 256),
        ("gfx950", 256, 12, "bf16", 256),
        ("gfx942", 304, 12, "fp8", 304),
        ("gfx942", 304, 24, "fp8", 608),
    ],
)
def test_workers_of_a_device(
    monkeypatch: pytest.MonkeyPatch, arch: str, units: int, rows: int, q_dtype: str, workers: int
) -> None:
    pairs = (12, 24) if arch == "gfx950" else (24,)
    properties = SimpleNamespace(multi_processor_count=units, gcnArchName=f"{arch}:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert core.max_active_workers("cuda", rows, q_dtype) == workers  # type: ignore[arg-type]
    assert core.max_active_workers("cpu", rows, q_dtype) == 8  # type: ignore[arg-type]
    # Without a shape: the most that any object of this GPU uses.
    assert core.max_active_workers("cuda") == 2 * units
    assert core.max_active_workers("cuda", rows) == 2 * units // (1 if rows in pairs else 2)
    assert core.supports(12, 8, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not core.supports(12, 8, "cuda")
