"""In which block sizes a layer's cache can stand at a given page size, and what rules one out.

Groups of one pool need pages of one size. A layer reaches it by its block size: fewer or more
tokens per block, and padding for what is left. Not every block size is of use:

* a padded page cannot be split into kernel blocks, so every backend of its group must take the
  manager block as its kernel block;
* an unpadded page is split into kernel blocks of one size that all backends of its group take;
* MLA caches are read in whole token rows and are never padded to a foreign size;
* a prefix hit ends at a multiple of the lcm of all block sizes, so a block size that raises the lcm
  makes prefix caching coarser.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from k3backend.common.errors import K3Error
from k3backend.common.kv_spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from k3backend.common.plan_context import KernelBlocks, PlanContext

MAX_LCM_FACTOR = 64
"""Block sizes are looked for among the divisors of this many multiples of the target's lcm."""
_MAX_DIVISION = 1 << 24


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers with one spec on one side.

    Attributes:
        spec: their spec; ``is_draft`` says which side.
        layers: positions of the layers in model order.
    """

    spec: KVCacheSpec
    layers: tuple[int, ...]

    @property
    def is_draft(self) -> bool:
        """Whether a draft model owns the layers."""
        return self.spec.is_draft

    @property
    def side(self) -> str:
        """ "draft" or "target", as messages name it."""
        return "draft" if self.spec.is_draft else "target"


def layer_kinds(specs: Iterable[KVCacheSpec]) -> list[LayerKind]:
    """Layers counted by spec and side, in order of first appearance. O(layers)."""
    positions: dict[tuple[KVCacheSpec, bool], list[int]] = {}
    for position, spec in enumerate(specs):
        positions.setdefault((spec, spec.is_draft), []).append(position)
    return [LayerKind(spec, tuple(layers)) for (spec, _), layers in positions.items()]


def is_mla(spec: KVCacheSpec) -> bool:
    """Whether the spec is a cache of latent vectors."""
    return isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)


def kernel_blocks(spec: KVCacheSpec, context: PlanContext) -> KernelBlocks | None:
    """Kernel blocks of the spec's backend; None where the context does not speak of it."""
    if is_mla(spec):
        return context.mla_kernel_block
    if isinstance(spec, AttentionSpec) and spec.is_draft:
        return context.draft_kernel_block
    return None


def real_page_bytes(spec: KVCacheSpec) -> int:
    """Bytes of the page that hold state."""
    if isinstance(spec, AttentionSpec | MambaSpec):
        return spec.real_page_size_bytes
    return spec.page_size_bytes


def is_padded(spec: KVCacheSpec) -> bool:
    """Whether an attention page is wider than its content."""
    return isinstance(spec, AttentionSpec) and spec.page_size_bytes != spec.real_page_size_bytes


