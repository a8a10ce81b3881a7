"""A fake GPU driver for Triton: kernels are bound and compiled as for a real GPU, but never run.

It stands in for hardware that is not here. Everything up to the driver's calls is real: Triton's
argument binding and specialisation, its compiler, the choice to compile anew. What a real driver
would be given is checked against the contract of a launch and kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

MAX_GRID = (2**31 - 1, 65535, 65535)
DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
NUMBERS = {"fp32": float, "i32": int, "i64": int}


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        number: the device's; one that no machine has, because Triton keeps kernels by it.
        shared_bytes: most shared memory of a workgroup. lanes: of a wave, warps: of a workgroup.
    """

    number: int
    target: GPUTarget
    shared_bytes: int
    lanes: int


GPUS = {
    "sm_90": Gpu(1090, GPUTarget("cuda", 90, 32), 232448, 32),
    "sm_100": Gpu(1100, GPUTarget("cuda", 100, 32), 232448, 32),
    "gfx950": Gpu(1950, GPUTarget("hip", "gfx950", 64), 163840, 64),
    "gfx942": Gpu(1942, GPUTarget("hip", "gfx942", 64), 65536, 64),
}


@dataclass(frozen=True)
class Launch:
    """What a driver was told to run: kernel, grid, and its arguments by name."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


@dataclass
class FakeDriver:
    """See the module. ``launches`` and ``loaded`` grow as kernels are launched and loaded."""

    gpu: Gpu
    launches: list[Launch] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    @property
    def utils(self) -> FakeDriver:
        return self

    def get_current_device(self) -> int:
        return self.gpu.number

    def get_current_stream(self, device: int) -> int:
        assert device == self.gpu.number
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.gpu.target

    def get_device_properties(self, device: int) -> dict[str, int]:
        assert device == self.gpu.number
        return {"max_shared_mem": self.gpu.shared_bytes}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        """(module, function, registers, spills, most threads of a workgroup)"""
        assert device == self.gpu.number
        assert isinstance(binary, bytes)
        assert binary, f"{name} has no machine code"
        assert shared <= self.gpu.shared_bytes
        self.loaded.append(name)
        return 1, len(self.loaded), 255, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What Triton calls with the grid, the stream, its own five, and every argument."""
        names = list(source.fn.arg_names)

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            arguments = dict(zip(names, rest[6:], strict=True))
            for size, most in zip((x, y, z), MAX_GRID, strict=True):
                assert type(size) is int
                assert 1 <= size <= most, f"{metadata.name}: grid {(x, y, z)}"
            assert metadata.num_warps * self.gpu.lanes <= 1024
            for name, value in arguments.items():
                check_argument(metadata.name, name, source.signature[name], value)
            self.launches.append(Launch(metadata.name, (x, y, z), arguments))

        return launch


def check_argument(kernel: str, name: str, kind: str, value: Any) -> None:
    """A pointer's tensor has its element type; a number fits its type and is Python's own."""
    said = f"{kernel}: {name} of type {kind} is {value!r:.60}"
    if kind == "constexpr":
        # An argument that Triton took for a constant, 1 or None, or one that the kernel declares.
        assert value is None or type(value) in (int, float, bool, str), said
    elif kind.startswith("*"):
        assert isinstance(value, torch.Tensor), said
        assert value.dtype == DTYPES[kind[1:]], f"{said} of {value.dtype}"
    else:
        assert type(value) is NUMBERS[kind], said
        if kind == "i32":
            assert -(2**31) <= value < 2**31, said


_DRIVERS = {name: FakeDriver(gpu) for name, gpu in GPUS.items()}
"""One per GPU: a kernel that was loaded keeps the driver that it was loaded by."""


@contextmanager
def fake_gpu(name: str) -> Iterator[FakeDriver]:
    """Launch on a fake GPU of ``GPUS`` inside the block; the driver has kept nothing yet."""
    fake = _DRIVERS[name]
    fake.launches.clear()
    fake.loaded.clear()
    # Triton's own reset would look for a GPU.
    before = driver._active
    driver.set_active(fake)
    try:
        yield fake
    finally:
        driver._active = before
