"""How the folded decode is launched: the choices that a vendor makes per shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass

from k3backend.common.errors import InputError

VALUE_DIM = 512


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """One launch choice of the folded decode kernel.

    Attributes:
        row_groups: rows of the two groups of a row tile, powers of two; the second may be 0.
        tile_tokens: keys of one step, a power of two.
        value_chunk: columns of one value chunk; divides 512.
        num_warps, num_stages: Triton's.
        prefetch: load the next step's keys into registers while this one computes; with it
            num_stages is 1, without it the compiler pipelines num_stages deep.
        num_xcds: dies that workgroups are dealt to round-robin; 1 where there is one L2.
        backend_options: further options of the vendor's compiler, by name.
        combine_rows, combine_warps: rows of one combine program and its warps.
    """

    row_groups: tuple[int, int]
    tile_tokens: int
    value_chunk: int
    num_warps: int
    num_stages: int = 1
    prefetch: bool = False
    num_xcds: int = 1
    backend_options: tuple[tuple[str, int], ...] = ()
    combine_rows: int = 2
    combine_warps: int = 2

    def __post_init__(self) -> None:
        first, second = self.row_groups
        sizes = {"row_groups[0]": first, "tile_tokens": self.tile_tokens}
        sizes |= {"value_chunk": self.value_chunk, "combine_rows": self.combine_rows}
        if second:
            sizes["row_groups[1]"] = second
        for name, size in sizes.items():
            if size < 1 or size & (size - 1):
                raise InputError(f"{name} is {size}; Triton tiles are powers of two, give one")
        if VALUE_DIM % self.value_chunk:
            raise InputError(f"value_chunk is {self.value_chunk}; it has to divide {VALUE_DIM}")
        if self.prefetch and self.num_stages != 1:
            raise InputError(
                f"prefetch with num_stages {self.num_stages}: keys would be pipelined twice; "
                "set num_stages to 1 or turn prefetch off"
            )

    @property
    def tile_rows(self) -> int:
        """Rows of one row tile."""
        return sum(self.row_groups)

    def row_tiles(self, rows: int) -> int:
        """Row tiles of a request with ``rows`` rows: how often its KV is read."""
        return -(-rows // self.tile_rows)

    def slot_rows(self, rows: int) -> int:
        """Rows of one partial slot."""
        return min(rows, self.tile_rows)
