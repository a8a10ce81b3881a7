# mypy: ignore-errors
# Kernel bodies are Triton's language: not typed as Python.
"""Rounding to narrow formats that Triton's interpreter does as devices do.

The interpreter (3.9) cuts bfloat16 instead of rounding it, and loses the carry of fp8 mantissas
(127 becomes 64). Interpreted kernels therefore round in float32 arithmetic, to nearest even, before
they cast. Remove this once the oldest Triton that is supported rounds itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _drop_bits(x, DROP: tl.constexpr):
    """float32 rounded to nearest even after cutting DROP bits of its mantissa."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP << DROP
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 ``x`` as bfloat16 or, for 0 <= x <= 256 (128 in the fnuz format), as fp8 e4m3.

    Interpreted, an fp8 result stays float32 with fp8's values.
    """
    # One return: the compiler goes on behind a return inside a constant condition.
    if not INTERPRETED:
        rounded = x.to(dtype)
    elif dtype == tl.bfloat16:
        rounded = _drop_bits(x, 16).to(tl.bfloat16)
    # Below the smallest normal number steps are even: adding 2**23 steps rounds to one.
    elif dtype == tl.float8e4b8:
        rounded = tl.where(x < 2.0**-7, (x + 2.0**13) - 2.0**13, _drop_bits(x, 20))
    else:
        rounded = tl.where(x < 2.0**-6, (x + 2.0**14) - 2.0**14, _drop_bits(x, 20))
    return rounded
