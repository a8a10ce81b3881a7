"""Machine code as a list of instructions, and the loop in which a kernel spends its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    Attributes:
        name: mnemonic with its modifiers, without predicate.
        operands: the rest of the line.
        jumps_to: label of a branch, else None.
    """

    name: str
    operands: str
    jumps_to: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A kernel's instructions in order. ``labels`` maps a label to the instruction behind it."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def loops(self) -> list[tuple[int, int]]:
        """Half-open ranges of instructions from a label to the last branch back to it."""
        ends: dict[int, int] = {}
        for index, instruction in enumerate(self.instructions):
            if instruction.jumps_to is None:
                continue
            start = self.labels.get(instruction.jumps_to, index + 1)
            if start <= index:
                ends[start] = index + 1
        return sorted(ends.items())

    def main_loop(self, *weights: Callable[[Instruction], bool]) -> tuple[Instruction, ...]:
        """The loop in which the kernel spends its time, or () where it has none.

        Args:
            weights: what makes a loop heavy, most important first: matrix instructions, then memory
                accesses. The first that any loop contains decides, among innermost loops.
        """
        for weight in weights:
            heavy = {
                (start, end): count
                for start, end in self.loops()
                if (count := sum(map(weight, self.instructions[start:end])))
            }
            innermost = [loop for loop in heavy if not any(_inside(other, loop) for other in heavy)]
            if innermost:
                start, end = max(innermost, key=lambda loop: (heavy[loop], loop[0] - loop[1]))
                return self.instructions[start:end]
        return ()


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]
