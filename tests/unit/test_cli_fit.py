"""``k3backend fit``: the longest length is exact, and a length that does not fit is a "no"."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.command_lines import assert_refused, run_here


def fit(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    outcome = run_here(capsys, "fit", "--json", *words)
    assert outcome.stderr == ""
    return outcome.code, json.loads(outcome.stdout)


@pytest.mark.parametrize("draft", ["none", "dspark-mla", "dspark-gqa-full", "dspark-gqa-window"])
@pytest.mark.parametrize("memory", ["1.5", "10"])
def test_the_longest_length_fits_and_one_token_more_does_not(
    draft: str, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--draft", draft, "--memory", memory, "--platform", "rocm")
    code, document = fit(capsys, *words)
    longest = document["longest_max_model_len"]
    assert (code, document["fits"], document["limited_by"]) == (0, True, "memory")
    assert document["max_model_len"] == longest
    code, exact = fit(capsys, *words, "--max-model-len", str(longest))
    assert (code, exact["fits"], exact["missing_bytes"]) == (0, True, 0)
    assert exact["max_concurrency"] >= 1
    code, beyond = fit(capsys, *words, "--max-model-len", str(longest + 1))
    assert (code, beyond["fits"]) == (1, False)
    assert beyond["max_concurrency"] < 1
    needed = beyond["available_bytes"] + beyond["missing_bytes"]
    assert needed == (beyond["request"]["blocks"] + 1) * beyond["block_bytes"]


def test_a_large_budget_is_limited_by_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = fit(capsys, "--draft", "dspark-mla", "--memory", "60")
    assert code == 0
    assert document["limited_by"] == "model"
    assert document["longest_max_model_len"] == 1_048_576
    assert document["usable_blocks"] == 60 * 2**30 // 25_657_344 - 1
    assert document["max_concurrency"] == document["usable_blocks"] / 710


def test_the_null_block_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--draft", "dspark-mla", "--policy", "vllm", "--max-model-len", "1048576")
    exact_gib = 710 * 25_657_344 / 2**30
    code, document = fit(capsys, *words, "--memory", f"{exact_gib:.9f}")
    assert code == 1
    assert document["usable_blocks"] == document["num_blocks"] - 1 < 710
    code, _ = fit(capsys, *words, "--memory", f"{711 * 25_657_344 / 2**30 + 1e-8:.9f}")
    assert code == 0


def test_the_tightest_pipeline_stage_decides(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--draft", "dspark-mla", "--policy", "vllm", "--memory", "10")
    _, one = fit(capsys, *words)
    _, two = fit(capsys, *words, "--pp", "2")
    assert two["longest_max_model_len"] > one["longest_max_model_len"]
    words = (*words, "--pp", "2", "--max-model-len")
    assert fit(capsys, *words, str(two["longest_max_model_len"]))[0] == 0
    assert fit(capsys, *words, str(two["longest_max_model_len"] + 1))[0] == 1


def test_nothing_fits_into_almost_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = fit(capsys, "--memory", "0.001")
    assert code == 1
    assert (document["fits"], document["longest_max_model_len"]) == (False, 0)
    human = run_here(capsys, "fit", "--memory", "0.001")
    assert human.code == 1
    assert "none fits" in human.stdout


def test_platforms_answer_together(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = fit(capsys, "--memory", "60", "--platform", "all")
    assert code == 0
    assert document["schema"] == "k3backend.fit-set/1"
    assert document["equal"] is True
    assert list(document["platforms"]) == ["nvidia", "rocm", "reference"]
    human = run_here(capsys, "fit", "--memory", "60", "--platform", "all").stdout
    assert "nvidia = rocm = reference" in human


def test_memory_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(run_here(capsys, "fit"), "--memory", "GiB")
