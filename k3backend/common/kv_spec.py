"""The KV cache spec family, all names in one place; the ``kv_spec_*`` modules hold the parts.

Class and attribute names are vLLM's (0.33), so that its users recognise them. Where vLLM's
methods take its configuration, these take a :class:`~k3backend.common.plan_context.PlanContext`.
"""

from __future__ import annotations

from k3backend.common.kv_dtype import (
    DType,
    KVQuantMode,
    MultipleOf,
    get_kv_quant_mode,
    is_quantized_kv_cache,
    kv_cache_uses_per_token_head_scales,
)
from k3backend.common.kv_spec_base import (
    AttentionSpec,
    KVCacheSpec,
    cdiv,
    compared_field_names,
    replace_as,
    round_up,
)
from k3backend.common.kv_spec_config import (
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheTensor,
    group_kernel_blocks,
)
from k3backend.common.kv_spec_full import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SparseCacheRole,
)
from k3backend.common.kv_spec_local import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KpoolTailSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from k3backend.common.kv_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec
from k3backend.common.kv_spec_state import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    MambaSpec,
    MambaType,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from k3backend.common.kv_spec_uniform import (
    SPEC_CLASSES,
    KVCacheSpecKind,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    is_full_attention_spec,
    iter_layer_specs,
    spec_kind_name,
)

__all__ = [
    "SPEC_CLASSES",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "DType",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
    "HiddenStateCacheSpec",
    "KVCacheConfig",
    "KVCacheGroupRole",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheSpecKind",
    "KVCacheSpecRegistry",
    "KVCacheTensor",
    "KVQuantMode",
    "KpoolTailSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "MambaType",
    "MultipleOf",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "SparseCacheRole",
    "UniformTypeKVCacheSpecs",
    "cdiv",
    "compared_field_names",
    "get_kv_cache_spec_kind",
    "get_kv_cache_spec_sliding_window",
    "get_kv_quant_mode",
    "get_mamba_prefill_checkpoint_position",
    "group_kernel_blocks",
    "is_full_attention_spec",
    "is_mamba_prefill_checkpoint_valid",
    "is_quantized_kv_cache",
    "iter_layer_specs",
    "kv_cache_uses_per_token_head_scales",
    "register_kv_cache_spec",
    "replace_as",
    "round_up",
    "spec_kind_name",
]
