"""KV cache groups of a model that runs with a draft of another attention family.

The class is what a model's own grouping hook calls; vendors export it under one name. It answers
with vLLM's default wherever that needs no repair, so a model without such a draft plans as before.
"""

from __future__ import annotations

from collections.abc import Mapping

from k3backend.common import envs
from k3backend.common.group_policy import choose_grouping
from k3backend.common.grouping_choice import GroupingChoice
from k3backend.common.kv_layout import KVCacheLayout
from k3backend.common.kv_spec import (
    AttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
)
from k3backend.common.plan_context import PlanContext


def needs_policy(specs: Mapping[str, KVCacheSpec], context: PlanContext) -> bool:
    """Whether some draft attention is no full MLA cache, beside a target, in a layout that needs
    one page size. A window of latent vectors counts as such a draft."""
    if KVCacheLayout[context.layout].is_block_outermost:
        return False
    foreign = any(
        spec.is_draft and isinstance(spec, AttentionSpec) and not isinstance(spec, MLAAttentionSpec)
        for spec in specs.values()
    )
    return foreign and any(not spec.is_draft for spec in specs.values())


class GQADraftKVCacheGrouping:
    """Groups for a target whose draft has grouped-query attention."""

    @classmethod
    def choose(
        cls,
        context: PlanContext,
        kv_cache_spec: Mapping[str, KVCacheSpec],
        policy: str | None = None,
    ) -> GroupingChoice:
        """The groups with what they were compared to. Arguments as ``get_kv_cache_groups``."""
        asked = policy or envs.GROUPING.get() or "k3"
        if not needs_policy(kv_cache_spec, context):
            asked = "vllm"
        return choose_grouping(kv_cache_spec, context, asked)

    @classmethod
    def get_kv_cache_groups(
        cls,
        context: PlanContext,
        kv_cache_spec: Mapping[str, KVCacheSpec],
        policy: str | None = None,
    ) -> list[KVCacheGroupSpec]:
        """Group the layers of target and draft.

        Args:
            context: the deployment.
            kv_cache_spec: spec per layer, drafts marked; not changed.
            policy: "k3", "vllm" or "isolate" (the draft apart, in the largest blocks that divide
                the target's and fit its page); None takes K3BACKEND_GROUPING, else "k3".

        Raises:
            PlanError: (a ValueError) the draft does not fit; names its page in bytes and its spec.
            InputError: an unknown policy.
        """
        return cls.choose(context, kv_cache_spec, policy).groups
