"""What a compiled kernel has to show before its numbers mean anything.

A compiler can fail without an error: tiles that do not fit tensor memory compile to a kernel that
loads nothing and multiplies nothing. So beside spills and memory limits, the checks ask that one
pass of the main loop loads the whole tile of keys, once, and multiplies it with every row.
"""

from __future__ import annotations

from k3backend.common.launch_config import LaunchConfig, ProductionShape
from k3backend.report.chips import CHIPS
from k3backend.report.kernel_facts import KernelFacts

HEAD_DIM = 576
VALUE_DIM = 512
MAX_READ_RATIO = 1.13
"""Loads of a tile over its bytes: lanes that the 64 rope columns leave over may repeat them."""
ELEMENT_BYTES = {"fp8": 1, "bf16": 2}
ONE_READ_ROWS = {"fp8": 128, "bf16": 96}
"""Rows per request that gfx950 serves with one KV read, by the type of the query."""
_NATIVE_FP8 = ("fp8", "f8f6f4", "e4m3")


def kv_reads(shape: ProductionShape, launch: LaunchConfig, facts: KernelFacts) -> float:
    """How often a decode reads the KV of a request: row tiles x loads per tile over its bytes."""
    row_tiles = launch.row_tiles(shape.heads * shape.q_len)
    loaded = facts.loop_load_bytes(8)
    return row_tiles * loaded / _tile_bytes(shape, launch, HEAD_DIM)


def matrix_work(launch: LaunchConfig, facts: KernelFacts) -> float | None:
    """Multiplications of one pass of the main loop over those that its rows and keys take.

    Above 1 where waves repeat each other's scores or a matrix instruction is wider than the rows.
    None where the machine code does not tell.
    """
    macs = facts.loop.matrix_macs
    return None if macs is None else macs / _tile_macs(launch)


def resource_problems(kind: str, target: str, facts: KernelFacts) -> list[str]:
    """Spills, and memory that the chip does not have.

    Args:
        kind: "decode", "combine" or "plan". A plan runs once per forward and may keep scalars in
            lanes of vector registers; how many is bounded by the recorded numbers, and none may go
            to memory.
    """
    chip = CHIPS[target]
    problems = []
    spilled_scalars = 0 if kind == "plan" else facts.scalar_spills
    for count, what in (
        (facts.spilled_registers, "registers are spilled"),
        (spilled_scalars, "scalar registers are spilled"),
        (facts.scratch_bytes, "bytes of scratch per lane"),
    ):
        if count:
            problems.append(f"{count} {what}, expected 0")
    if facts.lds_bytes > chip.lds_bytes:
        problems.append(
            f"{facts.lds_bytes:,} bytes of LDS, a workgroup of {target} has {chip.lds_bytes:,}"
        )
    elif chip.workgroups_per_unit(facts) < 1:
        problems.append(
            f"no workgroup fits a unit: {facts.registers} registers x {facts.lanes} lanes, "
            f"{facts.tensor_memory_columns} tensor memory columns"
        )
    return problems


def decode_problems(
    target: str,
    shape: ProductionShape,
    launch: LaunchConfig,
    facts: KernelFacts,
    expected: str | None,
) -> list[str]:
    """What a decode kernel lacks of its matrix instructions, loads and single KV read.

    Args:
        expected: part of the name of the matrix instruction that has to be there.
    """
    return [
        *_matrix_problems(target, shape, launch, facts, expected),
        *_load_problems(target, shape, launch, facts),
    ]


def _matrix_problems(
    target: str,
    shape: ProductionShape,
    launch: LaunchConfig,
    facts: KernelFacts,
    expected: str | None,
) -> list[str]:
    names = [name for name, _ in facts.matrix_instructions]
    found = ", ".join(names) or "none"
    problems = []
    if expected is not None and not any(expected in name for name in names):
        problems.append(f"no matrix instruction with {expected!r}; found {found}")
    if shape.q_dtype == "fp8" and target in {"gfx950", "gfx942", "sm_90"}:
        foreign = [n for n in names if not any(part in n for part in _NATIVE_FP8)]
        if foreign:
            problems.append(f"fp8 is widened for {', '.join(foreign)}")
    if not facts.loop.matrix:
        problems.append("no matrix instruction in the main loop: the kernel computes nothing")
    needed = _tile_macs(launch)
    macs = facts.loop.matrix_macs
    if macs is not None and macs < needed:
        problems.append(
            f"one pass of the main loop multiplies {macs:,} times, a tile of {launch.tile_rows} "
            f"rows x {launch.tile_tokens} keys takes {needed:,}: part of it is missing"
        )
    return problems


def _load_problems(
    target: str, shape: ProductionShape, launch: LaunchConfig, facts: KernelFacts
) -> list[str]:
    problems = []
    latent_bytes = _tile_bytes(shape, launch, VALUE_DIM)
    wide = facts.loop_load_bytes(16)
    if wide < latent_bytes:
        problems.append(
            f"16-byte loads bring {wide:,} of the {latent_bytes:,} latent bytes of a tile; all of "
            "them should"
        )
    whole = _tile_bytes(shape, launch, HEAD_DIM)
    loaded = facts.loop_load_bytes(8)
    if loaded < whole:
        problems.append(f"one pass loads {loaded:,} bytes, a tile of keys has {whole:,}")
    elif loaded > whole * MAX_READ_RATIO:
        problems.append(
            f"one pass loads {loaded:,} bytes, a tile of keys has {whole:,}: it is read "
            f"{loaded / whole:.2f} times"
        )
    rows = shape.heads * shape.q_len
    if target == "gfx950" and rows <= ONE_READ_ROWS[shape.q_dtype] and launch.row_tiles(rows) > 1:
        problems.append(
            f"{rows} rows take {launch.row_tiles(rows)} row tiles, each of which reads the KV; "
            "one should do"
        )
    return problems


def _tile_bytes(shape: ProductionShape, launch: LaunchConfig, columns: int) -> int:
    return launch.tile_tokens * columns * ELEMENT_BYTES[shape.kv_dtype]


def _tile_macs(launch: LaunchConfig) -> int:
    return launch.tile_rows * launch.tile_tokens * (HEAD_DIM + VALUE_DIM)
