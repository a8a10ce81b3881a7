"""What NVIDIA's assembler made of a kernel: resources and machine instructions of a cubin.

Uses the tools that Triton carries. Reading the cubin, rather than assembling the PTX again, shows
what will run: Triton hands its assembler options that change register allocation.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

from k3backend.common.errors import PlatformError


@dataclass(frozen=True, slots=True)
class Disassembly:
    """Text of the two tools.

    Attributes:
        resources: one function's line of ``cuobjdump -res-usage``.
        sass: machine code of ``nvdisasm -c``.
    """

    resources: str
    sass: str


def disassemble(cubin: bytes) -> Disassembly:
    """Disassemble a cubin. Raises PlatformError where Triton's tools are missing or refuse it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "-res-usage", path)
        return Disassembly(
            resources=next(line for line in usage.splitlines() if "REG:" in line).strip(),
            sass=_run("nvdisasm", "-c", path),
        )


def _run(tool: str, option: str, path: Path) -> str:
    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    if not binary.exists():
        raise PlatformError(
            f"{tool} is not among the tools of triton {triton.__version__}; install a triton wheel "
            "that carries it (3.6 to 3.9 for Linux x86_64 do)"
        )
    done = subprocess.run([binary, option, path], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PlatformError(f"{tool} {option} refused a compiled kernel: {done.stderr.strip()}")
    return done.stdout
