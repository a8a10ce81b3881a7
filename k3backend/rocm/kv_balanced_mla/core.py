"""The balanced MLA decode on AMD with the folded kernel, free of any framework.

The names and the use are those of ``nvidia/kv_balanced_mla/core.py``. Under the Triton interpreter
CPU tensors take the place of a gfx950 device, with 8 workers.
"""

from __future__ import annotations

import torch

from k3backend.common import balanced_mla
from k3backend.common.balanced_mla import BalancedMla
from k3backend.common.decode_checks import most_planned_requests, shape_problems
from k3backend.common.launch_config import DtypeName, LaunchConfig
from k3backend.rocm.aiter_capabilities import ARCHS
from k3backend.rocm.launch_config import decode_launch, workgroups_per_cu

INTERPRETER_WORKERS = 8
FP8_DTYPES = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
"""The fp8 format of each GPU's matrix instructions: OCP on gfx950, fnuz on gfx942."""


def gpu_arch(device: torch.device | str) -> str:
    """The GPU's name, "gfx950"; that of the CPU under the interpreter is gfx950 too."""
    found = torch.device(device)
    if found.type != "cuda":
        return ARCHS[0]
    properties = torch.cuda.get_device_properties(found)
    return str(getattr(properties, "gcnArchName", "") or properties.name).split(":")[0]


def supports(heads: int, q_len: int, device: torch.device | str = "cuda") -> bool:
    """Whether ``KvBalancedMla(heads, q_len, …, device)`` can be built. There is no row floor."""
    return not shape_problems(heads, q_len) and gpu_arch(device) in ARCHS


def max_planned_requests(heads: int, q_len: int) -> int:
    """Most requests that one launch plans: 1,024, fewer for thousands of rows, 0 for bad shapes."""
    rows = max(heads * q_len, 1)
    return most_planned_requests(heads, q_len, max(c.row_tiles(rows) for _, c in _configs(rows)))


def max_active_workers(
    device: torch.device | str | None = None, rows: int = 128, q_dtype: DtypeName = "fp8"
) -> int:
    """Persistent workgroups that run at the same time: on MI355X 256, on MI300X 304, or twice that.

    Args:
        device: None is the current device, or the CPU where there is none.
        rows, q_dtype: heads x query tokens; few fp8 rows take few registers, so that two
            workgroups share a compute unit.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type != "cuda":
        return INTERPRETER_WORKERS
    units = int(torch.cuda.get_device_properties(found).multi_processor_count)
    return units * workgroups_per_cu(rows, q_dtype=q_dtype, arch=gpu_arch(found))


def work_list_len(heads: int, q_len: int, max_requests: int, workers: int | None = None) -> int:
    """int32 entries of ``work`` for any dtype; ``workers`` None is ``max_active_workers()``."""
    rows = heads * q_len
    return max(
        balanced_mla.work_list_len(
            config.row_tiles(rows),
            max_requests,
            max_active_workers(None, rows, q_dtype) if workers is None else workers,
        )
        for q_dtype, config in _configs(rows)
    )


def workspace_bytes(heads: int, q_len: int, max_requests: int, workers: int | None = None) -> int:
    """Bytes of ``workspace`` for any dtype; ``workers`` None is ``max_active_workers()``."""
    rows = heads * q_len
    return max(
        balanced_mla.workspace_bytes(
            config.slot_rows(rows),
            config.row_tiles(rows),
            max_requests,
            max_active_workers(None, rows, q_dtype) if workers is None else workers,
        )
        for q_dtype, config in _configs(rows)
    )


def _configs(rows: int) -> list[tuple[DtypeName, LaunchConfig]]:
    names: tuple[DtypeName, ...] = ("fp8", "bf16")
    return [(name, decode_launch(rows, q_dtype=name)) for name in names]


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
        q_dtype: DtypeName = "fp8",
        arch: str | None = None,
    ) -> None:
        """See `BalancedMla`.

        Args:
            workers: None is ``max_active_workers`` of the device and shape.
            arch: None is the device's; the interpreter also plays "gfx942".
        """
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
