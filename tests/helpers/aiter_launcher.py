"""AITER's launch rules restated as conditions, apart from the tables that the package reads.

From `csrc/py_itfs_cu/asm_mla.cu`, `aiter/mla.py` and `v1_2_device.cuh` at v0.1.20, and from 0.1.7's
`asm_mla.cu`. A table row that is wrong, missing or superfluous shows as a difference.
"""

from __future__ import annotations


def launcher_runs(
    version: str,
    arch: str,
    q: str,
    kv: str,
    heads: int,
    q_len: int,
    causal: bool,
    lse: bool,
    cprr: bool,
) -> bool:
    """Whether the launcher finds a persistent kernel for exactly this call, without a fold."""
    causal = causal or q_len == 1
    if version.startswith("0.1.7"):
        if lse or cprr or not causal:
            return False
        if heads == 16:
            return q_len <= 4 and (q, kv) != ("fp8", "bf16")
        return heads == 128 and (q, kv) == ("fp8", "fp8")
    if arch == "gfx942":
        if cprr or not causal:
            return False
        if (q, kv) == ("fp8", "fp8"):
            if heads == 64:
                return q_len == 1
            return not lse and heads in (16, 128) and q_len <= 4
        if lse or q == "fp8":
            return False
        if heads == 16:
            return q_len <= 4
        return (q, kv, heads, q_len) == ("bf16", "bf16", 8, 2)
    if (q, kv) == ("bf16", "fp8"):
        return heads == 16 and q_len <= 4 and causal and not lse and not cprr
    if (q, kv) == ("bf16", "bf16"):
        # (32, 4) or (64, 1): both have every combination of mask, LSE and cprr.
        return heads in (16, 32, 64, 128)
    if (q, kv) != ("fp8", "fp8"):
        return False
    if (heads, q_len) == (8, 4):
        return not cprr
    if heads in (16, 32) and q_len == 1:
        return not cprr
    if heads == 16 and q_len == 2:
        return causal and not lse and not cprr
    # (16, 4) or (32, 4): both have every combination.
    return heads in (16, 32, 64, 128)


def query_tiles(version: str, arch: str, q: str, kv: str, heads: int, q_len: int) -> int:
    """Query tiles of AITER's planner, each of which reads the KV."""
    rows = heads * q_len
    group = 128
    if not version.startswith("0.1.7") and arch == "gfx950":
        if q == kv == "bf16" and 64 <= rows < 128 and heads <= 64:
            group = 64
        if q == kv == "fp8" and (heads, q_len) == (32, 3):
            group = 64
    if rows <= group:
        return 1
    return q_len if 2 * heads > group else -(-rows // group)
