"""``k3backend diff``: what changed between two plans, from saved layouts or spec files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_lines import REPOSITORY, assert_refused, run_here
from tests.unit.test_cli_layout import K3, UNDECLARED

CASES = REPOSITORY / "tests" / "data" / "planning"


def save(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> str:
    outcome = run_here(capsys, "layout", "--json", *words)
    assert outcome.code == 0
    path.write_text(outcome.stdout)
    return str(path)


def diff(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    outcome = run_here(capsys, "diff", "--json", *words)
    assert outcome.stderr == ""
    return outcome.code, json.loads(outcome.stdout)


def test_a_plan_equals_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(capsys, tmp_path / "a.json", *K3)
    code, document = diff(capsys, path, path)
    assert (code, document["equal"]) == (0, True)
    assert len(document["comparisons"]) == 3
    for comparison in document["comparisons"]:
        assert {group["change"] for group in comparison["groups"]} == {"same"}
        assert all(total["difference"] in (0, None) for total in comparison["totals"])
    assert "The plans are equal." in run_here(capsys, "diff", path, path).stdout


def test_platforms_of_one_deployment_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = K3[: K3.index("--platform")]
    paths = [
        save(capsys, tmp_path / f"{name}.json", *words, "--platform", name)
        for name in ("rocm", "nvidia")
    ]
    code, document = diff(capsys, *paths)
    assert (code, document["equal"]) == (0, True)
    settings = document["comparisons"][0]["settings"]
    assert settings == [{"field": "platform", "a": "rocm", "b": "nvidia"}]


def test_an_undeclared_draft_against_a_declared_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = save(capsys, tmp_path / "a.json", *UNDECLARED)
    b = save(capsys, tmp_path / "b.json", *K3)
    code, document = diff(capsys, a, b)
    assert (code, document["equal"]) == (1, False)
    for comparison in document["comparisons"]:
        totals = {total["field"]: total for total in comparison["totals"]}
        assert (totals["groups"]["a"], totals["groups"]["b"]) == (20, 4)
        assert totals["request.bytes"]["difference"] == 18_216_714_240 - 18_685_624_320
        changes = [group["change"] for group in comparison["groups"]]
        assert (changes.count("changed"), changes.count("removed")) == (4, 16)
        assert comparison["warnings"]["removed"] == ["undeclared-shards"]
    human = run_here(capsys, "diff", a, b)
    assert human.code == 1
    assert "-468,910,080" in human.stdout
    assert "The plans differ." in human.stdout


def test_draft_on_and_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "vllm", "--spec-tokens", "7")
    off = save(capsys, tmp_path / "off.json", *words)
    on = save(capsys, tmp_path / "on.json", *words, "--draft", "dspark-mla")
    code, document = diff(capsys, off, on)
    assert code == 1
    (comparison,) = document["comparisons"]
    changed = [group for group in comparison["groups"] if group["layers_added"]]
    assert len(changed) == 1
    assert len(changed[0]["layers_added"]) == 5
    assert {"field": "is_draft", "a": False, "b": True} in changed[0]["fields"]


def test_spec_files_are_planned_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("k3-mla-draft-undeclared-shards", "k3-mla-draft"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(json.loads((CASES / f"{name}.json").read_text())["specs"]))
        paths.append(str(path))
    code, document = diff(capsys, "--policy", "vllm", *paths)
    assert code == 1
    totals = {total["field"]: total for total in document["comparisons"][0]["totals"]}
    assert (totals["request.blocks"]["a"], totals["request.blocks"]["b"]) == (4224, 710)
    code, document = diff(capsys, "--policy", "vllm", paths[1], paths[1])
    assert (code, document["equal"]) == (0, True)


def test_plans_without_a_common_platform_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = save(capsys, tmp_path / "all.json", *K3)
    document = json.loads(Path(both).read_text())
    renamed = {"amd": document["platforms"]["rocm"], "intel": document["platforms"]["rocm"]}
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**document, "platforms": renamed}))
    assert_refused(run_here(capsys, "diff", both, str(other)), "argument B", "amd", "--platform")


def mutations(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a document, lists by their first item."""
    paths = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            paths += mutations(item, (*path, key))
    elif isinstance(value, list) and value:
        paths += mutations(value[0], (*path, 0))
    return paths


@pytest.mark.parametrize("junk", [None, "x", -1, 1.5, [], {}, True, [None], {"a": 1}])
def test_a_damaged_layout_is_refused_or_compared_but_never_a_traceback(
    junk: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = save(capsys, tmp_path / "whole.json", *K3[:-4], "--memory", "60", "--policy", "vllm")
    document = json.loads(Path(whole).read_text())
    damaged = tmp_path / "damaged.json"
    refused = 0
    paths = mutations(document)
    for path in paths:
        copy = json.loads(json.dumps(document))
        place = copy
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = junk
        damaged.write_text(json.dumps(copy))
        for output in ((), ("--json",)):
            outcome = run_here(capsys, "diff", *output, whole, str(damaged))
            assert outcome.code in (0, 1, 2), path
            if outcome.code == 2:
                refused += 1
                assert_refused(outcome, "argument B", "damaged.json")
    assert refused > len(paths) // 4, "most keys have a type that junk breaks"
