"""Renew the outputs in README.md: the block after each `k3backend …` line is what it prints now.

    python tools/update_readme.py [--check]

With --check nothing is written; exit 1 where a block is out of date.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
SCREEN = re.compile(r"^`k3backend (?P<args>[^`]+)`\n\n```\n(?P<screen>.*?)\n```$", re.M | re.S)


def renewed(text: str) -> str:
    """The text with every screen printed anew."""

    def replace(match: re.Match[str]) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "k3backend", *shlex.split(match["args"])],
            cwd=README.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        screen = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
        return f"`k3backend {match['args']}`\n\n```\n{screen}\n```"

    return SCREEN.sub(replace, text)


def main(argv: list[str]) -> int:
    """Write or check README.md."""
    old = README.read_text()
    new = renewed(old)
    if "--check" in argv:
        return int(old != new)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
