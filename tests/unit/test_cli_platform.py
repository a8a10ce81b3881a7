"""``k3backend platform`` says the choice and the versions and imports none of them."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from k3backend import dispatch
from k3backend.cli import platform
from tests.helpers.command_lines import run_fresh, run_here

HEAVY = ("torch", "triton", "vllm", "aiter")


def test_says_the_choice_its_reason_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "platform", "--json")
    document = json.loads(outcome.stdout)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert document["schema"] == "k3backend.platform/1"
    assert document["platform"] == dispatch.BACKEND.name
    assert document["reason"] == dispatch.CHOICE.reason
    assert document["versions"]["torch"] == importlib.metadata.version("torch")
    assert set(HEAVY) <= set(document["versions"])
    human = run_here(capsys, "platform").stdout
    for text in (dispatch.CHOICE.reason, document["versions"]["torch"], *HEAVY):
        assert text in human


def test_imports_none_of_what_it_reports() -> None:
    outcome = run_fresh("platform", "--json", block=HEAVY)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr == "loaded:\n"
    assert json.loads(outcome.stdout)["schema"] == "k3backend.platform/1"


def test_routes_of_k3_with_dspark(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("platform", "--routes", "--tp", "8", "--spec-tokens", "7")
    outcome = run_here(capsys, *command, "--json")
    assert (outcome.code, outcome.stderr) == (0, "")
    routes = json.loads(outcome.stdout)["routes"]
    shapes = {(row["heads"], row["q_len"], row["causal"]) for row in routes}
    assert shapes == {(12, 1, True), (12, 8, True), (8, 7, False)}
    assert all(row["reason"] and row["kv_reads"] == 1 for row in routes)
    human = run_here(capsys, *command).stdout
    for text in ("shape", "route", "why", "gfx950", "gfx942", "12 x 8", "8 x 7", "folded"):
        assert text in human


def test_routes_for_a_named_aiter_and_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(
        capsys, "platform", "--routes", "--json", "--arch", "gfx950", "--aiter-version", "0.1.20"
    )
    routes = json.loads(outcome.stdout)["routes"]
    assert {row["arch"] for row in routes} == {"gfx950"}
    assert all(row["verified"] for row in routes)


@pytest.mark.parametrize("installed", [None, "0.1.20"])
def test_routes_say_what_layers_take_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    versions = platform.installed_versions() | {"aiter": installed}
    monkeypatch.setattr(platform, "installed_versions", lambda: versions)
    command = ("platform", "--routes", "--arch", "gfx950", "--aiter-version", "0.1.20")
    document = json.loads(run_here(capsys, *command, "--json").stdout)
    assert document["aiter_installed"] is (installed is not None)
    routes = {row["route"] for row in document["routes"]}
    assert any("aiter" in route for route in routes)
    for row in document["routes"]:
        assert row["taken"] == ("folded" if installed is None else row["route"])
    human = " ".join(run_here(capsys, *command).stdout.split())
    assert "taken here" in human
    assert ("AITER is not installed here" in human) is (installed is None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--tp", "8"), "--routes"),
        (("--routes", "--tp", "7"), "argument --tp: 7 does not divide the target's 96 heads"),
        (("--routes", "--arch", "gfx90a"), "gfx90a"),
        (("--routes", "--tp", "x"), "--tp"),
    ],
)
def test_bad_route_flags_are_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    outcome = run_here(capsys, "platform", *arguments)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.count("\n") == 1
    assert named in outcome.stderr


def test_routes_import_none_of_what_they_are_about() -> None:
    outcome = run_fresh("platform", "--routes", "--json", block=HEAVY)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr == "loaded:\n"
