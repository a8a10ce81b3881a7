"""``k3backend.mla_decode``: one MLA decode step on whatever platform this is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def mla_decode(
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
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of every query token over its request's paged KV cache.

    Args:
        q: [requests * q_len, heads, 576], request-major, contiguous; 512 latent and 64 rope
            columns, divided by q_scale. fp8 or bfloat16; the reference backend also takes float32
            and float64. At most 128 heads, 64 tokens per request, 1,024 requests, and 16,384 tiles
            of 64 rows in all (a request has heads x q_len rows).
        kv_cache: [blocks, block_size, 576], holding key / k_scale; q's dtype, or fp8 under a
            bfloat16 q (reference: fp8, bfloat16 or float16 under a wider q). The value is the first
            512 columns. Any block size, any block stride; a block spans at most 2**31 - 1 elements.
        block_table: [requests, columns] int32; entries past a request's length are not read.
        seq_lens: [requests] int32, keys of this rank including the query tokens' own; 0 allowed.
        scale: softmax scale (Kimi-K3: 192 ** -0.5). q_scale, k_scale: quantisation scales. Numbers
            from 1e-30 to 1e30, as their product; a tensor would have to be read from its device.
        q_len: query tokens per request, the same for all.
        causal: query token i of q_len sees the first len - q_len + i + 1 keys; otherwise all.
        causal_lens: [requests] int32 keys of all ranks; needed with context parallelism if causal.
        cp: (world, rank, interleave) of decode context parallelism: local key j is the global key
            j // interleave * world * interleave + rank * interleave + j % interleave.
        return_lse: also return the log-sum-exp.
        backend: "reference", "nvidia", "rocm", or None for the dispatcher's choice. Tensors on the
            CPU run under "reference", or in the Triton interpreter.
    Returns:
        out: [tokens, heads, 512] bfloat16 (float32 and float64 queries keep their dtype).
        lse2: [tokens, heads] float32, base 2; -inf, with out 0, where a row sees no key. None
            without ``return_lse``.
    Deterministic; does not sync except on the reference backend, which plans on the host.
    Raises:
        UnsupportedDecodeError: (a ValueError) with every reason why this cannot run, the same for
            every backend; nothing else is tried instead. Block numbers and lengths that reach
            outside of the cache, and causal_lens of which the rank holds other lengths, are found
            on the CPU alone, where looking does not sync.
        InputError: (a ValueError) there is no backend of that name.
        PlatformError: the backend does not import.
    """
    from k3backend import dispatch
    from k3backend.common.backend import VENDOR_NAMES
    from k3backend.common.decode_call import plain_number
    from k3backend.common.errors import InputError

    if backend is not None and backend not in VENDOR_NAMES:
        raise InputError(
            f"backend is {backend!r}, expected one of {', '.join(VENDOR_NAMES)}, or None for the "
            "dispatcher's choice"
        )
    vendor = dispatch.BACKEND if backend is None else dispatch.load_backend(backend)
    out, lse2 = vendor.mla_decode.decode(
        q,
        kv_cache,
        block_table,
        seq_lens,
        scale=plain_number(scale),
        q_scale=plain_number(q_scale),
        k_scale=plain_number(k_scale),
        q_len=plain_number(q_len),
        causal=causal,
        causal_lens=causal_lens,
        cp=tuple(map(plain_number, cp)) if isinstance(cp, list | tuple) else cp,
        return_lse=return_lse,
    )
    return out, lse2
