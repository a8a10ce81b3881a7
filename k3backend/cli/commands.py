"""The commands: their names, what each answers, and the module that loads when one is asked."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from k3backend._version import __version__
from k3backend.cli.command_line import (
    EXIT_DONE,
    CommandModule,
    CommandParser,
    UsageError,
    guarded,
    print_answer,
    print_text,
)

PROG = "k3backend"


@dataclass(frozen=True, slots=True)
class Command:
    """One command; its module is ``k3backend.cli.<name>`` and loads only when it is asked."""

    name: str
    summary: str

    def load(self) -> CommandModule:
        """Import the module of this command."""
        return cast(CommandModule, importlib.import_module(f"k3backend.cli.{self.name}"))


COMMANDS: tuple[Command, ...] = (
    Command("layout", "how a K3 target and draft are grouped, per platform"),
    Command("groups", "the same for any model, from a spec file"),
    Command("explain", "which layers do not share a group, and what would join them"),
    Command("fit", "the longest request in a byte budget, or how many of a given length"),
    Command("replay", "a request trace through vLLM's scheduler under two layouts"),
    Command("diff", "what changed between two saved plans"),
    Command("kernels", "what the compiler makes of the production kernels, per GPU"),
    Command("platform", "the chosen vendor and why, and the versions found"),
)


def run(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` names and return its exit code."""
    command = next((c for c in COMMANDS if argv and c.name == argv[0]), None)
    if command is None:
        return guarded(PROG, lambda: _without_command(argv))
    chosen = command
    prog = f"{PROG} {chosen.name}"

    def body() -> int:
        module = chosen.load()
        parser = CommandParser(prog, f"Answers: {chosen.summary}.")
        module.add_arguments(parser)
        args = parser.parse_args(list(argv[1:]))
        return print_answer(module.run(args), as_json=args.json)

    return guarded(prog, body)


def _without_command(argv: Sequence[str]) -> int:
    names = ", ".join(c.name for c in COMMANDS)
    if not argv:
        raise UsageError(f"no command is given; give one of {names}, or --help")
    first = argv[0]
    if first in {"-h", "--help"}:
        print_text(help_text())
        return EXIT_DONE
    if first == "--version":
        print_text(f"{PROG} {__version__}\n")
        return EXIT_DONE
    close = difflib.get_close_matches(first, [c.name for c in COMMANDS], n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise UsageError(f"{first[:80]!r} is not a command{hint}; give one of {names}, or --help")


def help_text() -> str:
    """The text of ``k3backend --help``."""
    width = max(len(c.name) for c in COMMANDS)
    lines = [f"usage: {PROG} COMMAND [arguments]", "", "commands:"]
    lines += [f"  {c.name:<{width}}  {c.summary}" for c in COMMANDS]
    lines += [
        "",
        f"`{PROG} COMMAND --help` lists a command's arguments; --version prints the version.",
        "Exit codes: 0 done; 1 the answer is no; 2 bad usage or bad input, one line on stderr.",
    ]
    return "\n".join(lines) + "\n"
