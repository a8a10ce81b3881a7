"""The MLA attention backend on ROCm: AITER's kernels where they exist, else the folded one."""

from __future__ import annotations

from typing import Any

from k3backend.common.layer_config import DecodeConfig
from k3backend.rocm.aiter_capabilities import ARCHS
from k3backend.rocm.kv_balanced_mla.core import gpu_arch
from k3backend.rocm.kv_balanced_mla.decode import KvBalancedDecode
from k3backend.vllm_plugin.mla_backend import K3MLABackend, K3MLAImpl


class K3RocmMLAImpl(K3MLAImpl):
    """One MLA layer on ROCm."""

    platform = "rocm"

    def make_decode(self, config: DecodeConfig) -> KvBalancedDecode:
        """The decode that routes each shape to AITER or to the folded kernel."""
        return KvBalancedDecode(self.num_heads, config)


class K3RocmMLABackend(K3MLABackend):
    """KIMI_K3_MLA on ROCm."""

    @staticmethod
    def get_impl_cls() -> type[K3RocmMLAImpl]:
        """The layer's implementation."""
        return K3RocmMLAImpl

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """The GPUs that have route tables and launch choices."""
        arch = gpu_arch("cuda")
        if arch in ARCHS:
            return None
        return (
            f"the GPU is {arch}, KIMI_K3_MLA runs on {' and '.join(ARCHS)}: choose "
            "--attention-backend TRITON_MLA"
        )
