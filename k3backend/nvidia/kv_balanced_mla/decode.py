"""The decode object that one MLA layer owns on NVIDIA."""

from __future__ import annotations

from k3backend.common.balanced_mla import BalancedMla
from k3backend.common.layer_config import DecodeConfig
from k3backend.common.layer_decode import BalancedDecode
from k3backend.nvidia.kv_balanced_mla.core import MIN_CAPABILITY, KvBalancedMla, capability

__all__ = ["DecodeConfig", "KvBalancedDecode"]


class KvBalancedDecode(BalancedDecode):
    """``KvBalancedDecode(num_heads, config=…)``: see `BalancedDecode` for its contract."""

    platform = "nvidia"

    def make_core(self, q_len: int, causal: bool) -> BalancedMla:
        """A `KvBalancedMla` on the config's device."""
        return KvBalancedMla(
            self.heads,
            q_len,
            self.config.max_requests,
            causal,
            self.config.device,
            q_dtype=self.config.q_dtype,
        )

    def platform_problems(self) -> list[str]:
        """A compute capability below 9.0."""
        found = capability(self.config.device)
        if found >= MIN_CAPABILITY:
            return []
        return [f"compute capability is {found / 10}, expected at least {MIN_CAPABILITY / 10}"]
