"""Groups to bytes, blocks and tensors: what one block ID takes and what one request needs.

Formulas are vLLM 0.33.0's. A pool block is as wide as the widest group; every group draws its
blocks from the one pool, so a request of some length costs the sum over groups of its blocks, each
a pool block wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from k3backend.common.errors import InputError, K3Error, LayoutError, PlanError
from k3backend.common.kv_groups import kv_tp_replicas
from k3backend.common.kv_layout import BLOCK_COMPACT_NAMES, KVCacheLayout, layout_strides_bytes
from k3backend.common.kv_spec import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
    round_up,
)
from k3backend.common.plan_context import PlanContext


def layer_spec_runs(group: KVCacheGroupSpec) -> Iterator[tuple[KVCacheSpec, list[str]]]:
    """Specs of a group's own layers, each with the layers that have it, in layer order.

    A group that was cut to a pipeline stage lists only the stage's layers, whatever its spec holds.
    """
    spec = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        if group.layer_names:
            yield spec, list(group.layer_names)
        return
    runs: dict[KVCacheSpec, list[str]] = {}
    for name in group.layer_names:
        runs.setdefault(spec.kv_cache_specs[name], []).append(name)
    yield from runs.items()


def block_stride_bytes(spec: KVCacheSpec) -> int:
    """Bytes from one block of a layer to the next where the layer lies by itself."""
    return round_up(spec.page_size_bytes, spec.get_block_stride_alignment())


def pool_block_bytes(groups: Sequence[KVCacheGroupSpec], context: PlanContext) -> int:
    """Bytes that one block ID takes in the pool: the widest group's pages. 0 for no groups.

    Block-outermost layouts hold a group's pages side by side and round the sum to the lcm of all
    stride alignments; other layouts round each page to its own.

    Raises:
        LayoutError: the layout cannot hold one block of the groups (see ``check_placement``).
    """
    check_placement(groups, context)
    runs = [list(layer_spec_runs(group)) for group in groups]
    if not KVCacheLayout[context.layout].is_block_outermost:
        return max(
            (sum(len(names) * block_stride_bytes(spec) for spec, names in run) for run in runs),
            default=0,
        )
    widest = max(
        (sum(len(names) * spec.page_size_bytes for spec, names in run) for run in runs), default=0
    )
    alignment = math.lcm(*(spec.get_block_stride_alignment() for run in runs for spec, _ in run))
    return round_up(widest, alignment)


def check_placement(groups: Sequence[KVCacheGroupSpec], context: PlanContext) -> None:
    """Require that the context's layout can hold one block of each group. For foreign groups too.

    Raises:
        LayoutError: pages of several sizes in a layout that needs one, a padded page where the
            layout cuts pages apart, or a kernel block that holds no state. Names the layer.
    """
    layout = KVCacheLayout[context.layout]
    layers_by_page: dict[int, list[str]] = {}
    for group in groups:
        for spec, names in layer_spec_runs(group):
            layers_by_page.setdefault(spec.page_size_bytes, []).extend(names)
            try:
                spec.get_block_stride_alignment()
            except K3Error as error:
                raise LayoutError(
                    f"layer {names[0]}, in block_stride_alignment: {error}"
                ) from error
            _check_padding(spec, names[0], layout)
    if len(layers_by_page) <= 1:
        return
    if not layout.is_block_compact or (len(groups) > 1 and layout.is_layer_compact):
        rarest = min(layers_by_page, key=lambda page: len(layers_by_page[page]))
        raise LayoutError(
            f"layout {layout.name} needs one page size for all layers; layer "
            f"{layers_by_page[rarest][0]} has a page of {rarest} B, others have "
            f"{', '.join(f'{page} B' for page in sorted(layers_by_page) if page != rarest)}; take "
            "BLHNC or BLNHC, which hold pages of several sizes side by side"
        )


def _check_padding(spec: KVCacheSpec, layer: str, layout: KVCacheLayout) -> None:
    padded = spec.page_size_padded if isinstance(spec, AttentionSpec | MambaSpec) else None
    if layout.is_block_compact:
        if padded is not None:
            _check_heads_in_page(spec, padded, layer, layout)
        return
    # Here heads lie outside the block or the layer, so a page is contiguous only with one head.
    if padded is not None and spec.num_heads != 1:
        raise LayoutError(
            f"layout {layout.name} spreads the {spec.num_heads} heads of layer {layer} over the "
            f"pool and cannot hold its padded page of {padded} B; take {BLOCK_COMPACT_NAMES}"
        )
    if not layout.is_block_outermost and block_stride_bytes(spec) != spec.page_size_bytes:
        raise LayoutError(
            f"layout {layout.name} cannot pad the {spec.page_size_bytes} B page of layer {layer} "
            f"to its block stride of {block_stride_bytes(spec)} B; take {BLOCK_COMPACT_NAMES}"
        )


def _check_heads_in_page(spec: KVCacheSpec, padded: int, layer: str, layout: KVCacheLayout) -> None:
    """A recurrent state's shapes count once in its page but once per head in its view."""
    dense = spec.num_heads * spec.num_states * spec.state_content_size_bytes
    if dense > padded and dense % padded:
        raise LayoutError(
            f"layer {layer}: its num_heads of {spec.num_heads} spreads {dense} B over a page of "
            f"{padded} B, and layout {layout.name} places only whole pages; write the heads into "
            f"shapes with num_heads 1, or pad the page to at least {dense} B"
        )


