"""The balanced MLA decode on AMD with the folded kernel, free of any framework.

The names and the use are those of ``nvidia/kv_balanced_mla/core.py``. Under the Triton interpreter
CPU tensors take the place of a gfx950 device, with 8 workers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from k3backend.common.balanced_mla import BalancedMla
from k3backend.common.decode_checks import most_planned_requests, shape_problems
from k3backend.common.kernel_device import kernel_device_problems, require_gpu
from k3backend.common.launch_config import DtypeName, LaunchConfig
from k3backend.common.plan_layout import PlanLayout, plan_layout, require_shape
from k3backend.rocm.aiter_capabilities import ARCHS
from k3backend.rocm.launch_config import decode_launch, workgroups_per_cu

INTERPRETER_WORKERS = 8
Q_DTYPES: tuple[DtypeName, ...] = ("fp8", "bf16")
FP8_DTYPES = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
"""The fp8 format of each GPU's matrix instructions: OCP on gfx950, fnuz on gfx942."""


def gpu_arch(device: torch.device | str) -> str:
    """The GPU's name, "gfx950"; gfx950 too for the CPU, "none" where there is no GPU."""
    found = torch.device(device)
    if found.type == "cpu":
        return ARCHS[0]
    if kernel_device_problems(found):
        return "none"
    properties = torch.cuda.get_device_properties(found)
    return str(getattr(properties, "gcnArchName", "") or properties.name).split(":")[0]


def supports(heads: int, q_len: int, device: torch.device | str = "cuda") -> bool:
    """Whether ``KvBalancedMla(heads, q_len, …, device)`` can decode. There is no row floor.

    False without an error where no kernel can run: no GPU, or the CPU without Triton's interpreter.
    """
    if shape_problems(heads, q_len) or kernel_device_problems(device):
        return False
    return gpu_arch(device) in ARCHS


def max_planned_requests(heads: int, q_len: int) -> int:
    """Most requests that one launch plans: 1,024, fewer for thousands of rows, 0 for bad shapes."""
    if shape_problems(heads, q_len):
        return 0
    rows = heads * q_len
    row_tiles = [config.row_tiles(rows) for arch in ARCHS for config in _configs(rows, arch)]
    return most_planned_requests(max(row_tiles))


def max_active_workers(
    device: torch.device | str | None = None,
    rows: int | None = None,
    q_dtype: DtypeName | None = None,
) -> int:
    """Persistent workgroups that run at the same time, one or two per compute unit.

    Args:
        device: None is the current device, or the CPU where there is none.
        rows: heads x query tokens; None: the most that any shape uses, 512 on MI355X.
        q_dtype: None: the more of both. Few fp8 rows take few registers, so that two workgroups
            share a compute unit.
    Raises:
        UnsupportedDecodeError: the device is not here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    require_gpu(found)
    if found.type == "cpu":
        return INTERPRETER_WORKERS
    units = int(torch.cuda.get_device_properties(found).multi_processor_count)
    arch = gpu_arch(found)
    return units * max(
        workgroups_per_cu(of, q_dtype=name, arch=arch)
        for of in ((16, 32) if rows is None else (rows,))
        for name in (Q_DTYPES if q_dtype is None else (q_dtype,))
    )


def work_list_len(heads: int, q_len: int, max_requests: int, workers: int | None = None) -> int:
    """int32 entries of ``work`` for any dtype and GPU.

    Args:
        workers: None is what an object of this shape uses on the current device.
    Raises:
        UnsupportedDecodeError: with every limit of the shape that is broken.
    """
    return max(layout.work_len for layout in _layouts(heads, q_len, max_requests, workers))


def workspace_bytes(heads: int, q_len: int, max_requests: int, workers: int | None = None) -> int:
    """Bytes of ``workspace`` for any dtype and GPU; arguments and errors as in `work_list_len`."""
    return max(layout.workspace_bytes for layout in _layouts(heads, q_len, max_requests, workers))


def _layouts(
    heads: int, q_len: int, max_requests: int, workers: int | None
) -> Iterator[PlanLayout]:
    require_shape(heads, q_len, max_requests, workers)
    rows = heads * q_len
    workers = max_active_workers(None, rows) if workers is None else workers
    for arch in ARCHS:
        yield plan_layout(heads, q_len, max_requests, workers, _configs(rows, arch))


def _configs(rows: int, arch: str) -> Iterator[LaunchConfig]:
    return (decode_launch(rows, q_dtype=name, arch=arch) for name in Q_DTYPES)


class KvBalancedMla(BalancedMla):
    """Plan and decode of one shape on one AMD device. See `BalancedMla` for its methods."""

    platform = "rocm"

    def __init__(
        self,
        heads: int,
        q_len: int,
        max_requests: int,
        causal: bool = True,
        device: torch.device | str = "cuda",
        *,
        workers: int | None = None,
        q_dtype: DtypeName | None = None,
        arch: str | None = None,
    ) -> None:
        """See `BalancedMla`.

        Args:
            workers: None is ``max_active_workers`` of the device and shape.
            arch: None is the device's; the interpreter also plays "gfx942".
        """
        require_shape(heads, q_len, max_requests, workers, device)
        self.arch = gpu_arch(device) if arch is None else arch
        super().__init__(
            heads,
            q_len,
            max_requests,
            causal,
            device,
            workers=max_active_workers(device, heads * q_len, q_dtype)
            if workers is None
            else workers,
            q_dtype=q_dtype,
            fp8_dtype=FP8_DTYPES.get(self.arch, torch.float8_e4m3fn),
        )

    def launch_config(self, q_dtype: DtypeName, kv_dtype: DtypeName) -> LaunchConfig:
        """See `k3backend.rocm.launch_config`."""
        return decode_launch(self.rows, q_dtype=q_dtype, kv_dtype=kv_dtype, arch=self.arch)
