"""The balanced MLA decode on NVIDIA, free of any framework.

Sizes are functions of the shape alone, so a server can reserve memory before it knows a length::

    core = KvBalancedMla(heads=12, q_len=8, max_requests=256, causal=True, device=device)
    counts, work, workspace = core.new_buffers()
    core.plan(seq_lens, counts, work)                      # once per forward
    for layer in layers:
        core.decode(q, cache, table, seq_lens, scale, k_scale, counts, work, workspace)

Under the Triton interpreter CPU tensors take the place of a device, with 8 workers.
"""

from __future__ import annotations

import torch

from k3backend.common.balanced_mla import BalancedMla
from k3backend.common.decode_checks import most_planned_requests, shape_problems
from k3backend.common.kernel_device import kernel_device_problems, require_gpu
from k3backend.common.launch_config import DtypeName, LaunchConfig
from k3backend.common.plan_layout import PlanLayout, plan_layout, require_shape
from k3backend.nvidia.launch_config import decode_launch

INTERPRETER_WORKERS = 8
MIN_CAPABILITY = 90


def capability(device: torch.device | str) -> int:
    """Compute capability as major * 10 + minor; 90 for the CPU, 0 where there is no NVIDIA GPU."""
    found = torch.device(device)
    if found.type == "cpu":
        return MIN_CAPABILITY
    if torch.version.hip is not None or kernel_device_problems(found):
        return 0
    major, minor = torch.cuda.get_device_capability(found)
    return int(major) * 10 + int(minor)


def supports(heads: int, q_len: int, device: torch.device | str = "cuda") -> bool:
    """Whether ``KvBalancedMla(heads, q_len, …, device)`` can decode. There is no row floor.

    False without an error where no kernel can run: no GPU, or the CPU without Triton's interpreter.
    """
    if shape_problems(heads, q_len) or kernel_device_problems(device):
        return False
    return capability(device) >= MIN_CAPABILITY


def max_planned_requests(heads: int, q_len: int) -> int:
    """Most requests that one launch plans: 1,024, fewer for thousands of rows, 0 for bad shapes."""
    if shape_problems(heads, q_len):
        return 0
    rows = heads * q_len
    return most_planned_requests(decode_launch(rows).row_tiles(rows))


def max_active_workers(device: torch.device | str | None = None) -> int:
    """Persistent workgroups: one per SM, which its shared memory and registers allow.

    Args:
        device: None is the current CUDA device, or the CPU where there is none.
    Raises:
        UnsupportedDecodeError: the device is not here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    require_gpu(found)
    if found.type == "cpu":
        return INTERPRETER_WORKERS
    return int(torch.cuda.get_device_properties(found).multi_processor_count)


def work_list_len(heads: int, q_len: int, max_requests: int, workers: int | None = None) -> int:
    """int32 entries of ``work`` for any dtype; ``workers`` None is ``max_active_workers()``.

    Raises:
        UnsupportedDecodeError: with every limit of the shape that is broken.
    """
    return _layout(heads, q_len, max_requests, workers).work_len


def workspace_bytes(heads: int, q_len: int, max_requests: int, workers: int | None = None) -> int:
    """Bytes of ``workspace`` for any dtype; ``workers`` and errors as in `work_list_len`.

    At most two partial slots per worker, so it does not grow with requests beyond that.
    """
    return _layout(heads, q_len, max_requests, workers).workspace_bytes


def _layout(heads: int, q_len: int, max_requests: int, workers: int | None) -> PlanLayout:
    require_shape(heads, q_len, max_requests, workers)
    workers = max_active_workers() if workers is None else workers
    return plan_layout(heads, q_len, max_requests, workers, [decode_launch(heads * q_len)])


class KvBalancedMla(BalancedMla):
    """Plan and decode of one shape on one NVIDIA device. See `BalancedMla` for its methods."""

    platform = "nvidia"

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
    ) -> None:
        """See `BalancedMla`; ``workers`` None is ``max_active_workers(device)``."""
        require_shape(heads, q_len, max_requests, workers, device)
        self._capability = capability(device)
        super().__init__(
            heads,
            q_len,
            max_requests,
            causal,
            device,
            workers=max_active_workers(device) if workers is None else workers,
            q_dtype=q_dtype,
        )

    def launch_config(self, q_dtype: DtypeName, kv_dtype: DtypeName) -> LaunchConfig:
        """See `k3backend.nvidia.launch_config`."""
        return decode_launch(
            self.rows, q_dtype=q_dtype, kv_dtype=kv_dtype, capability=self._capability
        )
