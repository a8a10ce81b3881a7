"""Caches that keep every token of a request: full attention and its family, MLA among it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from k3backend.common.kv_spec_base import AttentionSpec, cdiv, round_up
from k3backend.common.kv_spec_checks import field_error
from k3backend.common.plan_context import PlanContext

if TYPE_CHECKING:
    from typing_extensions import Self


class SparseCacheRole(str, enum.Enum):
    """What an MLA cache of a sparse model holds: latent vectors, or the indexer's keys."""

    SPARSE = "sparse"
    INDEXER = "indexer"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FullAttentionSpec(AttentionSpec):
    """Blocks for every token of the request.

    A window or chunk size here means that the layer computes that way while its blocks are
    allocated in full.

    Attributes:
        sliding_window, attention_chunk_size: tokens, or None.
        non_causal: whether the layer sees later tokens (prefix LM). Says nothing of the layout.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        tokens = context.max_model_len
        if self.dcp_sharded and context.dcp_size > 1:
            tokens = cdiv(tokens, context.dcp_size)
        return cdiv(tokens, self.block_size) * self.page_size_bytes


def aligned_page_bytes(
    real_bytes: int, padded_bytes: int | None, alignment: int | None
) -> int | None:
    """The padded page of an MLA cache whose page must be a multiple of ``alignment`` bytes.

    A page that is no multiple is padded to the next one, whatever padding was asked for.
    """
    if alignment is None or real_bytes % alignment == 0:
        return padded_bytes
    return round_up(real_bytes, alignment)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAAttentionSpec(FullAttentionSpec):
    """One latent vector per state, in full; there is no separate value.

    Attributes:
        cache_dtype_str: name of the cache dtype as the backend was told.
        topk_buffer_width: width of the sparse model's top-k index buffer, padding included.
        alignment: bytes that the page is padded to a multiple of.
        model_version: name of a model-specific format.
        storage_block_size: tokens of a storage block where it differs from the kernel block.
        cache_role: latent vectors or indexer keys.
        is_index_group_leader: whether the layer computes the indices that its group shares.
        non_causal_multi_token_decode: whether a non-causal query block becomes decode rows.
    """

    cache_dtype_str: str | None = None
    topk_buffer_width: int | None = None
    alignment: int | None = None
    model_version: str | None = None
    storage_block_size: int | None = None
    cache_role: SparseCacheRole = SparseCacheRole.SPARSE
    is_index_group_leader: bool = False
    non_causal_multi_token_decode: bool = False
    head_size_v: int = 0

    def __post_init__(self) -> None:
        if self.cache_role.__class__ is not SparseCacheRole:
            object.__setattr__(self, "cache_role", _as_cache_role(type(self), self.cache_role))
        AttentionSpec.__post_init__(self)

    def _padded_page_bytes(self, real_page_bytes: int) -> int | None:
        return aligned_page_bytes(real_page_bytes, self.page_size_padded, self.alignment)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        return replace(self, block_size=block_size, page_size_padded=explicit_padding(self))


def explicit_padding(spec: MLAAttentionSpec) -> int | None:
    """``page_size_padded`` where somebody asked for it, None where the alignment gave it.

    Without this, a block size whose page is a multiple of the alignment would keep the padding of
    the old one.
    """
    from_alignment = aligned_page_bytes(spec.real_page_size_bytes, None, spec.alignment)
    return None if spec.page_size_padded == from_alignment else spec.page_size_padded


def _as_cache_role(cls: type, value: object) -> SparseCacheRole:
    members = SparseCacheRole.__members__
    for name, member in members.items():
        if value in (name, member.value):
            return member
    raise field_error(
        cls, "cache_role", value, f"one of {', '.join(members)}", "give a member's name"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Marks a layer that stores hidden states. It always forms a group of its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RSWASpec(FullAttentionSpec):
    """Reference sliding-window attention: the prompt stays, of generated tokens a window.

    Sized like full attention, its upper bound.

    Attributes:
        rswa_window: generated tokens that stay.
    """

    rswa_window: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with sink tokens.

    Attributes:
        sink_len: tokens of the sink.
    """

    sink_len: int | None = None
