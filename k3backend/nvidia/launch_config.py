"""Launch choices of the folded decode on NVIDIA, one heuristic with the reason beside each number.

The reasons are static: what the compiler makes of the kernel for sm_90 and sm_100 (registers,
spills, shared memory, matrix instructions), without timing on a device.
"""

from __future__ import annotations

from k3backend.common.launch_config import DtypeName, LaunchConfig


def decode_launch(
    rows: int, *, q_dtype: DtypeName = "fp8", kv_dtype: DtypeName = "fp8", capability: int = 90
) -> LaunchConfig:
    """How to launch the decode of requests with ``rows`` rows (heads x query tokens).

    Row groups depend on ``rows`` alone, so that one plan serves every dtype.

    Args:
        rows: at least 1.
        q_dtype, kv_dtype: "fp8" or "bf16".
        capability: compute capability, major * 10 + minor.
    """
    # 64 rows, also for fewer: wgmma's M is 64, and below it Triton turns fp8 into float16 mma.sync.
    # 128 rows do not fit: their 128 x 512 float32 accumulators take all 256 registers of each of
    # 256 threads on sm_90, and fill tensor memory on sm_100, where Triton then compiles to an
    # almost empty kernel without an error.
    del rows, q_dtype, kv_dtype
    if capability >= 100:
        return LaunchConfig(
            row_groups=(64, 0),
            # 64 keys and one 512-wide value fill the 512 columns of tensor memory exactly; 32 keys
            # or narrower chunks ask for 576, and Triton then compiles to a kernel without a body.
            tile_tokens=64,
            value_chunk=512,
            num_warps=8,
            num_stages=2,
        )
    return LaunchConfig(
        row_groups=(64, 0),
        # 32 keys and 128-wide value chunks: no spills for fp8. 256-wide ones spill 3 registers, 64
        # keys 24 and more, all outside the loop over tiles.
        tile_tokens=32,
        value_chunk=128,
        num_warps=8,
        num_stages=2,
    )
