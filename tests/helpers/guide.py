"""The commands of docs/user-guide.md and what the guide says they print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "user-guide.md"
_SCREEN = re.compile(r"^`k3backend (?P<args>[^`]+)`\n\n```\n(?P<screen>.*?)\n```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Answer:
    """One command of the guide.

    Attributes:
        question: the heading that it stands under.
        args: the words after ``k3backend``, as written.
        screen: what it prints, without trailing blanks.
    """

    question: str
    args: str
    screen: str


def questions() -> list[str]:
    """The numbered headings."""
    return re.findall(r"^## (\d+\. .*)$", GUIDE.read_text(), re.M)


def answers() -> list[Answer]:
    """All commands in order."""
    text = GUIDE.read_text()
    found = []
    for match in _SCREEN.finditer(text):
        headings = re.findall(r"^## (\d+\. .*)$", text[: match.start()], re.M)
        found.append(Answer(headings[-1], match["args"], match["screen"]))
    return found


def trimmed(output: str) -> str:
    """Output without blanks at line ends and empty lines at its end."""
    return "\n".join(line.rstrip() for line in output.rstrip().splitlines())
