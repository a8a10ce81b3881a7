"""``k3backend groups``: spec files, one or several, planned and reported in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_lines import REPOSITORY, run_here

CASES = sorted((REPOSITORY / "tests" / "data" / "planning").glob("*.json"))


def spec_file(case: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    document = json.loads(case.read_text())
    path = folder / case.name
    path.write_text(json.dumps(document["specs"]))
    return str(path), document["expect"]["vllm"]


def test_all_cases_in_one_list_with_errors_in_their_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [spec_file(case, tmp_path) for case in CASES]
    words = [word for path, _ in files for word in ("--specs", path)]
    outcome = run_here(capsys, "groups", "--json", "--policy", "vllm", *words)
    documents = json.loads(outcome.stdout)
    assert outcome.stderr == ""
    assert len(documents) == len(CASES)
    errors = 0
    for document, (path, expected) in zip(documents, files, strict=True):
        if "group_sizes" not in expected:
            assert list(document) == ["error"], path
            assert Path(path).name in document["error"]
            errors += 1
            continue
        assert document["schema"] == "k3backend.layout/1"
        assert document["platform"] is None
        groups = document["groups"]
        assert [group["num_layers"] for group in groups] == expected["group_sizes"], path
        assert [group["block_size"] for group in groups] == expected["block_sizes"], path
        assert document["block_bytes"] == expected["block_bytes"], path
        assert document["request"]["blocks"] == expected["request_blocks"], path
        assert document["request"]["bytes"] == expected["request_bytes"], path
        assert document["kv_tp_replicas"] == expected["kv_tp_replicas"], path
    assert errors > 0, "the cases must hold one that vLLM cannot plan"
    assert outcome.code == 1


def test_one_file_is_one_document_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(case for case in CASES if case.stem == "k3-mla-draft")
    path, _ = spec_file(case, tmp_path)
    one = run_here(capsys, "groups", "--json", "--policy", "vllm", "--specs", path)
    assert one.code == 0
    document = json.loads(one.stdout)
    assert document["request"]["bytes"] == 18_216_714_240
    twice = run_here(
        capsys, "groups", "--json", "--policy", "vllm", "--specs", path, "--specs", path
    )
    assert (twice.code, json.loads(twice.stdout)) == (0, [document, document])
    human = run_here(capsys, "groups", "--policy", "vllm", "--specs", path)
    assert human.code == 0
    assert "18,216,714,240 B" in human.stdout
    assert path in human.stdout


def test_tables_show_a_failure_beside_the_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(case for case in CASES if case.stem == "k3-mla-draft")
    path, _ = spec_file(case, tmp_path)
    missing = str(tmp_path / "missing.json")
    outcome = run_here(capsys, "groups", "--policy", "vllm", "--specs", missing, "--specs", path)
    assert outcome.code == 1
    assert outcome.stderr == ""
    assert "does not exist" in " ".join(outcome.stdout.split())
    assert "18,216,714,240 B" in outcome.stdout


def test_flags_win_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(case for case in CASES if case.stem == "k3-mla-draft")
    path, _ = spec_file(case, tmp_path)
    words = ("groups", "--json", "--policy", "vllm", "--specs", path)
    assert json.loads(run_here(capsys, *words).stdout)["context"] == 1_048_576
    shorter = json.loads(run_here(capsys, *words, "--context", "60000").stdout)
    assert shorter["context"] == 60_000
    assert shorter["candidates"][0]["request_bytes"] < 18_216_714_240
    assert shorter["request"]["bytes"] == 18_216_714_240
