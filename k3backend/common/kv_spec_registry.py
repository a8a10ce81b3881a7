"""Which spec classes may stand together in one group that keeps a spec per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from k3backend.common.errors import SpecError
from k3backend.common.kv_spec_base import KVCacheSpec, SpecT


class KVCacheSpecRegistry:
    """Spec class -> base class: classes with one base need the same number of token slots.

    A class that is not registered has the base of its nearest registered ancestor.
    """

    _bases: ClassVar[dict[type[KVCacheSpec], type[KVCacheSpec]]] = {}

    @classmethod
    def register(
        cls,
        kvcache_spec_cls: type[KVCacheSpec],
        uniform_type_base_spec: type[KVCacheSpec] | None = None,
    ) -> None:
        """Register a class with its base (itself where none is given). Repeating it is allowed.

        Raises:
            SpecError: the class does not derive from the base, or has another base already.
        """
        base = uniform_type_base_spec or kvcache_spec_cls
        if not issubclass(kvcache_spec_cls, base):
            raise SpecError(
                f"{kvcache_spec_cls.__name__} does not derive from its base {base.__name__}; "
                "derive it, or register it without a base"
            )
        known = cls._bases.setdefault(kvcache_spec_cls, base)
        if known is not base:
            raise SpecError(
                f"{kvcache_spec_cls.__name__} is registered with base {known.__name__}, not "
                f"{base.__name__}; register a class once"
            )

    @classmethod
    def get_uniform_type_base_spec(cls, kvcache_spec: KVCacheSpec) -> type[KVCacheSpec] | None:
        """The base of the spec's class, None where no ancestor is registered."""
        for ancestor in type(kvcache_spec).__mro__:
            base = cls._bases.get(ancestor)
            if base is not None:
                return base
        return None

    @classmethod
    def require_uniform_type_base_spec(cls, kvcache_spec: KVCacheSpec) -> type[KVCacheSpec]:
        """As :meth:`get_uniform_type_base_spec`; raises SpecError where there is none."""
        base = cls.get_uniform_type_base_spec(kvcache_spec)
        if base is None:
            raise SpecError(
                f"{type(kvcache_spec).__name__} takes part in no group: neither it nor an "
                "ancestor is registered; register it with register_kv_cache_spec"
            )
        return base


def register_kv_cache_spec(
    uniform_type_base_spec: type[KVCacheSpec] | None = None,
) -> Callable[[type[SpecT]], type[SpecT]]:
    """Class decorator for :meth:`KVCacheSpecRegistry.register`."""

    def decorate(kvcache_spec_cls: type[SpecT]) -> type[SpecT]:
        KVCacheSpecRegistry.register(kvcache_spec_cls, uniform_type_base_spec)
        return kvcache_spec_cls

    return decorate
