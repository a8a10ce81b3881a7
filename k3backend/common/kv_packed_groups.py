"""Groups for block-outermost layouts whose layers have pages of different sizes.

In such a layout a block holds the pages of one group side by side, so the sizes need not agree;
what counts is that all groups fill about the same number of bytes. The rules are those of vLLM
0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k3backend.common.errors import PlanError
from k3backend.common.kv_distinct_specs import DistinctSpecs
from k3backend.common.kv_page_sizes import uniform_with_first
from k3backend.common.kv_spec import (
    CircularBufferSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers of one uniform type.

    Attributes:
        first_spec: spec of the first layer; decides the type.
        layers: names in layer order.
        layers_by_page: page size in bytes -> names, both in order of appearance.
    """

    first_spec: KVCacheSpec
    layers: list[str]
    layers_by_page: dict[int, list[str]]

    @property
    def is_balanced(self) -> bool:
        """As many layers of each page size: a pattern that repeats."""
        return len({len(names) for names in self.layers_by_page.values()}) == 1

    @property
    def repeats(self) -> int:
        """Layers of the most frequent page size; the repeats of the pattern where balanced."""
        return max(len(names) for names in self.layers_by_page.values())

    def widest_group_bytes(self, num_groups: int) -> int:
        """Page bytes of the widest of the groups that the bucket is dealt into."""
        return sum(
            cdiv(len(names), num_groups) * page for page, names in self.layers_by_page.items()
        )


def pack_groups(
    distinct: DistinctSpecs, specs: Mapping[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Deal layers of mixed page sizes into groups of about equal bytes per block.

    Args:
        distinct: the layers to group; more than one page size.
        specs: spec per layer, at least for the layers of ``distinct``.

    Raises:
        PlanError: layers of one type have two page sizes in unequal numbers and would have to be
            split over several groups.
    """
    buckets = _buckets(distinct)
    mixed = [
        bucket.repeats
        for bucket in buckets
        if bucket.is_balanced and len(bucket.layers_by_page) > 1
    ]
    repeats_per_group = None
    if mixed:
        balanced = [bucket.repeats for bucket in buckets if bucket.is_balanced]
        repeats_per_group = least_padding_divisor(balanced, max(mixed))

    def pattern_groups(bucket: _Bucket) -> int:
        if repeats_per_group is None or not bucket.is_balanced:
            return 1
        return cdiv(bucket.repeats, repeats_per_group)

    def holds_state(bucket: _Bucket) -> bool:
        """Whether the bucket may go down to one layer per group."""
        if isinstance(bucket.first_spec, MambaSpec | CircularBufferSpec):
            return True
        return repeats_per_group is None and isinstance(bucket.first_spec, SlidingWindowSpec)

    anchor_bytes = max(
        bucket.widest_group_bytes(
            len(bucket.layers) if holds_state(bucket) else pattern_groups(bucket)
        )
        for bucket in buckets
    )

    groups: list[KVCacheGroupSpec] = []
    for bucket in buckets:
        num_groups = pattern_groups(bucket)
        if holds_state(bucket):
            states_per_block = max(anchor_bytes // bucket.first_spec.page_size_bytes, 1)
            num_groups = max(num_groups, cdiv(len(bucket.layers), states_per_block))
        groups.extend(_deal(bucket, num_groups, specs))
    return groups


def _buckets(distinct: DistinctSpecs) -> list[_Bucket]:
    """Each spec joins the first bucket of its uniform type."""
    buckets: dict[int, _Bucket] = {}
    bucket_of_spec: list[_Bucket] = []
    for index, spec in enumerate(distinct.specs):
        joined = next((b for first, b in buckets.items() if _joins(distinct, first, index)), None)
        if joined is None:
            uniform_with_first(distinct, (index,))
            joined = buckets[index] = _Bucket(spec, [], {})
        bucket_of_spec.append(joined)
    pages = [spec.page_size_bytes for spec in distinct.specs]
    for name, index in distinct.index_of_layer.items():
        bucket = bucket_of_spec[index]
        bucket.layers.append(name)
        bucket.layers_by_page.setdefault(pages[index], []).append(name)
    return list(buckets.values())


def _joins(distinct: DistinctSpecs, first: int, index: int) -> bool:
    return uniform_with_first(distinct, (first, index))


def _deal(
    bucket: _Bucket, num_groups: int, specs: Mapping[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    if num_groups == 1:
        return [uniform_group(bucket.layers, specs)]
    if not bucket.is_balanced or num_groups > bucket.repeats:
        # vLLM 0.33.0 loses layers here, or stops on an empty group.
        scarce = min(bucket.layers_by_page, key=lambda page: len(bucket.layers_by_page[page]))
        layer = bucket.layers_by_page[scarce][0]
        sizes = ", ".join(f"{len(n)} of {page} B" for page, n in bucket.layers_by_page.items())
        raise PlanError(
            f"layer {layer}: layers of its kind have pages of several sizes ({sizes}) and cannot "
            f"be dealt evenly into the {num_groups} groups that a block has room for; give them "
            "one page size or take a layout that is not block-outermost",
            layer,
        )
    repeats = list(zip(*bucket.layers_by_page.values(), strict=True))
    return [
        uniform_group([name for repeat in repeats[i::num_groups] for name in repeat], specs)
        for i in range(num_groups)
    ]


def uniform_group(layers: Sequence[str], specs: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    """One group that keeps a spec per layer; the layers are of one uniform type."""
    kept = {name: specs[name] for name in layers}
    first = specs[layers[0]]
    return KVCacheGroupSpec(
        list(layers), UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=kept)
    )


def least_padding_divisor(values: Sequence[int], lower_bound: int) -> int:
    """The d >= lower_bound whose multiples lie closest above the values; ties take the larger d.

    Minimises the sum over values of ceil(value / d) * d - value.
    """
    best, best_padding = lower_bound, None
    for d in range(lower_bound, max(values) + 1):
        padding = sum(-value % d for value in values)
        if best_padding is None or padding <= best_padding:
            best, best_padding = d, padding
    return best
