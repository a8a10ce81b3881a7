"""One plan with every number that its readers show: groups, a request, capacity, stages.

Pure and without rendering; the Layout JSON document is this, key by key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from k3backend.common.errors import InputError
from k3backend.common.group_policy import choose_grouping
from k3backend.common.grouping_choice import GroupingCandidate, PlanWarning
from k3backend.common.kv_capacity import Capacity, StagePlan, plan_capacity, plan_stages
from k3backend.common.kv_config import (
    layer_spec_runs,
    request_blocks,
)
from k3backend.common.kv_groups import check_partition, kv_tp_replicas
from k3backend.common.kv_spec import (
    AttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    spec_kind_name,
)
from k3backend.common.plan_context import PlanContext
from k3backend.common.plan_warnings import plan_warnings

POLICIES = ("k3", "vllm", "isolate")


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group of a plan.

    Attributes:
        id: number of the group, from 0.
        kind: its spec's kind as a spec file names it; "full_attention" for MLA beside full.
        layer_names: in the group's order.
        block_size: tokens of a block.
        page_size_bytes: widest page of a layer, padding included.
        used_bytes_per_block: pages of all its layers.
        idle_bytes_per_block: what the pool block has beyond them.
        blocks_per_request: for one request of max_model_len.
        block_table_columns: entries of a block table row for max_model_len.
        is_draft: whether at least one layer belongs to the draft.
        draft_layers: how many do.
        spec: the merged spec, or the specs per layer.
    """

    id: int
    kind: str
    layer_names: tuple[str, ...]
    block_size: int
    page_size_bytes: int
    used_bytes_per_block: int
    idle_bytes_per_block: int
    blocks_per_request: int
    block_table_columns: int
    is_draft: bool
    draft_layers: int
    spec: KVCacheSpec

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len(self.layer_names)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request of max_model_len.

    Attributes:
        blocks: sum over groups.
        bytes: blocks times the pool block.
        real_bytes: unpadded pages of the layers that exist.
    """

    blocks: int
    bytes: int
    real_bytes: int

    @property
    def padding_bytes(self) -> int:
        """Bytes that hold no layer's state."""
        return self.bytes - self.real_bytes

    @property
    def padding_fraction(self) -> float:
        """Share of the bytes that hold no layer's state; 0 for a request without blocks."""
        return self.padding_bytes / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Groups of a model and their cost.

    Attributes:
        policy: that chose the groups.
        context: deployment that was planned for.
        block_bytes: pool block, of the widest pipeline stage; 0 without groups.
        groups: in block-table order.
        request: one request of max_model_len.
        capacity: None where no bytes are given or nothing is cached.
        kv_tp_replicas: consecutive ranks with identical KV.
        prefix_hit_tokens: lcm of the block sizes; 1 without groups.
        stages: pipeline stages; one where none are given.
        candidates: groupings that were compared.
        reason: why the policy chose this one.
        warnings: what the reader should know.
        group_specs: the groups as the engine takes them.
    """

    policy: str
    context: PlanContext
    block_bytes: int
    groups: tuple[GroupPlan, ...]
    request: RequestPlan
    capacity: Capacity | None
    kv_tp_replicas: int
    prefix_hit_tokens: int
    stages: tuple[StagePlan, ...]
    candidates: tuple[GroupingCandidate, ...]
    reason: str
    warnings: tuple[PlanWarning, ...]
    group_specs: tuple[KVCacheGroupSpec, ...]

    @property
    def block_table_columns(self) -> tuple[int, ...]:
        """Entries of a block table row per group."""
        return tuple(group.block_table_columns for group in self.groups)


def make_plan(
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
    policy: str = "k3",
    stages: Mapping[str, int] | None = None,
    available_bytes: int | None = None,
) -> KvPlan:
    """Group the layers and work out every number of the plan.

    Args:
        specs: spec per layer, in layer order.
        context: deployment.
        policy: "vllm" for vLLM's default planner, "k3" for the cheapest grouping, "isolate" for
            the draft apart.
        stages: layer -> pipeline stage; None: one stage.
        available_bytes: bytes for the cache on each rank; None: no capacity.

    Raises:
        InputError: an unknown policy.
        PlanError, LayoutError: the layers cannot be grouped or placed; names the layer.
    """
    if policy not in POLICIES:
        raise InputError(f"policy is {policy!r}, expected one of {', '.join(POLICIES)}")
    choice = choose_grouping(specs, context, policy, stages)
    groups = choice.groups
    check_partition(groups, specs)
    stage_plans = plan_stages(groups, context, stages, available_bytes)
    # Bytes are those of one rank, so they are counted on the stage with the widest block.
    widest = max(stage_plans, key=lambda stage: stage.block_bytes, default=None)
    on_rank = widest.groups if widest else ()
    block_bytes = widest.block_bytes if widest else 0
    blocks = request_blocks(groups, context)
    group_plans = tuple(
        _group_plan(number, group, count, block_bytes - _used_bytes(cut), specs, context)
        for number, (group, cut, count) in enumerate(zip(groups, on_rank, blocks, strict=True))
    )
    request = RequestPlan(
        blocks=sum(blocks),
        bytes=sum(blocks) * block_bytes,
        real_bytes=sum(
            count * _real_bytes(cut) for cut, count in zip(on_rank, blocks, strict=True)
        ),
    )
    return KvPlan(
        policy=policy,
        context=context,
        block_bytes=block_bytes,
        groups=group_plans,
        request=request,
        capacity=None
        if available_bytes is None
        else plan_capacity(stage_plans, context, available_bytes),
        kv_tp_replicas=kv_tp_replicas(groups, context),
        prefix_hit_tokens=math.lcm(*(group.block_size for group in group_plans)),
        stages=tuple(stage_plans),
        candidates=choice.candidates,
        reason=choice.reason,
        warnings=tuple(plan_warnings(groups, specs, context, choice.warnings)),
        group_specs=tuple(groups),
    )


def _group_plan(
    number: int,
    group: KVCacheGroupSpec,
    blocks: int,
    idle_bytes: int,
    specs: Mapping[str, KVCacheSpec],
    context: PlanContext,
) -> GroupPlan:
    spec = group.kv_cache_spec
    draft_layers = sum(specs[name].is_draft for name in group.layer_names)
    return GroupPlan(
        id=number,
        kind=spec_kind_name(spec),
        layer_names=tuple(group.layer_names),
        block_size=spec.block_size,
        page_size_bytes=max(run.page_size_bytes for run, _ in layer_spec_runs(group)),
        used_bytes_per_block=_used_bytes(group),
        idle_bytes_per_block=idle_bytes,
        blocks_per_request=blocks,
        block_table_columns=spec.max_num_blocks_per_req(context, context.max_model_len),
        is_draft=draft_layers > 0,
        draft_layers=draft_layers,
        spec=spec,
    )


def _used_bytes(group: KVCacheGroupSpec) -> int:
    """Pages of the group's layers in one block, padding included."""
    return sum(len(names) * spec.page_size_bytes for spec, names in layer_spec_runs(group))


def _real_bytes(group: KVCacheGroupSpec) -> int:
    """Pages of the group's layers in one block, without padding."""
    total = 0
    for spec, names in layer_spec_runs(group):
        page = spec.page_size_bytes
        if isinstance(spec, AttentionSpec | MambaSpec):
            page = spec.real_page_size_bytes
        total += len(names) * page
    return total
