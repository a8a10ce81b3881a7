"""The example programs run and say what they claim."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import split_plans

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "plan_and_decode.py"), run_name="example")


def mooncake_prompts() -> list[int]:
    with split_plans.MOONCAKE.open() as file:
        return [int(row["input_tokens"]) for row in csv.DictReader(file)]


def balance(text: str) -> tuple[float, float, float]:
    """Fullest worker, lower bound and whole requests dealt in turn, in tiles."""
    numbers = re.search(
        r"fullest worker: ([\d.]+) tiles; lower bound ([\d.]+); "
        r"whole requests, dealt to the workers in turn, would take ([\d.]+)",
        text,
    )
    assert numbers is not None, text
    return float(numbers[1]), float(numbers[2]), float(numbers[3])


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
    fullest, bound, dealt = balance(text)
    assert bound <= fullest <= 2 * bound
    lengths = mooncake_prompts()[7:10]
    assert dealt == max(-(-n // 64) for n in lengths) + 1.25
    decoded = re.search(r"in (\d+) split pieces; largest difference (\S+)", text)
    assert decoded is not None, text
    assert int(decoded[1]) > 3
    # Outputs stay below 0.5, where half a step of bfloat16 is at most 2**-10.
    assert float(decoded[2]) <= 2**-10


def test_more_requests_than_workers_are_dealt_in_turn(example: dict[str, Any]) -> None:
    # 300 requests of 2 tiles and 1.25 to start: 44 of 256 workers get two.
    _, bound, dealt = balance(example["describe_plan"]([100] * 300))
    assert dealt == 6.5
    assert bound <= dealt
    # The first worker gets requests 0 and 256: 10 + 5 tiles and two starts.
    _, bound, dealt = balance(example["describe_plan"]([640] + [64] * 255 + [320]))
    assert dealt == 17.5
    assert bound <= dealt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch is 0, .* 4000 rows from row 0 on: give 1 to 4000$"),
        (["--batch", "-3"], "--batch is -3, .*: give 1 to 4000$"),
        (["--batch", "99999"], "--batch is 99999, .*: give 1 to 4000$"),
        (["--batch", "9", "--first", "3995"], "--batch is 9, .* from row 3995 on: give 1 to 5$"),
        (["--batch", "4000"], r"--batch is 4000, whose cache takes 6\d\.\d GB, .*: give 1 to \d+$"),
        (["--first", "4000"], "--first is 4000, .* has 4000 rows: give 0 to 3999$"),
        (["--first", "-2"], "--first is -2, .*: give 0 to 3999$"),
        (["--lengths", "/nope"], r"--lengths /nope cannot be read \(No such file.*: give a CSV"),
        (["--lengths", str(EXAMPLES)], "--lengths .* cannot be read .*: give a CSV file"),
        (
            ["--lengths", str(EXAMPLES.parent / "README.md")],
            "--lengths .*README.md has no column input_tokens: give a CSV file with",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    example: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert re.search(message, refused(example, capsys, arguments))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no column input_tokens"),
        (b"input_tokens\n", "has no rows: give a CSV file"),
        (b"a,input_tokens\n1,2\n3,x\n", "row 1 has input_tokens 'x': give a whole number"),
        (b"a,input_tokens\n1\n2,3\n", "row 0 has input_tokens None: give a whole number"),
        (b"a,input_tokens\n1,0\n2,3\n", "row 0 has input_tokens '0': give a whole number"),
        (b"a,input_tokens\n1,9999999999\n2,3\n", "cache takes .* GB, .*: choose another row"),
        (b"input_tokens\n\xff\n3\n", "is no CSV file .*: give a CSV file"),
        (b'input_tokens\n"' + b"1" * 140_000 + b'"\n', "is no CSV file .*: give a CSV file"),
    ],
)
def test_files_of_lengths_that_cannot_be_used_are_named(
    example: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: bytes,
    message: str,
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_bytes(content)
    line = refused(example, capsys, ["--lengths", str(path), "--batch", "2"])
    assert str(path) in line or "--batch is 2" in line
    assert re.search(message, line)


def refused(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> str:
    """The line that refuses the arguments."""
    with pytest.raises(SystemExit) as end:
        example["main"](arguments)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *usage, line = captured.err.splitlines()
    assert usage[0].startswith("usage: ")
    assert "error: --" in line
    return line
