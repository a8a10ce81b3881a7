"""Ways to bring layers together: a block size for every kind, then buckets that may share groups.

First every kind of layer takes a block size at the common page (``block_forms``). Then layers that
may share a group form buckets: equal specs, specs that merge, and specs that need the same number
of token slots and stand side by side with a spec each. How many groups a bucket is dealt into is
the next step (``group_candidates``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from k3backend.common.block_forms import (
    MAX_LCM_FACTOR,
    LayerKind,
    can_share,
    form_at_block,
    group_kernel_problem,
    is_mla,
    is_padded,
    largest_blocks,
    most_tokens,
    unified_form,
)
from k3backend.common.errors import K3Error, LayoutError, PlanError
from k3backend.common.kv_config import block_stride_bytes, check_placement
from k3backend.common.kv_groups import largest_divisor
from k3backend.common.kv_layout import KVCacheLayout
from k3backend.common.kv_merge import mergeable
from k3backend.common.kv_spec import HiddenStateCacheSpec, KVCacheGroupSpec, KVCacheSpec, cdiv
from k3backend.common.plan_context import PlanContext

MAX_ASSIGNMENTS = 128
"""Block sizes are combined freely up to this many combinations, else one kind departs at a time."""


@dataclass(frozen=True, slots=True)
class SearchFrame:
    """What all groupings of one search have in common.

    Attributes:
        lcm_tokens: lcm of the groups' block sizes; None where prefix caching is off.
        span_tokens: the same with blocks counted over all DCP ranks.
        at_context: the deployment with the planning context as its longest request.
        names: every layer's name, in model order.
        stages: pipeline stage of every layer, in model order; empty for one stage.
    """

    lcm_tokens: int | None
    span_tokens: int | None
    at_context: PlanContext
    names: tuple[str, ...]
    stages: tuple[int, ...] = ()

    def problem(self, specs: Sequence[KVCacheSpec]) -> str | None:
        """Why these specs' block sizes are too coarse together, or None."""
        if self.lcm_tokens is None or self.span_tokens is None:
            return None
        lcm, span = block_lcm(specs), block_lcm(specs, self.at_context.dcp_size)
        if lcm <= self.lcm_tokens and span <= self.span_tokens:
            return None
        now, allowed = (
            (span, self.span_tokens) if lcm <= self.lcm_tokens else (lcm, self.lcm_tokens)
        )
        return (
            f"prefix hits would end at multiples of {now} tokens instead of {allowed}; prefix "
            "caching off would allow it"
        )


