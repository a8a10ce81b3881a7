"""KV cache groups on NVIDIA for a draft outside the MLA family; the logic is common to all."""

from __future__ import annotations

from k3backend.common.draft_grouping import GQADraftKVCacheGrouping

__all__ = ["GQADraftKVCacheGrouping"]
