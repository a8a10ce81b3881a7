"""How the folded decode is launched: the choices that a vendor makes per shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3backend.common.errors import InputError

VALUE_DIM = 512
DtypeName = Literal["fp8", "bf16"]


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
        hoist: the compiler may compute what no step changes before the loop over tiles, where it
            stays in registers; False computes it again in every step.
        exact_sums: add the values of every step in float32 outside of the matrix unit, whose sums
            of fp8 products are narrower on sm_90.
        num_xcds: dies that workgroups are dealt to round-robin; 1 where there is one L2.
        backend_options: further options of the vendor's compiler, by name.
        combine_splits, combine_columns, combine_warps: splits that one combine program reads at a
            time, columns of its row, and its warps.
    """

    row_groups: tuple[int, int]
    tile_tokens: int
    value_chunk: int
    num_warps: int
    num_stages: int = 1
    prefetch: bool = False
    hoist: bool = True
    exact_sums: bool = False
    num_xcds: int = 1
    backend_options: tuple[tuple[str, int], ...] = ()
    combine_splits: int = 32
    combine_columns: int = 128
    combine_warps: int = 4

    def __post_init__(self) -> None:
        first, second = self.row_groups
        sizes = {"row_groups[0]": first, "tile_tokens": self.tile_tokens}
        sizes |= {"value_chunk": self.value_chunk, "combine_splits": self.combine_splits}
        sizes |= {"combine_columns": self.combine_columns}
        if second:
            sizes["row_groups[1]"] = second
        for name, size in sizes.items():
            if size < 1 or size & (size - 1):
                raise InputError(f"{name} is {size}; Triton tiles are powers of two, give one")
        for name in ("value_chunk", "combine_columns"):
            if VALUE_DIM % getattr(self, name):
                raise InputError(f"{name} is {getattr(self, name)}; it has to divide {VALUE_DIM}")
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


@dataclass(frozen=True, slots=True)
class ProductionShape:
    """A shape that a Kimi-K3 deployment really decodes, kept free of spills on every target.

    Attributes:
        name: for reports.
        heads, q_len: local heads (gathered ones under DCP) and query tokens per request.
        q_dtype, kv_dtype: "fp8" or "bf16".
        causal: token i sees the keys up to its own position. cp: under decode context parallelism.
        block_size: tokens of a KV block.
    """

    name: str
    heads: int
    q_len: int
    q_dtype: DtypeName = "fp8"
    kv_dtype: DtypeName = "fp8"
    causal: bool = True
    cp: bool = False
    block_size: int = 1536


# Block sizes are those of Kimi-K3 with 7 draft tokens, fp8: 1,536 at TP 8, 12,288 at TP 1.
PRODUCTION_SHAPES: tuple[ProductionShape, ...] = (
    ProductionShape("TP8 1 token", 12, 1),
    ProductionShape("TP8 8 tokens", 12, 8),
    ProductionShape("TP8 draft of 7", 12, 7, causal=False),
    ProductionShape("TP8 4 tokens", 12, 4),
    ProductionShape("TP4 1 token", 24, 1, block_size=3072),
    ProductionShape("TP16 8 tokens", 6, 8, block_size=768),
    ProductionShape("TP1 1 token", 96, 1, block_size=12288),
    ProductionShape("TP8 DCP8 8 tokens", 96, 8, cp=True),
)
