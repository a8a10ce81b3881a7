"""vLLM 0.33.0's own planner on a spec file: the reference of the grouping tests.

Imports vLLM, so only tests of the vLLM tier may import this module. The configuration that vLLM's
functions read is a plain record of the few values that they look at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
import vllm.v1.core.kv_cache_planning as planning
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

CLASSES: dict[str, type[KVCacheSpec]] = {
    "full_attention": FullAttentionSpec,
    "mla_attention": MLAAttentionSpec,
    "hidden_state_cache": HiddenStateCacheSpec,
    "rswa": RSWASpec,
    "chunked_local_attention": ChunkedLocalAttentionSpec,
    "sliding_window": SlidingWindowSpec,
    "circular_buffer": CircularBufferSpec,
    "sliding_window_mla": SlidingWindowMLASpec,
    "mamba": MambaSpec,
    "encoder_only_attention": EncoderOnlyAttentionSpec,
    "cross_attention": CrossAttentionSpec,
    "sink_full_attention": SinkFullAttentionSpec,
}

VLLM_ERRORS = (
    AssertionError,
    ValueError,
    NotImplementedError,
    TypeError,
    StopIteration,
    ZeroDivisionError,
)
"""How vLLM's planner refuses, or falls over."""


@dataclass
class Outcome:
    """What a planner makes of a spec file. Two planners agree when their outcomes are equal.

    Attributes:
        groups: per group: layers, block size, page bytes, page bytes per layer, whether it keeps a
            spec per layer, blocks of a request, block table columns.
        tensors: per tensor, for seven blocks: layers, layer stride, block stride, offset, size.
        fit: per available bytes and stages: blocks, longest length.
    """

    groups: list[tuple[Any, ...]] = field(default_factory=list)
    block_bytes: int = 0
    request_bytes: int = 0
    kv_tp_replicas: int = 1
    tensors: list[tuple[Any, ...]] = field(default_factory=list)
    fit: tuple[int, int] | None = None


def _convert(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "dtype":
        return getattr(torch, value)
    if name == "dtypes":
        return tuple(getattr(torch, dtype) for dtype in value)
    if name == "shapes":
        return tuple(tuple(shape) for shape in value)
    if name == "kv_quant_mode":
        return KVQuantMode[value]
    if name == "cache_role":
        return SparseCacheRole[value]
    if name == "mamba_type":
        return MambaAttentionBackendEnum[value]
    if name == "tokens_per_state" and isinstance(value, str):
        return Fraction(value)
    if name == "block_stride_alignment" and isinstance(value, dict):
        return MultipleOf(value["multiple_of"])
    return value


def vllm_specs(document: dict[str, Any]) -> tuple[dict[str, KVCacheSpec], dict[str, int]]:
    """vLLM's spec per layer, and the pipeline stage per layer. A new object for every layer."""
    specs: dict[str, KVCacheSpec] = {}
    stages: dict[str, int] = {}
    for entry in document["layers"]:
        fields = {
            name: _convert(name, value)
            for name, value in entry.items()
            if name not in ("count", "prefix", "kind", "stage")
        }
        for index in range(entry["count"]):
            name = f"{entry['prefix']}{index}"
            specs[name] = CLASSES[entry["kind"]](**fields)
            stages[name] = entry.get("stage", 0)
    return specs, stages


def vllm_config(document: dict[str, Any]) -> Any:
    """The values that vLLM's planner reads from its configuration."""
    layout = KVCacheLayout[document["layout"]]
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=document.get("disable_hybrid_kv_cache_manager", False),
            max_num_encoder_input_tokens=document.get("max_num_encoder_input_tokens", 0),
        ),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            mamba_cache_mode=document["mamba_cache_mode"],
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(
            max_model_len=document["max_model_len"], supports_kv_cache_grouping=False
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=document["tp_size"],
            decode_context_parallel_size=document["dcp_size"],
        ),
        max_in_flight_tokens=document["max_in_flight_tokens"],
    )


def plan_with_vllm(document: dict[str, Any]) -> Outcome:
    """Plan with vLLM's code. Raises one of ``VLLM_ERRORS`` where it does."""
    config = vllm_config(document)
    builder = planning.DefaultKVCacheConfigBuilder()
    specs, stages = vllm_specs(document)
    # The hybrid manager's switch changes the mapping that it is given.
    groups = planning.get_kv_cache_groups_from_builder(builder, config, specs)
    if not groups:
        return Outcome()
    block_bytes = planning._pool_bytes_per_block_from_builder(builder, config, groups)
    outcome = Outcome(
        block_bytes=block_bytes,
        request_bytes=planning._max_memory_usage_bytes_from_groups(builder, config, groups),
        kv_tp_replicas=planning.kv_cache_groups_tp_replicas(
            groups, document["tp_size"], document["dcp_size"]
        ),
    )
    for group in groups:
        spec = group.kv_cache_spec
        keeps_layers = isinstance(spec, UniformTypeKVCacheSpecs)
        layer_pages = [
            planning._get_per_layer_spec(group, name).page_size_bytes for name in group.layer_names
        ]
        blocks = (
            spec.max_memory_usage_pages(config)
            if keeps_layers
            else math.ceil(Fraction(spec.max_memory_usage_bytes(config), spec.page_size_bytes))
        )
        columns = spec.max_num_blocks_per_req(config, document["max_model_len"])
        outcome.groups.append(
            (
                list(group.layer_names),
                spec.block_size,
                spec.page_size_bytes,
                layer_pages,
                keeps_layers,
                blocks,
                columns,
            )
        )
    placed = builder.get_kv_cache_config_from_groups(config, groups, 7)
    outcome.tensors = [
        (list(t.layers), t.layer_stride, t.block_stride, t.offset, t.size)
        for t in placed.kv_cache_tensors
    ]
    outcome.fit = _fit(builder, config, groups, stages, document.get("available_bytes"))
    return outcome


def _fit(
    builder: Any, config: Any, groups: Any, stages: dict[str, int], available_bytes: int | None
) -> tuple[int, int] | None:
    """Blocks and longest length of the smallest stage, as ``get_kv_cache_configs`` finds them."""
    if available_bytes is None:
        return None
    blocks, lengths = [], []
    for stage in sorted(set(stages.values())):
        worker = {name: None for name, at in stages.items() if at == stage}
        cut = planning._project_kv_cache_groups_to_worker(groups, worker)
        block_bytes = planning._get_kv_cache_bytes_per_block(
            cut, config.cache_config.get_resolved_kv_cache_layout()
        )
        blocks.append(available_bytes // block_bytes)
        lengths.append(
            planning._estimate_max_model_len_from_groups(
                builder, config, cut, available_bytes - block_bytes
            )
        )
    return min(blocks), min(lengths)


class PathCounter:
    """Counts which of vLLM's planner paths give the groups, by wrapping its functions."""

    RESULTS = (
        "_get_kv_cache_groups_uniform_spec",
        "_get_kv_cache_groups_uniform_type",
        "_get_packed_kv_cache_groups",
        "_get_kv_cache_groups_uniform_page_size",
        "_try_get_full_allocation_fallback_groups",
        "_promote_local_kv_cache_specs",
        "_ensure_min_page_size",
        "_approximate_gcd",
        "unify_hybrid_kv_cache_specs",
    )

    def __init__(self, patch: Callable[[Any, str, Any], None]) -> None:
        self.counts: Counter[str] = Counter()
        for name in self.RESULTS:
            patch(planning, name, self._counting(name, getattr(planning, name)))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if result is not None or name == "unify_hybrid_kv_cache_specs":
                self.counts[name] += 1
            return result

        return counted
