"""The core's sizes and limits, and one call through torch and through the public function."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import k3backend
from k3backend.common import decode_checks
from k3backend.common.balanced_mla import PLAN_TILE_TOKENS
from k3backend.common.errors import InputError, UnsupportedDecodeError
from k3backend.common.launch_config import LaunchConfig
from k3backend.common.split_plan import plan_splits
from k3backend.nvidia.kv_balanced_mla import core as nvidia_core
from k3backend.nvidia.launch_config import decode_launch as nvidia_launch
from k3backend.reference import mla_decode as reference_backend
from k3backend.rocm.kv_balanced_mla import core as rocm_core
from k3backend.rocm.launch_config import decode_launch as rocm_launch
from tests.helpers.decode_cases import BF16, FP8, SCALE, Case, answer, build
from tests.helpers.torch_core import WORKERS, TorchCore

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[1] / "data" / "decode.json").read_text(encoding="utf-8")
    )
}

VENDORS: tuple[Any, ...] = (nvidia_core, rocm_core)


def new_core(heads: int = 12, q_len: int = 2, max_requests: int = 4, **changes: Any) -> TorchCore:
    return TorchCore(heads, q_len, max_requests, True, "cpu", workers=WORKERS, **changes)


def test_there_is_no_row_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(12, 1), (12, 4), (12, 8), (6, 8), (96, 1), (48, 1)]
    assert [shape[0] * shape[1] > 64 for shape in shapes] == CASES["row-floor"]["upstream"]
    for heads, q_len in shapes:
        assert not any(vendor.supports(heads, q_len, "cpu") for vendor in VENDORS)
        monkeypatch.setattr(decode_checks, "interpreting", lambda: True)
        assert all(vendor.supports(heads, q_len, "cpu") for vendor in VENDORS)
        monkeypatch.undo()
        assert nvidia_core.max_planned_requests(heads, q_len) == 1024
    # 8,192 rows are 128 row tiles per request, and a plan holds 16,384 items.
    assert nvidia_core.max_planned_requests(128, 64) == 128
    assert rocm_core.max_planned_requests(128, 64) == 16384 // 86
    with pytest.raises(UnsupportedDecodeError, match="max_requests is 129, expected 1 to 128"):
        nvidia_core.KvBalancedMla(128, 64, 129, True, "cpu")
    assert nvidia_core.max_planned_requests(0, 1) == 0


@pytest.mark.parametrize(
    ("workers", "mebibytes"), [(132, 32.8), (148, 36.8), (256, 63.9), (304, 75.9)]
)
def test_scratch_of_k3_tp8_with_8_tokens_and_256_requests(workers: int, mebibytes: float) -> None:
    found = nvidia_core.workspace_bytes(12, 8, 256, workers)
    assert found == 2 * (workers - 1) * 64 * 513 * 4
    assert found / 2**20 == pytest.approx(mebibytes, abs=0.05)
    assert nvidia_core.workspace_bytes(12, 8, 1024, workers) == found


def test_the_document_states_the_scratch_and_the_row_tiles() -> None:
    text = (Path(__file__).parents[2] / "docs" / "decode.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) B \| ([\d,]+) B \|$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [132, 148, 256, 304]
    for workers, nvidia, rocm in rows:
        found = nvidia_core.workspace_bytes(12, 8, 256, int(workers))
        assert int(nvidia.replace(",", "")) == found
        found = rocm_core.workspace_bytes(12, 8, 256, int(workers))
        assert int(rocm.replace(",", "")) == found
    tiles = re.findall(r"\| (\d+) x [^|]+\| (\d+) x [^|]+\| (\d+) x 64 \|$", text, re.MULTILINE)
    for rows_of, (fp8, bf16, nvidia) in zip((12, 96, 128, 768), tiles, strict=True):
        assert rocm_launch(rows_of).row_tiles(rows_of) == int(fp8)
        assert rocm_launch(rows_of, q_dtype="bf16").row_tiles(rows_of) == int(bf16)
        assert nvidia_launch(rows_of).row_tiles(rows_of) == int(nvidia)


@pytest.mark.parametrize("workers", [1, 8, 132, 256])
@pytest.mark.parametrize("seed", range(4))
def test_plans_stay_within_the_buffers(workers: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    requests = int(generator.integers(1, 200))
    lens = generator.integers(0, 200_000, requests) * generator.integers(0, 2, requests)
    heads, q_len = [(12, 8), (96, 1), (96, 8), (6, 1)][seed]
    core = TorchCore(heads, q_len, requests, True, "cpu", workers=workers)
    plan = plan_splits(lens, core.row_tiles, workers, PLAN_TILE_TOKENS, core.cost)
    partial = plan.num_slots * core.slot_rows * 513 * 4
    assert partial <= core.workspace_bytes
    assert plan.num_slots <= 2 * workers + requests
    assert workers + 1 + plan.work.size <= core.work_len
    assert plan.counts.size == core.counts_len


@pytest.mark.parametrize(("launch"), [nvidia_launch, rocm_launch])
def test_row_tiles_never_read_the_kv_more_often_than_needed(launch: Any) -> None:
    for rows in range(1, 1025):
        for q_dtype in ("fp8", "bf16"):
            config: LaunchConfig = launch(rows, q_dtype=q_dtype)
            assert config.row_tiles(rows) * config.tile_rows >= rows
            assert PLAN_TILE_TOKENS % config.tile_tokens == 0
    for rows in range(1, 129):
        assert rocm_launch(rows).row_tiles(rows) == 1
    assert rocm_launch(96).tile_rows == 96


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"row_groups": (48, 0)}, r"row_groups\[0\] is 48"),
        ({"row_groups": (64, 24)}, r"row_groups\[1\] is 24"),
        ({"tile_tokens": 0}, "tile_tokens is 0"),
        ({"value_chunk": 1024}, "value_chunk is 1024; it has to divide 512"),
        ({"combine_columns": 1024}, "combine_columns is 1024; it has to divide 512"),
        ({"prefetch": True, "num_stages": 2}, "pipelined twice"),
    ],
)
def test_launch_choices_that_cannot_be_launched(change: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {
        "row_groups": (64, 32), "tile_tokens": 32, "value_chunk": 128, "num_warps": 4,
    }  # fmt: skip
    assert LaunchConfig(**good).tile_rows == 96
    with pytest.raises(InputError, match=text):
        LaunchConfig(**(good | change))


def test_limits_of_the_core_are_listed_together() -> None:
    with pytest.raises(UnsupportedDecodeError) as error:
        TorchCore(0, 65, 1025, True, "cpu", workers=0)
    assert len(error.value.reasons) == 4


@pytest.mark.parametrize("vendor", VENDORS)
def test_devices_that_are_not_here(vendor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(decode_checks, "interpreting", lambda: True)
    assert vendor.supports(12, 8, "cpu")
    assert not vendor.supports(129, 1, "cpu")
    for device in ("cuda", "meta"):
        assert not vendor.supports(12, 8, device)
        for build_one in (
            lambda device=device: vendor.KvBalancedMla(12, 8, 4, True, device),
            lambda device=device: vendor.max_active_workers(device),
        ):
            with pytest.raises(UnsupportedDecodeError, match=f"device is {device}"):
                build_one()


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((0, 8, 4), ("heads",)),
        ((12, 65, 4), ("q_len",)),
        ((12, 8, 0), ("max_requests",)),
        ((129, 0, 1025), ("heads", "q_len", "max_requests")),
        ((128, 64, 1024), ("max_requests",)),
    ],
)
def test_sizes_of_shapes_that_cannot_be_built_are_refused(
    vendor: Any, shape: tuple[int, int, int], names: tuple[str, ...]
) -> None:
    for function in (vendor.work_list_len, vendor.workspace_bytes):
        with pytest.raises(UnsupportedDecodeError) as error:
            function(*shape)
        assert len(error.value.reasons) == len(names)
        assert all(f"{name} is" in str(error.value) for name in names)


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("units", [None, 256])
def test_the_documented_sizes_hold_any_object(
    vendor: Any, units: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    archs: tuple[dict[str, str], ...] = ({},)
    if vendor is rocm_core:
        archs = ({"arch": "gfx950"}, {"arch": "gfx942"})
    if units is not None:  # the CPU plays a GPU of 256 units
        properties = SimpleNamespace(multi_processor_count=units, gcnArchName="gfx950")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for heads, q_len, requests in ((1, 1, 4), (12, 1, 256), (12, 8, 64), (128, 1, 8), (96, 8, 3)):
        workers = {} if units is None else {"workers": vendor.max_active_workers("cuda")}
        if units is not None and vendor is rocm_core:
            workers = {"workers": vendor.max_active_workers("cuda", heads * q_len)}
            assert workers["workers"] <= vendor.max_active_workers("cuda")
        for arch, q_dtype in itertools.product(archs, (None, "fp8", "bf16")):
            core = vendor.KvBalancedMla(
                heads, q_len, requests, True, "cpu", q_dtype=q_dtype, **arch, **workers
            )
            assert core.work_len <= vendor.work_list_len(heads, q_len, requests)
            assert core.workspace_bytes <= vendor.workspace_bytes(heads, q_len, requests)


def test_every_reason_of_a_decode_is_listed() -> None:
    inputs = build(Case(lens=(30, 70), heads=12, q_len=2))
    core = new_core()
    good: dict[str, Any] = {
        "q": inputs.q, "kv_cache": inputs.kv_cache, "block_table": inputs.block_table,
        "seq_lens": inputs.seq_lens, "scale": 1.0, "k_scale": 1.0,
    }  # fmt: skip
    assert core.decode_problems(**good) == []
    broken: dict[str, tuple[dict[str, Any], str]] = {
        "table dtype": ({"block_table": inputs.block_table.long()}, "block_table is torch.int64"),
        "table rows": ({"block_table": inputs.block_table[:1]}, "block_table has shape"),
        "table stride": (
            {"block_table": torch.zeros(9, 2, dtype=torch.int32).T}, "contiguous columns"
        ),
        "lens dtype": ({"seq_lens": inputs.seq_lens.long()}, "seq_lens is torch.int64"),
        "lens shape": ({"seq_lens": inputs.seq_lens[:, None]}, "expected [requests]"),
        "scale": ({"scale": 0.0}, "scale is 0.0"),
        "scale nan": ({"k_scale": math.nan}, "k_scale is nan"),
        "cp": ({"cp": (2, 2, 1)}, "cp is (2, 2, 1)"),
        "cp lens": ({"cp": (2, 1, 1)}, "causal_lens is None"),
        "causal lens": ({"causal_lens": inputs.seq_lens[:1]}, "causal_lens has shape"),
        "lse": ({"lse": torch.zeros(4, 12, dtype=BF16)}, "lse is torch.bfloat16"),
        "cache stride": (
            {"kv_cache": torch.zeros(2, 64, 1152).to(FP8)[..., ::2]}, "contiguous last dimension"
        ),
        "meta": ({"q": inputs.q.to("meta")}, "q is on meta"),
    }  # fmt: skip
    for name, (change, text) in broken.items():
        reasons = core.decode_problems(**(good | change))
        assert any(text in reason for reason in reasons), (name, reasons)
    everything = core.decode_problems(**(good | {"scale": -1.0, "q": (1, 2), "cp": (0, 0, 0)}))
    assert len(everything) == 3


def test_buffers_that_are_too_small_are_refused() -> None:
    core = new_core()
    counts, work, workspace = core.new_buffers()
    assert core._plan_buffer_problems(counts, work) == []
    assert "counts has shape" in core._plan_buffer_problems(counts[:-1], work)[0]
    assert "allocate it with work_len" in core._plan_buffer_problems(counts, work[:-1])[0]
    assert core._workspace_problems(workspace) == []
    assert "workspace_bytes" in core._workspace_problems(workspace[:-1])[0]
    longer = torch.empty(workspace.numel() + 8, dtype=torch.uint8)
    assert any("16 bytes" in text for text in core._workspace_problems(longer[8:]))


def test_a_query_dtype_with_other_row_tiles_is_refused() -> None:
    class Rocm(TorchCore):
        def launch_config(self, q_dtype: Any, kv_dtype: Any) -> LaunchConfig:
            return rocm_launch(self.rows, q_dtype=q_dtype, kv_dtype=kv_dtype)

    inputs = build(Case(lens=(30,), heads=128, q_dtype=BF16, kv_dtype=BF16))
    arguments = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, 1.0, 1.0)
    planned = Rocm(128, 1, 1, True, "cpu", workers=4, q_dtype="fp8")
    assert "construct with q_dtype='bf16'" in planned.decode_problems(*arguments)[0]
    assert Rocm(128, 1, 1, True, "cpu", workers=4, q_dtype="bf16").decode_problems(*arguments) == []
    both = Rocm(128, 1, 1, True, "cpu", workers=4)
    assert both.decode_problems(*arguments) == []
    assert [part.row_tiles for part in both.layout.parts] == [1, 2]


def test_cpu_tensors_without_the_interpreter_are_refused() -> None:
    inputs = build(Case(lens=(30,), heads=12))
    with pytest.raises(UnsupportedDecodeError, match="TRITON_INTERPRET=1"):
        k3backend.mla_decode(
            inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, scale=SCALE,
            backend="nvidia",
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "nvidia", "rocm"])
def test_a_query_in_two_parts_is_refused_everywhere(backend: str) -> None:
    inputs = build(Case(lens=(30,), heads=12))
    parts: Any = (inputs.q[..., :512], inputs.q[..., 512:])
    for q, text in ((parts, "q is a tuple"), (inputs.q[0], "q has shape")):
        with pytest.raises(UnsupportedDecodeError, match=text):
            k3backend.mla_decode(
                q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, scale=SCALE,
                backend=backend,
            )  # fmt: skip


def test_an_unknown_backend_is_refused() -> None:
    inputs = build(Case(lens=(30,), heads=12))
    for backend in ("cuda", "", 3):
        with pytest.raises(InputError, match=f"backend is {backend!r}, .*nvidia, rocm, reference"):
            k3backend.mla_decode(
                inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, scale=SCALE,
                backend=backend,
            )  # fmt: skip


REFERENCE_CASES = (
    Case(lens=(0, 1, 400, 65), heads=12, q_len=8, block_size=16),
    Case(lens=(5, 1600, 33), heads=12, q_len=8, block_size=48, cp=(4, 2, 16)),
    Case(lens=(90, 3), heads=96, q_len=2, causal=False, q_dtype=BF16, kv_dtype=BF16),
    Case(lens=(200,), heads=6, q_len=1, q_dtype=BF16),
)


@pytest.mark.parametrize("case", REFERENCE_CASES, ids=lambda case: f"{case.heads}x{case.q_len}")
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_the_reference_backend_plans_splits_and_is_right(
    case: Case, dtype: torch.dtype | None
) -> None:
    inputs = build(case)
    want, want_lse = answer(inputs)
    q = inputs.q if dtype is None else inputs.q.to(dtype)
    before = k3backend.stats()
    out, lse2 = k3backend.mla_decode(
        q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, scale=SCALE,
        q_scale=case.q_scale, k_scale=case.k_scale, q_len=case.q_len, causal=case.causal,
        causal_lens=inputs.causal_lens, cp=case.cp, backend="reference",
    )  # fmt: skip
    after = k3backend.stats()
    assert after.calls == before.calls + 1
    assert after.splits > before.splits
    assert out.dtype == (BF16 if dtype is None else dtype)
    assert lse2 is not None
    # bfloat16 output: 2**-9 of the value. float32: 576 and up to 400 products of 2**-24 each.
    tolerance = {None: 2**-8, torch.float32: 2**-15, torch.float64: 2**-44}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance / 64)
    assert lse2.dtype == torch.float32
    # float32 scores of magnitude 64 and less: 2**-24 each, over 576 products.
    lse_tolerance = 2**-18
    torch.testing.assert_close(lse2.double(), want_lse, rtol=lse_tolerance, atol=lse_tolerance)


@pytest.mark.parametrize("length", [1, 2])
def test_more_workers_than_tiles_change_nothing(length: int) -> None:
    assert CASES["more-splits-than-tiles"]["right"].startswith("equal to one split")
    inputs = build(Case(lens=(length,), heads=12))
    plan = plan_splits(inputs.seq_lens, 1, 16, PLAN_TILE_TOKENS)
    assert plan.counts.tolist() == [1]
    assert plan.work.tolist() == [[0, 0, 0, length, -1, 0]]


def test_the_reference_backend_lists_every_reason() -> None:
    inputs = build(Case(lens=(30, 70), heads=12, q_len=2))
    with pytest.raises(UnsupportedDecodeError) as error:
        reference_backend.decode(
            inputs.q[:3], inputs.kv_cache[..., :100], inputs.block_table[:1], inputs.seq_lens,
            scale=-1.0, q_len=2, cp=(2, 5, 1),
        )  # fmt: skip
    assert len(error.value.reasons) == 6


def test_stats_log_one_line_on_request_and_at_exit(caplog: pytest.LogCaptureFixture) -> None:
    inputs = build(Case(lens=(30, 400), heads=12))
    k3backend.mla_decode(
        inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, scale=SCALE,
        backend="reference",
    )  # fmt: skip
    with caplog.at_level(logging.INFO, logger="k3backend"):
        totals = k3backend.stats()
    assert [record.getMessage() for record in caplog.records] == [str(totals)]
    assert str(totals) == (
        f"k3backend: {totals.calls} decode calls, {totals.splits} split pieces, "
        + "+".join(totals.platforms)
    )
    program = (
        "import logging, multiprocessing, torch, k3backend\n"
        "torch.set_num_threads(1)  # a forked child cannot use its parent's threads\n"
        "def decode():\n"
        "    logging.basicConfig(level=logging.INFO)\n"
        "    cache = torch.zeros(1, 400, 576)\n"
        "    k3backend.mla_decode(torch.zeros(1, 2, 576), cache, torch.zeros(1, 1).int(),\n"
        "        torch.tensor([400]).int(), scale=1.0, backend='reference')\n"
        "if __name__ == '__main__':\n"
        "    decode()\n"
        "    child = multiprocessing.get_context('fork').Process(target=decode)\n"
        "    child.start(); child.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    lines = [line for line in done.stderr.splitlines() if "decode calls" in line]
    assert len(lines) == 2, done.stderr
    assert all("k3backend: 1 decode calls, " in line for line in lines)
    assert all(line.endswith(" split pieces, reference") for line in lines)
