"""``k3backend platform`` says the choice and the versions and imports none of them."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from k3backend import dispatch
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
