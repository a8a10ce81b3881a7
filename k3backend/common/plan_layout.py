"""How the plans of one decode object lie in its buffers.

A plan depends on how the rows of a request are cut into row tiles, and a vendor may cut bfloat16
queries finer than fp8 ones. An object that serves both then makes both plans, which lie behind each
other in ``counts`` and ``work``; where the cut is the same there is one plan.

Each plan's part of ``work`` is its ``worker_indptr`` (workers + 1 entries, padded to a multiple of
8) and behind it its items, 6 entries each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from k3backend.common.decode_checks import (
    device_name_problems,
    integer_problems,
    most_planned_requests,
    shape_problems,
)
from k3backend.common.errors import UnsupportedDecodeError
from k3backend.common.launch_config import VALUE_DIM, LaunchConfig
from k3backend.common.split_plan import WORK_FIELDS, SplitCost, max_items, max_slots

MAX_WORKERS = 8192
"""Workers of a plan: the device planner holds one in registers, as it does an item."""
ALIGNMENT = 8
"""int32 entries: every part of a buffer starts at a multiple, which keeps loads wide."""


def _aligned(entries: int) -> int:
    return -(-entries // ALIGNMENT) * ALIGNMENT


def indptr_len(workers: int) -> int:
    """Entries of a plan in ``work`` in front of its items."""
    return _aligned(workers + 1)


@dataclass(frozen=True, slots=True)
class PlanPart:
    """One plan of an object.

    Attributes:
        row_groups, row_tiles, slot_rows: of the launch choice that it serves.
        cost: what it charges per piece.
        counts_start, work_start: where it lies in the buffers, in entries.
    """

    row_groups: tuple[int, int]
    row_tiles: int
    slot_rows: int
    cost: SplitCost
    counts_start: int
    work_start: int


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """The plans of one object and the sizes of its buffers.

    Attributes:
        parts: one plan per distinct cut into row tiles, at least one.
        counts_len, work_len: int32 entries of ``counts`` and ``work``.
        workspace_bytes: partials of any lengths, float32 outputs and lse2 of every slot; at most
            two slots per worker (``split_plan.max_slots``), whatever the number of requests.
    """

    parts: tuple[PlanPart, ...]
    counts_len: int
    work_len: int
    workspace_bytes: int


def require_shape(
    heads: object,
    q_len: object,
    max_requests: object,
    workers: object = None,
    device: object = "cpu",
) -> None:
    """Refuse a shape before anything is computed from it; ``workers`` may be None.

    Raises:
        UnsupportedDecodeError: with every limit that is broken.
    """
    reasons = shape_problems(heads, q_len, max_requests)
    if workers is not None:
        reasons += integer_problems("workers", workers, MAX_WORKERS)
    reasons += device_name_problems(device)
    if reasons:
        raise UnsupportedDecodeError("balanced MLA decode cannot be built", reasons)


def plan_layout(
    heads: int, q_len: int, max_requests: int, workers: int, configs: Iterable[LaunchConfig]
) -> PlanLayout:
    """Lay out the plans that serve every launch choice of ``configs``.

    Raises:
        UnsupportedDecodeError: with every limit of ``heads``, ``q_len``, ``max_requests`` and
            ``workers`` that is broken.
    """
    require_shape(heads, q_len, max_requests, workers)
    rows = heads * q_len
    parts: list[PlanPart] = []
    counts_len = work_len = workspace_bytes = 0
    for config in {config.row_groups: config for config in configs}.values():
        row_tiles, slot_rows = config.row_tiles(rows), config.slot_rows(rows)
        most = most_planned_requests(row_tiles)
        if max_requests > most:
            raise UnsupportedDecodeError(
                "balanced MLA decode cannot be built",
                [
                    f"max_requests is {max_requests}, expected 1 to {most}: {rows} rows are "
                    f"{row_tiles} row tiles per request, and one launch plans {most} requests"
                ],
            )
        part = PlanPart(
            config.row_groups, row_tiles, slot_rows, SplitCost.derived(slot_rows),
            _aligned(counts_len), _aligned(work_len),
        )  # fmt: skip
        parts.append(part)
        counts_len = part.counts_start + max_requests * row_tiles
        items = max_items(max_requests, row_tiles, workers)
        work_len = part.work_start + indptr_len(workers) + items * WORK_FIELDS
        slots = max(max_slots(max_requests, row_tiles, workers), 1)
        workspace_bytes = max(workspace_bytes, slots * slot_rows * (VALUE_DIM + 1) * 4)
    return PlanLayout(tuple(parts), counts_len, work_len, workspace_bytes)
