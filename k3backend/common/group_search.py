"""Where groupings are looked for: the page sizes, the families at each, the widths of each family.

Two page sizes are tried: the one that vLLM's default brings all layers to, and the one of the
target alone, at which a draft with a larger page has to shrink its block. Only groupings that could
be chosen, or whose refusal a reader wants to see, come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from k3backend.common.block_forms import (
    LayerKind,
    divisors,
    form_at_block,
    group_kernel_problem,
    is_mla,
    kernel_blocks,
    layer_kinds,
    most_tokens,
    side_of,
    unified_form,
)
from k3backend.common.errors import PlanError
from k3backend.common.group_candidates import (
    Candidate,
    best_of_each_name,
    deal_widths,
    measure,
)
from k3backend.common.group_families import (
    Family,
    SearchFrame,
    block_lcm,
    find_families,
    form_buckets,
    group_problem,
)
from k3backend.common.kv_groups import WIDEST_WITHIN
from k3backend.common.kv_merge import mergeable
from k3backend.common.kv_spec import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    cdiv,
    iter_layer_specs,
)
from k3backend.common.plan_context import PlanContext

ISOLATE_NAME = "isolate"
MLA_DRAFT_STAYS = "an MLA draft whose specs merge with the target's stays in the target's group"


def find_candidates(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    default: Candidate | None,
    cost: Callable[[Candidate], float],
    stages: tuple[int, ...] = (),
) -> list[Candidate]:
    """Every grouping worth a look besides vLLM's default.

    Args:
        specs: spec per layer, labels and shards repaired.
        default: vLLM's grouping; None where it cannot plan.
        cost: what the policy minimises.
        stages: pipeline stage of every layer, in order; empty for one stage.
    Returns:
        Candidates with their problems: of each usable family the useful widths, of the others the
        one that would have been cheapest.
    """
    kinds = layer_kinds(specs.values())
    frame = _frame(kinds, context, default, tuple(specs), stages)
    found: list[Candidate] = []
    refused: list[Candidate] = []
    for page_bytes in _page_sizes(kinds):
        for family in find_families(kinds, page_bytes, context, frame):
            dealt = deal_widths(family, context)
            if family.problem is None:
                found += dealt
            else:
                refused.append(min(dealt, key=lambda c: (cost(c), c.num_groups)))
    found = [*best_of_each_name(found), *best_of_each_name(refused)]
    if default is not None:
        found = [candidate for candidate in found if not _is_default(candidate, default)]
    plain = isolated_candidate(specs, context, stages, quiet=True)
    if plain is None:
        return found
    problem = plain.problem or frame.problem(plain.specs())
    if problem is None and not _has_foreign_draft(kinds):
        problem = MLA_DRAFT_STAYS
    plain = replace(plain, problem=problem)
    return [*found, plain]


def _is_default(candidate: Candidate, default: Candidate) -> bool:
    """Whether it costs exactly what vLLM's grouping costs, in as many groups."""
    return default.problem is None and (
        (candidate.num_groups, candidate.block_bytes, candidate.blocks)
        == (default.num_groups, default.block_bytes, default.blocks)
    )


def _page_sizes(kinds: Sequence[LayerKind]) -> list[int]:
    """Page sizes to try, in bytes: the largest of all layers, and the target's largest."""
    shared = [kind for kind in kinds if not isinstance(kind.spec, HiddenStateCacheSpec)]
    every = [kind.spec.page_size_bytes for kind in shared]
    target = [kind.spec.page_size_bytes for kind in shared if not kind.is_draft]
    return list(dict.fromkeys(max(pages) for pages in (every, target) if pages))


def _frame(
    kinds: Sequence[LayerKind],
    context: PlanContext,
    default: Candidate | None,
    names: tuple[str, ...],
    stages: tuple[int, ...],
) -> SearchFrame:
    """The lcm to keep: the default grouping's; the target's own where there is no default."""
    at_context = context.with_max_model_len(context.planning_tokens)
    if not context.prefix_caching:
        return SearchFrame(None, None, at_context, names, stages)
    if default is not None:
        held = [spec for group in default.given for spec in iter_layer_specs(group.kv_cache_spec)]
    else:
        sides = [kind for kind in kinds if not kind.is_draft] or list(kinds)
        page_bytes = max(kind.spec.page_size_bytes for kind in sides)
        held = [unified_form(kind.spec, page_bytes) or kind.spec for kind in sides]
    return SearchFrame(
        block_lcm(held), block_lcm(held, context.dcp_size), at_context, names, stages
    )


