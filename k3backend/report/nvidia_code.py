"""Static facts from an NVIDIA cubin (``cuobjdump -res-usage``, ``nvdisasm``) and its PTX.

PTX names the matrix instructions by shape and type (``wgmma...e4m3.e4m3``, ``tcgen05.mma...``);
everything else comes from the machine code, whose names NVIDIA's binary utilities document.
"""

from __future__ import annotations

import re

from k3backend.report.kernel_facts import KernelFacts, LoopFacts, counted, load_widths
from k3backend.report.machine_code import Instruction, Listing

WARP_LANES = 32
WARPGROUP_LANES = 128
REGISTER_BYTES = 4

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.ASCII
)
_JUMP = re.compile(r"`\((\.L_x_\d+)\)")
_MATRIX = re.compile(r"(?:[QHIBD]GMMA|[QHIDO]MMA|UTC\w*MMA)\b")
_PTX_MATRIX = re.compile(r"\b((?:wgmma\.mma_async|tcgen05\.mma|mma\.sync|wmma\.mma)[\w.:]*)")
_GLOBAL = re.compile(r"(?:LDG|LDGSTS|STG|ATOMG|REDG?|UTMALDG|UTMASTG|UBLKCP)\b")
_SHARED = re.compile(r"(?:LDS|LDSM|STS|STSM|ATOMS)\b")
_LOAD = re.compile(r"(?:LDG|LDGSTS)\b")
_WARPGROUP_SHAPE = re.compile(r"GMMA\.(\d+)x(\d+)x(\d+)")
_WARP_SHAPE = re.compile(r"MMA(?:\.SP)?\.(16|8)(8|16)(\d{1,3})\b")


def nvidia_facts(
    resources: str,
    sass: str,
    ptx: str,
    lds_bytes: int,
    lanes: int,
    tensor_memory_columns: int,
) -> KernelFacts:
    """Facts of one kernel.

    Args:
        resources, sass: texts of ``kernels.disassembly.Disassembly``.
        ptx: Triton's "ptx" text.
        lds_bytes: shared memory that the launch asks for.
        lanes: threads of a workgroup.
        tensor_memory_columns: that the kernel allocates.
    """
    usage = {name: int(value) for name, value in re.findall(r"\b(\w+):(\d+)", resources)}
    listing = _listing(sass)
    loop = listing.main_loop(_is_matrix, lambda instruction: _width(instruction) is not None)
    spilled = [_access_bytes(i) for i in listing.instructions if i.name.split(".")[0] == "STL"]
    return KernelFacts(
        registers=usage["REG"],
        spilled_registers=sum(spilled) // REGISTER_BYTES,
        scalar_spills=0,
        scratch_bytes=usage["STACK"] + usage["LOCAL"],
        lds_bytes=lds_bytes,
        tensor_memory_columns=tensor_memory_columns,
        lanes=lanes,
        instructions=len(listing.instructions),
        matrix_instructions=counted(_PTX_MATRIX.findall(ptx)),
        loads=load_widths(listing.instructions, _width),
        loop=LoopFacts(
            instructions=len(loop),
            matrix=sum(map(_is_matrix, loop)),
            lds=sum(_SHARED.match(i.name) is not None for i in loop),
            global_=sum(_GLOBAL.match(i.name) is not None for i in loop),
            loads=load_widths(loop, _width),
            matrix_macs=_loop_macs(loop, lanes),
        ),
    )


def _listing(sass: str) -> Listing:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(instructions)
            continue
        match = _INSTRUCTION.match(line)
        if match and match[1] != "NOP":
            jump = _JUMP.search(match[2]) if match[1].startswith("BRA") else None
            instructions.append(Instruction(match[1], match[2], jump[1] if jump else None))
    return Listing(tuple(instructions), labels)


def _is_matrix(instruction: Instruction) -> bool:
    return _MATRIX.match(instruction.name) is not None


def _width(instruction: Instruction) -> int | None:
    return _access_bytes(instruction) if _LOAD.match(instruction.name) else None


def _access_bytes(instruction: Instruction) -> int:
    modifiers = set(instruction.name.split(".")[1:])
    if modifiers & {"U8", "S8"}:
        return 1
    if modifiers & {"U16", "S16"}:
        return 2
    return next((int(m) // 8 for m in modifiers if m in {"64", "128", "256"}), 4)


def _loop_macs(loop: tuple[Instruction, ...], lanes: int) -> int | None:
    total = 0
    for instruction in filter(_is_matrix, loop):
        shape = _WARPGROUP_SHAPE.search(instruction.name)
        groups = lanes // WARPGROUP_LANES
        if shape is None:
            shape = _WARP_SHAPE.search(instruction.name)
            groups = lanes // WARP_LANES
        if shape is None:
            return None
        total += int(shape[1]) * int(shape[2]) * int(shape[3]) * groups
    return total
