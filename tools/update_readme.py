"""Renew the outputs in documents: the block after each `k3backend …` line is what it prints now.

    python tools/update_readme.py [--check] [DOCUMENT …]

Without a document, README.md and docs/user-guide.md. `k3backend replay` is left as it stands: it
needs vLLM 0.33 and times the host. With --check nothing is written; exit 1 where a block is out of
date.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/user-guide.md")
SCREEN = re.compile(r"^`k3backend (?P<args>[^`]+)`\n\n```\n(?P<screen>.*?)\n```$", re.M | re.S)


def renewed(text: str) -> str:
    """The text with every screen printed anew."""

    def replace(match: re.Match[str]) -> str:
        if match["args"].startswith("replay "):
            return match[0]
        done = subprocess.run(
            [sys.executable, "-m", "k3backend", *shlex.split(match["args"])],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1):  # 1 is an answer too: "the plans differ"
            raise RuntimeError(f"k3backend {match['args']}: {done.stderr}")
        screen = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
        return f"`k3backend {match['args']}`\n\n```\n{screen}\n```"

    return SCREEN.sub(replace, text)


def main(argv: list[str]) -> int:
    """Write or check the documents."""
    stale = False
    for name in [word for word in argv if word != "--check"] or DOCUMENTS:
        document = ROOT / name
        old = document.read_text()
        new = renewed(old)
        stale |= old != new
        if "--check" not in argv:
            document.write_text(new)
    return int(stale and "--check" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
