"""Roofline arithmetic of the folded decode: what a tile of keys costs, from sizes and machine code.

One key of one layer is 576 elements that are read once per row tile, and every row multiplies it
twice: 576 products for the score and 512 for the value, 2 x 1,088 = 2,176 flop. A chip whose peak
divided by bandwidth is r flop per byte is limited by memory up to r x (bytes of a key) / 2,176
rows.

The issue estimate charges every instruction of one pass of the main loop the cycles in which a SIMD
issues it and lets nothing overlap with it. It is an upper bound on issue time, not a measurement:
memory latency, LDS conflicts and the overlap of matrix with vector instructions are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3backend.common.launch_config import LaunchConfig, ProductionShape
from k3backend.report.chips import CHIPS, Chip
from k3backend.report.kernel_checks import ELEMENT_BYTES, HEAD_DIM, VALUE_DIM
from k3backend.report.kernel_facts import KernelFacts

FLOP_PER_ROW_AND_KEY = 2 * (HEAD_DIM + VALUE_DIM)


@dataclass(frozen=True, slots=True)
class TileTimes:
    """Nanoseconds that one compute unit takes for one tile of keys and one row tile.

    Attributes:
        memory_ns: its bytes at the unit's share of the bandwidth.
        matrix_ns: its products, padding and repeats included, at the unit's share of the peak.
        issue_ns: its instructions, one after the other.
        row_tiles: passes over the KV.
    """

    memory_ns: float
    matrix_ns: float
    issue_ns: float
    row_tiles: int

    @property
    def bandwidth_share(self) -> float:
        """Useful KV bytes over what the bandwidth could bring, by the slowest of the three."""
        slowest = max(self.memory_ns, self.matrix_ns, self.issue_ns)
        return self.memory_ns / slowest / self.row_tiles


def ridge_rows(chip: Chip, dtype: str) -> float:
    """Rows up to which a decode of ``dtype`` ("fp8" or "bf16") is limited by memory."""
    flop_s = chip.fp8_flop_s if dtype == "fp8" else chip.bf16_flop_s
    key_bytes = HEAD_DIM * ELEMENT_BYTES[dtype]
    return flop_s / chip.bandwidth_bytes_s * key_bytes / FLOP_PER_ROW_AND_KEY


def tile_times(
    target: str, shape: ProductionShape, launch: LaunchConfig, facts: KernelFacts
) -> TileTimes:
    """Times of one tile of a compiled decode."""
    chip = CHIPS[target]
    tile_bytes = launch.tile_tokens * HEAD_DIM * ELEMENT_BYTES[shape.kv_dtype]
    flop_s = chip.fp8_flop_s if shape.q_dtype == "fp8" else chip.bf16_flop_s
    # tcgen05 keeps shapes in descriptors: the useful products stand in, a lower bound.
    useful = launch.tile_rows * launch.tile_tokens * (HEAD_DIM + VALUE_DIM)
    macs = facts.loop.matrix_macs or useful
    waves_per_simd = -(-facts.lanes // chip.wave_lanes // chip.simds)
    cycles = facts.loop.instructions * waves_per_simd * chip.issue_cycles
    return TileTimes(
        memory_ns=tile_bytes / (chip.bandwidth_bytes_s / chip.units) * 1e9,
        matrix_ns=2 * macs / (flop_s / chip.units) * 1e9,
        issue_ns=cycles / chip.clock_hz * 1e9,
        row_tiles=launch.row_tiles(shape.heads * shape.q_len),
    )
