"""The example programs run and say what they claim."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_plan_and_decode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = EXAMPLES / "plan_and_decode.py"
    monkeypatch.setattr(sys, "argv", [str(program), "--batch", "3", "--first", "7"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(program), run_name="__main__")
    assert end.value.code == 0
    text = capsys.readouterr().out
    found = re.search(r"plan: (\d+) pieces, (\d+) of them", text)
    assert found is not None, text
    # Three requests over 256 workers: nearly every piece belongs to a split request.
    assert int(found[1]) > 100
    numbers = re.search(r"fullest worker: ([\d.]+) tiles; lower bound ([\d.]+)", text)
    assert numbers is not None, text
    assert float(numbers[2]) <= float(numbers[1]) <= 2 * float(numbers[2])
    decoded = re.search(r"in (\d+) split pieces; largest difference (\S+)", text)
    assert decoded is not None, text
    assert int(decoded[1]) > 3
    # Outputs stay below 0.5, where half a step of bfloat16 is at most 2**-10.
    assert float(decoded[2]) <= 2**-10
