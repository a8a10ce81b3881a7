"""One decode step on NVIDIA tensors: plan, decode and merge in one call.

For tests, examples and programs without layers. A server plans once per forward and reuses the
plan in every layer: see ``kv_balanced_mla``.
"""

from __future__ import annotations

import torch

from k3backend.common.balanced_mla import dtype_name
from k3backend.common.decode_call import call_problems, kernel_pairs
from k3backend.common.decode_checks import device_problems
from k3backend.common.errors import UnsupportedDecodeError
from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    q_len: int = 1,
    causal: bool = True,
    causal_lens: torch.Tensor | None = None,
    cp: tuple[int, int, int] = (1, 0, 1),
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One decode step. See ``k3backend.decode.mla_decode`` for the arguments.

    Returns:
        out [tokens, heads, 512] bfloat16 and lse2 [tokens, heads] float32 or None.
    Allocates its buffers on every call. Does not sync; deterministic.
    Raises:
        UnsupportedDecodeError: with every reason why it cannot run.
    """
    problems = call_problems(
        q, kv_cache, block_table, seq_lens, scale=scale, q_scale=q_scale, k_scale=k_scale,
        q_len=q_len, causal=causal, causal_lens=causal_lens, cp=cp,
        pairs=kernel_pairs(torch.float8_e4m3fn),
    )  # fmt: skip
    if isinstance(q, torch.Tensor):
        problems += device_problems(q.device)
    if problems:
        raise UnsupportedDecodeError("balanced MLA decode cannot run", problems)
    core = KvBalancedMla(
        heads=q.shape[1],
        q_len=q_len,
        max_requests=max(seq_lens.shape[0], 1),
        causal=causal,
        device=q.device,
        q_dtype=dtype_name(q.dtype) or "fp8",
    )
    return core.run(
        q, kv_cache, block_table, seq_lens, scale=scale * q_scale * k_scale, k_scale=k_scale,
        causal_lens=causal_lens, cp=cp, return_lse=return_lse,
    )  # fmt: skip
