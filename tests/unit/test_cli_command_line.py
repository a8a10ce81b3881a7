"""The frame of every command: exit codes, refusals in one line, streams that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from k3backend._version import __version__
from k3backend.cli import command_line, commands
from k3backend.cli.command_line import Answer, CommandParser, UsageError, guarded, print_answer
from k3backend.common.errors import InputError
from tests.helpers.command_lines import REPOSITORY, assert_refused, run_here


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "--help")
    assert (outcome.code, outcome.stderr) == (0, "")
    for command in commands.COMMANDS:
        assert f"  {command.name} " in outcome.stdout
        helped = run_here(capsys, command.name, "--help")
        assert (helped.code, helped.stderr) == (0, "")
        assert helped.stdout.startswith(f"usage: k3backend {command.name} ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(capsys, "--version").stdout == f"k3backend {__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "no command is given; give one of "),
        (("",), "'' is not a command; give one of "),
        (("platfrm",), "did you mean platform?"),
        (("--json",), "is not a command"),
        (("x" * 10_000,), "is not a command"),
        (("a\nb\x1b[31m",), "is not a command"),
    ],
)
def test_refuses_what_is_not_a_command(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capsys, *words)
    assert_refused(outcome, expected, "platform")
    assert len(outcome.stderr) < 1000
    assert "\x1b" not in outcome.stderr


def parser_with(*names: str) -> CommandParser:
    parser = CommandParser("k3backend test", "A test.")
    for name in names:
        parser.add_argument(name)
    return parser


def test_a_flag_is_given_once_and_in_full() -> None:
    parser = parser_with("--spec-tokens", "--tp")
    args = parser.parse_args(["--tp", "8", "--spec-tokens=7"])
    assert (args.tp, args.spec_tokens) == ("8", "7")
    assert command_line.given_flags(args) == ["--tp", "--spec-tokens"]
    with pytest.raises(UsageError, match=r"argument --tp: is given twice; give it once"):
        parser.parse_args(["--tp", "8", "--tp", "8"])
    with pytest.raises(UsageError, match=r"--spec .*did you mean --spec-tokens"):
        parser.parse_args(["--spec", "7"])
    with pytest.raises(UsageError, match="expected one argument"):
        parser.parse_args(["--tp"])


def raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputError("--tp 7 does\nnot divide 96; use 8"), "--tp 7 does not divide 96; use 8"),
        (KeyboardInterrupt(), "interrupted"),
        (MemoryError(), "does not fit in memory"),
        (PermissionError(13, "Permission denied", "plan.png"), "plan.png: Permission denied"),
        (InputError("x" * 100_000), "xxx ... xxx"),
    ],
)
def test_every_failure_is_one_line(
    error: BaseException, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = guarded("k3backend test", lambda: raising(error))
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("k3backend test: error: ")
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 2000


def test_a_defect_is_said_to_be_one_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded("k3backend test", lambda: raising(KeyError("kind"))) == 2
    error = capsys.readouterr().err
    assert "internal error: KeyError: 'kind' (test_cli_command_line.py:" in error


def test_json_is_one_document_and_tables_have_no_colour_in_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = Answer({"a": 1}, lambda console: console.print("wide [bold]a[/]", style="red"), 1)
    assert print_answer(answer, as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    assert print_answer(answer, as_json=False) == 1
    assert capsys.readouterr().out == "wide [bold]a[/]\n"


def run_with_streams(redirect: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = f'"$0" -m k3backend "$@" {redirect}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "words", [("platform",), ("layout",), ("layout", "--json"), ("platform", "--help"), ("--help",)]
)
@pytest.mark.parametrize(
    ("redirect", "expected"),
    [(">/dev/full", "stdout cannot be written (No space left"), (">&-", "stdout is closed")],
)
def test_a_stdout_that_takes_nothing_is_a_refusal(
    words: tuple[str, ...], redirect: str, expected: str
) -> None:
    done = run_with_streams(redirect, *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_early_is_a_refusal_without_traceback() -> None:
    done = run_with_streams('| { exec 0<&-; wait; }; exit "${PIPESTATUS[0]}"', "platform")
    assert done.returncode in (0, 2), "0 where the pipe took the text before its reader left"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("\n") == (1 if done.returncode else 0)


def test_a_stream_without_unicode_gets_escapes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "k3backend", "pl\u00e4tform"],
        capture_output=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert b"'pl\\xe4tform' is not a command" in done.stderr
