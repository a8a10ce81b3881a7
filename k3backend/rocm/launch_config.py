"""Launch choices of the folded decode on AMD, one heuristic with the reason beside each number.

The reasons are static: what the compiler makes of the kernel for gfx950 (registers, spills,
instructions of the main loop), without timing on a device. "VGPR" counts vector and accumulation
registers of one lane, of which a wave has 512 at one wave per SIMD and 256 at two.
"""

from __future__ import annotations

from k3backend.common.launch_config import DtypeName, LaunchConfig

NUM_XCDS = {"gfx950": 8, "gfx942": 8}


def decode_launch(
    rows: int,
    *,
    q_dtype: DtypeName = "fp8",
    kv_dtype: DtypeName = "fp8",
    arch: str = "gfx950",
) -> LaunchConfig:
    """How to launch the decode of requests with ``rows`` rows (heads x query tokens).

    Args:
        rows: at least 1.
        q_dtype, kv_dtype: "fp8" or "bf16".
        arch: "gfx950" or "gfx942".
    """
    groups = _row_groups(rows, q_dtype, arch)
    tile_tokens, nonkdim = _step(sum(groups), q_dtype)
    options = [("matrix_instr_nonkdim", nonkdim)]
    if arch == "gfx942" and q_dtype == kv_dtype == "bf16" and sum(groups) == 96:
        # Two matrix instructions per LDS read: 491 VGPR, where one spills 43.
        options.append(("kpack", 2))
    return LaunchConfig(
        row_groups=groups,
        tile_tokens=tile_tokens,
        # 128: half the registers of one 512-wide accumulator dot; 64 doubles the barriers.
        value_chunk=128,
        # 4 warps: 8 halve the registers of a lane, and 128 rows then spill.
        num_warps=4,
        # In registers: two pipeline stages spill 157 registers and more from 64 rows on.
        prefetch=True,
        num_xcds=NUM_XCDS.get(arch, 1),
        backend_options=tuple(options),
    )


def workgroups_per_cu(rows: int, *, q_dtype: DtypeName = "fp8", arch: str = "gfx950") -> int:
    """Workgroups of the decode that one compute unit holds, so that one computes as one loads.

    Two where a lane takes at most 256 registers (two waves per SIMD): for fp8 tiles of 16 rows, 242
    on gfx950 (261 on gfx942), and of 32 rows, 212 (218). LDS allows more everywhere.
    """
    tile = decode_launch(rows, q_dtype=q_dtype, arch=arch).tile_rows
    fits = (16, 32) if arch == "gfx950" else (32,)
    return 2 if q_dtype == "fp8" and tile in fits else 1


def _row_groups(rows: int, q_dtype: DtypeName, arch: str) -> tuple[int, int]:
    """The groups that read the KV least often, and of those the ones with the fewest rows."""
    # A bfloat16 query takes twice the registers: its 128 rows spill 82 even at 16 keys a step. On
    # gfx942, whose fp8 instructions are narrower, 128 rows spill 5.
    choices = [(16, 0), (32, 0), (64, 0), (64, 32)]
    if q_dtype == "fp8" and arch != "gfx942":
        choices.append((128, 0))
    return min(choices, key=lambda groups: (-(-rows // sum(groups)), sum(groups)))


def _step(tile_rows: int, q_dtype: DtypeName) -> tuple[int, int]:
    """Keys of a step and the matrix instructions' M (16 or 32)."""
    if q_dtype == "bf16":
        # 96 rows: 16 keys take 507 VGPR, 32 spill 217. Up to 64 rows: 32 keys take 363 at most.
        return (16 if tile_rows == 96 else 32), 16
    if tile_rows == 128:
        # 32x32 instructions: 498 VGPR and 656 instructions a step; 16x16 ones spill 18.
        return 32, 32
    # 96 rows (64 + 32): 450 VGPR and 542 instructions for 32 keys, 128 rows padded would take 656;
    # 64 keys spill 92. 32 rows: 214 VGPR, so that two workgroups share a CU; 64 keys take 272.
    # 16 and 64 rows: 64 keys take 242 and 340.
    return (32 if tile_rows in (32, 96) else 64), 16
