"""The device planner, in Triton's interpreter, against the host planner: identical plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3backend.common.errors import ShapeError
from k3backend.common.kernels.split_plan_device import SCRATCH_INTS, plan_splits_device
from k3backend.common.split_plan import SplitCost, max_items, plan_splits

pytestmark = pytest.mark.interpreter

DEFAULT = SplitCost()
Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def new_buffers(requests: int, row_tiles: int, workers: int) -> Buffers:
    """work, worker_indptr, counts full of garbage, and scratch of zeros."""
    sizes = ((max_items(requests, row_tiles, workers), 6), (workers + 1,), (requests * row_tiles,))
    work, indptr, counts = (torch.full(size, 77, dtype=torch.int32) for size in sizes)
    return work, indptr, counts, torch.zeros(SCRATCH_INTS, dtype=torch.int32)


def check_identical(
    lens: list[int],
    row_tiles: int,
    workers: int,
    *,
    cost: SplitCost = DEFAULT,
    tile_tokens: int = 64,
    buffers: Buffers | None = None,
) -> None:
    """Plan on both sides and compare every element, used and unused."""
    work, indptr, counts, scratch = buffers or new_buffers(len(lens), row_tiles, workers)
    plan_splits_device(
        torch.tensor(lens, dtype=torch.int32), work, indptr, counts, scratch,
        row_tiles=row_tiles, num_workers=workers, tile_tokens=tile_tokens, cost=cost,
    )  # fmt: skip
    plan = plan_splits(lens, row_tiles, workers, tile_tokens, cost)
    used = len(plan.work)
    assert counts.tolist() == plan.counts.tolist()
    assert indptr.tolist() == plan.worker_indptr.tolist()
    assert work[:used].tolist() == plan.work.tolist()
    assert work[used:].tolist() == [[-1, 0, 0, 0, -1, 0]] * (len(work) - used)
    assert scratch[-1] == 0


def lengths(kind: str, requests: int, seed: int = 0) -> list[int]:
    """A batch of one kind; ragged ones are seeded."""
    random = np.random.default_rng(seed)
    if kind == "short":
        return random.integers(0, 700, requests).tolist()
    if kind == "long":
        return random.integers(0, 130_000, requests).tolist()
    if kind == "lognormal":
        return np.minimum(np.exp(random.normal(9, 1.5, requests)), 1e6).astype(int).tolist()
    if kind == "edges":
        return random.choice([0, 1, 63, 64, 65, 127, 128, 129], requests).tolist()
    if kind == "equal":
        return [68_430] * requests
    if kind == "one giant":
        return [*[300] * (requests - 1), 1_000_000]
    if kind == "mostly padding":
        return [50_000, 0, 9000] + [0] * (requests - 3)
    raise ValueError(kind)


@pytest.mark.parametrize(
    ("kind", "requests", "row_tiles", "workers"),
    [
        ("equal", 1, 1, 256),
        ("long", 2, 3, 16),
        ("mostly padding", 8, 1, 20),
        ("edges", 13, 2, 16),
        ("equal", 24, 1, 30),
        ("one giant", 40, 1, 16),
        ("lognormal", 64, 1, 132),
        ("short", 100, 6, 16),
        ("long", 256, 1, 60),
        ("short", 1024, 1, 60),
    ],
)
def test_identical_to_the_host_plan(kind: str, requests: int, row_tiles: int, workers: int) -> None:
    check_identical(lengths(kind, requests), row_tiles, workers)


@pytest.mark.parametrize(
    ("cost", "tile_tokens"),
    [(SplitCost(0, 0), 16), (SplitCost.derived(96), 64), (SplitCost(0.25, 40), 128)],
)
def test_identical_with_other_costs_and_tiles(cost: SplitCost, tile_tokens: int) -> None:
    check_identical(lengths("lognormal", 11), 1, 16, cost=cost, tile_tokens=tile_tokens)


def test_replayed_for_other_lengths_in_the_same_buffers() -> None:
    """What a captured launch does: planned at length 1, replayed long, then with nothing to do."""
    buffers = new_buffers(3, 1, 16)
    for lens in ([1, 1, 1], [100_000, 1, 0], [0, 0, 0], [5000, 6000, 7000]):
        check_identical(lens, 1, 16, buffers=buffers)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["short", "long", "lognormal", "edges", "equal", "one giant", "mostly padding"]
)
@pytest.mark.parametrize(
    ("requests", "row_tiles", "workers"),
    [
        (3, 1, 132), (7, 6, 148), (16, 2, 256), (33, 1, 304), (75, 2, 132), (129, 1, 256),
        (300, 2, 64), (512, 1, 304), (1000, 1, 132), (1024, 6, 256),
    ],
)  # fmt: skip
def test_identical_on_the_whole_grid(
    kind: str, requests: int, row_tiles: int, workers: int
) -> None:
    check_identical(lengths(kind, requests, seed=requests), row_tiles, workers)


@pytest.mark.long
def test_identical_for_every_small_batch() -> None:
    random = np.random.default_rng(7)
    for requests in range(1, 65):
        kind = ("short", "long", "lognormal", "edges")[requests % 4]
        workers = int(random.integers(1, 33))
        check_identical(lengths(kind, requests, requests), int(random.integers(1, 4)), workers)


def test_buffers_that_do_not_fit_are_named() -> None:
    lens = torch.tensor([5, 6], dtype=torch.int32)
    work, indptr, counts, scratch = new_buffers(2, 2, 8)
    shape = {"row_tiles": 2, "num_workers": 8}
    for name, buffers in (
        ("work", (work[:-1], indptr, counts, scratch)),
        ("work", (work.long(), indptr, counts, scratch)),
        ("work", (work.T, indptr, counts, scratch)),
        ("worker_indptr", (work, indptr[:-1], counts, scratch)),
        ("counts", (work, indptr, counts[1:], scratch)),
        ("scratch", (work, indptr, counts, scratch[1:])),
        ("counts", (work, indptr, counts.to("meta"), scratch)),
    ):
        with pytest.raises(ShapeError, match=f"^{name}: expected a contiguous int32 tensor"):
            plan_splits_device(lens, *buffers, **shape)
    for bad in (lens[:0], lens[None], torch.zeros(2**15 + 1, dtype=torch.int32)):
        with pytest.raises(ShapeError, match="seq_lens: expected shape"):
            plan_splits_device(bad, work, indptr, counts, scratch, **shape)
    with pytest.raises(ShapeError, match="seq_lens: expected a contiguous int32"):
        plan_splits_device(lens.long(), work, indptr, counts, scratch, **shape)
