"""The rule by which engine runs are compared."""

from __future__ import annotations

import pytest

from tests.helpers.engine_runs import EngineRun, disagreements


def run(tokens, logprobs):
    return EngineRun("run", "model", tokens=[tokens], logprobs=[logprobs])


REFERENCE = run([5, 6, 7], [[[5, -1.0], [9, -2.0]], [[6, -1.0], [8, -1.02]], [[7, -0.5], [3, -4]]])


def test_equal_runs_agree():
    assert disagreements(REFERENCE, REFERENCE) == []


def test_another_token_disagrees():
    other = run([9, 6, 7], [[[9, -1.0], [5, -2.0]], *REFERENCE.logprobs[0][1:]])
    assert disagreements(REFERENCE, other) == ["prompt 0, token 0: 9, expected 5"]


def test_a_run_may_leave_where_the_top_two_are_close_and_is_not_compared_after():
    other = run([5, 8, 1], [REFERENCE.logprobs[0][0], [[8, -1.0], [6, -1.1]], [[1, -9], [2, -9]]])
    assert disagreements(REFERENCE, other) == []


@pytest.mark.parametrize(
    ("value", "agrees"), [(-1.049, True), (-1.051, False), (float("nan"), False)]
)
def test_log_probabilities_are_within_the_tolerance(value, agrees):
    other = run([5, 6, 7], [[[5, value], [9, -2.0]], *REFERENCE.logprobs[0][1:]])
    assert (disagreements(REFERENCE, other) == []) is agrees