def _has_foreign_draft(kinds: Sequence[LayerKind]) -> bool:
    """Whether some draft layer has a cache that merges with no target layer's."""
    targets = [kind.spec for kind in kinds if not kind.is_draft]
    return any(
        kind.is_draft
        and not (
            isinstance(kind.spec, MLAAttentionSpec)
            and any(mergeable([kind.spec, spec]) for spec in targets)
        )
        for kind in kinds
    )


def isolated_candidate(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    stages: tuple[int, ...] = (),
    quiet: bool = False,
) -> Candidate | None:
    """The plain rule: target as by default, draft apart in blocks that divide the target's.

    The draft takes the largest divisor of the target's block whose page fits the target's page and
    that its backend takes; the groups are as wide as the target's default groups.

    Args:
        stages: pipeline stage of every layer, in order; empty for one stage.
        quiet: give None instead of raising where the draft does not fit.
    Returns:
        None where there is no draft, or no target.
    Raises:
        PlanError: a layer does not fit; for the draft it carries the page in bytes and the spec.
    """
    kinds = layer_kinds(specs.values())
    targets = [kind for kind in kinds if not kind.is_draft]
    if not targets or len(targets) == len(kinds):
        return None
    names = list(specs)
    page_bytes = max(kind.spec.page_size_bytes for kind in targets)
    forms: dict[int, KVCacheSpec] = {}
    for index, kind in enumerate(kinds):
        if not kind.is_draft:
            form = unified_form(kind.spec, page_bytes)
            if form is None:
                if quiet:
                    return None
                raise PlanError(
                    f"layer {names[kind.layers[0]]}: its page of {kind.spec.page_size_bytes} B "
                    f"cannot grow to the target's {page_bytes} B; plan with policy k3",
                    names[kind.layers[0]],
                )
            forms[index] = form
    target_block = block_lcm(list(forms.values()))
    for index, kind in enumerate(kinds):
        if kind.is_draft:
            form = plain_form(kind, page_bytes, target_block, context)
            if form is None:
                if quiet:
                    return None
                raise _unfit(kind, names[kind.layers[0]], page_bytes, target_block, context)
            forms[index] = form
    at_context = context.with_max_model_len(context.planning_tokens)
    ordered = [forms[index] for index in range(len(kinds))]
    frame = SearchFrame(None, None, at_context, tuple(names), stages)
    buckets = form_buckets(kinds, ordered, frame, apart=True, strict=True, fitting=context)
    family = Family(ISOLATE_NAME, buckets, group_problem(buckets, context, names))
    counts = [len(bucket.layers) for bucket in buckets if not bucket.specs[0].is_draft]
    width = min(counts)
    if max(counts) < width * WIDEST_WITHIN:
        width = max(counts)
    return measure(family, tuple(cdiv(len(bucket.layers), width) for bucket in buckets), context)


def plain_form(
    kind: LayerKind, page_bytes: int, target_block: int, context: PlanContext
) -> KVCacheSpec | None:
    """The draft's spec at the largest divisor of the target's block that fits; None if none."""
    spec = kind.spec
    if spec.page_size_bytes == page_bytes and target_block % spec.block_size == 0:
        return spec
    for block in reversed(divisors(target_block)):
        if block <= most_tokens(spec, page_bytes):
            form = form_at_block(spec, block, page_bytes)
            if form is not None and group_kernel_problem([form], context) is None:
                return form
    return None


def _unfit(
    kind: LayerKind, layer: str, page_bytes: int, target_block: int, context: PlanContext
) -> PlanError:
    spec = kind.spec
    rule = kernel_blocks(spec, context)
    kernel = "" if rule is None else f" and its backend ({rule}) takes"
    padded = " unpadded" if is_mla(spec) and isinstance(spec, FullAttentionSpec) else ""
    return PlanError(
        f"{side_of(spec)} layer {layer}: no divisor of the target's block of {target_block} tokens "
        f"has a page that fits{padded} into the target's {page_bytes} B{kernel}; its own page is "
        f"{spec.page_size_bytes} B; give it fewer KV heads per rank or a smaller dtype: {spec}",
        layer,
    )
