"""The layers of a model with equal specs counted once.

A model has about a hundred layers and two to five different specs. Every step of the planner works
on the different ones and only the dealing of layers into groups walks all names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from k3backend.common.kv_spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class DistinctSpecs:
    """Different specs in order of first appearance, and which of them each layer has.

    Attributes:
        specs: the different specs. Equality is the specs' own, so ``is_draft`` does not count.
        index_of_layer: layer name -> position in ``specs``, in layer order.
    """

    specs: tuple[KVCacheSpec, ...]
    index_of_layer: dict[str, int]

    @classmethod
    def of(cls, layer_specs: Mapping[str, KVCacheSpec]) -> DistinctSpecs:
        """Collect the different specs of a model. O(layers)."""
        specs: list[KVCacheSpec] = []
        index_of_spec: dict[KVCacheSpec, int] = {}
        index_of_layer: dict[str, int] = {}
        # A layer mostly equals the last one of its class; that is cheaper to see than a hash.
        last: dict[type[KVCacheSpec], tuple[KVCacheSpec, int]] = {}
        for name, spec in layer_specs.items():
            known = last.get(spec.__class__)
            if known is None or known[0] != spec:
                index = index_of_spec.setdefault(spec, len(specs))
                if index == len(specs):
                    specs.append(spec)
                known = last[spec.__class__] = (specs[index], index)
            index_of_layer[name] = known[1]
        return cls(tuple(specs), index_of_layer)

    def with_specs(self, specs: Sequence[KVCacheSpec]) -> DistinctSpecs:
        """The same layers with ``specs[i]`` in place of the i-th spec; equal ones are joined."""
        index_of_spec: dict[KVCacheSpec, int] = {}
        new_index = [index_of_spec.setdefault(spec, len(index_of_spec)) for spec in specs]
        if len(index_of_spec) == len(specs):
            return DistinctSpecs(tuple(specs), self.index_of_layer)
        return DistinctSpecs(
            tuple(index_of_spec),
            {name: new_index[index] for name, index in self.index_of_layer.items()},
        )

    def joined(self, key: Callable[[KVCacheSpec], KVCacheSpec]) -> DistinctSpecs:
        """The same layers with specs of one key counted as one: the first of them."""
        keys = [key(spec) for spec in self.specs]
        if len(set(keys)) == len(keys):
            return self
        first: dict[KVCacheSpec, KVCacheSpec] = {}
        return self.with_specs(
            [first.setdefault(k, spec) for k, spec in zip(keys, self.specs, strict=True)]
        )

    def layers(self) -> list[list[str]]:
        """Layer names per spec, both in order."""
        names: list[list[str]] = [[] for _ in self.specs]
        for name, index in self.index_of_layer.items():
            names[index].append(name)
        return names

    def first_layer(self, index: int) -> str:
        """Name of the first layer that has ``specs[index]``."""
        return next(name for name, at in self.index_of_layer.items() if at == index)