def block_lcm(specs: Sequence[KVCacheSpec], dcp_size: int = 1) -> int:
    """The lcm of the block sizes; with ``dcp_size``, of the tokens a block spans over all ranks."""
    return math.lcm(*(spec.block_size * (dcp_size if spec.dcp_sharded else 1) for spec in specs))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Layers that may share groups.

    Attributes:
        specs: the different specs, all at one page size and block size.
        layers: positions in model order.
        spec_of_layer: index into ``specs`` per entry of ``layers``.
        merges: whether the specs merge into one; else each layer keeps its own.
        blocks: blocks of one group for one request at the planning context.
        stride_bytes: bytes per layer in a pool block, where all layers have the same; else 0.
        stages: pipeline stage per entry of ``layers``; empty for one stage.
    """

    specs: tuple[KVCacheSpec, ...]
    layers: tuple[int, ...]
    spec_of_layer: tuple[int, ...]
    merges: bool
    blocks: int
    stride_bytes: int
    stages: tuple[int, ...] = ()

    def widest_bytes(self, groups: int, strides: Sequence[int]) -> int:
        """Bytes of the widest of ``groups`` groups, on the pipeline stage where it is widest."""
        if self.stages:
            return self._widest_on_a_stage(groups, strides)
        if self.stride_bytes:
            return cdiv(len(self.layers), groups) * self.stride_bytes
        own = [strides[index] for index in self.spec_of_layer]
        return max(sum(own[i::groups]) for i in range(groups))

    def _widest_on_a_stage(self, groups: int, strides: Sequence[int]) -> int:
        widths: dict[tuple[int, int], int] = {}
        for position, (index, stage) in enumerate(
            zip(self.spec_of_layer, self.stages, strict=True)
        ):
            key = (position % groups, stage)
            widths[key] = widths.get(key, 0) + (self.stride_bytes or strides[index])
        return max(widths.values())


@dataclass(frozen=True, slots=True)
class Family:
    """One way to form buckets; its members differ in width only.

    Attributes:
        name: what it does with the draft.
        buckets: in order of their first layer.
        problem: why no member may be used, or None.
    """

    name: str
    buckets: tuple[Bucket, ...]
    problem: str | None


def find_families(
    kinds: Sequence[LayerKind], page_bytes: int, context: PlanContext, frame: SearchFrame
) -> Iterator[Family]:
    """Every way to form buckets at one page size.

    Kinds that cannot stand at this page give no family.
    """
    shared = [kind for kind in kinds if not isinstance(kind.spec, HiddenStateCacheSpec)]
    hidden = [kind for kind in kinds if isinstance(kind.spec, HiddenStateCacheSpec)]
    options = [block_options(kind, shared, page_bytes, context, frame) for kind in shared]
    if not options or not all(options):
        return
    seen: set[tuple[Bucket, ...]] = set()
    for forms in _assignments(options):
        states = hidden_state_forms(hidden, forms, page_bytes)
        if states is None:
            return
        placed, taken = [*shared, *hidden], [*forms, *states]
        for family in _families_of(placed, taken, context, frame):
            if family.buckets not in seen:
                seen.add(family.buckets)
                yield family


def block_options(
    kind: LayerKind,
    kinds: Sequence[LayerKind],
    page_bytes: int,
    context: PlanContext,
    frame: SearchFrame,
) -> list[KVCacheSpec]:
    """Specs that the kind could take at this page: the default's, block sizes of other kinds that
    it could share a group with, the largest that keeps the lcm, and the largest of all."""
    spec = kind.spec
    forms: dict[int, KVCacheSpec] = {}

    def add(form: KVCacheSpec | None) -> None:
        if form is not None:
            forms.setdefault(form.block_size, form)

    default = unified_form(spec, page_bytes)
    add(default)
    for other in kinds:
        if other is not kind:
            partner = unified_form(other.spec, page_bytes)
            if partner is not None and _may_take(kind, partner.block_size):
                form = form_at_block(spec, partner.block_size, page_bytes)
                if form is not None and can_share(form, partner):
                    add(form)
    if default is not None and not is_padded(default):
        # It fills its page; no other block size takes fewer bytes.
        return list(forms.values())
    for multiple in _lcm_choices(kind, kinds, page_bytes, frame):
        for block in largest_blocks(spec, page_bytes, context, multiple):
            if _may_take(kind, block):
                add(form_at_block(spec, block, page_bytes))
                break
    return list(forms.values())


def hidden_state_forms(
    hidden: Sequence[LayerKind], forms: Sequence[KVCacheSpec], page_bytes: int
) -> list[KVCacheSpec] | None:
    """Hidden-state specs padded to the common page, in blocks that divide all others; None where
    one token's hidden state does not fit the page."""
    block = math.gcd(*(form.block_size for form in forms))
    states = []
    for kind in hidden:
        tokens = most_tokens(kind.spec, page_bytes)
        if tokens < 1:
            return None
        size = largest_divisor(block, tokens)
        states.append(replace(kind.spec, block_size=size, page_size_padded=page_bytes))  # type: ignore[call-arg]
    return states


def _may_take(kind: LayerKind, block: int) -> bool:
    """A draft's backend is described by the context; the target's is known to take its own block
    and so multiples of it."""
    return kind.is_draft or is_mla(kind.spec) or block % kind.spec.block_size == 0