def request_blocks(
    groups: Sequence[KVCacheGroupSpec], context: PlanContext, tokens: int | None = None
) -> list[int]:
    """Blocks that one request of ``tokens`` (default: max_model_len) needs, per group.

    Raises:
        PlanError: a layer's cache cannot serve the deployment, such as a DCP-sharded window.
    """
    if tokens is not None:
        context = context.with_max_model_len(tokens)
    blocks = []
    for group in groups:
        spec = group.kv_cache_spec
        try:
            if isinstance(spec, UniformTypeKVCacheSpecs):
                blocks.append(spec.max_memory_usage_pages(context))
            else:
                blocks.append(cdiv(spec.max_memory_usage_bytes(context), spec.page_size_bytes))
        except K3Error as error:
            layer = group.layer_names[0] if group.layer_names else "(no layer of this stage)"
            raise PlanError(f"layer {layer}: {error}", layer) from error
    return blocks


def request_bytes(
    groups: Sequence[KVCacheGroupSpec], context: PlanContext, tokens: int | None = None
) -> int:
    """Pool bytes that one request of ``tokens`` (default: max_model_len) takes.

    Raises:
        PlanError, LayoutError: as ``request_blocks`` and ``pool_block_bytes``.
    """
    return pool_block_bytes(groups, context) * sum(request_blocks(groups, context, tokens))


def num_blocks(available_bytes: int, block_bytes: int) -> int:
    """Blocks of ``block_bytes`` in ``available_bytes``, the null block among them.

    Raises:
        InputError: negative bytes, or a block without bytes.
    """
    if available_bytes < 0:
        raise InputError(
            f"available_bytes is {available_bytes}, expected >= 0; give the bytes of the cache"
        )
    if block_bytes <= 0:
        raise InputError(
            f"block_bytes is {block_bytes}, expected > 0; plan at least one layer that has a cache"
        )
    return available_bytes // block_bytes


def build_kv_cache_config(
    groups: Sequence[KVCacheGroupSpec], context: PlanContext, blocks: int
) -> KVCacheConfig:
    """Place ``blocks`` blocks of every group in one buffer. Groups alias from byte 0.

    Args:
        groups: the groups of one worker; with pipeline stages cut to its layers.
        blocks: block IDs of the pool, the null block among them.

    Returns:
        One KVCacheTensor per group and distinct spec. Without layers, the null block alone.

    Raises:
        InputError: no block.
        LayoutError: the layout cannot hold the groups.
    """
    if type(blocks) is not int or blocks < 1:
        raise InputError(f"blocks is {blocks!r}, expected an integer >= 1; give the pool's blocks")
    layout = KVCacheLayout[context.layout]
    block_bytes = pool_block_bytes(groups, context)
    if block_bytes == 0:
        return KVCacheConfig(1, [], list(groups), kv_cache_layout=context.layout)
    tensors = []
    for group in groups:
        offset = 0
        for spec, names in layer_spec_runs(group):
            page = spec.page_size_bytes
            # A dense page needs no fixed stride: layouts that cut pages apart have another one.
            padded = block_stride_bytes(spec)
            fixed = padded if padded != page else None
            if layout.is_block_outermost:
                fixed = block_bytes
            strides = layout_strides_bytes(
                spec, blocks, len(names), layout, fixed_strides=(None, fixed, None, None, None)
            )
            tensors.append(
                KVCacheTensor(
                    size=block_bytes * blocks,
                    layers=names,
                    layer_stride=strides[0],
                    block_stride=strides[1],
                    offset=offset,
                )
            )
            # Block-outermost: side by side within a block. Otherwise each layer has its region.
            offset += len(names) * (page if layout.is_block_outermost else strides[0])
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=list(groups),
        kv_cache_layout=context.layout,
        kv_tp_replicas=kv_tp_replicas(groups, context),
    )
