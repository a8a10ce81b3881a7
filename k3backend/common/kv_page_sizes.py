"""One page size for all layers, or full allocation where there is none.

Groups whose layers lie side by side in one pool need pages of one size. Pages grow by whole factors
of the block size, or by padding where the reader of the cache can step over it. The rules are those
of vLLM 0.33.0's default planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from k3backend.common.errors import K3Error, KvMergeError, PlanError
from k3backend.common.kv_distinct_specs import DistinctSpecs
from k3backend.common.kv_merge import vllm_uniform
from k3backend.common.kv_spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    replace_as,
)


class PageSizeError(PlanError):
    """Pages of different size that no block size or padding can make equal.

    Attributes:
        unfit: position (in the DistinctSpecs) of the spec whose page can neither grow nor be
            padded.
    """

    def __init__(self, message: str, layer_name: str, unfit: int) -> None:
        self.unfit = unfit
        super().__init__(message, layer_name)


def unify_page_sizes(distinct: DistinctSpecs) -> DistinctSpecs:
    """Bring all pages to the largest page size.

    Mamba pages are padded (their size does not follow the block size). Other pages that divide the
    largest one get a larger block. The rest is padded, except MLA pages, whose readers step through
    the cache in whole token rows.

    Raises:
        PageSizeError: an MLA page does not divide the largest page.
        PlanError: a page that is already padded would have to grow by a factor.
    """
    pages = [spec.page_size_bytes for spec in distinct.specs]
    largest = max(pages, default=0)
    if all(page == largest for page in pages):
        return distinct
    unified = [
        spec if page == largest else _grown(distinct, index, page, largest)
        for index, (spec, page) in enumerate(zip(distinct.specs, pages, strict=True))
    ]
    return distinct.with_specs(unified)


def _grown(distinct: DistinctSpecs, index: int, page: int, largest: int) -> KVCacheSpec:
    spec = distinct.specs[index]
    try:
        if isinstance(spec, MambaSpec):
            grown: KVCacheSpec = replace(spec, page_size_padded=largest)
        elif largest % page == 0:
            grown = replace(spec, block_size=spec.block_size * (largest // page))
        elif isinstance(spec, AttentionSpec) and not isinstance(spec, MLAAttentionSpec):
            grown = replace(spec, page_size_padded=largest)
        else:
            layer = distinct.first_layer(index)
            raise PageSizeError(
                f"layer {layer}: its page of {page} B does not divide the largest page of "
                f"{largest} B, and only pages outside the MLA family can be padded to any size",
                layer,
                index,
            )
        grown_page = grown.page_size_bytes
    except PlanError:
        raise
    except K3Error as error:
        layer = distinct.first_layer(index)
        raise PlanError(
            f"layer {layer}: its page of {page} B cannot grow to the largest page of "
            f"{largest} B: {error}",
            layer,
        ) from error
    if grown_page != largest:
        layer = distinct.first_layer(index)
        raise PlanError(
            f"layer {layer}: its page of {page} B cannot grow to the largest page of {largest} B, "
            f"a block of {grown.block_size} tokens gives {grown_page} B because the page is padded "
            f"already; give the layer an unpadded page or a block size whose page is {largest} B",
            layer,
        )
    return grown


def name_misfit(
    error: PageSizeError, distinct: DistinctSpecs, specs: Mapping[str, KVCacheSpec]
) -> PlanError:
    """The error of ``unify_page_sizes`` in terms of the layer that really does not fit.

    Two kinds of layers are in conflict: those with the largest page and those whose page cannot
    become as large. A draft yields to the target; otherwise the kind with fewer layers is named.
    """
    pages = [spec.page_size_bytes for spec in distinct.specs]
    largest = max(pages)
    names = distinct.layers()
    wide = [name for index, page in enumerate(pages) if page == largest for name in names[index]]
    unfit = names[error.unfit]
    wide_is_draft = all(specs[name].is_draft for name in wide)
    unfit_is_draft = all(specs[name].is_draft for name in unfit)
    if wide_is_draft != unfit_is_draft:
        blame_wide = wide_is_draft
    else:
        blame_wide = len(wide) < len(unfit)
    page = pages[error.unfit]
    if blame_wide:
        spec = specs[wide[0]]
        return PlanError(
            f"layer {wide[0]} ({type(spec).__name__}, block_size {spec.block_size}) does not fit: "
            f"its page of {largest} B is no multiple of the {page} B page of {unfit[0]}, which "
            f"cannot be padded; give {wide[0]} a block size whose page is at most {page} B, or "
            f"plan with policy k3",
            wide[0],
        )
    spec = specs[unfit[0]]
    return PlanError(
        f"layer {unfit[0]} ({type(spec).__name__}, block_size {spec.block_size}) does not fit: its "
        f"page of {page} B does not divide the {largest} B page of {wide[0]} and cannot be padded; "
        f"give {unfit[0]} a block size whose page divides {largest} B, or plan with policy k3",
        unfit[0],
    )


def all_merge(distinct: DistinctSpecs) -> bool:
    """Whether all layers merge into one spec, as vLLM's probe finds it.

    Raises:
        PlanError: where vLLM's probe fails: full attention with two windows or two chunk sizes.
    """
    try:
        return vllm_uniform(distinct.specs)
    except KvMergeError as error:
        layer = _second_of_conflict(distinct, error)
        raise PlanError(
            f"layer {layer}: {error.field} is {error.right!r} where another full-attention layer "
            f"has {error.left!r}, and vLLM's planner stops there; use one value, or allocate the "
            "layer as a sliding window",
            layer,
        ) from error


def _second_of_conflict(distinct: DistinctSpecs, error: KvMergeError) -> str:
    index = next(
        at
        for at, spec in enumerate(distinct.specs)
        if getattr(spec, error.field, None) == error.right
    )
    return distinct.first_layer(index)


def is_uniform_type(distinct: DistinctSpecs) -> bool:
    """Whether all layers may sit in one UniformType group. False for no layers.

    Raises:
        PlanError: the first layer's class takes part in no group.
    """
    if not distinct.specs:
        return False
    return uniform_with_first(distinct, range(len(distinct.specs)))


def uniform_with_first(distinct: DistinctSpecs, indices: Sequence[int]) -> bool:
    """Whether the specs at ``indices`` are of the uniform type of the first of them.

    Raises:
        PlanError: the first spec's class takes part in no group.
    """
    by_position = {str(index): distinct.specs[index] for index in indices}
    try:
        return UniformTypeKVCacheSpecs.is_uniform_type(by_position)
    except K3Error as error:
        layer = distinct.first_layer(indices[0])
        raise PlanError(f"layer {layer}: {error}", layer) from error


def promote_local_specs(distinct: DistinctSpecs) -> DistinctSpecs:
    """Allocate sliding-window and chunked-local layers in full where full attention is present.

    Layers still compute what they computed; only their blocks are kept for the whole request. The
    promoted layers take the block size of the full-attention layers where these agree on one.

    Raises:
        PlanError: the promoted layers still do not make one group.
    """
    if all_merge(distinct) or is_uniform_type(distinct):
        return distinct
    specs = distinct.specs
    full_blocks = {spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec)}
    if full_blocks:
        block_size = next(iter(full_blocks)) if len(full_blocks) == 1 else None
        distinct = distinct.with_specs(
            [_promoted(distinct, index, block_size) for index in range(len(specs))]
        )
    if not (all_merge(distinct) or is_uniform_type(distinct)):
        layer = _odd_layer(distinct)
        raise PlanError(
            f"layer {layer} cannot share one group with the other layers even when local attention "
            "is allocated in full; leave the hybrid KV cache manager enabled for this model",
            layer,
        )
    return distinct


def _promoted(distinct: DistinctSpecs, index: int, block_size: int | None) -> KVCacheSpec:
    spec = distinct.specs[index]
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    layer = distinct.first_layer(index)
    if isinstance(spec, SlidingWindowMLASpec):
        # vLLM 0.33.0 fails here with a TypeError: the full spec has no bounded_replay.
        raise PlanError(
            f"layer {layer}: a sliding-window MLA cache cannot be allocated in full; leave the "
            "hybrid KV cache manager enabled for this model",
            layer,
        )
    try:
        return _allocated_in_full(spec, block_size or spec.block_size)
    except K3Error as error:
        raise PlanError(f"layer {layer}: cannot be allocated in full: {error}", layer) from error


def _allocated_in_full(
    spec: SlidingWindowSpec | ChunkedLocalAttentionSpec, block_size: int
) -> FullAttentionSpec:
    """The spec as full attention that computes locally; padding follows the block size."""
    padded = spec.page_size_padded
    if padded is not None:
        padded = max(padded, spec.real_page_size_bytes * block_size // spec.block_size)
    return replace_as(
        spec,
        FullAttentionSpec,
        # Blocks of all tokens are kept, those below the window too.
        drop=("extra_retained_tokens",),
        block_size=block_size,
        page_size_padded=padded,
    )


def _odd_layer(distinct: DistinctSpecs) -> str:
    """First layer of the spec that the fewest layers have."""
    return min(distinct.layers(), key=len)[0]


def full_allocation_fallback(distinct: DistinctSpecs) -> DistinctSpecs | None:
    """MLA beside a plain sliding window whose pages do not unify: the window allocated in full.

    Returns:
        The promoted specs, which make one UniformType group; None where this does not help.
    """
    specs = distinct.specs
    if any(
        isinstance(spec, HiddenStateCacheSpec | SlidingWindowMLASpec | ChunkedLocalAttentionSpec)
        for spec in specs
    ):
        return None
    if not any(isinstance(spec, MLAAttentionSpec) for spec in specs):
        return None
    if not any(isinstance(spec, SlidingWindowSpec) for spec in specs):
        return None
    try:
        promoted = promote_local_specs(distinct)
    except PlanError:
        return None
    return promoted if is_uniform_type(promoted) else None
