"""Groups that keep one spec per layer, and what kind of cache a (group) spec is."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3backend.common.errors import PlanError, SpecError
from k3backend.common.kv_spec_base import KVCacheSpec, cdiv
from k3backend.common.kv_spec_full import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
)
from k3backend.common.kv_spec_local import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KpoolTailSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from k3backend.common.kv_spec_registry import KVCacheSpecRegistry
from k3backend.common.kv_spec_state import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    MambaSpec,
)
from k3backend.common.plan_context import PlanContext

if TYPE_CHECKING:
    from typing_extensions import Self

# Encoder-only layers keep nothing and are in no group: they have no base.
for _cls, _base in (
    (FullAttentionSpec, FullAttentionSpec),
    (MLAAttentionSpec, FullAttentionSpec),
    (HiddenStateCacheSpec, FullAttentionSpec),
    (RSWASpec, FullAttentionSpec),
    (SinkFullAttentionSpec, FullAttentionSpec),
    (SlidingWindowSpec, SlidingWindowSpec),
    (SlidingWindowMLASpec, SlidingWindowMLASpec),
    (KpoolTailSpec, KpoolTailSpec),
    (CircularBufferSpec, CircularBufferSpec),
    (ChunkedLocalAttentionSpec, ChunkedLocalAttentionSpec),
    (CrossAttentionSpec, CrossAttentionSpec),
    (MambaSpec, MambaSpec),
    (HiSparseHotSpec, HiSparseHotSpec),
    (HiSparseResidentSpec, HiSparseResidentSpec),
):
    KVCacheSpecRegistry.register(_cls, _base)

SPEC_CLASSES: dict[str, type[KVCacheSpec]] = {
    "full_attention": FullAttentionSpec,
    "mla_attention": MLAAttentionSpec,
    "hidden_state_cache": HiddenStateCacheSpec,
    "rswa": RSWASpec,
    "chunked_local_attention": ChunkedLocalAttentionSpec,
    "sliding_window": SlidingWindowSpec,
    "circular_buffer": CircularBufferSpec,
    "sliding_window_mla": SlidingWindowMLASpec,
    "kpool_tail": KpoolTailSpec,
    "mamba": MambaSpec,
    "encoder_only_attention": EncoderOnlyAttentionSpec,
    "cross_attention": CrossAttentionSpec,
    "sink_full_attention": SinkFullAttentionSpec,
}
"""Kind names of the spec file and the classes that they stand for."""

_CLASS_NAMES = {cls: name for name, cls in SPEC_CLASSES.items()}


class KVCacheSpecKind(str, enum.Enum):
    """vLLM's coarse kinds; a class without one is its nearest ancestor's, or UNKNOWN."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


_KIND_OF_CLASS: dict[type[KVCacheSpec], KVCacheSpecKind] = {
    SPEC_CLASSES[kind.value]: kind for kind in KVCacheSpecKind if kind.value in SPEC_CLASSES
}


