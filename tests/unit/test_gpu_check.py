"""tools/gpu_check.py where there is no GPU: refusals, the list, tiny checks, the arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla
from tools import gpu_check, gpu_correctness, gpu_peers, gpu_speed

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpu_check.py"
CPU = gpu_correctness.Device("cpu", KvBalancedMla, torch.float8_e4m3fn)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows the refusal without a GPU")


@no_gpu
def test_without_a_gpu_it_refuses_in_one_line():
    done = subprocess.run(
        [sys.executable, str(TOOL)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    for word in ("no GPU", torch.__version__, "--dry-run"):
        assert word in done.stderr


@pytest.mark.parametrize("words", [("--budget", "0"), ("--only", "all"), ("x",)])
def test_bad_usage_is_refused(capsys, words):
    assert gpu_check.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_dry_run_lists_everything(capsys, tmp_path):
    path = tmp_path / "result.json"
    assert gpu_check.main(["--dry-run", "--only", "speed", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["schema"] == "k3backend.gpu-check/1"
    assert document["left_out"] == [case.name for case in gpu_speed.cases()]
    assert "would time: TP8 1 tokens fp8 128k x 32, 2.25 GiB of KV" in out


def test_shapes_cover_what_is_served():
    cases = gpu_speed.cases()
    assert len(cases) == len(set(cases))
    fp8 = [case for case in cases if case.dtype == "fp8"]
    assert {(case.tp, case.q_len) for case in fp8} == {
        (tp, q_len) for tp in (1, 2, 4, 8, 16) for q_len in (1, 4, 8)
    }
    longest = {max(case.lens) for case in cases}
    assert {8192, 32768, 131072, 1048576} <= longest
    assert any(len(set(case.lens)) > 50 for case in cases), "a ragged set"
    assert all(sum(case.lens) <= gpu_speed.MAX_TOKENS for case in cases)
    blocks = {case: gpu_speed.BLOCK_SIZES[case.tp] for case in cases}
    pool = gpu_speed.MAX_TOKENS + gpu_speed.MAX_REQUESTS * max(gpu_speed.BLOCK_SIZES.values())
    for case, size in blocks.items():
        assert sum(-(-n // size) for n in case.lens) <= pool // size


def test_rates_are_plain_arithmetic():
    case = gpu_speed.SpeedCase(8, 8, "fp8", "x", (1000, 500))
    row = gpu_speed.result(case, 10.0, copy_bytes_s=1e12)
    assert row["gb_s"] == pytest.approx(1500 * 576 / 10e-6 / 1e9, abs=0.1)
    assert row["of_copy"] == pytest.approx(1500 * 576 / 10e-6 / 1e12, abs=1e-4)
    assert row["tflop_s"] == pytest.approx(1500 * 96 * 2176 / 10e-6 / 1e12, abs=0.01)


def test_tables_name_different_blocks_of_the_pool(monkeypatch):
    monkeypatch.setattr(gpu_speed, "MAX_TOKENS", 8192)
    monkeypatch.setattr(gpu_speed, "MAX_REQUESTS", 1)
    monkeypatch.setattr(gpu_speed, "BLOCK_SIZES", {8: 512})
    case = gpu_speed.SpeedCase(8, 2, "bf16", "x", (600, 1, 512))
    problem = gpu_speed.make_problem(case, gpu_speed.Pool(CPU))
    assert problem.q.shape == (6, 12, 576)
    assert problem.cache.shape == (17, 512, 576)
    assert not problem.cache.isnan().any()
    used = [*problem.table[0].tolist(), int(problem.table[1, 0]), int(problem.table[2, 0])]
    assert len(set(used)) == 4


def test_a_peer_that_is_missing_or_fails_says_so(monkeypatch):
    def broken(problem):
        raise ValueError("takes no such shape")

    peers = {
        "absent": ("no_such_package", 64, broken),
        "broken": ("json", 64, broken),
    }
    monkeypatch.setattr(gpu_speed, "MAX_TOKENS", 8192)
    monkeypatch.setattr(gpu_speed, "MAX_REQUESTS", 1)
    monkeypatch.setattr(gpu_peers, "PEERS", peers)
    case = gpu_speed.SpeedCase(8, 1, "bf16", "x", (600,))
    rows = gpu_peers.time_peers(gpu_speed.Pool(CPU), case, 1e12)
    assert [row["why_not"] for row in rows] == [
        "no_such_package is not installed",
        "ValueError: takes no such shape",
    ]


def test_what_the_budget_cuts_off_is_listed(capsys):
    record = gpu_check.Record(None, 1)
    gpu_check._correctness(record, CPU, limit_s=-1)
    names = [item.name for item in gpu_correctness.checks(CPU)]
    assert record.document["left_out"] == names
    assert record.document["correctness"] == []
    assert capsys.readouterr().out.count("left out: ") == len(names)


@pytest.mark.interpreter
def test_dry_run_checks_tiny_shapes_in_the_interpreter(capsys, tmp_path):
    path = tmp_path / "result.json"
    assert gpu_check.main(["--dry-run", "--only", "correctness", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["correctness"]
    assert [entry["name"] for entry in found] == [i.name for i in gpu_correctness.checks(CPU)]
    assert all(entry["ok"] for entry in found), found
    assert "ok   " in capsys.readouterr().out


@pytest.mark.interpreter
def test_a_wrong_kernel_is_caught(monkeypatch, capsys):
    class Wrong(KvBalancedMla):
        def decode(self, *args, out, **kwargs):
            super().decode(*args, out=out, **kwargs)
            out[-1, -1, -1] += 1
            return out

    device = gpu_correctness.Device("cpu", Wrong, torch.float8_e4m3fn)
    record = gpu_check.Record(None, 1)
    first = next(iter(gpu_correctness.checks(device)))
    monkeypatch.setattr(gpu_correctness, "checks", lambda _: [first])
    gpu_check._correctness(record, device, limit_s=1e9)
    assert record.document["ok"] is False
    assert "error bound" in record.document["correctness"][0]["message"]
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.interpreter
def test_checks_and_timing_of_a_device_run(monkeypatch):
    """What only a GPU reaches, with a cache of less than 4 GiB and without a clock."""
    monkeypatch.setattr(gpu_correctness, "GIB", 2**20)
    gpu_correctness._check_far_blocks(CPU)
    monkeypatch.setattr(gpu_speed, "MAX_TOKENS", 8192)
    monkeypatch.setattr(gpu_speed, "MAX_REQUESTS", 1)
    monkeypatch.setattr(gpu_speed, "BLOCK_SIZES", {8: 512})
    calls = []

    def untimed(step):
        calls.append(step())
        return 10.0, "x"

    monkeypatch.setattr(gpu_speed, "time_us", untimed)
    case = gpu_speed.SpeedCase(8, 1, "bf16", "x", (600, 1, 512))
    row = gpu_speed.time_case(CPU, gpu_speed.Pool(CPU), case, 1e12)
    assert len(calls) == 2, "plan and decode"
    assert (row["plan_us"], row["decode_us"], row["timed"], row["row_tiles"]) == (10, 10, "x", 1)
    assert gpu_check._rates(row).startswith("TP8 1 tokens bf16 x")
