"""The split planner as it is launched in production, for ``static_compile``."""

from __future__ import annotations

from k3backend.common.kernels.split_plan_device import launch_constants, split_plan_kernel
from k3backend.common.kernels.static_compile import KernelRequest
from k3backend.common.split_plan import SplitCost


def plan_request(
    requests: int, target: str, *, workers: int, row_tiles: int = 1, rows: int = 96
) -> KernelRequest:
    """The plan of up to ``requests`` requests, with the constants of ``plan_splits_device``.

    Args:
        target: key of ``static_compile.TARGETS``.
        workers: persistent workgroups.
        row_tiles: row tiles of a request. rows: of one partial, for the plan's cost.
    """
    constants, num_warps = launch_constants(
        requests,
        row_tiles=row_tiles,
        num_workers=workers,
        tile_tokens=64,
        cost=SplitCost.derived(rows),
    )
    names = split_plan_kernel.arg_names
    return KernelRequest(
        name=f"plan {requests} requests",
        target=target,
        kernel=split_plan_kernel,
        signature={
            name: "*i32" if name.endswith("_ptr") else "constexpr" if name in constants else "i32"
            for name in names
        },
        constants=constants,
        aligned=tuple(name for name in names if name.endswith("_ptr")),
        options={"num_warps": num_warps},
        expected=None,
    )
