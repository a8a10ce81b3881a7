"""The launches of a decode as Triton binds and compiles them for a GPU, on a fake driver.

Kernels do not run here. What is real: binding, specialisation, compilers for four GPUs, and whether
a launch compiles anew, which inside a graph capture would fail.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from k3backend.common import balanced_mla, kernel_device
from k3backend.common.balanced_mla import BalancedMla
from k3backend.common.decode_checks import cache_problems, table_problems
from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla as NvidiaMla
from k3backend.rocm.kv_balanced_mla.core import KvBalancedMla as RocmMla

BF16 = torch.bfloat16
FP8 = {"gfx942": torch.float8_e4m3fnuz}
ORDER = ["split_plan_kernel", "folded_decode_kernel", "combine_kernel"]
WORKERS = 132


def core_for(gpu: str, heads: int, q_len: int, requests: int, name: str) -> BalancedMla:
    """The vendor's core with its launch choices for a GPU, on CPU tensors."""
    core: BalancedMla
    if gpu.startswith("gfx"):
        core = RocmMla(heads, q_len, requests, True, "cpu", workers=WORKERS, q_dtype=name, arch=gpu)
    else:
        core = NvidiaMla(heads, q_len, requests, True, "cpu", workers=WORKERS, q_dtype=name)
        core._capability = int(gpu.removeprefix("sm_"))
    return core


def step(core: BalancedMla, kind: torch.dtype, size: int = 1536, **changes: Any) -> dict[str, Any]:
    """Plan and decode with fresh tensors; returns them."""
    requests, tokens = core.max_requests, core.max_requests * core.q_len
    tensors: dict[str, Any] = {
        "q": torch.zeros(tokens, core.heads, 576).to(kind),
        "kv": torch.zeros(3, size, 576).to(kind),
        "table": torch.zeros(requests, 70, dtype=torch.int32),
        "lens": torch.ones(requests, dtype=torch.int32),
        "causal_lens": None,
        "out": torch.empty(tokens, core.heads, 512, dtype=BF16),
        "lse": torch.empty(tokens, core.heads),
        "scale": 0.07,
        "k_scale": 1.0,
        "cp": (1, 0, 1),
    } | changes
    buffers = core.new_buffers()
    core.plan(tensors["lens"], *buffers[:2])
    core.decode(
        *(tensors[name] for name in ("q", "kv", "table", "lens", "scale", "k_scale")), *buffers,
        **{name: tensors[name] for name in ("out", "lse", "causal_lens", "cp")}, check=False,
    )  # fmt: skip
    return tensors


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("sm_90", "fp8"), ("sm_90", "bf16"), ("sm_100", "fp8"),
        ("gfx950", "fp8"), ("gfx950", "bf16"), ("gfx942", "fp8"),
    ],
)  # fmt: skip
def test_a_step_is_three_launches_and_compiles_once(gpu: str, name: str) -> None:
    from tests.helpers.fake_gpu_driver import fake_gpu

    kind = BF16 if name == "bf16" else FP8.get(gpu, torch.float8_e4m3fn)
    core = core_for(gpu, 12, 8, 5, name)
    with fake_gpu(gpu) as driver:
        tensors = step(core, kind)
        assert [launch.kernel for launch in driver.launches] == ORDER
        plan, decode, combine = driver.launches
        assert decode.grid == (WORKERS, 1, 1)
        assert combine.grid[0] == 5 * core.row_tiles
        for argument, given in (
            ("q_ptr", "q"), ("kv_ptr", "kv"), ("table_ptr", "table"), ("lens_ptr", "lens"),
            ("causal_lens_ptr", "lens"), ("out_ptr", "out"), ("lse_ptr", "lse"),
        ):  # fmt: skip
            assert decode.arguments[argument] is tensors[given]
        for argument in ("indptr_ptr", "work_ptr"):
            assert decode.arguments[argument].data_ptr() == plan.arguments[argument].data_ptr()
        assert plan.arguments["seq_lens_ptr"] is tensors["lens"]
        assert combine.arguments["counts_ptr"].data_ptr() == plan.arguments["counts_ptr"].data_ptr()
        # Partials: what the decode writes, the combine reads.
        for argument in ("partial_ptr", "partial_lse_ptr", "out_ptr", "lse_ptr"):
            mine, theirs = combine.arguments[argument], decode.arguments[argument]
            assert mine.data_ptr() == theirs.data_ptr()
        scratch = plan.arguments["scratch_ptr"]
        assert scratch.eq(0).all(), "the planner's scratch starts at zero"

        # Other tensors, lengths and scales: nothing may be compiled or loaded, as in a capture.
        loaded = list(driver.loaded)
        step(core, kind, lens=torch.full((5,), 100_000, dtype=torch.int32), scale=0.2, k_scale=0.3)
        assert driver.loaded == loaded
        assert [launch.kernel for launch in driver.launches[3:]] == ORDER