@dataclass(frozen=True, slots=True, eq=False)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Several layers that need the same number of token slots, each with its own spec.

    Attributes:
        kv_cache_specs: layer name -> spec, at least one. Do not change it.

    Raises:
        SpecError: there is no layer, or a value is no spec.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec]

    def __post_init__(self) -> None:
        specs = self.kv_cache_specs
        if not isinstance(specs, Mapping) or not specs:
            raise SpecError(
                f"UniformTypeKVCacheSpecs.kv_cache_specs is {specs!r}, expected at least one "
                "layer name with its spec; leave the group out where there is no layer",
                "kv_cache_specs",
            )
        for name, spec in specs.items():
            if not isinstance(spec, KVCacheSpec):
                raise SpecError(
                    f"UniformTypeKVCacheSpecs.kv_cache_specs[{name!r}] is {spec!r}, expected a "
                    "KVCacheSpec; give the layer's spec",
                    "kv_cache_specs",
                )
        object.__setattr__(self, "dcp_sharded", self.first_spec.dcp_sharded)
        KVCacheSpec.__post_init__(self)

    def _comparison_key(self) -> tuple[Any, ...]:
        layers = frozenset(self.kv_cache_specs.items())
        return (self.block_size, self.dcp_sharded, self.block_stride_alignment, layers)

    @property
    def first_spec(self) -> KVCacheSpec:
        """The first layer's spec."""
        return next(iter(self.kv_cache_specs.values()))

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block takes in all these layers together."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    @property
    def prefix_cacheable(self) -> bool:
        return all(spec.prefix_cacheable for spec in self.kv_cache_specs.values())

    @property
    def prefix_replay_tokens(self) -> int:
        return max(spec.prefix_replay_tokens for spec in self.kv_cache_specs.values())

    @property
    def block_table_token_alignment(self) -> int | None:
        return self.first_spec.block_table_token_alignment

    @property
    def uses_slot_mapping(self) -> bool:
        return self.first_spec.uses_slot_mapping

    def max_memory_usage_pages(self, context: PlanContext) -> int:
        """Blocks for one request: the most that any layer needs."""
        return max(
            cdiv(spec.max_memory_usage_bytes(context), spec.page_size_bytes)
            for spec in set(self.kv_cache_specs.values())
        )

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        return self.max_memory_usage_pages(context) * self.page_size_bytes

    def max_num_blocks_per_req(self, context: PlanContext, max_len: int) -> int:
        """Table columns, which must be the same for every layer.

        Raises:
            PlanError: two layers need different numbers of columns.
        """
        columns: dict[int, str] = {}
        for name, spec in self.kv_cache_specs.items():
            columns.setdefault(spec.max_num_blocks_per_req(context, max_len), name)
        if len(columns) > 1:
            (count, name), (other_count, other_name) = list(columns.items())[:2]
            raise PlanError(
                f"one group shares one block table, but layer {name} needs {count} columns and "
                f"layer {other_name} needs {other_count} at {max_len} tokens; give them the same "
                "dcp_sharded and block_size or two groups",
                other_name,
            )
        return next(iter(columns))

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether the layers can stand in one such group. The first layer's rule decides.

        Raises:
            SpecError: there is no layer, or the first one's class has no registered base.
        """
        if not kv_cache_specs:
            raise SpecError(
                "kv_cache_specs is empty, expected at least one layer; an empty model has no group",
                "kv_cache_specs",
            )
        specs = iter(kv_cache_specs.values())
        first = next(specs)
        if any(
            spec.block_size != first.block_size or spec.dcp_sharded != first.dcp_sharded
            for spec in specs
        ):
            return False
        return first.is_uniform_with_collection(kv_cache_specs)

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> Self | None:
        """The group of these layers, or None where they cannot stand together."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, kv_cache_specs=kv_cache_specs)

    def get_max_layers_per_page_size(self) -> int:
        """The most layers that have one page size: how often a balanced pattern repeats."""
        sizes = Counter(spec.page_size_bytes for spec in self.kv_cache_specs.values())
        return max(sizes.values())


def iter_layer_specs(kv_cache_spec: KVCacheSpec) -> Collection[KVCacheSpec]:
    """The layer specs that a group spec covers: its own, or one per layer."""
    if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
        return kv_cache_spec.kv_cache_specs.values()
    return (kv_cache_spec,)


def is_full_attention_spec(kv_cache_spec: KVCacheSpec) -> bool:
    """Whether every layer keeps all tokens, so that slots stay where they are."""
    return all(isinstance(spec, FullAttentionSpec) for spec in iter_layer_specs(kv_cache_spec))


def get_kv_cache_spec_kind(kv_cache_spec: KVCacheSpec) -> KVCacheSpecKind:
    """vLLM's kind of a spec; a group of full attention and MLA counts as full attention."""
    if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
        specs = iter_layer_specs(kv_cache_spec)
        kinds = {get_kv_cache_spec_kind(spec) for spec in specs}
        if len(kinds) == 1:
            return kinds.pop()
        bases = {KVCacheSpecRegistry.get_uniform_type_base_spec(spec) for spec in specs}
        same = bases == {FullAttentionSpec}
        return KVCacheSpecKind.FULL_ATTENTION if same else KVCacheSpecKind.UNKNOWN
    for ancestor in type(kv_cache_spec).__mro__:
        kind = _KIND_OF_CLASS.get(ancestor)
        if kind is not None:
            return kind
    return KVCacheSpecKind.UNKNOWN


def spec_kind_name(kv_cache_spec: KVCacheSpec) -> str:
    """The spec file's kind name, finer than :func:`get_kv_cache_spec_kind`.

    A group of one kind has its name, a mixed one its coarse kind; a class that the spec file
    lacks has its class name.
    """
    specs = iter_layer_specs(kv_cache_spec)
    classes = {type(spec) for spec in specs}
    if len(classes) > 1:
        return get_kv_cache_spec_kind(kv_cache_spec).value
    cls = classes.pop()
    return _CLASS_NAMES.get(cls, cls.__name__)


def get_kv_cache_spec_sliding_window(kv_cache_spec: KVCacheSpec) -> int | None:
    """The window in tokens of a spec that keeps only a window; None if none or not one."""
    if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
        specs = iter_layer_specs(kv_cache_spec)
        windows = {get_kv_cache_spec_sliding_window(spec) for spec in specs}
        return windows.pop() if len(windows) == 1 else None
    return kv_cache_spec.sliding_window if isinstance(kv_cache_spec, SlidingWindowSpec) else None
