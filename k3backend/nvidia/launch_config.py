"""Launch choices of the folded decode on NVIDIA, one heuristic with the reason beside each number.

The reasons are static: what the compiler makes of the kernel for sm_90 and sm_100 (registers,
spills, shared memory, matrix instructions), without timing on a device. "In flight" means that the
machine code asks for keys at least one step before it waits for them.
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
    del rows
    tile_tokens, value_chunk, num_stages = _step(q_dtype, kv_dtype, capability)
    return LaunchConfig(
        # 64 rows, also for fewer: wgmma's M is 64, and below it Triton turns fp8 into float16
        # mma.sync. 128 rows do not fit: their 128 x 512 float32 accumulators take all 256 registers
        # of each of 256 threads on sm_90, and fill tensor memory on sm_100, where Triton then
        # compiles to an almost empty kernel without an error.
        row_groups=(64, 0),
        tile_tokens=tile_tokens,
        value_chunk=value_chunk,
        num_warps=8,
        # What the compiler does not pipeline is loaded a step ahead into registers.
        prefetch=num_stages == 1,
        # 5: the page of a block comes two stages before its keys, and these two before the
        # products, so that one tile is in flight while another is multiplied. With 2 to 4 the code
        # asks for a tile at the end of a step and waits for it at the start of the next one.
        num_stages=num_stages,
        # The descriptors of the query's 36 matrix operands (18 in fp8) are the same in every step.
        # Held in registers they spill 24 to 100 of them in bfloat16.
        hoist=False,
        # Hopper's fp8 matrix unit keeps 13 bits behind the leading one of a sum (reported by
        # SageAttention2 and DeepSeek-V3): a sum over thousands of keys would swallow what is added.
        exact_sums=q_dtype == "fp8" and capability < 100,
    )


def _step(q_dtype: DtypeName, kv_dtype: DtypeName, capability: int) -> tuple[int, int, int]:
    """Keys of a step, columns of a value chunk, and stages of the pipeline of loads."""
    if capability >= 100:
        # One 512-wide value fills the 512 columns of tensor memory exactly; narrower chunks ask for
        # 576, and Triton then compiles to a kernel without a body.
        if kv_dtype == "bf16":
            # 64 keys spill 17. A third buffer of 32 fits with Triton 3.9 alone: 250,424 B before.
            return 32, 512, 2
        return 64, 512, 5
    if q_dtype == "fp8":
        # fp8 values are transposed on their way through registers, so Triton does not pipeline
        # them: in registers they are in flight. 64 keys then spill 235 and more.
        return 32, 128, 1
    if kv_dtype == "fp8":
        # 1,383 instructions for 64 keys, 1,076 for 32.
        return 64, 256, 5
    # 64 keys need 294,920 B of shared memory, of which there are 232,448.
    return 32, 128, 5
