"""What one compute unit (AMD) or streaming multiprocessor (NVIDIA) of each target holds.

Sources: AMD's CDNA3 and CDNA4 instruction set documents (512 unified vector registers per lane and
SIMD, four SIMDs, at most eight waves each, 64 and 160 KiB of LDS) and NVIDIA's CUDA programming
guide, technical specifications per compute capability (65,536 registers, 64 warps, 32 blocks, 228
KiB of shared memory of which a block takes 1 KiB more than it asks for, 512 tensor memory columns).
"""

from __future__ import annotations

from dataclasses import dataclass

from k3backend.report.kernel_facts import KernelFacts

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Chip:
    """Limits of one target.

    Attributes:
        units: compute units or SMs of the whole device.
        wave_lanes: lanes of a wave or warp.
        unit_waves: waves that a unit holds. unit_workgroups: workgroups.
        lane_registers: vector registers that the waves of one SIMD share, per lane.
        simds: of a unit. register_granule: registers are allotted in such steps.
        lds_bytes: most that one workgroup may ask for. unit_lds_bytes: of the unit.
        lds_overhead_bytes: taken per workgroup beside what it asks for.
        bandwidth_bytes_s: of the device memory. fp8_flop_s, bf16_flop_s: dense matrix peak.
        clock_hz: at which those peaks are stated.
        issue_cycles: in which a SIMD issues one instruction of a wave (CDNA: 64 lanes on 16).
        device: marketing name of the device that the last figures are of.
    """

    units: int
    wave_lanes: int
    unit_waves: int
    unit_workgroups: int
    lane_registers: int
    simds: int
    register_granule: int
    lds_bytes: int
    unit_lds_bytes: int
    lds_overhead_bytes: int
    bandwidth_bytes_s: float
    fp8_flop_s: float
    bf16_flop_s: float
    clock_hz: float
    issue_cycles: int
    device: str

    def workgroups_per_unit(self, facts: KernelFacts) -> int:
        """Workgroups of a kernel that one unit holds at a time; 0 where not even one fits."""
        if not facts.lanes or facts.lds_bytes > self.lds_bytes:
            return 0
        waves = -(-facts.lanes // self.wave_lanes)
        granule = self.register_granule
        registers = max(-(-facts.registers // granule) * granule, granule)
        waves_by_registers = self.lane_registers // registers * self.simds
        limits = [
            self.unit_workgroups,
            min(self.unit_waves, waves_by_registers) // waves,
        ]
        if facts.lds_bytes + self.lds_overhead_bytes:
            limits.append(self.unit_lds_bytes // (facts.lds_bytes + self.lds_overhead_bytes))
        if facts.tensor_memory_columns:
            limits.append(512 // facts.tensor_memory_columns)
        return min(limits)


def _amd(
    device: str, units: int, lds_kib: int, tb_s: float, fp8: float, bf16: float, ghz: float
) -> Chip:
    return Chip(
        units=units,
        wave_lanes=64,
        unit_waves=32,
        unit_workgroups=32,
        lane_registers=512,
        simds=4,
        register_granule=8,
        lds_bytes=lds_kib * _KIB,
        unit_lds_bytes=lds_kib * _KIB,
        lds_overhead_bytes=0,
        bandwidth_bytes_s=tb_s * 1e12,
        fp8_flop_s=fp8 * 1e12,
        bf16_flop_s=bf16 * 1e12,
        clock_hz=ghz * 1e9,
        issue_cycles=4,
        device=device,
    )


def _nvidia(device: str, units: int, tb_s: float, fp8: float, bf16: float, ghz: float) -> Chip:
    return Chip(
        units=units,
        wave_lanes=32,
        unit_waves=64,
        unit_workgroups=32,
        lane_registers=512,
        simds=4,
        register_granule=8,
        lds_bytes=227 * _KIB,
        unit_lds_bytes=228 * _KIB,
        lds_overhead_bytes=_KIB,
        bandwidth_bytes_s=tb_s * 1e12,
        fp8_flop_s=fp8 * 1e12,
        bf16_flop_s=bf16 * 1e12,
        clock_hz=ghz * 1e9,
        issue_cycles=1,
        device=device,
    )


CHIPS: dict[str, Chip] = {
    "gfx950": _amd("MI355X", 256, 160, 8.0, 5000, 2500, 2.4),
    "gfx942": _amd("MI300X", 304, 64, 5.3, 2615, 1307, 2.1),
    "sm_90": _nvidia("H200", 132, 4.8, 1979, 989, 1.83),
    "sm_100": _nvidia("B200", 148, 8.0, 4500, 2250, 1.85),
}
