"""One decode step on ROCm tensors, and which kernel runs a shape.

`choose_route` and `route_table` need neither torch, triton nor aiter; `decode` needs torch. A
server plans once per forward and reuses the plan in every layer: see ``kv_balanced_mla``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3backend.rocm.decode_routes import Route, RouteRow, choose_route, route_table

if TYPE_CHECKING:
    import torch

__all__ = ["Route", "RouteRow", "choose_route", "decode", "route_table"]


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
    """One decode step with the folded kernel. See ``k3backend.decode.mla_decode``.

    Layers of a server take AITER's kernels where `choose_route` says so; one call alone would
    spend more on their plan and index list than it saves.

    Returns:
        out [tokens, heads, 512] bfloat16 and lse2 [tokens, heads] float32 or None.
    Allocates its buffers on every call. Does not sync; deterministic.
    Raises:
        UnsupportedDecodeError: with every reason why it cannot run.
    """
    import torch

    from k3backend.common.balanced_mla import dtype_name
    from k3backend.common.decode_call import call_problems, kernel_pairs
    from k3backend.common.decode_checks import device_problems
    from k3backend.common.errors import UnsupportedDecodeError
    from k3backend.rocm.kv_balanced_mla.core import FP8_DTYPES, KvBalancedMla, gpu_arch

    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    arch = gpu_arch(device)
    if device.type == "cpu":
        # The interpreter plays the GPU whose fp8 format the tensors have.
        formats = {t.dtype for t in (q, kv_cache) if isinstance(t, torch.Tensor)}
        arch = next((name for name, dtype in FP8_DTYPES.items() if dtype in formats), arch)
    problems = call_problems(
        q, kv_cache, block_table, seq_lens, scale=scale, q_scale=q_scale, k_scale=k_scale,
        q_len=q_len, causal=causal, causal_lens=causal_lens, cp=cp,
        pairs=kernel_pairs(FP8_DTYPES.get(arch, torch.float8_e4m3fn)),
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
        arch=arch,
    )
    return core.run(
        q, kv_cache, block_table, seq_lens, scale=scale * q_scale * k_scale, k_scale=k_scale,
        causal_lens=causal_lens, cp=cp, return_lse=return_lse,
    )  # fmt: skip
