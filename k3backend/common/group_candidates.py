"""Buckets dealt into groups, and what each grouping costs, to the byte.

A pool block is as wide as the widest group and each group draws its own blocks, so for one width
the fewest groups per bucket are the best, and only widths at which a number of groups changes are
worth a look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from k3backend.common.group_families import Bucket, Family, stride_bytes
from k3backend.common.kv_config import layer_spec_runs
from k3backend.common.kv_layout import KVCacheLayout
from k3backend.common.kv_merge import merge_specs
from k3backend.common.kv_packed_groups import uniform_group
from k3backend.common.kv_spec import KVCacheGroupSpec, KVCacheSpec, cdiv
from k3backend.common.plan_context import PlanContext


@dataclass(frozen=True, slots=True)
class Candidate:
    """One grouping with its numbers at the planning context.

    Attributes:
        name: short and unique within a choice.
        num_groups: groups, each one a block table and one metadata build per step.
        block_bytes: bytes of a pool block.
        blocks: blocks of one request, all groups together.
        idle_bytes: bytes that one block of each group leaves unused, all groups together.
        problem: why it may not be used, or None.
        family: how its buckets came about; None for a grouping that was given.
        widths: groups per bucket.
        given: the groups, where they were given.
    """

    name: str
    num_groups: int
    block_bytes: int
    blocks: int
    idle_bytes: int
    problem: str | None
    family: Family | None = None
    widths: tuple[int, ...] = ()
    given: tuple[KVCacheGroupSpec, ...] = ()

    @property
    def request_bytes(self) -> int:
        """Pool bytes of one request."""
        return self.blocks * self.block_bytes

    def specs(self) -> list[KVCacheSpec]:
        """The different specs that its groups hold."""
        if self.family is None:
            return [spec for group in self.given for spec, _ in layer_spec_runs(group)]
        return [spec for bucket in self.family.buckets for spec in bucket.specs]

    def build(self, names: Sequence[str]) -> list[KVCacheGroupSpec]:
        """The groups, layers by name; ``names`` are the model's layers in order."""
        if self.family is None:
            return list(self.given)
        groups = []
        for bucket, count in zip(self.family.buckets, self.widths, strict=True):
            for i in range(count):
                dealt = [names[layer] for layer in bucket.layers[i::count]]
                groups.append(_group(bucket, dealt, bucket.spec_of_layer[i::count]))
        return groups


def _group(bucket: Bucket, dealt: list[str], spec_indices: Sequence[int]) -> KVCacheGroupSpec:
    present = list(dict.fromkeys(spec_indices))
    if len(present) == 1:
        return KVCacheGroupSpec(dealt, bucket.specs[present[0]])
    if bucket.merges:
        return KVCacheGroupSpec(dealt, merge_specs([bucket.specs[index] for index in present]))
    own = {name: bucket.specs[index] for name, index in zip(dealt, spec_indices, strict=True)}
    return uniform_group(dealt, own)


def deal_widths(family: Family, context: PlanContext) -> list[Candidate]:
    """The family's useful widths: fewer groups than any that needs as few bytes.

    Returns:
        In rising number of groups, so in falling bytes; the first is the family's narrowest table.
    """
    buckets = family.buckets
    counts = [len(bucket.layers) for bucket in buckets]
    widths = sorted({cdiv(n, g) for n in counts for g in range(1, n + 1)}, reverse=True)
    alignment = _pool_alignment(buckets, context)
    useful: list[Candidate] = []
    seen: set[tuple[int, ...]] = set()
    for width in widths:
        dealt = tuple(cdiv(n, width) for n in counts)
        if dealt in seen:
            continue
        seen.add(dealt)
        found = measure(family, dealt, context, alignment)
        if not useful or found.request_bytes < useful[-1].request_bytes:
            useful.append(found)
    return useful


def measure(
    family: Family, dealt: tuple[int, ...], context: PlanContext, alignment: int = 0
) -> Candidate:
    """The candidate that deals the family's buckets into ``dealt`` groups each."""
    alignment = alignment or _pool_alignment(family.buckets, context)
    widest = used = blocks = 0
    for bucket, groups in zip(family.buckets, dealt, strict=True):
        strides = (
            () if bucket.stride_bytes else [stride_bytes(spec, context) for spec in bucket.specs]
        )
        widest = max(widest, bucket.widest_bytes(groups, strides))
        used += (
            bucket.stride_bytes * len(bucket.layers)
            if bucket.stride_bytes
            else sum(strides[index] for index in bucket.spec_of_layer)
        )
        blocks += groups * bucket.blocks
    block_bytes = cdiv(widest, alignment) * alignment
    width = max(
        cdiv(len(bucket.layers), groups)
        for bucket, groups in zip(family.buckets, dealt, strict=True)
    )
    return Candidate(
        name=f"{family.name}-w{width}",
        num_groups=sum(dealt),
        block_bytes=block_bytes,
        blocks=blocks,
        idle_bytes=sum(dealt) * block_bytes - used,
        problem=family.problem,
        family=family,
        widths=dealt,
    )


def _pool_alignment(buckets: Sequence[Bucket], context: PlanContext) -> int:
    if not KVCacheLayout[context.layout].is_block_outermost:
        return 1
    return math.lcm(
        *(spec.get_block_stride_alignment() for bucket in buckets for spec in bucket.specs)
    )


def unique_names(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with a number behind names that occur more than once."""
    used: dict[str, int] = {}
    result = []
    for candidate in candidates:
        count = used[candidate.name] = used.get(candidate.name, 0) + 1
        if count > 1:
            candidate = replace(candidate, name=f"{candidate.name}-{count}")
        result.append(candidate)
    return result


def best_of_each_name(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of families with one name, the candidates that no other beats in both groups and bytes."""
    kept: list[Candidate] = []
    by_family: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        name = candidate.family.name if candidate.family else candidate.name
        by_family.setdefault(name, []).append(candidate)
    for members in by_family.values():
        members.sort(key=lambda c: (c.num_groups, c.request_bytes, c.idle_bytes))
        least: int | None = None
        for candidate in members:
            if least is None or candidate.request_bytes < least:
                kept.append(candidate)
                least = candidate.request_bytes
    return kept
