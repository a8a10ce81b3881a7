"""What the compiler made of one kernel, in numbers that AMD and NVIDIA share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from k3backend.report.machine_code import Instruction


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """The main loop: one pass handles one tile of keys.

    Attributes:
        instructions: all of them; matrix, lds (shared memory), global_: of that kind.
        loads: width in bytes of a lane's global vector load -> how many.
        matrix_macs: multiply-accumulates of one pass by one workgroup, None where the machine code
            does not tell the shape of a matrix instruction (tcgen05 keeps it in a descriptor).
    """

    instructions: int = 0
    matrix: int = 0
    lds: int = 0
    global_: int = 0
    loads: tuple[tuple[int, int], ...] = ()
    matrix_macs: int | None = None


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Static numbers of one compiled kernel.

    Attributes:
        registers: vector registers of one lane (AMD: with accumulation registers).
        spilled_registers: those that live in memory for a while. scalar_spills: AMD's scalar ones.
        scratch_bytes: private memory of one lane.
        lds_bytes: LDS or shared memory of one workgroup.
        tensor_memory_columns: of 512 that an SM has (sm_100), else 0.
        lanes: of one workgroup.
        instructions: of the whole kernel.
        matrix_instructions: name -> count in the code.
        loads: width in bytes -> global vector loads of one lane, in the code.
        loop: the main loop.
    """

    registers: int
    spilled_registers: int
    scalar_spills: int
    scratch_bytes: int
    lds_bytes: int
    tensor_memory_columns: int
    lanes: int
    instructions: int
    matrix_instructions: tuple[tuple[str, int], ...]
    loads: tuple[tuple[int, int], ...]
    loop: LoopFacts

    def loop_load_bytes(self, least_width_bytes: int) -> int:
        """Bytes that one workgroup loads per pass of the main loop, by loads of at least a width.

        Lanes that a predicate turns off count too.
        """
        return self.lanes * sum(
            width * count for width, count in self.loop.loads if width >= least_width_bytes
        )


NO_FACTS = KernelFacts(0, 0, 0, 0, 0, 0, 0, 0, (), (), LoopFacts())
"""Of a kernel that did not compile."""


def counted(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Names with their counts, sorted by name."""
    return tuple(sorted(Counter(names).items()))


def load_widths(
    instructions: Iterable[Instruction], width: Callable[[Instruction], int | None]
) -> tuple[tuple[int, int], ...]:
    """Widths in bytes of global vector loads, with their counts, sorted by width."""
    widths = (width(instruction) for instruction in instructions)
    return tuple(sorted(Counter(w for w in widths if w is not None).items()))
