"""What the tensors of a decode hold, looked at on the CPU alone, where looking waits for nothing.

A GPU cannot be asked without stopping it: there the caller answers for lengths and block numbers.
"""

from __future__ import annotations

import torch

from k3backend.common.attention_reference import local_length


def content_problems(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    causal_lens: torch.Tensor | None = None,
    cp: tuple[int, int, int] = (1, 0, 1),
) -> list[str]:
    """Lengths that disagree, and lengths and block numbers outside of the tensors; empty on a GPU.

    Args:
        kv_cache, block_table, seq_lens, causal_lens, cp: as of ``k3backend.decode.mla_decode``,
            with shapes and dtypes checked.
    """
    if seq_lens.device.type != "cpu" or seq_lens.numel() == 0:
        return []
    shortest, longest = int(seq_lens.min()), int(seq_lens.max())
    if shortest < 0:
        return [f"seq_lens holds {shortest}, expected lengths of at least 0"]
    if causal_lens is not None:
        reasons = _causal_problems(seq_lens, causal_lens, cp)
        if reasons:
            return reasons
    if longest == 0:
        return []
    blocks, block_size, _ = kv_cache.shape
    columns = block_table.shape[1]
    needed = -(-longest // block_size)
    if needed > columns:
        return [
            f"block_table has {columns} columns, expected at least {needed}: the longest request "
            f"has {longest} keys in blocks of {block_size}"
        ]
    if blocks == 0:
        return [f"kv_cache has no block, expected some: the longest request has {longest} keys"]
    first_keys = torch.arange(needed, device=seq_lens.device) * block_size
    used = first_keys < seq_lens[:, None]
    outside = used & ((block_table[:, :needed] < 0) | (block_table[:, :needed] >= blocks))
    if bool(outside.any()):
        request, column = (int(at) for at in outside.nonzero()[0])
        return [
            f"block_table[{request}, {column}] is {int(block_table[request, column])}, expected a "
            f"block from 0 to {blocks - 1}: request {request} has {int(seq_lens[request])} keys"
        ]
    return []


def _causal_problems(
    seq_lens: torch.Tensor, causal_lens: torch.Tensor, cp: tuple[int, int, int]
) -> list[str]:
    """Global lengths of which this rank would hold another number of keys."""
    world, rank, interleave = cp
    held = local_length(causal_lens.to(torch.int64), world, rank, interleave)
    wrong = (held != seq_lens) | (causal_lens < 0)
    if not bool(wrong.any()):
        return []
    request = int(wrong.nonzero()[0])
    return [
        f"causal_lens[{request}] is {int(causal_lens[request])}, of which rank {rank} of {world} "
        f"holds {int(held[request])} keys (interleave {interleave}), but seq_lens[{request}] is "
        f"{int(seq_lens[request])}; pass the global lengths in causal_lens, this rank's in seq_lens"
    ]
