"""The guide's replay, run again: everything but the host times is the same."""

from __future__ import annotations

import re
import shlex

import pytest

from k3backend.__main__ import main
from tests.helpers.guide import Answer, answers, trimmed

pytestmark = pytest.mark.vllm

REPLAYED = [answer for answer in answers() if answer.args.startswith("replay ")]


def without_times(screen: str) -> str:
    return re.sub(r"^(host us per [\w: ]+?) .*$", r"\1", screen, flags=re.M)


@pytest.mark.parametrize("answer", REPLAYED, ids=lambda answer: answer.args[:40])
def test_screen_is_current(answer: Answer, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(answer.args)) == 0
    printed = trimmed(capfd.readouterr().out)
    assert without_times(printed) == without_times(answer.screen)
    assert "host us per step: schedule" in printed


def test_the_guide_replays_something() -> None:
    assert REPLAYED
