"""KV cache groups of the reference backend for a draft outside the MLA family."""

from __future__ import annotations

from k3backend.common.draft_grouping import GQADraftKVCacheGrouping

__all__ = ["GQADraftKVCacheGrouping"]
