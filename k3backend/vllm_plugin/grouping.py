"""Groups of a live vLLM model, by this package's policy."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3backend.common import envs
from k3backend.common.group_policy import choose_grouping
from k3backend.common.grouping_choice import GroupingChoice
from k3backend.common.kv_dtype import MultipleOf
from k3backend.common.kv_spec import AttentionSpec, KVCacheSpec, MLAAttentionSpec
from k3backend.common.plan_context import KernelBlocks, PlanContext
from k3backend.vllm_plugin.translate import from_vllm_spec, to_vllm_groups
from k3backend.vllm_plugin.vllm_names import vllm_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec as VllmGroup
    from vllm.v1.kv_cache_interface import KVCacheSpec as VllmSpec

LOGGER = logging.getLogger("k3backend.vllm_plugin")
UNSAID = KernelBlocks(multiple_of=16)
"""Every backend of vLLM that takes multiples takes those of 16 tokens."""
_said: set[str] = set()


def owned_groups(vllm_config: VllmConfig, kv_cache_spec: dict[str, VllmSpec]) -> list[VllmGroup]:
    """What a model answers to vLLM's ``get_kv_cache_groups``: the groups of the policy.

    ``K3BACKEND_GROUPING`` names the policy: "k3" (also where unset), "isolate", or "vllm", which
    is vLLM's own code.

    Args:
        kv_cache_spec: spec per layer; not changed.
    Raises:
        PlanError: (a ValueError) no grouping holds the layers; names the layer that does not fit.
        PluginError: vLLM's specs cannot be translated.
    """
    policy = envs.GROUPING.get() or "k3"
    pcp_size = getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1)
    if pcp_size > 1 and policy != "vllm":
        _say_once(
            f"prefill context parallelism ({pcp_size} ranks) is unknown to policy {policy}; "
            "vLLM's own planner groups the layers"
        )
        policy = "vllm"
    if policy == "vllm":
        plan = vllm_name("vllm.v1.core.kv_cache_planning", "get_kv_cache_groups")
        groups: list[VllmGroup] = plan(vllm_config, kv_cache_spec)
        return groups
    specs = {name: from_vllm_spec(spec) for name, spec in kv_cache_spec.items()}
    context = plan_context(vllm_config, specs)
    choice = choose_grouping(specs, context, policy, pipeline_stages(vllm_config, specs))
    _say(choice, policy)
    # vLLM's core marks draft groups itself, and only where a hit must leave their last block out.
    unmarked = [replace(group, is_eagle_group=False) for group in choice.groups]
    return to_vllm_groups(unmarked, originals=kv_cache_spec)


def plan_context(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> PlanContext:
    """The deployment that a vLLM configuration describes."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    longest = vllm_config.model_config.max_model_len
    asked = envs.PLAN_CONTEXT.positive_int()
    targets = [spec for spec in specs.values() if not spec.is_draft]
    drafts = [spec for spec in specs.values() if spec.is_draft]
    return PlanContext(
        layout=cache.get_resolved_kv_cache_layout().name,
        tp_size=parallel.tensor_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        max_model_len=longest,
        context=None if asked is None else min(asked, longest),
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        mamba_cache_mode=cache.mamba_cache_mode,
        mla_kernel_block=_kernel_blocks(_mla_specs(targets), _mla_backend(vllm_config)),
        draft_kernel_block=_kernel_blocks(_attention_specs(drafts), None),
        prefix_caching=bool(cache.enable_prefix_caching),
        disable_hybrid_kv_cache_manager=bool(
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
        max_num_encoder_input_tokens=vllm_config.scheduler_config.max_num_encoder_input_tokens,
    )


def pipeline_stages(
    vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]
) -> dict[str, int] | None:
    """The pipeline stage of each layer, as vLLM cuts the model; a draft is on the last one.

    None without pipeline parallelism, or where a layer's name does not say its index.
    """
    size = vllm_config.parallel_config.pipeline_parallel_size
    if size == 1:
        return None
    cut = vllm_name("vllm.distributed.utils", "get_pp_indices")
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    ends = [cut(layers, rank, size)[1] for rank in range(size)]
    stages = {}
    for name, spec in specs.items():
        index = re.search(r"\blayers\.(\d+)\b", name)
        if spec.is_draft:
            stages[name] = size - 1
        elif index is None or int(index[1]) >= layers:
            return None
        else:
            stages[name] = next(rank for rank, end in enumerate(ends) if int(index[1]) < end)
    return stages


def _kernel_blocks(specs: Iterable[AttentionSpec], backend: Any) -> KernelBlocks:
    """The blocks that the specs' backends take unsplit.

    vLLM writes the largest of a backend's fixed sizes into ``block_stride_alignment``, and nothing
    for a backend that takes multiples. ``backend`` is the one that is known by name, or None.
    """
    fixed = {
        spec.block_stride_alignment.base
        for spec in specs
        if isinstance(spec.block_stride_alignment, MultipleOf)
    }
    if fixed:
        return KernelBlocks(sizes=tuple(sorted(fixed)))
    if backend is not None and backend.name.startswith("KIMI_K3_"):
        return KernelBlocks()
    return UNSAID


def _mla_backend(vllm_config: VllmConfig) -> Any:
    attention = vllm_config.attention_config
    return attention.backend_per_kind.get("mla_attention", attention.backend)


def _mla_specs(specs: Iterable[KVCacheSpec]) -> list[AttentionSpec]:
    return [spec for spec in specs if isinstance(spec, MLAAttentionSpec)]


def _attention_specs(specs: Iterable[KVCacheSpec]) -> list[AttentionSpec]:
    return [spec for spec in specs if isinstance(spec, AttentionSpec)]


def _say_once(text: str) -> None:
    """Warn once: vLLM asks several times during a start."""
    if text not in _said:
        _said.add(text)
        LOGGER.warning("k3backend: %s", text)


def _say(choice: GroupingChoice, policy: str) -> None:
    """Log a choice once: vLLM asks several times during a start."""
    sizes = "/".join(str(len(group.layer_names)) for group in choice.groups)
    text = f"{len(choice.groups)} KV cache groups ({sizes} layers), policy {policy}: "
    if text + choice.reason not in _said:
        _said.add(text + choice.reason)
        LOGGER.info("k3backend: %s%s", text, choice.reason)
        for warning in choice.warnings:
            LOGGER.warning("k3backend: %s", warning.message)