@pytest.mark.compiler
def test_every_kind_of_block_and_mode_compiles_for_hopper() -> None:
    from tests.helpers.fake_gpu_driver import fake_gpu

    lens = torch.ones(3, dtype=torch.int32)
    with fake_gpu("sm_90") as driver:
        # Blocks that a tile of keys straddles; context parallelism; a cache above 2**31 elements.
        step(core_for("sm_90", 12, 4, 3, "bf16"), BF16, 48)
        step(core_for("sm_90", 96, 1, 3, "bf16"), BF16, 48, causal_lens=lens, cp=(8, 3, 2))
        cache = torch.empty_strided(
            (2, 1536, 576), (2**32, 576, 1), dtype=torch.float8_e4m3fn, device="meta"
        )
        step(core_for("sm_90", 12, 4, 3, "fp8"), torch.float8_e4m3fn, kv=cache)
        strides = [x.arguments["block_stride"] for x in driver.launches if x.kernel == ORDER[1]]
    assert strides == [48 * 576, 48 * 576, 2**32]


@pytest.mark.compiler
def test_numbers_of_numpy_are_launched_as_python_s_own() -> None:
    from tests.helpers.fake_gpu_driver import fake_gpu

    lens = torch.ones(3, dtype=torch.int32)
    core = core_for("sm_90", 12, 4, 3, "bf16")
    cp = tuple(np.array([8, 3, 2]))
    with fake_gpu("sm_90") as driver:
        # check_argument refuses other types in the fake; Triton refuses them on a device.
        step(core, BF16, causal_lens=lens, cp=cp, scale=np.float32(0.07), k_scale=np.float64(0.5))
        core.causal = np.True_
        step(core, BF16, k_scale=2)
    assert len(driver.launches) == 6


@pytest.mark.compiler
def test_the_fake_driver_refuses_what_a_gpu_would(monkeypatch: Any) -> None:
    from tests.helpers.fake_gpu_driver import check_argument, fake_gpu

    wrong = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"\*i32"):
        check_argument("k", "lens_ptr", "*i32", wrong)
    with pytest.raises(AssertionError, match="fp32"):
        check_argument("k", "scale", "fp32", 1)
    with pytest.raises(AssertionError, match="i32"):
        check_argument("k", "stride", "i32", 2**31)
    core = core_for("sm_90", 12, 4, 3, "bf16")
    with fake_gpu("sm_90") as driver:
        # A device of its own, because kernels are kept by device.
        monkeypatch.setattr(driver, "gpu", replace(driver.gpu, number=1091, shared_bytes=1024))
        with pytest.raises(Exception, match="out of resource"):
            step(core, BF16)


class GuardedDevice:
    """torch.cuda's current device, which `launching_on` reads and sets."""

    def __init__(self) -> None:
        self.current = 0

    def device(self, index: int) -> Any:
        guard = nullcontext()
        self.current = index
        return guard


def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch: Any) -> None:
    cuda = GuardedDevice()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.current)
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    for place, expected in (("cuda:1", 1), ("cuda:1", 1), ("cuda:0", 0), ("cpu", 0)):
        tensor: Any = SimpleNamespace(device=torch.device(place))
        with kernel_device.launching_on(tensor):
            assert cuda.current == expected


@pytest.mark.compiler
def test_plan_and_decode_choose_the_gpu_of_their_tensors(monkeypatch: Any) -> None:
    from tests.helpers.fake_gpu_driver import fake_gpu

    chosen: list[Any] = []

    def launching_on(tensor: torch.Tensor) -> Any:
        chosen.append(tensor)
        return nullcontext()

    monkeypatch.setattr(balanced_mla, "launching_on", launching_on)
    with fake_gpu("sm_90"):
        tensors = step(core_for("sm_90", 12, 4, 3, "bf16"), BF16)
    assert len(chosen) == 2
    assert chosen[0] is tensors["lens"]
    assert chosen[1] is tensors["q"]


def test_tensors_on_another_gpu_are_refused() -> None:
    here, there = torch.device("meta:0"), torch.device("meta:1")
    cache = torch.empty(2, 64, 576, device=there)
    table = torch.empty(3, 4, dtype=torch.int32, device=there)
    for problems in (cache_problems(cache, here), table_problems(table, 3, here)):
        assert len(problems) == 1
        assert "is on meta" in problems[0]
    assert cache_problems(cache, torch.device("meta")) == []
