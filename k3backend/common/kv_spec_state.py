"""Caches of another shape: recurrent states, encoder layers, HiSparse pages."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from k3backend.common.errors import SpecError
from k3backend.common.kv_dtype import DType
from k3backend.common.kv_spec_base import AttentionSpec, KVCacheSpec, as_dtype, cdiv
from k3backend.common.kv_spec_checks import field_error
from k3backend.common.plan_context import MAMBA_CACHE_MODES, PlanContext


class MambaType(str, enum.Enum):
    """Which backend runs a recurrent layer; member names are vLLM's."""

    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    SHORT_CONV = "short_conv"
    LINEAR = "linear"
    GDN_ATTN = "gdn_attn"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaSpec(KVCacheSpec):
    """Recurrent state (Mamba, KDA, GDN, convolutions): its size does not grow with the request.

    Attributes:
        shapes, dtypes: one tensor each of the state of this rank.
        page_size_padded: bytes of the page where it is padded.
        mamba_type: backend; a member's name or value is taken too, and a name that a third party
            registered with vLLM stays text.
        mamba_cache_mode: "none", "align" or "all". What a request needs follows the context's
            mode, as in vLLM.
        num_speculative_blocks: states kept for speculative tokens.
        num_prefill_checkpoint_blocks: states kept as prefill checkpoints.
        prefill_checkpoint_alignment: tokens that a checkpoint's distance is a multiple of.
        num_heads: heads of the page.
        tokens_per_state: -1: one state however many tokens.
        tp_replicated: whether every tensor-parallel rank holds the whole state.
    """

    FIELD_MINIMUM: ClassVar[Mapping[str, int]] = {
        "num_speculative_blocks": 0,
        "num_prefill_checkpoint_blocks": 0,
        "tokens_per_state": -1,
    }

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    page_size_padded: int | None = None
    mamba_type: MambaType | str = MambaType.MAMBA2
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None
    num_heads: int = 1
    tokens_per_state: int = -1
    tp_replicated: bool = False

    def __post_init__(self) -> None:
        cls = type(self)
        object.__setattr__(self, "shapes", _as_shapes(cls, self.shapes))
        object.__setattr__(self, "dtypes", _as_dtypes(cls, self.dtypes, len(self.shapes)))
        if self.mamba_type.__class__ is not MambaType:
            object.__setattr__(self, "mamba_type", _as_mamba_type(cls, self.mamba_type))
        if self.mamba_cache_mode not in MAMBA_CACHE_MODES:
            raise field_error(
                cls,
                "mamba_cache_mode",
                self.mamba_cache_mode,
                f"one of {', '.join(MAMBA_CACHE_MODES)}",
                "give one of these",
            )
        KVCacheSpec.__post_init__(self)
        if self.tokens_per_state == 0:
            raise field_error(
                cls, "tokens_per_state", 0, "-1 or an integer >= 1", "-1 is one state in all"
            )
        real = sum(
            prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        object.__setattr__(self, "_real_page_bytes", real)
        padded = self.page_size_padded
        if padded is not None and padded < real:
            raise SpecError(
                f"{cls.__name__}.page_size_padded is {padded}, expected at least the state's "
                f"{real} bytes; raise it (and the attention block that it follows)",
                "page_size_padded",
            )

    @property
    def state_content_size_bytes(self) -> int:
        return self._real_page_bytes

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of the state, without padding."""
        return self._real_page_bytes

    @property
    def page_size_bytes(self) -> int:
        padded = self.page_size_padded
        return self._real_page_bytes if padded is None else padded

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        pages = 1 + self.num_speculative_blocks
        if context.mamba_cache_mode == "align":
            pages += 1 + self.num_prefill_checkpoint_blocks
        return pages * self.page_size_bytes

    def max_num_blocks_per_req(self, context: PlanContext, max_len: int) -> int:
        """Table columns. In align mode rows are indexed by position, whatever stays resident."""
        if context.mamba_cache_mode == "align":
            return cdiv(max_len, self.block_size) + self.num_speculative_blocks
        return 1 + self.num_speculative_blocks

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        return all(
            isinstance(spec, MambaSpec)
            and spec.num_speculative_blocks == self.num_speculative_blocks
            and spec.num_prefill_checkpoint_blocks == self.num_prefill_checkpoint_blocks
            and spec.prefill_checkpoint_alignment == self.prefill_checkpoint_alignment
            and spec.page_size_bytes == self.page_size_bytes
            and spec.tp_replicated == self.tp_replicated
            for spec in kv_cache_specs.values()
        )


def _as_shapes(cls: type, value: object) -> tuple[tuple[int, ...], ...]:
    valid = isinstance(value, (tuple, list)) and len(value) > 0
    if valid:
        for shape in value:  # type: ignore[attr-defined]
            valid = valid and isinstance(shape, (tuple, list)) and len(shape) > 0
            valid = valid and all(type(size) is int and size >= 1 for size in shape)
    if not valid:
        raise field_error(
            cls,
            "shapes",
            value,
            "a sequence of shapes, each of integers >= 1",
            "give one shape per state tensor, such as [[4608, 10], [12, 128, 128]]",
        )
    return tuple(tuple(shape) for shape in value)  # type: ignore[attr-defined]


def _as_dtypes(cls: type, value: object, count: int) -> tuple[DType, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != count:
        raise field_error(
            cls,
            "dtypes",
            value,
            f"a sequence of {count} dtypes, one per shape",
            "give one dtype per state tensor",
        )
    return tuple(as_dtype(cls, "dtypes", dtype) for dtype in value)


def _as_mamba_type(cls: type, value: object) -> MambaType | str:
    if isinstance(value, str) and value.isidentifier():
        return MambaType.__members__.get(value.upper(), value)
    raise field_error(
        cls,
        "mamba_type",
        value,
        f"one of {', '.join(MambaType.__members__)}, or a registered name",
        "give a member's name",
    )


def get_mamba_prefill_checkpoint_position(
    num_tokens: int,
    hash_block_size: int,
    drop_eagle_block: bool,
    num_hash_lookahead_tokens: int = 0,
) -> int:
    """The token position at which a prefill's state can be kept for later requests.

    At least one token stays behind it for the logits (or as many as the hash looks ahead); a
    drafter that drops its last block leaves that block instead.

    Args:
        num_tokens: tokens of the prefill.
        hash_block_size: tokens per prefix-cache hash.
        drop_eagle_block: whether a drafter's last block is dropped.
        num_hash_lookahead_tokens: tokens that the hash of a block needs beyond it.
    """
    left_over = 0 if drop_eagle_block else max(1, num_hash_lookahead_tokens)
    position = (num_tokens - left_over) // hash_block_size * hash_block_size
    if drop_eagle_block:
        position -= hash_block_size
    return max(position, 0)


def is_mamba_prefill_checkpoint_valid(
    query_start: int,
    query_end: int,
    checkpoint_position: int,
    hash_block_size: int,
    mamba_block_size: int,
    checkpoint_alignment: int | None,
) -> bool:
    """Whether a backend can export the checkpoint while it computes this query.

    All arguments are in tokens; the query is ``[query_start, query_end)``.

    Raises:
        SpecError: ``checkpoint_alignment`` is not positive.
    """
    if checkpoint_alignment is None:
        return False
    if checkpoint_alignment < 1:
        raise SpecError(
            f"checkpoint_alignment is {checkpoint_alignment}, expected an integer >= 1 or None; "
            "give the tokens between prefill checkpoints",
            "prefill_checkpoint_alignment",
        )
    first_column = (query_start - 1) // mamba_block_size
    checkpoint_column = cdiv(query_end, mamba_block_size) - 2
    return (
        query_start % hash_block_size == 0
        and checkpoint_column > first_column
        and query_start + hash_block_size <= checkpoint_position < query_end
        and (checkpoint_position - query_start) % checkpoint_alignment == 0
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Encoder layers compute in one go and keep nothing."""

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossAttentionSpec(AttentionSpec):
    """Encoder states that a decoder attends to."""

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        blocks = cdiv(context.max_num_encoder_input_tokens, self.block_size)
        return blocks * self.page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HiSparseHotSpec(KVCacheSpec):
    """A request's hot buffer on the device; it ends with the request.

    Attributes:
        page_size: bytes of a page.
        blocks_per_request: blocks of a request, however long.
    """

    page_size: int
    blocks_per_request: int

    @property
    def prefix_cacheable(self) -> bool:
        return False

    @property
    def page_size_bytes(self) -> int:
        return self.page_size

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    @property
    def has_layer_views(self) -> bool:
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        return self.blocks_per_request * self.page_size

    def max_num_blocks_per_req(self, context: PlanContext, max_len: int) -> int:
        return self.blocks_per_request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HiSparseResidentSpec(KVCacheSpec):
    """Device pages of a cache whose home is the host; they can be reclaimed.

    Attributes:
        page_size: bytes of a page.
    """

    page_size: int

    @property
    def prefix_cacheable(self) -> bool:
        return False

    @property
    def page_size_bytes(self) -> int:
        return self.page_size

    @property
    def has_layer_views(self) -> bool:
        return False

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Blocks that a request may hold: those of the tokens in flight."""
        return cdiv(min(max_in_flight_tokens, max_model_len), self.block_size)

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        blocks = self.max_admission_blocks_per_request(
            context.max_in_flight_tokens, context.max_model_len
        )
        return blocks * self.page_size
