"""The MLA attention backend on NVIDIA, under both of its names."""

from __future__ import annotations

from typing import Any

from k3backend.common.layer_config import DecodeConfig
from k3backend.nvidia.kv_balanced_mla.core import MIN_CAPABILITY
from k3backend.nvidia.kv_balanced_mla.decode import KvBalancedDecode
from k3backend.vllm_plugin.mla_backend import K3MLABackend, K3MLAImpl


class K3NvidiaMLAImpl(K3MLAImpl):
    """One MLA layer on NVIDIA."""

    platform = "nvidia"

    def make_decode(self, config: DecodeConfig) -> KvBalancedDecode:
        """The folded decode, planned once per forward."""
        return KvBalancedDecode(self.num_heads, config)


class K3NvidiaMLABackend(K3MLABackend):
    """KIMI_K3_MLA on NVIDIA."""

    @staticmethod
    def get_impl_cls() -> type[K3NvidiaMLAImpl]:
        """The layer's implementation."""
        return K3NvidiaMLAImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper and later."""
        return bool(capability.to_int() >= MIN_CAPABILITY)


class K3KvBalancedMLABackend(K3NvidiaMLABackend):
    """The same under the name that names the algorithm."""

    @staticmethod
    def get_name() -> str:
        """The name that it is registered under."""
        return "KIMI_K3_KV_BALANCED_MLA"
