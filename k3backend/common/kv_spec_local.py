"""Caches that keep a bounded part of a request: windows, chunks and one-block rings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from k3backend.common.errors import SpecError
from k3backend.common.kv_spec_base import AttentionSpec, KVCacheSpec, cdiv
from k3backend.common.kv_spec_checks import field_error
from k3backend.common.kv_spec_full import aligned_page_bytes
from k3backend.common.plan_context import PlanContext

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attention within chunks: one chunk and the tokens in flight stay.

    Attributes:
        attention_chunk_size: tokens of a chunk.
    """

    attention_chunk_size: int

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Blocks that a request may hold: the one source for sizing and for admission."""
        tokens = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size)

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        blocks = self.max_admission_blocks_per_request(
            context.max_in_flight_tokens, context.max_model_len
        )
        return blocks * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        return all(
            isinstance(spec, ChunkedLocalAttentionSpec)
            and spec.attention_chunk_size == self.attention_chunk_size
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlidingWindowSpec(AttentionSpec):
    """A window of the last tokens, and the tokens in flight.

    Attributes:
        sliding_window: tokens of the window.
        extra_retained_tokens: tokens below the window that stay unattended, because drafting with
            several modules computes them again.
    """

    FIELD_MINIMUM: ClassVar[Mapping[str, int]] = {"head_size_v": 0, "extra_retained_tokens": 0}

    sliding_window: int
    extra_retained_tokens: int = 0

    @property
    def num_retained_tokens(self) -> int:
        """Tokens below the first scheduled one that must stay readable."""
        return self.sliding_window - 1 + self.extra_retained_tokens

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Blocks that a request may hold: the one source for sizing and for admission.

        One block more than the tokens need, because a window may start inside a block.
        """
        tokens = min(self.num_retained_tokens + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        """As the base. Raises SpecError where DCP would have to shard the window."""
        if self.dcp_sharded and context.dcp_size > 1:
            raise SpecError(
                f"{type(self).__name__}.dcp_sharded is True at dcp_size {context.dcp_size}, "
                "expected False: a window is not sharded over DCP ranks; set it to False or "
                "dcp_size to 1",
                "dcp_sharded",
            )
        blocks = self.max_admission_blocks_per_request(
            context.max_in_flight_tokens, context.max_model_len
        )
        return blocks * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        return all(
            isinstance(spec, SlidingWindowSpec) and spec.sliding_window == self.sliding_window
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A window of latent vectors.

    Attributes:
        cache_dtype_str: name of the cache dtype as the backend was told.
        alignment: bytes that the page is padded to a multiple of.
        model_version: None or "deepseek_v4".
        bounded_replay: whether a prefix hit computes one window again instead of finding it; such
            a cache is not prefix cacheable.
    """

    cache_dtype_str: str | None = None
    alignment: int | None = None
    model_version: str | None = None
    bounded_replay: bool = False
    head_size_v: int = 0

    def __post_init__(self) -> None:
        if self.model_version not in (None, "deepseek_v4"):
            raise field_error(
                type(self),
                "model_version",
                self.model_version,
                "None or 'deepseek_v4'",
                "leave it out for other models",
            )
        AttentionSpec.__post_init__(self)

    def _padded_page_bytes(self, real_page_bytes: int) -> int | None:
        return aligned_page_bytes(real_page_bytes, self.page_size_padded, self.alignment)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        from_alignment = aligned_page_bytes(self.real_page_size_bytes, None, self.alignment)
        padded = None if self.page_size_padded == from_alignment else self.page_size_padded
        return replace(self, block_size=block_size, page_size_padded=padded)

    @property
    def prefix_cacheable(self) -> bool:
        return not self.bounded_replay

    @property
    def prefix_replay_tokens(self) -> int:
        return self.sliding_window if self.bounded_replay else 0

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        return all(
            isinstance(spec, SlidingWindowMLASpec)
            and spec.sliding_window == self.sliding_window
            and spec.bounded_replay == self.bounded_replay
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KpoolTailSpec(SlidingWindowSpec):
    """One circular block per request with the raw tail of a pooled indexer's keys.

    vLLM had it before 0.33 and has since folded it into other caches.
    """

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        return 1

    def max_num_blocks_per_req(self, context: PlanContext, max_len: int) -> int:
        return 1

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, KpoolTailSpec) for spec in kv_cache_specs.values())

    @property
    def prefix_cacheable(self) -> bool:
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CircularBufferSpec(AttentionSpec):
    """One ring block per request, for the raw keys of a token group that is being compressed.

    ``block_size`` is the ring's capacity in tokens.
    """

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    @property
    def prefix_cacheable(self) -> bool:
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        return self.page_size_bytes

    def max_num_blocks_per_req(self, context: PlanContext, max_len: int) -> int:
        return 1

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, CircularBufferSpec) for spec in kv_cache_specs.values())
