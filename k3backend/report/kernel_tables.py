"""The static kernel report for people: one table per target, and what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from k3backend.report.chips import CHIPS
from k3backend.report.tables import data_table, whole

if TYPE_CHECKING:
    from rich.console import Console

NUMBERS = [
    ("kernel", "left"),
    ("regs", "right"),
    ("spilled", "right"),
    ("LDS", "right"),
    ("WG/CU", "right"),
    ("loop", "right"),
    ("mx/LDS/gl", "right"),
    ("reads", "right"),
    ("work", "right"),
]
CODE = [("kernel", "left"), ("loads: count x bytes", "left"), ("matrix instructions", "text")]


def print_kernels(console: Console, document: dict[str, Any]) -> None:
    """Print a ``k3backend.kernels/1`` document."""
    kernels: list[dict[str, Any]] = document["kernels"]
    for target in dict.fromkeys(kernel["target"] for kernel in kernels):
        mine = [kernel for kernel in kernels if kernel["target"] == target]
        title = f"{target} ({CHIPS[target].device})"
        console.print(data_table(NUMBERS, map(_numbers, mine), title=title))
        console.print(data_table(CODE, map(_code, mine)))
    _print_verdict(console, document, kernels)


def _numbers(kernel: dict[str, Any]) -> Sequence[str]:
    loop = kernel["main_loop"]
    spilled = f"{kernel['spilled_registers']} + {kernel['scalar_spills']}"
    reads, work = kernel.get("kv_reads"), kernel.get("matrix_work")
    return (
        ("" if kernel["ok"] else "! ") + kernel["name"],
        whole(kernel["registers"]),
        "0" if spilled == "0 + 0" else spilled,
        whole(kernel["lds_bytes"]),
        str(kernel["workgroups_per_cu"]),
        str(loop["instructions"]),
        "/".join(str(loop[key]) for key in ("matrix", "lds", "global")),
        "" if reads is None else f"{reads:.2f}",
        "" if work is None else f"{work:.2f}",
    )


def _code(kernel: dict[str, Any]) -> Sequence[str]:
    loads = sorted(kernel["global_load_bytes"].items(), key=lambda item: -int(item[0]))
    return (
        kernel["name"],
        ", ".join(f"{count} x {width}" for width, count in loads),
        ", ".join(
            f"{count} {_short(name)}" for name, count in kernel["matrix_instructions"].items()
        ),
    )


def _short(name: str) -> str:
    """A matrix instruction without what all of its kind share."""
    name = name.removeprefix("v_mfma_").removeprefix("f32_")
    name = name.replace(".mma_async.sync.aligned", "").replace(".cta_group::1", "")
    return name.replace(".sync.aligned", "")


def _print_verdict(
    console: Console, document: dict[str, Any], kernels: list[dict[str, Any]]
) -> None:
    wrong = [kernel for kernel in kernels if not kernel["ok"]]
    console.print(
        f"Triton {document['triton']}. regs: vector registers of a lane; spilled: vector + scalar; "
        "LDS: bytes of a workgroup; loop: instructions of one pass of the main loop (one tile of "
        "keys), of which mx matrix, LDS, gl global; reads: of the KV, row tiles x bytes loaded per "
        "tile over its bytes; work: multiplications of a pass over those of its rows and keys."
    )
    bounds = document["bounds"]
    if not bounds["compared"]:
        console.print(
            f"Bounds are recorded for Triton {bounds['triton']}, so they were not compared."
        )
    for kernel in wrong:
        for problem in kernel["problems"]:
            console.print(f"! {kernel['target']} {kernel['name']}: {problem}")
    console.print(f"{len(kernels) - len(wrong)} of {len(kernels)} kernels are as they should be.")
