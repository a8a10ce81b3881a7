"""The argument parser of every command, and the one place where an answer or a refusal is printed.

A command computes its whole answer before anything is printed, so a refusal leaves stdout empty.
Exit codes: 0 done, 1 the answer is "no", 2 bad usage or bad input with one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from k3backend.common.errors import InputError, K3Error

if TYPE_CHECKING:
    from rich.console import Console

EXIT_DONE = 0
EXIT_NO = 1
EXIT_BAD_INPUT = 2

PIPE_WIDTH_COLUMNS = 100
MAX_REFUSAL_CHARACTERS = 1500


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found out.

    Attributes:
        document: what ``--json`` prints: dicts, lists, strings, finite numbers, booleans, None.
        render: prints the same for people on a rich console.
        exit_code: EXIT_DONE, or EXIT_NO where the answer is "no".
    """

    document: Any
    render: Callable[[Console], None]
    exit_code: int = EXIT_DONE


class CommandModule(Protocol):
    """What each ``cli`` module that is a command offers."""

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the command's flags."""

    def run(self, args: argparse.Namespace) -> Answer:
        """Compute the answer. Raises K3Error on bad input."""


class UsageError(InputError):
    """The command line itself cannot be read."""


class _HelpRequest(Exception):
    """``--help`` was read; carries the text. argparse would drop a failure to print it."""


class _LostOutput(Exception):
    """Stdout did not take the answer; carries the reason."""


class _Help(argparse.Action):
    """Stops the parse with the help text."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise _HelpRequest(parser.format_help())


class _StoreOnce(argparse.Action):
    """Stores a value; a second one is refused, because one of the two would be lost."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del parser
        given = given_flags(namespace)
        flag = option_string or self.dest
        if flag in given:
            raise argparse.ArgumentError(self, "is given twice; give it once")
        given.append(flag)
        setattr(namespace, self.dest, values)


def given_flags(namespace: argparse.Namespace) -> list[str]:
    """The flags with a value that stood on the command line, in order."""
    given: list[str] = namespace.__dict__.setdefault("given_flags", [])
    return given


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviations, with errors raised and each flag given at most once."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False)
        self.register("action", None, _StoreOnce)
        self.register("action", "store", _StoreOnce)
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="print this text")

    def error(self, message: str) -> NoReturn:
        kind, _, words = message.partition("unrecognized arguments: ")
        hint = ""
        if not kind and words:
            word = words.split()[0].split("=")[0]
            close = difflib.get_close_matches(word, self._option_string_actions, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"{message}{hint}; `{self.prog} --help` lists the arguments")


def print_answer(answer: Answer, as_json: bool) -> int:
    """Print the answer on stdout and return its exit code."""
    if as_json:
        text = json.dumps(answer.document, indent=1, allow_nan=False) + "\n"
    else:
        text = _rendered(answer)
    print_text(text)
    return answer.exit_code


def print_text(text: str) -> None:
    """Write ``text`` to stdout at once. A stdout that cannot take it is a refusal too."""
    if sys.stdout is None:
        raise InputError("stdout is closed; give the command a place to write to")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        reason = "its reader closed it before the whole answer was written"
        raise _LostOutput(reason) from error
    except OSError as error:
        raise _LostOutput(error.strerror or str(error)) from error


def _rendered(answer: Answer) -> str:
    from rich.console import Console

    terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(
        # Rich also touches its file while it captures. Only print_text writes to stdout.
        file=io.TextIOWrapper(io.BytesIO(), encoding=getattr(sys.stdout, "encoding", None)),
        force_terminal=True if terminal else None,
        width=None if terminal else PIPE_WIDTH_COLUMNS,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as capture:
        answer.render(console)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def guarded(prog: str, body: Callable[[], int]) -> int:
    """Run ``body``; turn every failure into one line on stderr and exit code 2."""
    _escape_what_the_stream_cannot_show()
    try:
        return _with_help(body)
    except K3Error as error:
        return _refuse(prog, str(error))
    except _LostOutput as error:
        return _lost_output(prog, str(error))
    except OSError as error:
        reason = error.strerror or str(error)
        return _refuse(prog, f"{error.filename or 'a file'}: {reason}; give a usable path")
    except KeyboardInterrupt:
        return _refuse(prog, "interrupted before the answer was complete; run it again")
    except MemoryError:
        return _refuse(prog, "the plan does not fit in memory; ask for smaller sizes")
    except Exception as error:
        return _refuse(prog, f"internal error: {_where(error)}; please report the command")


def _with_help(body: Callable[[], int]) -> int:
    try:
        return body()
    except _HelpRequest as request:
        print_text(str(request))
        return EXIT_DONE


def _lost_output(prog: str, reason: str) -> int:
    """Refuse, and let the interpreter's last flush of stdout go nowhere instead of complaining."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _refuse(prog, f"stdout cannot be written ({reason}); give it a place with room")


def _refuse(prog: str, message: str) -> int:
    line = "".join(_visible(character) for character in " ".join(message.split()))
    if len(line) > MAX_REFUSAL_CHARACTERS:
        half = MAX_REFUSAL_CHARACTERS // 2
        line = f"{line[:half]} ... {line[-half:]}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"{prog}: error: {line}", file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _where(error: Exception) -> str:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    name = f"{type(error).__name__}: {error}"
    if place is None:
        return name
    return f"{name} ({os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno})"


def _escape_what_the_stream_cannot_show() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