def unified_form(spec: KVCacheSpec, page_bytes: int) -> KVCacheSpec | None:
    """The spec at ``page_bytes`` as vLLM's default brings it there; None where it cannot."""
    own = spec.page_size_bytes
    if own == page_bytes:
        return spec
    if own > page_bytes:
        return None
    try:
        if isinstance(spec, MambaSpec):
            form: KVCacheSpec = replace(spec, page_size_padded=page_bytes)
        elif page_bytes % own == 0:
            form = replace(spec, block_size=spec.block_size * (page_bytes // own))
        elif isinstance(spec, AttentionSpec) and not isinstance(spec, MLAAttentionSpec):
            form = replace(spec, page_size_padded=page_bytes)
        else:
            return None
    except K3Error:
        return None
    return form if form.page_size_bytes == page_bytes else None


def form_at_block(spec: KVCacheSpec, block_tokens: int, page_bytes: int) -> KVCacheSpec | None:
    """The spec with blocks of ``block_tokens``, padded to ``page_bytes``; None where it cannot."""
    if not isinstance(spec, AttentionSpec) or not _can_change_block(spec):
        return None
    try:
        form = spec.copy_with_new_block_size(block_tokens)
        if form.page_size_bytes < page_bytes and not isinstance(spec, MLAAttentionSpec):
            form = replace(form, page_size_padded=page_bytes)
    except K3Error:
        return None
    return form if form.page_size_bytes == page_bytes else None


def _can_change_block(spec: KVCacheSpec) -> bool:
    """Whether the block size is free: rings and encoder caches have a meaning of their own in it,
    and a page that was padded on purpose stays as it was asked for."""
    if isinstance(spec, HiddenStateCacheSpec) or type(spec) not in (
        FullAttentionSpec,
        MLAAttentionSpec,
        RSWASpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
        SlidingWindowMLASpec,
        ChunkedLocalAttentionSpec,
    ):
        return False
    if not isinstance(spec, AttentionSpec):
        return False
    return spec.page_size_padded is None or is_mla(spec)


def most_tokens(spec: KVCacheSpec, page_bytes: int) -> int:
    """Most tokens of a block whose page fits ``page_bytes``; 0 where not one state does."""
    if not isinstance(spec, AttentionSpec):
        return 0
    states = page_bytes // (spec.num_heads * spec.state_content_size_bytes)
    return int(states * spec.tokens_per_state)


def largest_blocks(
    spec: KVCacheSpec, page_bytes: int, context: PlanContext, multiples_of: int | None
) -> list[int]:
    """The largest block sizes that the spec's own backend takes at this page, best first.

    Args:
        multiples_of: None: any size (no lcm to keep); else only divisors of this number of tokens.
    Returns:
        At most two sizes: the largest whose page is padded, the largest that fills it exactly.
    """
    most = most_tokens(spec, page_bytes)
    if most < 1 or not _can_change_block(spec):
        return []
    exact = None
    if most * _bytes_per_token(spec) == page_bytes:
        exact = most
    rule = kernel_blocks(spec, context)
    if multiples_of is None:
        sizes = _sizes_below(most, rule)
    else:
        sizes = [size for size in divisors(multiples_of) if size <= most]
        sizes.reverse()
        if exact is not None and multiples_of % exact:
            exact = None
    found = [] if exact is None or not _has_kernel_block(exact, (rule,)) else [exact]
    if not isinstance(spec, MLAAttentionSpec):
        padded = next((size for size in sizes if rule is None or rule.allows(size)), None)
        if padded is not None:
            found.append(padded)
    return sorted(set(found), reverse=True)


def _bytes_per_token(spec: KVCacheSpec) -> int | Fraction:
    if not isinstance(spec, AttentionSpec):
        return 0
    return Fraction(1) * spec.num_heads * spec.state_content_size_bytes / spec.tokens_per_state


def _sizes_below(most: int, rule: KernelBlocks | None) -> list[int]:
    if rule is None:
        return [most]
    if rule.sizes:
        return [size for size in reversed(rule.sizes) if size <= most]
    size = most // rule.multiple_of * rule.multiple_of
    return [size] if size else []


def divisors(value: int) -> list[int]:
    """All divisors in rising order; only ``value`` itself where it is too large to factor."""
    if value > _MAX_DIVISION:
        return [value]
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def group_kernel_problem(specs: Sequence[KVCacheSpec], context: PlanContext) -> str | None:
    """Why these specs cannot share one group of one block size: the kernel blocks.

    Returns:
        One clause, or None where a kernel block size serves all.
    """
    rules = [(spec, rule) for spec in specs if (rule := kernel_blocks(spec, context)) is not None]
    block = specs[0].block_size
    padded = next((spec for spec in specs if is_padded(spec)), None)
    if padded is not None:
        for spec, rule in rules:
            if not rule.allows(block):
                return (
                    f"the {side_of(padded)}'s page is padded from {real_page_bytes(padded)} to "
                    f"{padded.page_size_bytes} B and cannot be split into kernel blocks, and "
                    f"{rule_name(spec)} ({rule}) does not take the whole block of {block} tokens"
                )
        return None
    if not _has_kernel_block(block, [rule for _, rule in rules]):
        named = " and ".join(sorted({f"{rule_name(spec)} ({rule})" for spec, rule in rules}))
        return f"no kernel block divides the block of {block} tokens and suits {named}"
    return None


def side_of(spec: KVCacheSpec) -> str:
    """ "draft" or "target"."""
    return "draft" if spec.is_draft else "target"


def rule_name(spec: KVCacheSpec) -> str:
    """The context's field that speaks of the spec's backend."""
    return "mla_kernel_block" if is_mla(spec) else "draft_kernel_block"


def _has_kernel_block(block: int, rules: Iterable[KernelBlocks | None]) -> bool:
    """Whether some size divides ``block`` and every rule takes it."""
    known = [rule for rule in rules if rule is not None]
    lists = [set(rule.sizes) for rule in known if rule.sizes]
    if lists:
        common = set.intersection(*lists)
        return any(
            block % size == 0 and all(rule.allows(size) for rule in known) for size in common
        )
    return all(rule.allows(block) for rule in known)


def can_share(left: KVCacheSpec, right: KVCacheSpec) -> bool:
    """Whether two specs may sit in one group that keeps a spec per layer.

    Stricter than vLLM's uniform type where that looks at one side only, and where the one manager
    of the group would treat the other layer wrongly (an R-SWA manager drops blocks that a
    full-attention layer still reads).
    """
    if left.block_size != right.block_size or left.dcp_sharded != right.dcp_sharded:
        return False
    if _manager(left) is not _manager(right):
        return False
    if isinstance(left, SlidingWindowSpec) and isinstance(right, SlidingWindowSpec):
        if left.extra_retained_tokens != right.extra_retained_tokens:
            return False
        if left.prefix_cacheable != right.prefix_cacheable:
            return False
    if isinstance(left, MambaSpec) and isinstance(right, MambaSpec):
        if left.mamba_cache_mode != right.mamba_cache_mode:
            return False
        if left.tokens_per_state != right.tokens_per_state:
            return False
    pair = {"left": left, "right": right}
    try:
        return left.is_uniform_with_collection(pair) and right.is_uniform_with_collection(pair)
    except K3Error:
        return False


def _manager(spec: KVCacheSpec) -> type:
    """Specs with one value are served alike by one manager of vLLM."""
    cls = type(spec)
    return FullAttentionSpec if cls is MLAAttentionSpec else cls
