"""Every answer of the user guide is what its command prints today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from k3backend.__main__ import main
from k3backend.common.group_policy import choose_grouping
from k3backend.common.request_trace import read_trace
from tests.helpers.guide import GUIDE, Answer, answers, questions, trimmed
from tests.helpers.k3_layers import k3_context, k3_layers

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = answers()
PLANNED = [answer for answer in ANSWERS if not answer.args.startswith("replay ")]


def test_there_are_ten_questions_and_each_is_answered_by_a_command() -> None:
    asked = questions()
    assert [question.split(".")[0] for question in asked] == [str(n) for n in range(1, 11)]
    assert {answer.question for answer in ANSWERS} == set(asked)
    assert len(PLANNED) >= 10


@pytest.mark.parametrize("answer", PLANNED, ids=lambda answer: answer.args[:60])
def test_screen_is_current(
    answer: Answer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code = main(shlex.split(answer.args))
    # A difference between two plans is an answer with exit code 1.
    assert code == (1 if answer.args.startswith("diff ") else 0)
    printed = trimmed(capsys.readouterr().out)
    assert printed == answer.screen, "run tools/update_readme.py docs/user-guide.md"


def test_numbers_in_the_text() -> None:
    text = re.sub(r"```.*?```", "", GUIDE.read_text(), flags=re.S)
    choice = choose_grouping(k3_layers(8, "full"), k3_context(8))
    size = {candidate.name: candidate.request_bytes for candidate in choice.candidates}
    more = size["isolate-w24"] / size["vllm"] - 1
    assert f"{more:.0%}".replace("%", " %") + " more than vLLM's default" in text
    trace = read_trace(ROOT / "tests/data/mooncake_conversation_lengths.csv", 40)
    mean = sum(request.total_tokens for request in trace) / len(trace)
    assert f"hold {mean:,.0f} tokens on average" in text
    assert "0.00225" in text
