"""Split plans of random batches: coverage, slots, bounds, determinism."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from k3backend.common.split_plan import SplitCost, max_items, max_slots, plan_splits
from tests.helpers.split_plans import check_plan, item_tiles, lower_bound

LENGTHS = st.one_of(
    st.integers(0, 200),
    st.integers(0, 20_000),
    st.sampled_from([0, 1, 63, 64, 65, 4096, 100_000, 1_000_000]),
)
COSTS = st.builds(
    SplitCost,
    piece_tiles=st.integers(0, 20).map(lambda quarters: quarters / 4),
    split_tiles=st.integers(0, 40).map(lambda quarters: quarters / 4),
)


@settings(max_examples=300, deadline=None)
@given(
    lens=st.lists(LENGTHS, max_size=60),
    row_tiles=st.integers(1, 6),
    workers=st.integers(1, 64),
    tile_tokens=st.sampled_from([16, 64, 100]),
    cost=COSTS,
)
def test_any_batch(
    lens: list[int], row_tiles: int, workers: int, tile_tokens: int, cost: SplitCost
) -> None:
    plan = plan_splits(lens, row_tiles, workers, tile_tokens, cost)
    check_plan(plan, lens)
    assert len(plan.work) <= max_items(len(lens), row_tiles, workers)
    assert plan.num_slots <= max_slots(len(lens), row_tiles, workers)
    tiles = item_tiles(lens, row_tiles, tile_tokens)
    assert plan.makespan_tiles >= lower_bound(tiles, workers, cost.piece_tiles)
    again = plan_splits(lens, row_tiles, workers, tile_tokens, cost)
    for left, right in zip(plan, again, strict=True):
        assert left.tobytes() == right.tobytes()


@settings(max_examples=200, deadline=None)
@given(lens=st.lists(LENGTHS, min_size=1, max_size=60), workers=st.integers(1, 64))
def test_makespan_is_near_the_bound(lens: list[int], workers: int) -> None:
    """No batch is far off: an eighth over the bound, or a few start-ups where tiles are few.

    Four start-ups: a worker's own piece, a split piece's partial, the whole tiles that do not fit
    beside them, and one more piece of an item that lies across the worker.
    """
    plan = plan_splits(lens, 1, workers)
    bound = lower_bound(item_tiles(lens, 1), workers)
    assert plan.makespan_tiles <= max(1.125 * bound, bound + 4 * 1.25)
