"""Static numbers that must not get worse: a data file, and the comparison with it.

The file holds what the recorded Triton makes of every kernel. Another Triton makes other code, so
its numbers are reported but not compared; the checks of ``kernel_checks`` hold for every version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from k3backend.common.errors import InputError
from k3backend.common.json_file import read_json_object
from k3backend.report.chips import CHIPS
from k3backend.report.kernel_facts import KernelFacts

BOUNDS_SCHEMA = "k3backend.kernel-bounds/1"
BOUNDS_PATH = Path(__file__).resolve().parents[1] / "data" / "kernel_bounds.json"

UPPER = (
    "registers",
    "scalar_spills",
    "lds_bytes",
    "loop_instructions",
    "loop_lds",
    "loop_global",
)
"""Numbers that must not grow."""
LOWER = ("workgroups_per_cu", "loop_matrix", "loop_wide_loads")
"""Numbers that must not shrink: fewer matrix instructions or 16-byte loads mean missing work."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Recorded numbers.

    Attributes:
        triton: the version that they were recorded with; None where there are none.
        compared: the running version is that one.
        kernels: target -> kernel name -> number by name.
    """

    triton: str | None = None
    compared: bool = False
    kernels: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)


def bounded_numbers(target: str, facts: KernelFacts) -> dict[str, int]:
    """The numbers that a bound is kept for."""
    return {
        "registers": facts.registers,
        "scalar_spills": facts.scalar_spills,
        "lds_bytes": facts.lds_bytes,
        "loop_instructions": facts.loop.instructions,
        "loop_lds": facts.loop.lds,
        "loop_global": facts.loop.global_,
        "workgroups_per_cu": CHIPS[target].workgroups_per_unit(facts),
        "loop_matrix": facts.loop.matrix,
        "loop_wide_loads": sum(count for width, count in facts.loop.loads if width >= 16),
    }


def bound_problems(bounds: Bounds, target: str, name: str, facts: KernelFacts) -> list[str]:
    """Every number that is worse than its bound."""
    if not bounds.compared:
        return []
    recorded = bounds.kernels.get(target, {}).get(name)
    if recorded is None:
        return ["no bounds are recorded; run tools/kernel_report.py --update-bounds"]
    numbers = bounded_numbers(target, facts)
    grown = [
        f"{key} {numbers[key]:,} is above its bound {recorded[key]:,}"
        for key in UPPER
        if numbers[key] > recorded[key]
    ]
    shrunk = [
        f"{key} {numbers[key]:,} is below its bound {recorded[key]:,}"
        for key in LOWER
        if numbers[key] < recorded[key]
    ]
    return grown + shrunk


def load_bounds(triton: str, path: Path = BOUNDS_PATH) -> Bounds:
    """Read the recorded bounds.

    Args:
        triton: the running version.
    Raises:
        InputError: the file is not a bounds file.
    """
    document = read_json_object(path, "kernel bounds")
    if document.get("schema") != BOUNDS_SCHEMA:
        raise InputError(
            f"{path.name}: is not a {BOUNDS_SCHEMA} document; record one with "
            "tools/kernel_report.py --update-bounds"
        )
    recorded = document["triton"]
    return Bounds(recorded, recorded == triton, document["kernels"])


def save_bounds(
    triton: str,
    kernels: dict[str, dict[str, dict[str, int]]],
    path: Path = BOUNDS_PATH,
) -> None:
    """Write bounds, sorted, so that a change shows as the lines that changed."""
    document = {"schema": BOUNDS_SCHEMA, "triton": triton, "kernels": kernels}
    path.write_text(json.dumps(document, indent=1) + "\n")
