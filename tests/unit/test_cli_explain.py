"""``k3backend explain`` names the fields that keep layers apart, and proves its remedies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_lines import REPOSITORY, assert_refused, run_here
from tests.unit.test_cli_layout import K3, UNDECLARED

CASES = REPOSITORY / "tests" / "data" / "planning"


def explain(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    outcome = run_here(capsys, "explain", "--json", *words)
    assert (outcome.code, outcome.stderr) == (0, "")
    document: dict[str, Any] = json.loads(outcome.stdout)
    return document


def spec_file(name: str, folder: Path) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(json.loads((CASES / f"{name}.json").read_text())["specs"]))
    return str(path)


def draft_pair(document: dict[str, Any]) -> dict[str, Any]:
    """The pair of the draft with the target's MLA layers."""
    formats = {item["id"]: item for item in document["formats"]}
    pairs = [
        pair
        for pair in document["apart"]
        if formats[pair["left"]]["is_draft"] and formats[pair["right"]]["kind"] == "mla_attention"
    ]
    assert len(pairs) == 1
    return pairs[0]


def test_an_undeclared_draft_is_told_which_field_and_both_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = explain(capsys, *UNDECLARED)
    assert document["equal"] is True
    for plan in document["platforms"].values():
        pair = draft_pair(plan)
        blocking = [d for d in pair["differences"] if d["blocks"]]
        assert blocking == [
            {"field": "max_tp_shards", "left": None, "right": 1, "kind": "sharing", "blocks": True}
        ]
        changes = pair["joined"]["changes"]
        assert changes == [{"format": pair["left"], "field": "max_tp_shards", "value": 1}]
        assert pair["joined"]["groups"] == 4
        assert pair["joined"]["request_bytes"] == 18_216_714_240
    human = run_here(capsys, "explain", *UNDECLARED).stdout
    assert "max_tp_shards" in human
    assert "None against 1" in human
    assert "4 groups, pool block 25,657,344 B, 18,216,714,240 B per request" in human


def test_layers_that_share_a_group_are_not_said_to_be_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = explain(capsys, *K3)["platforms"]["rocm"]
    assert [item["num_layers"] for item in plan["formats"]] == [69, 24, 5]
    assert plan["formats"][1]["groups"] == plan["formats"][2]["groups"] == [3]
    assert plan["formats"][0]["groups"] == [0, 1, 2]
    kinds = {item["id"]: item["kind"] for item in plan["formats"]}
    for pair in plan["apart"]:
        assert {kinds[pair["left"]], kinds[pair["right"]]} == {"mamba", "mla_attention"}
        assert pair["joinable"] is False
        assert pair["joined"] is None
        assert "keep different things" in pair["remedy"]


@pytest.mark.parametrize(
    ("case", "field", "kind"),
    [
        ("k3-label-alias", "cache_dtype_str", "label"),
        ("k3-backend-alignment", "block_stride_alignment", "label"),
        ("k3-mla-draft-undeclared-shards", "max_tp_shards", "sharing"),
        ("k3-dcp8-replicated-draft", "dcp_sharded", "sharing"),
    ],
)
def test_spec_files_are_told_their_field(
    case: str, field: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = explain(capsys, "--policy", "vllm", "--specs", spec_file(case, tmp_path))
    assert document["platform"] is None
    pair = draft_pair(document)
    assert (field, kind) in {(d["field"], d["kind"]) for d in pair["differences"] if d["blocks"]}
    assert pair["joinable"] is True
    assert pair["joined"]["groups"] < document["groups"]


def test_a_window_is_a_fact_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--policy", "vllm", "--specs", spec_file("mimo-9-39-5", tmp_path))
    document = explain(capsys, *words)
    windows = next(
        pair
        for pair in document["apart"]
        if [d["field"] for d in pair["differences"]] == ["sliding_window"]
    )
    assert windows["differences"][0]["kind"] == "policy"
    assert "follows from the model" in windows["remedy"]
    assert "Nothing joins them" in run_here(capsys, "explain", *words).stdout


def test_one_format_has_nothing_to_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((CASES / "k3-mla-draft.json").read_text())["specs"]
    document["layers"] = document["layers"][1:2]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(document))
    words = ("--policy", "vllm", "--specs", str(path))
    assert explain(capsys, *words)["apart"] == []
    assert "Every two formats share a group." in run_here(capsys, "explain", *words).stdout


def test_a_difference_that_the_policy_reconciles_is_still_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = UNDECLARED[: UNDECLARED.index("--policy")]
    words = (*words, "--draft-max-tp-shards", "none", "--policy", "k3")
    for plan in explain(capsys, *words)["platforms"].values():
        assert plan["groups"] == 4
        (pair,) = plan["reconciled"]
        blocking = [d for d in pair["differences"] if d["blocks"]]
        assert [(d["field"], d["left"], d["right"]) for d in blocking] == [
            ("max_tp_shards", None, 1)
        ]
    human = " ".join(run_here(capsys, "explain", *words).stdout.split())
    assert "though their specs do not merge" in human
    assert "None against 1" in human
    assert explain(capsys, *K3)["platforms"]["rocm"]["reconciled"] == []


def test_every_two_of_many_formats_are_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((CASES / "k3-mla-draft.json").read_text())["specs"]
    mla = document["layers"][1]
    document["layers"] = [
        {**mla, "prefix": f"layer{shards}.", "count": 1, "max_tp_shards": shards}
        for shards in range(1, 202)
    ]
    path = tmp_path / "many.json"
    path.write_text(json.dumps(document))
    outcome = run_here(capsys, "explain", "--policy", "vllm", "--specs", str(path))
    assert_refused(outcome, "--specs", "201 different specs", "at most 200")


@pytest.mark.parametrize(("policy", "pairs"), [("vllm", "apart"), ("k3", "reconciled")])
def test_sharding_over_one_dcp_rank_is_a_label(
    policy: str, pairs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((CASES / "k3-mla-draft.json").read_text())["specs"]
    document["layers"][-1]["dcp_sharded"] = False
    path = tmp_path / "specs.json"
    kinds = {}
    for dcp_size in (1, 8):
        path.write_text(json.dumps({**document, "dcp_size": dcp_size}))
        answer = explain(capsys, "--specs", str(path), "--policy", policy)
        found = answer[pairs] if dcp_size == 1 else answer["apart"]
        (kinds[dcp_size],) = {
            (d["kind"], "policy k3 takes them for one" in pair["remedy"])
            for pair in found
            for d in pair["differences"]
            if d["field"] == "dcp_sharded" and d["blocks"] and len(pair["differences"]) <= 2
        }
    assert kinds == {1: ("label", True), 8: ("sharing", False)}
