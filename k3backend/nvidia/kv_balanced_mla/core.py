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

from k3backend.common import balanced_mla
from k3backend.common.balanced_mla import BalancedMla
from k3backend.common.decode_checks import most_planned_requests, shape_problems
from k3backend.common.launch_config import DtypeName, LaunchConfig
from k3backend.nvidia.launch_config import decode_launch

INTERPRETER_WORKERS = 8
MIN_CAPABILITY = 90


def capability(device: torch.device | str) -> int:
    """Compute capability as major * 10 + minor; 90 for the CPU under the interpreter."""
    found = torch.device(device)
    if found.type != "cuda":
        return MIN_CAPABILITY
    major, minor = torch.cuda.get_device_capability(found)
    return int(major) * 10 + int(minor)


def supports(heads: int, q_len: int, device: torch.device | str = "cuda") -> bool:
    """Whether ``KvBalancedMla(heads, q_len, …, device)`` can be built. There is no row floor."""
    return not shape_problems(heads, q_len) and capability(device) >= MIN_CAPABILITY


def max_planned_requests(heads: int, q_len: int) -> int:
    """Most requests that one launch plans: 1,024, fewer for thousands of rows, 0 for bad shapes."""
    rows = max(heads * q_len, 1)
    return most_planned_requests(heads, q_len, decode_launch(rows).row_tiles(rows))


def max_active_workers(device: torch.device | str | None = None) -> int:
    """Persistent workgroups: one per SM, which its shared memory and registers allow.

    Args:
        device: None is the current CUDA device, or the CPU where there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type != "cuda":
        return INTERPRETER_WORKERS
    return int(torch.cuda.get_device_properties(found).multi_processor_count)


def work_list_len(heads: int, q_len: int, max_requests: int, workers: int | None = None) -> int:
    """int32 entries of ``work``; ``workers`` None is ``max_active_workers()``."""
    config = decode_launch(heads * q_len)
    workers = max_active_workers() if workers is None else workers
    return balanced_mla.work_list_len(config.row_tiles(heads * q_len), max_requests, workers)


def workspace_bytes(heads: int, q_len: int, max_requests: int, workers: int | None = None) -> int:
    """Bytes of ``workspace``; ``workers`` None is ``max_active_workers()``.

    At most two partial slots per worker, so it does not grow with requests beyond that.
    """
    rows = heads * q_len
    config = decode_launch(rows)
    workers = max_active_workers() if workers is None else workers
    return balanced_mla.workspace_bytes(
        config.slot_rows(rows), config.row_tiles(rows), max_requests, workers
    )


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
        q_dtype: DtypeName = "fp8",
    ) -> None:
        """See `BalancedMla`; ``workers`` None is ``max_active_workers(device)``."""
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
