"""What a worker of gpu_check.py runs: checks, compilations, timings and peers, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from k3backend.common.errors import PlatformError
from k3backend.common.kernels.launch import INTERPRETING
from tools.gpu_correctness import Device, checks, outcome
from tools.gpu_peers import PEERS, time_peer
from tools.gpu_speed import (
    KvPool,
    Watch,
    cases,
    compared_cases,
    compile_case,
    copy_bandwidth,
    time_case,
)
from tools.gpu_workers import DEVICE_LOST, failure

CHECK, COMPILE, COPY, SPEED, PEER = "check", "compile", "copy", "speed", "peer"
L2_FALLBACK_BYTES = 256 * 2**20
"""Where torch does not say: the largest last cache of a supported GPU, MI355X's 256 MiB."""


@dataclass(frozen=True, slots=True)
class Names:
    """Every entry of a run, by what it does, in the order in which it is wanted."""

    checks: list[str]
    compilations: list[str]
    timings: list[str]


def names(device: Device) -> Names:
    """Of a device that need not be here.

    Timings are COPY, then shapes and peers, the most telling first: what peers are compared with
    comes right before them.
    """
    shapes = cases()
    first = max(shapes.index(case) for case in compared_cases()) + 1
    peers = [f"{PEER} {name}: {case.name}" for case in compared_cases() for name in PEERS]
    speed = [f"{SPEED} {case.name}" for case in shapes]
    return Names(
        [f"{CHECK} {item.name}" for item in checks(device)],
        [f"{COMPILE} {case.name}" for case in shapes],
        [COPY, *speed[:first], *peers, *speed[first:]],
    )


def gpu_names() -> Names:
    """Of any GPU, which need not be here."""
    from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla

    return names(Device("cuda", KvBalancedMla, torch.float8_e4m3fn))


def tiny_names() -> Names:
    """Of the interpreter."""
    from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla

    return names(Device("cpu", KvBalancedMla, torch.float8_e4m3fn))


class GpuBench:
    """Runs entries on one device.

    Attributes:
        facts: JSON values that describe the device.
    """

    def __init__(self, device: Device, facts: dict[str, Any]) -> None:
        self.device = device
        self.facts = facts
        self._pool = KvPool(device)
        self._watch: Watch | None = None
        self._checks = {item.name: item for item in checks(device)}
        self._shapes = {case.name: case for case in (*cases(), *compared_cases())}

    def run(self, name: str) -> dict[str, Any]:
        """Run one entry of `names`; JSON values, with "why_not" where it could not run."""
        kind, _, what = name.partition(" ")
        try:
            found = self._run(kind, what)
        # Whatever a kernel, a compiler or another project raises is the entry's result.
        except Exception as error:
            found = {"why_not": failure(error)}
        bad = not found.get("ok", True) or "why_not" in found or "wrong" in found
        return found | self._lost() if bad else found

    def _run(self, kind: str, what: str) -> dict[str, Any]:
        if kind == CHECK:
            return outcome(self._checks[what])
        if kind == COMPILE:
            return compile_case(self.device, self._shapes[what])
        if kind == COPY:
            return {"copy_bytes_s": round(copy_bandwidth(self.device, self.watch))}
        if kind == PEER:
            peer, _, shape = what.partition(": ")
            return time_peer(peer, self._pool, self._shapes[shape], self.watch)
        return time_case(self.device, self._pool, self._shapes[what], self.watch)

    @property
    def watch(self) -> Watch:
        """Made when something is timed: it holds memory to sweep the caches with."""
        if self._watch is None:
            self._watch = Watch(self.device, self.facts["l2_bytes"])
        return self._watch

    def _lost(self) -> dict[str, Any]:
        """Whether the device still answers after a failure."""
        if not self.device.is_gpu:
            return {}
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return {DEVICE_LOST: True}
        return {}


def require_gpu() -> None:
    """Refuse without opening a device.

    Raises:
        PlatformError: there is no GPU, or kernels are interpreted in this process.
    """
    if INTERPRETING:
        raise PlatformError("TRITON_INTERPRET=1 runs kernels on the CPU; unset it")
    if not torch.cuda.is_available():
        build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
        raise PlatformError(
            f"no GPU: torch {torch.__version__} is a {build} build and sees none; run this on a "
            "machine with one, or give --dry-run"
        )


def open_gpu() -> GpuBench:
    """On the GPU that torch uses. Raises PlatformError as `require_gpu`."""
    require_gpu()
    # Checks compare with the host's float64, several workers side by side.
    torch.set_num_threads(max(2, (os.cpu_count() or 1) // 8))
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    fp8 = torch.float8_e4m3fn
    core: Callable[..., Any]
    if torch.version.hip:
        from k3backend.rocm.kv_balanced_mla.core import FP8_DTYPES, KvBalancedMla, gpu_arch

        arch, core = gpu_arch("cuda"), KvBalancedMla
        fp8 = FP8_DTYPES.get(arch, fp8)
    else:
        from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla as NvidiaMla

        arch, core = f"sm_{properties.major}{properties.minor}", NvidiaMla
    facts = {
        "name": properties.name,
        "arch": arch,
        "units": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": int(getattr(properties, "L2_cache_size", 0)) or L2_FALLBACK_BYTES,
    }
    if torch.version.hip:
        facts["l2_bytes"] = max(facts["l2_bytes"], L2_FALLBACK_BYTES)
    return GpuBench(Device("cuda", core, fp8, exact_fp8=arch != "sm_90"), facts)


def open_interpreter() -> GpuBench:
    """On the CPU, where Triton interprets the kernels: a few tiny checks, nothing is timed.

    Raises:
        PlatformError: TRITON_INTERPRET=1 is not set.
    """
    from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla

    if not INTERPRETING:
        raise PlatformError("the interpreter needs TRITON_INTERPRET=1 before triton is imported")
    device = Device("cpu", KvBalancedMla, torch.float8_e4m3fn)
    return GpuBench(device, {"name": "Triton's interpreter", "arch": "cpu"})
