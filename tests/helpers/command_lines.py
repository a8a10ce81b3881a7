"""Running ``k3backend`` command lines, here and in a fresh process with packages blocked."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from k3backend.__main__ import main

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one command line did."""

    code: int
    stdout: str
    stderr: str


def run_here(capsys: pytest.CaptureFixture[str], *words: str) -> Outcome:
    """Run one command line in this process."""
    capsys.readouterr()
    code = main(list(words))
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def run_fresh(*words: str, block: tuple[str, ...] = (), timeout_s: float = 60) -> Outcome:
    """Run one command line in a fresh process.

    Args:
        block: top-level packages whose import fails there, as if they were not installed.
    """
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in block)
    script = (
        f"import sys\n{blocked}"
        f"from k3backend.__main__ import main\n"
        f"code = main({list(words)!r})\n"
        f"loaded = {{n.split('.')[0] for n, m in sys.modules.items() if m is not None}}\n"
        f"heavy = sorted(loaded & {{'torch', 'vllm', 'aiter', 'triton'}})\n"
        f"print('loaded:', *heavy, file=sys.stderr)\n"
        f"sys.exit(code)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("K3BACKEND_")}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        cwd=REPOSITORY,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def assert_refused(outcome: Outcome, *expected: str) -> None:
    """Exit 2, nothing on stdout, one line on stderr that holds each of ``expected``."""
    assert outcome.code == 2, outcome
    assert outcome.stdout == ""
    lines = outcome.stderr.splitlines()
    assert len(lines) == 1, outcome.stderr
    assert "error: " in lines[0]
    assert "Traceback" not in lines[0]
    assert "internal error" not in lines[0]
    for part in expected:
        assert part in lines[0]
