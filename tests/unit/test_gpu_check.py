"""tools/gpu_check.py where there is no GPU: refusals, the list, tiny checks, faults, arithmetic.

Its processes are tested in test_gpu_workers.py, the launches for a GPU in test_gpu_launches.py.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla
from tests.helpers.decode_cases import BF16, FP8, Case, build
from tests.helpers.gpu_shapes import CPU, right_output, use_small_pool
from tools import gpu_bench, gpu_check, gpu_correctness, gpu_speed
from tools.gpu_speed import SpeedCase, make_problem, wrong_output

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.helpers.fake_cuda import FakeCuda, fake_cuda  # noqa: F401

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpu_check.py"
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


@pytest.mark.parametrize(
    "words", [("--budget", "0"), ("--only", "all"), ("x",), ("--jobs", "0"), ("--jobs", "many")]
)
def test_bad_usage_is_refused(capsys, words):
    assert gpu_check.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_dry_run_lists_everything(capsys, tmp_path):
    path = tmp_path / "result.json"
    assert gpu_check.main(["--dry-run", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["schema"] == "k3backend.gpu-check/2"
    names = gpu_bench.gpu_names()
    assert document["left_out"] == [*names.checks, *names.timings]
    assert "would time: TP8 1 tokens fp8 128k x 32, 2.25 GiB of KV" in out


def test_the_most_telling_entries_come_first():
    names = gpu_bench.gpu_names()
    for entries in (names.checks, names.compilations, names.timings):
        assert len(entries) == len(set(entries))
    head = " ".join(names.checks[:9])
    for word in ("graph", "4 GiB", "same bits", "65,536 keys of fp8", "100,000", "device equals"):
        assert word in head
    assert names.timings[0] == "copy"
    peers = [at for at, name in enumerate(names.timings) if name.startswith("peer ")]
    compared = [f"speed {case.name}" for case in gpu_speed.compared_cases()]
    assert peers, "peers are timed"
    assert max(names.timings.index(name) for name in compared) < peers[0] < 12
    assert set(names.compilations) == {
        f"compile {name.removeprefix('speed ')}" for name in names.timings if "speed " in name
    }


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
    case = SpeedCase(8, 8, "fp8", "x", (1000, 500))
    row = gpu_speed.timed_row(case, gpu_speed.Time(10.0, 9.0), "")
    assert row["gb_s"] == pytest.approx(1500 * 576 / 10e-6 / 1e9, abs=0.1)
    assert row["tflop_s"] == pytest.approx(1500 * 96 * 2176 / 10e-6 / 1e12, abs=0.01)
    assert row["timed"] == "graph"
    wrong = gpu_speed.timed_row(case, gpu_speed.Time(10.0, 9.0, "no"), "all of it")
    assert (wrong["wrong"], wrong["timed"]) == ("all of it", "eager launches: no")
    assert not {"gb_s", "tflop_s"} & set(wrong)
    assert "WRONG: all of it" in gpu_check.rates_line(wrong)


@pytest.fixture
def small_pool(monkeypatch):
    return use_small_pool(monkeypatch)


def test_tables_name_different_blocks_of_the_pool(small_pool):
    problem = make_problem(SpeedCase(8, 2, "bf16", "x", (600, 1, 512)), small_pool)
    assert problem.q.shape == (6, 12, 576)
    assert problem.cache.shape == (17, 512, 576)
    assert not problem.cache.isnan().any()
    used = [*problem.table[0].tolist(), int(problem.table[1, 0]), int(problem.table[2, 0])]
    assert sorted(used) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_a_timed_shape_s_output_is_checked(small_pool, dtype):
    case = SpeedCase(8, 4, dtype, "x", (600, 2, 512, 77))
    problem = make_problem(case, small_pool)
    out = right_output(problem)
    assert wrong_output(problem, out) == ""
    for fault in (
        lambda out: out.zero_(),
        lambda out: out.fill_(math.nan),
        lambda out: out[-1].mul_(1.2),
        lambda out: out[:4].copy_(out[12:16]),
        lambda out: out[5:].roll(1, 0),
    ):
        broken = out.clone()
        changed = fault(broken)
        broken = torch.cat([out[:5], changed]) if len(changed) == len(out) - 5 else broken
        assert "off float32" in wrong_output(problem, broken)


def test_a_split_that_is_left_out_is_seen(small_pool):
    problem = make_problem(SpeedCase(8, 1, "bf16", "x", (2048,)), small_pool)
    keys = problem.cache.float()[problem.table[0].long()].reshape(-1, 576)
    scores = (problem.q[0].float() @ keys.T) * gpu_speed.SCALE
    # One of 132 pieces.
    scores[:, 1024:1040] = -math.inf
    out = (scores.softmax(-1) @ keys[:, :512]).to(BF16)[None]
    assert "off float32" in wrong_output(problem, out)


def test_scores_have_the_slack_of_a_gpu_s_sums():
    gpu = replace(CPU, name="cuda")
    hopper = replace(gpu, exact_fp8=False)
    fp8, bf16 = build(Case((65, 0, 3))), build(Case((65, 0, 3), q_dtype=BF16, kv_dtype=BF16))
    assert gpu_correctness.lse_slack(CPU, fp8) == 0
    for device, inputs in ((gpu, fp8), (gpu, bf16), (hopper, bf16)):
        # One key less of 65 is 2e-2 in lse2.
        assert 2**-20 < gpu_correctness.lse_slack(device, inputs) < 1e-4
    slack = gpu_correctness.lse_slack(hopper, fp8)
    # A sum of 576 products of about 1.5 is about 36 wide: cut to 2**-7 or 2**-8, 594 times.
    assert 0.02 < slack < 0.5
    assert gpu_correctness.lse_slack(hopper, build(Case((0, 0)))) == 0


@pytest.mark.interpreter
def test_interpret_checks_tiny_shapes(capsys, tmp_path):
    path = tmp_path / "result.json"
    assert gpu_check.main(["--interpret", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    found = document["correctness"]
    assert [f"check {entry['name']}" for entry in found] == gpu_bench.tiny_names().checks
    assert all(entry["ok"] for entry in found), found
    assert (document["speed"], document["peers"]) == ([], [])
    assert "ok   " in capsys.readouterr().out


class Faulty(KvBalancedMla):
    """Decodes, then breaks the result as its fault says."""

    fault: Any = None

    def decode(self, *args, out, lse, **kwargs):
        super().decode(*args, out=out, lse=lse, **kwargs)
        type(self).fault(out, lse)
        return out


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda out, lse: out.zero_(), "error bound"),
        (lambda out, lse: out[-1, -1, -1].add_(1), "error bound"),
        (lambda out, lse: out.fill_(math.nan), "NaN"),
        (lambda out, lse: lse[-1].add_(0.01), "lse2"),
        (lambda out, lse: lse.mul_(math.log(2)), "lse2"),
        (lambda out, lse: lse.fill_(math.nan), "-inf exactly"),
    ],
    ids=["zero", "one element", "nan", "lse", "natural lse", "nan lse"],
)
def test_a_wrong_decode_is_caught(monkeypatch, fault, said):
    monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
    device = gpu_correctness.Device("cpu", Faulty, FP8)
    name = next(name for name in gpu_bench.tiny_names().checks if "decode fp8, tiny" in name)
    found = gpu_bench.GpuBench(device, {}).run(name)
    assert found["ok"] is False
    assert said in found["message"]


@pytest.mark.interpreter
def test_a_split_that_the_combine_drops_is_caught(monkeypatch):
    from k3backend.common.kernels import launch

    combine = launch.launch_combine

    def without_one(config, *, partial_lse, **arguments):
        partial_lse[:12] = -math.inf
        combine(config, partial_lse=partial_lse, **arguments)

    monkeypatch.setattr(launch, "launch_combine", without_one)
    item = gpu_correctness._decode_check(CPU, "long", Case((1300,), heads=6, q_len=2))
    found = gpu_correctness.outcome(item)
    assert found["ok"] is False
    assert "error bound" in found["message"]


@pytest.mark.interpreter
def test_a_decode_that_raises_is_a_failed_check(monkeypatch):
    def fault(out, lse):
        raise RuntimeError("\nout of resource: shared memory\nmore")

    monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
    device = gpu_correctness.Device("cpu", Faulty, FP8)
    found = gpu_bench.GpuBench(device, {}).run("check decode fp8, tiny")
    assert found["message"] == "RuntimeError: out of resource: shared memory"


@pytest.mark.interpreter
def test_checks_that_only_a_gpu_reaches(monkeypatch):
    """With a cache of less than 4 GiB and a few keys."""
    monkeypatch.setattr(gpu_correctness, "GIB", 2**20)
    gpu_correctness._check_far_blocks(CPU)
    monkeypatch.setattr(gpu_correctness, "LONG_TOKENS", 100)
    gpu_correctness._check_long_piece(CPU, FP8)
    monkeypatch.setattr(gpu_correctness, "REPEATED_LENS", (130, 0, 65))
    gpu_correctness._check_repeat(CPU)


@pytest.mark.interpreter
def test_a_graph_is_captured_short_and_replayed_long(monkeypatch, fake_cuda):
    case = Case((70, 1, 0), heads=2, q_len=2, block_size=48)
    monkeypatch.setattr(gpu_correctness, "_long_case", lambda _: case)

    class DevicePlanned(KvBalancedMla):
        interpret_planner = True

    few = replace(CPU, core=lambda *a, **k: DevicePlanned(*a, **(k | {"workers": 3})))
    gpu_correctness._check_graph(few)
    assert set(fake_cuda.launches) == {
        "split_plan_kernel", "folded_decode_kernel", "combine_kernel"
    }  # fmt: skip
    # A plan that the host makes while capturing is of the lengths of then.
    planned = replace(CPU, core=lambda *a, **k: KvBalancedMla(*a, **(k | {"workers": 3})))
    with pytest.raises((AssertionError, RuntimeError)):
        gpu_correctness._check_graph(planned)


@pytest.mark.interpreter
def test_shapes_are_compiled_checked_and_timed(monkeypatch, small_pool, fake_cuda):
    monkeypatch.setattr(gpu_speed, "REPEATS", 2)
    monkeypatch.setattr(gpu_speed, "WARM_REPLAYS", 2)
    monkeypatch.setattr(gpu_speed.Step, "plan", host_plan(gpu_speed.Step.plan))
    watch = gpu_speed.Watch(CPU, 1024)
    case = SpeedCase(8, 1, "bf16", "x", (60, 1, 51))
    assert gpu_speed.compile_case(CPU, case) == {"nan": False}
    row = gpu_speed.time_case(CPU, small_pool, case, watch)
    assert "wrong" not in row
    # The clock counts launches: a decode and its combine.
    assert (row["decode_us"], row["warm_us"], row["timed"]) == (20, 20, "graph")
    assert row["row_tiles"] == 1
    assert gpu_check.rates_line(row | {"of_copy": 0.5}).startswith("TP8 1 tokens bf16 x")
    # A copy, read and written; the bytes are of the call, the time of the fake.
    assert gpu_speed.copy_bandwidth(CPU, watch, 4096) == pytest.approx(2 * 4096 / 10e-6)


def host_plan(plan):
    """The interpreter plans on the host, which a capture refuses: plan before it."""

    def planned(step):
        from tests.helpers.fake_cuda import CUDA

        if CUDA.capturing is None:
            plan(step)

    return planned


@pytest.mark.interpreter
def test_what_cannot_be_captured_is_timed_eagerly_and_says_why(monkeypatch, fake_cuda):
    monkeypatch.setattr(gpu_speed, "REPEATS", 2)
    watch = gpu_speed.Watch(CPU, 1024)
    lens = torch.ones(3, dtype=torch.int32)
    time = watch.time(lambda: int(lens.sum()))
    assert "not permitted when stream is capturing" in time.eager
    assert fake_cuda.capturing is None
