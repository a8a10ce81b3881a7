"""Where the tests find vLLM 0.33's planning code, and how to run a script against it.

The environment holds vLLM 0.32 with its CPU engine; 0.33's Python code lies in a folder of its own
that only the processes started here put first on their path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def vllm033_path() -> Path | None:
    """The folder with vLLM 0.33's code: K3BACKEND_TEST_VLLM033, or ``.vllm-0.33`` in the tree."""
    named = os.environ.get("K3BACKEND_TEST_VLLM033", "")
    folder = Path(named) if named else REPOSITORY / ".vllm-0.33"
    return folder if (folder / "vllm" / "version.py").is_file() else None


def run_with_vllm033(
    *args: str, timeout_s: float = 900, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run ``python args`` with 0.33 first on the path. Raises on a non-zero exit with its output.

    Raises:
        RuntimeError: the code is not installed, or the process failed.
    """
    folder = vllm033_path()
    if folder is None:
        raise RuntimeError(
            "vLLM 0.33's code is not installed; tools/test.sh installs it into .vllm-0.33"
        )
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(folder), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, *args],
        env=env,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}")
    return done