def _lcm_choices(
    kind: LayerKind, kinds: Sequence[LayerKind], page_bytes: int, frame: SearchFrame
) -> list[int | None]:
    """Token counts whose divisors are tried as block size; None tries any size."""
    if frame.lcm_tokens is None:
        return [None]
    others = [
        form
        for other in kinds
        if other is not kind and (form := unified_form(other.spec, page_bytes)) is not None
    ]
    base = block_lcm(others) if others else frame.lcm_tokens
    factor = min(frame.lcm_tokens // base, MAX_LCM_FACTOR)
    choices: list[int | None] = [base * factor, base] if factor > 1 else [base]
    return [*choices, None]


def _assignments(options: Sequence[list[KVCacheSpec]]) -> Iterator[tuple[KVCacheSpec, ...]]:
    if math.prod(len(forms) for forms in options) <= MAX_ASSIGNMENTS:
        yield from itertools.product(*options)
        return
    first = tuple(forms[0] for forms in options)
    yield first
    yield tuple(forms[-1] for forms in options)
    for index, forms in enumerate(options):
        for form in forms[1:]:
            yield (*first[:index], form, *first[index + 1 :])


def _families_of(
    kinds: Sequence[LayerKind],
    forms: Sequence[KVCacheSpec],
    context: PlanContext,
    frame: SearchFrame,
) -> Iterator[Family]:
    """Buckets as large as possible; as large as kernel blocks allow; and with the draft apart."""
    lcm_problem = frame.problem(forms)
    seen: list[tuple[Bucket, ...]] = []
    for apart, fitting in ((False, False), (False, True), (True, True)):
        buckets = form_buckets(
            kinds, forms, frame, apart=apart, fitting=context if fitting else None
        )
        if buckets not in seen:
            seen.append(buckets)
            problem = lcm_problem or group_problem(buckets, context, frame.names)
            yield Family(family_name(buckets), buckets, problem)


def form_buckets(
    kinds: Sequence[LayerKind],
    forms: Sequence[KVCacheSpec],
    frame: SearchFrame,
    apart: bool,
    strict: bool = False,
    fitting: PlanContext | None = None,
) -> tuple[Bucket, ...]:
    """Deal the kinds into buckets, each kind into the first that takes it.

    Args:
        forms: spec per kind at the common page.
        apart: a draft shares no bucket with the target unless their specs merge.
        strict: not even then.
        fitting: where given, no bucket whose kernel blocks its backends could not agree on.
    """
    members: list[list[int]] = []
    merges: list[bool] = []
    alone: list[Bucket] = []
    for index, form in enumerate(forms):
        if isinstance(form, HiddenStateCacheSpec):
            for layer in kinds[index].layers:
                alone.append(_bucket([LayerKind(form, (layer,))], [form], True, frame))
            continue
        for number, bucket in enumerate(members):
            held = [forms[other] for other in bucket]
            crosses = any(other.is_draft != form.is_draft for other in held)
            if strict and crosses:
                continue
            if fitting and group_kernel_problem([*held, form], fitting) is not None:
                continue
            if merges[number] and mergeable([*held, form]):
                bucket.append(index)
                break
            if not (apart and crosses) and all(can_share(other, form) for other in held):
                bucket.append(index)
                merges[number] = False
                break
        else:
            members.append([index])
            merges.append(True)
    buckets = [
        _bucket([kinds[i] for i in bucket], [forms[i] for i in bucket], merged, frame)
        for bucket, merged in zip(members, merges, strict=True)
    ]
    return (*buckets, *alone)


def _bucket(
    kinds: Sequence[LayerKind],
    forms: Sequence[KVCacheSpec],
    merges: bool,
    frame: SearchFrame,
) -> Bucket:
    placed = sorted((layer, index) for index, kind in enumerate(kinds) for layer in kind.layers)
    strides = {stride_bytes(form, frame.at_context) for form in forms}
    return Bucket(
        specs=tuple(forms),
        layers=tuple(layer for layer, _ in placed),
        spec_of_layer=tuple(index for _, index in placed),
        merges=merges,
        blocks=max(request_pages(form, frame.at_context) for form in forms),
        stride_bytes=strides.pop() if len(strides) == 1 else 0,
        stages=tuple(frame.stages[layer] for layer, _ in placed) if frame.stages else (),
    )


def request_pages(spec: KVCacheSpec, at_context: PlanContext) -> int:
    """Blocks of one request of ``at_context.max_model_len`` tokens. Raises PlanError."""
    try:
        return cdiv(spec.max_memory_usage_bytes(at_context), spec.page_size_bytes)
    except K3Error as error:
        raise PlanError(str(error)) from error


def stride_bytes(spec: KVCacheSpec, context: PlanContext) -> int:
    """Bytes that a layer of this spec takes of a pool block."""
    if KVCacheLayout[context.layout].is_block_outermost:
        return spec.page_size_bytes
    return block_stride_bytes(spec)


def group_problem(
    buckets: Sequence[Bucket], context: PlanContext, names: Sequence[str]
) -> str | None:
    """The first reason why these buckets cannot be used: kernel blocks, then the layout.

    Args:
        names: every layer's name, in model order.
    """
    for bucket in buckets:
        mixed = len(bucket.specs) > 1
        if mixed or any(spec.is_draft for spec in bucket.specs):
            found = group_kernel_problem(bucket.specs, context)
            if found is not None:
                return found
    return layout_problem(buckets, context, names)


def layout_problem(
    buckets: Sequence[Bucket], context: PlanContext, names: Sequence[str]
) -> str | None:
    """Why the context's layout cannot hold these buckets side by side, or None."""
    for bucket in buckets:
        for index, spec in enumerate(bucket.specs):
            layer = names[bucket.layers[bucket.spec_of_layer.index(index)]]
            try:
                check_placement([KVCacheGroupSpec([layer], spec)], context)
            except LayoutError as error:
                return str(error)
    return None


def family_name(buckets: Sequence[Bucket]) -> str:
    """What a family does with the draft, in one word, with the draft's block where it is apart.

    "co-located": a spec per layer in some group; "merged": a draft in a target's group; "dealt":
    no draft, or none that meets the target.
    """
    shared = apart = merged = False
    blocks: set[int] = set()
    for bucket in buckets:
        drafts = [spec for spec in bucket.specs if spec.is_draft]
        targets = [spec for spec in bucket.specs if not spec.is_draft]
        if not bucket.merges:
            shared = True
        elif drafts and targets:
            merged = True
        elif drafts:
            apart = True
            blocks.update(spec.block_size for spec in drafts)
    if apart:
        word = "mixed" if shared or merged else "apart"
        return f"{word}-b{'-'.join(map(str, sorted(blocks)))}"
    if shared:
        return "co-located"
    return "merged" if merged else "dealt"
