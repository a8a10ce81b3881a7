"""The README shows what the commands print today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_screens_are_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "update_readme.py"), "--check", "README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run tools/update_readme.py\n{done.stderr}"


def test_the_two_commands_are_what_ci_runs():
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    for command in ("tools/run.sh", "tools/test.sh"):
        assert command in readme
        assert f"\n{command}\n" in ci
