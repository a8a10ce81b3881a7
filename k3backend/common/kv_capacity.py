"""How much fits: pipeline stages, blocks without the null block, the longest request.

The engine keeps block 0 for itself (the null block), so of ``num_blocks`` blocks a request can use
one less. All stages of a pipeline take the block count of the smallest, since they share one block
table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from k3backend.common.errors import PlanError
from k3backend.common.kv_config import num_blocks, pool_block_bytes, request_blocks
from k3backend.common.kv_spec import KVCacheGroupSpec, UniformTypeKVCacheSpecs
from k3backend.common.plan_context import PlanContext


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage.

    Attributes:
        stage: number, from 0.
        groups: the model's groups, cut to the stage's layers; a group may be empty here.
        layers: layers with a cache on this stage.
        block_bytes: pool block on this stage; 0 where the stage has no layer with a cache.
        num_blocks: blocks in the available bytes, or None where no bytes are given or needed.
    """

    stage: int
    groups: tuple[KVCacheGroupSpec, ...]
    layers: int
    block_bytes: int
    num_blocks: int | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the available bytes hold.

    Attributes:
        available_bytes: bytes for the cache, per rank.
        num_blocks: blocks of the smallest stage, the null block among them.
        usable_blocks: without the null block.
        max_concurrency: requests of max_model_len at a time, as a ratio of blocks; None where a
            request needs no block.
        max_model_len_that_fits: longest request, at most max_model_len; 0 where none fits.
    """

    available_bytes: int
    num_blocks: int
    usable_blocks: int
    max_concurrency: float | None
    max_model_len_that_fits: int


def stage_groups(
    groups: Sequence[KVCacheGroupSpec], layers: Collection[str]
) -> tuple[KVCacheGroupSpec, ...]:
    """The groups cut to the layers of one stage; a group keeps its number even when empty."""
    return tuple(_cut(group, layers) for group in groups)


def _cut(group: KVCacheGroupSpec, layers: Collection[str]) -> KVCacheGroupSpec:
    names = [name for name in group.layer_names if name in layers]
    if len(names) == len(group.layer_names):
        return group
    spec = group.kv_cache_spec
    if names and isinstance(spec, UniformTypeKVCacheSpecs):
        spec = UniformTypeKVCacheSpecs(
            block_size=spec.block_size,
            kv_cache_specs={name: spec.kv_cache_specs[name] for name in names},
        )
    return replace(group, layer_names=names, kv_cache_spec=spec)


def plan_stages(
    groups: Sequence[KVCacheGroupSpec],
    context: PlanContext,
    stages: Mapping[str, int] | None = None,
    available_bytes: int | None = None,
) -> list[StagePlan]:
    """Cut the groups to pipeline stages.

    Args:
        groups: groups of the whole model.
        stages: layer name -> stage; None puts all layers on stage 0.
        available_bytes: bytes for the cache on each rank.

    Raises:
        PlanError: a grouped layer has no stage.
        LayoutError: as ``pool_block_bytes``.
    """
    names = [name for group in groups for name in group.layer_names]
    layers_of_stage: dict[int, set[str]] = {}
    for name in names:
        stage = 0 if stages is None else stages.get(name)
        if stage is None:
            raise PlanError(f"layer {name} has no pipeline stage; give each layer one", name)
        layers_of_stage.setdefault(stage, set()).add(name)
    plans = []
    for stage in range(max(layers_of_stage, default=-1) + 1):
        layers = layers_of_stage.get(stage, set())
        cut = stage_groups(groups, layers)
        block_bytes = pool_block_bytes(cut, context)
        blocks = None
        if available_bytes is not None and block_bytes:
            blocks = num_blocks(available_bytes, block_bytes)
        plans.append(StagePlan(stage, cut, len(layers), block_bytes, blocks))
    return plans


def usable_blocks(blocks: int) -> int:
    """Blocks that requests can use: all but the null block."""
    return max(0, blocks - 1)


def longest_model_len(
    stages: Sequence[StagePlan], context: PlanContext, limit: int | None = None
) -> int:
    """Most tokens that one request can have on every stage, by binary search; 0 where none fits.

    Exact: the blocks of a request never fall with its length.

    Args:
        stages: with ``num_blocks``.
        limit: longest length to consider, in tokens (default: max_model_len).
    """
    bounded = [(stage, stage.num_blocks) for stage in stages if stage.num_blocks is not None]

    def fits(tokens: int) -> bool:
        at_length = context.with_max_model_len(tokens)
        return all(
            sum(request_blocks(stage.groups, at_length)) <= usable_blocks(blocks)
            for stage, blocks in bounded
        )

    low, high = 0, context.max_model_len if limit is None else limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def plan_capacity(
    stages: Sequence[StagePlan], context: PlanContext, available_bytes: int
) -> Capacity | None:
    """What the available bytes hold; None where no layer has a cache."""
    counts = [stage.num_blocks for stage in stages if stage.num_blocks is not None]
    if not counts:
        return None
    blocks = min(counts)
    usable = usable_blocks(blocks)
    needed = max(sum(request_blocks(stage.groups, context)) for stage in stages if stage.layers)
    return Capacity(
        available_bytes=available_bytes,
        num_blocks=blocks,
        usable_blocks=usable,
        max_concurrency=usable / needed if needed else None,
        max_model_len_that_fits=longest_model_len(stages, context),
    )
