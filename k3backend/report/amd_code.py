"""Static facts from AMD assembly as Triton prints it: metadata and instructions.

Sources: the code object metadata that LLVM documents for AMDGPU (``.vgpr_count`` is the unified
count of vector and accumulation registers on gfx90a and later), and the CDNA3 and CDNA4 instruction
sets for names and widths.
"""

from __future__ import annotations

import re

from k3backend.report.kernel_facts import KernelFacts, LoopFacts, counted, load_widths
from k3backend.report.machine_code import Instruction, Listing

WAVE_LANES = 64

_LABEL = re.compile(r"^(\.?[A-Za-z_][\w.$]*):")
_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9_]*)\b[ \t]*([^;]*)")
_MATRIX = re.compile(r"v_(?:mfma|smfmac|wmma|swmmac)_")
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?")
_LOAD = re.compile(r"(?:global|buffer|flat)_load_(?:lds_)?(\w+)")
_GLOBAL = re.compile(r"(?:global|buffer|flat)_(?:load|store|atomic)")
_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}
_WIDTHS |= {"ushort": 2, "sshort": 2, "short": 2, "ubyte": 1, "sbyte": 1, "byte": 1}


def amd_facts(assembly: str, lds_bytes: int, lanes: int) -> KernelFacts:
    """Facts of one kernel.

    Args:
        assembly: Triton's "amdgcn" text.
        lds_bytes: LDS that the launch asks for; comes on top of what the assembly declares.
        lanes: threads of a workgroup.
    """
    listing = _listing(assembly)
    loop = listing.main_loop(_is_matrix, lambda instruction: _width(instruction) is not None)
    return KernelFacts(
        registers=_metadata(assembly, "vgpr_count"),
        spilled_registers=_metadata(assembly, "vgpr_spill_count"),
        scalar_spills=_metadata(assembly, "sgpr_spill_count"),
        scratch_bytes=_metadata(assembly, "private_segment_fixed_size"),
        lds_bytes=lds_bytes + _metadata(assembly, "group_segment_fixed_size"),
        tensor_memory_columns=0,
        lanes=lanes,
        instructions=len(listing.instructions),
        matrix_instructions=counted(i.name for i in listing.instructions if _is_matrix(i)),
        loads=load_widths(listing.instructions, _width),
        loop=LoopFacts(
            instructions=len(loop),
            matrix=sum(map(_is_matrix, loop)),
            lds=sum(i.name.startswith("ds_") for i in loop),
            global_=sum(_GLOBAL.match(i.name) is not None for i in loop),
            loads=load_widths(loop, _width),
            matrix_macs=sum(_macs(i.name) for i in loop if _is_matrix(i)) * lanes // WAVE_LANES,
        ),
    )


def _metadata(assembly: str, name: str) -> int:
    return max(map(int, re.findall(rf"^\s+(?:- )?\.{name}:\s*(\d+)$", assembly, re.MULTILINE)))


def _listing(assembly: str) -> Listing:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(instructions)
            if label[1].startswith(".Lfunc_end"):
                break
            continue
        match = _INSTRUCTION.match(line)
        if match and labels:
            name, operands = match[1], match[2].strip()
            jump = operands if name.startswith(("s_cbranch", "s_branch")) else None
            instructions.append(Instruction(name, operands, jump))
    return Listing(tuple(instructions), labels)


def _is_matrix(instruction: Instruction) -> bool:
    return _MATRIX.match(instruction.name) is not None


def _width(instruction: Instruction) -> int | None:
    match = _LOAD.match(instruction.name)
    if match is None:
        return None
    kind = match[1].removesuffix("_d16_hi").removesuffix("_d16")
    return _WIDTHS.get(kind, 2 if "d16" in match[1] else 4)


def _macs(name: str) -> int:
    shape = _SHAPE.search(name)
    if shape is None:
        return 0
    rows, columns, depth, blocks = (int(part or 1) for part in shape.groups())
    return rows * columns * depth * blocks
