"""The root of the spec family: what every layer's cache format has, and attention's page.

Specs are immutable and compared by value. Planning hashes and compares the same few specs many
times, so the compared fields, their hash and the page size are computed once per spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from k3backend.common.errors import SpecError
from k3backend.common.kv_dtype import DType, KVQuantMode, MultipleOf
from k3backend.common.kv_spec_checks import check_fields, field_error
from k3backend.common.plan_context import PlanContext

if TYPE_CHECKING:
    from typing_extensions import Self

SpecT = TypeVar("SpecT", bound="KVCacheSpec")


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(a // -b)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return cdiv(value, multiple) * multiple


class _Memo:
    """Slots for what is computed once; no dataclass fields, so no part of equality or copies."""

    __slots__ = ("_compared", "_hashed", "_real_page_bytes")
    _compared: tuple[Any, ...]
    _hashed: int
    _real_page_bytes: int


_COMPARED_FIELDS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def compared_field_names(cls: type[KVCacheSpec]) -> tuple[str, ...]:
    """Names of the fields that take part in equality, in field order."""
    return tuple(f.name for f in fields(cls) if f.compare)


def _rebuild(cls: type[SpecT], values: dict[str, Any]) -> SpecT:
    return cls(**values)


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheSpec(_Memo):
    """The cache format of one layer. Abstract: the sizes below are for subclasses to say.

    Attributes:
        block_size: tokens that one block ID holds.
        dcp_sharded: whether decode context parallelism deals out this cache's tokens to ranks.
        block_stride_alignment: what the stride between blocks must be a multiple of: bytes, or
            the bytes of a kernel block of ``MultipleOf.base`` tokens. None: anything.
        is_draft: whether a draft model owns the layer. No part of equality, so it groups nothing.

    Raises:
        SpecError: a field is of the wrong type or out of range. Carries the field's name.
    """

    FIELD_MINIMUM: ClassVar[Mapping[str, int]] = {}

    block_size: int
    dcp_sharded: bool = field(default=False, kw_only=True)
    block_stride_alignment: int | MultipleOf | None = field(default=None, kw_only=True)
    is_draft: bool = field(default=False, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        alignment = self.block_stride_alignment
        if (
            alignment is not None
            and not isinstance(alignment, MultipleOf)
            and (type(alignment) is not int or alignment < 1)
        ):
            raise field_error(
                type(self),
                "block_stride_alignment",
                alignment,
                "an integer >= 1, MultipleOf(tokens) or None",
                "give the bytes, or MultipleOf(n) for kernel blocks of n tokens",
            )

    def _comparison_key(self) -> tuple[Any, ...]:
        try:
            return self._compared
        except AttributeError:
            pass
        cls = self.__class__
        getter = _COMPARED_FIELDS.get(cls)
        if getter is None:
            getter = _COMPARED_FIELDS[cls] = attrgetter(*compared_field_names(cls))
        key: tuple[Any, ...] = getter(self)
        object.__setattr__(self, "_compared", key)
        return key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._comparison_key() == other._comparison_key()

    def __hash__(self) -> int:
        try:
            return self._hashed
        except AttributeError:
            hashed = hash((self.__class__, self._comparison_key()))
            object.__setattr__(self, "_hashed", hashed)
            return hashed

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return (_rebuild, (self.__class__, values))

    @property
    def num_heads(self) -> int:
        """Heads of a page."""
        raise NotImplementedError(f"{type(self).__name__} has no heads")

    @property
    def tokens_per_state(self) -> int | Fraction:
        """Tokens that one stored state covers; below 1 for several states per token."""
        raise NotImplementedError(f"{type(self).__name__} has no states")

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of one state of one head."""
        raise NotImplementedError(f"{type(self).__name__} has no states")

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block takes in this layer, padding included."""
        raise NotImplementedError(f"{type(self).__name__} has no page size")

    @property
    def prefix_cacheable(self) -> bool:
        """Whether finished blocks can be found again by prefix."""
        return True

    @property
    def prefix_replay_tokens(self) -> int:
        """Tokens that are computed again after a prefix hit."""
        return 0

    @property
    def block_table_token_alignment(self) -> int | None:
        """Tokens that a block table's row length is rounded up to; None: no rounding."""
        return 128

    @property
    def has_layer_views(self) -> bool:
        """Whether each layer gets a shaped view of its pages."""
        return True

    @property
    def uses_slot_mapping(self) -> bool:
        """Whether the runner computes a slot per token for this cache."""
        return True

    @property
    def num_states(self) -> int:
        """States of a block: ``block_size // tokens_per_state``, 1 where that is not positive."""
        return self.get_num_kernel_states(self.block_size)

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        """States of a kernel block of this many tokens."""
        per_state = self.tokens_per_state
        if per_state == 1:
            return kernel_block_size
        return int(kernel_block_size // per_state) if per_state > 0 else 1

    def get_block_stride_alignment(self) -> int:
        """Bytes that the stride between blocks must be a multiple of; 1 where nothing is asked."""
        alignment = self.block_stride_alignment
        if not isinstance(alignment, MultipleOf):
            return alignment or 1
        kernel_block_size = math.gcd(alignment.base, self.block_size)
        if kernel_block_size == self.block_size:
            return 1
        return self.copy_with_new_block_size(kernel_block_size).page_size_bytes

    def max_memory_usage_bytes(self, context: PlanContext) -> int:
        """Bytes of this layer for one request of ``context.max_model_len`` tokens."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a request needs")

    def max_num_blocks_per_req(self, context: PlanContext, max_len: int) -> int:
        """Columns of the block table for requests of up to ``max_len`` tokens."""
        return cdiv(max_len, self.block_size)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same format with other blocks. Raises SpecError where padding gets too small."""
        return replace(self, block_size=block_size)

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether all these layers need the same number of token slots as this one.

        The default rule: all belong to this spec's registered base class.
        """
        from k3backend.common.kv_spec_registry import KVCacheSpecRegistry

        base = KVCacheSpecRegistry.require_uniform_type_base_spec(self)
        return all(isinstance(spec, base) for spec in kv_cache_specs.values())


def replace_as(
    spec: KVCacheSpec, target_cls: type[SpecT], *, drop: Collection[str] = (), **changes: Any
) -> SpecT:
    """Rebuild ``spec`` as another class, such as a window promoted to full attention.

    Fields that only the target has keep their defaults.

    Args:
        drop: fields of ``spec`` to leave behind.
        changes: new values.

    Raises:
        SpecError: ``spec`` has a field that the target lacks and that is not in ``drop``.
    """
    known = {f.name for f in fields(target_cls) if f.init}
    values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init and f.name not in drop}
    values.update(changes)
    unknown = sorted(set(values) - known)
    if unknown:
        raise SpecError(
            f"{type(spec).__name__}.{unknown[0]} has no place in {target_cls.__name__}; "
            "name it in drop",
            unknown[0],
        )
    return target_cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec(KVCacheSpec):
    """A cache of keys and values: pages of ``heads x states x cell`` bytes.

    Attributes:
        num_kv_heads: KV heads of this rank.
        head_size: elements of a key head (of the latent vector, for MLA).
        dtype: element type; a torch dtype or its name is taken too.
        max_tp_shards: distinct shards across tensor parallelism; further ranks hold replicas.
            None: unknown, taken for not replicated.
        head_size_v: elements of a value head; None means ``head_size``.
        kv_quant_mode: how elements are quantised; a member name is taken too.
        page_size_padded: bytes of the page where it is padded.
        num_head_slots: heads of a page where packing departs from one per KV head.
        state_content_bytes: bytes of a cell where it is packed.
        tokens_per_state: tokens of a stored state; a Fraction below 1 for several states a token.
    """

    FIELD_MINIMUM: ClassVar[Mapping[str, int]] = {"head_size_v": 0}

    dcp_sharded: bool = True
    max_tp_shards: int | None = None
    num_kv_heads: int
    head_size: int
    dtype: DType
    head_size_v: int = None  # type: ignore[assignment]
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        if self.dtype.__class__ is not DType:
            object.__setattr__(self, "dtype", as_dtype(type(self), "dtype", self.dtype))
        if self.kv_quant_mode.__class__ is not KVQuantMode:
            mode = as_quant_mode(type(self), self.kv_quant_mode)
            object.__setattr__(self, "kv_quant_mode", mode)
        if self.tokens_per_state != 1 or type(self.tokens_per_state) is not int:
            per_state = as_tokens_per_state(type(self), self.tokens_per_state)
            object.__setattr__(self, "tokens_per_state", per_state)
        KVCacheSpec.__post_init__(self)
        self._set_page()

    def _set_page(self) -> None:
        real = self.num_heads * self.num_states * self.state_content_size_bytes
        object.__setattr__(self, "_real_page_bytes", real)
        if real < 1:
            raise SpecError(
                f"{type(self).__name__}.block_size is {self.block_size}, which holds no state of "
                f"{self.tokens_per_state} tokens; take a block of at least one state",
                "block_size",
            )
        padded = self._padded_page_bytes(real)
        if padded != self.page_size_padded:
            object.__setattr__(self, "page_size_padded", padded)
        if padded is not None and padded < real:
            raise SpecError(
                f"{type(self).__name__}.page_size_padded is {padded}, expected at least the real "
                f"page of {real} bytes (block of {self.block_size} tokens); raise it or shrink "
                "the block",
                "page_size_padded",
            )

    def _padded_page_bytes(self, real_page_bytes: int) -> int | None:
        """Bytes of the padded page, None where it is not padded; for classes that pad by rule."""
        return self.page_size_padded

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads if self.num_head_slots is None else self.num_head_slots

    @property
    def state_content_size_bytes(self) -> int:
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        return (self.head_size + self.head_size_v) * self.dtype.itemsize

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of the page without padding: heads x states x cell."""
        return self._real_page_bytes

    @property
    def real_page_size_bytes(self) -> int:
        """Another name of ``unpadded_page_size_bytes``."""
        return self._real_page_bytes

    @property
    def page_size_bytes(self) -> int:
        padded = self.page_size_padded
        return self._real_page_bytes if padded is None else padded

    def max_num_blocks_per_req(self, context: PlanContext, max_len: int) -> int:
        shards = context.dcp_size if self.dcp_sharded else 1
        return cdiv(max_len, self.block_size * shards)


def as_dtype(cls: type, name: str, value: object) -> DType:
    """``value`` as a DType. Raises SpecError naming the field."""
    try:
        return DType.of(value)
    except ValueError as error:
        raise SpecError(f"{cls.__name__}.{name}: {error}", name) from None


def as_quant_mode(cls: type, value: object) -> KVQuantMode:
    """``value`` as a KVQuantMode member. Raises SpecError naming the field."""
    members = KVQuantMode.__members__
    if isinstance(value, str) and value in members:
        return members[value]
    raise field_error(
        cls, "kv_quant_mode", value, f"one of {', '.join(members)}", "give a member's name"
    )


def as_tokens_per_state(cls: type, value: object) -> int | Fraction:
    """``value`` as a positive integer or a Fraction below 1. Raises SpecError naming the field."""
    if isinstance(value, Fraction) and 0 < value < 1:
        return value
    if isinstance(value, Fraction) and value.denominator == 1:
        value = value.numerator
    if type(value) is int and value >= 1:
        return value
    raise field_error(
        cls,
        "tokens_per_state",
        value,
        "an integer >= 1, or a Fraction below 1",
        "give the tokens that a stored state covers",
    )
