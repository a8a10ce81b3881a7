"""Kimi-K3 as vLLM has it, with the one method by which a model owns its KV cache grouping.

The plugin registers ``kimi_k3_on_vllm_<version>`` of this module in place of vLLM's class; for the
name see ``compat.model_class_name``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from k3backend.common import envs
from k3backend.vllm_plugin.compat import MODEL_CLASS_PREFIX

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

NAME = "KimiK3ForConditionalGeneration"


def owning(base: type) -> type:
    """``base`` with a grouping of this package, or ``base`` itself where it is to keep its own.

    A class that already owns its grouping is replaced only where ``K3BACKEND_GROUPING`` names a
    policy of this package.
    """
    if hasattr(base, "get_kv_cache_groups") and envs.GROUPING.get() not in {"k3", "isolate"}:
        return base
    return _subclass(base)


@cache
def _subclass(base: Any) -> type:
    class KimiK3ForConditionalGeneration(base):  # type: ignore[misc]
        """vLLM's Kimi-K3; its layers and those of its draft are grouped by this package."""

        @classmethod
        def get_kv_cache_groups(
            cls, vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
        ) -> list[KVCacheGroupSpec]:
            """Split the layers into groups. See ``grouping.owned_groups``."""
            from k3backend.vllm_plugin.grouping import owned_groups

            return owned_groups(vllm_config, kv_cache_spec)

    # vLLM's speculative decoding compares the name.
    KimiK3ForConditionalGeneration.__qualname__ = NAME
    return KimiK3ForConditionalGeneration


def __getattr__(name: str) -> Any:
    if name == NAME or name.startswith(MODEL_CLASS_PREFIX):
        # vLLM's package gives the class of the platform that it runs on.
        from vllm.models.kimi_k3 import KimiK3ForConditionalGeneration

        return owning(KimiK3ForConditionalGeneration)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
