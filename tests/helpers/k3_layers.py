"""Kimi-K3's layers as specs, with drafts of every family, straight from the model's facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3backend.common.kv_spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from k3backend.common.plan_context import PlanContext

KDA_LAYERS = 69
MLA_LAYERS = 24
DRAFT_LAYERS = 5
MILLION = 1048576


def k3_target(tp: int, fp8: bool = True) -> tuple[MambaSpec, MLAAttentionSpec]:
    """The specs of a KDA and of an MLA layer, with 7 speculative tokens."""
    bytes_per_token = 576 if fp8 else 1152
    conv, recurrent = (3 * 96 * 128 // tp, 10), (96 // tp, 128, 128)
    state_bytes = conv[0] * conv[1] * 2 + recurrent[0] * recurrent[1] * recurrent[2] * 4
    block = 128 * -(-state_bytes // (128 * bytes_per_token))
    kda = MambaSpec(
        block_size=block,
        shapes=(conv, recurrent),
        dtypes=("bfloat16", "float32"),  # type: ignore[arg-type]
        page_size_padded=block * bytes_per_token,
        mamba_cache_mode="align",
        num_speculative_blocks=7,
    )
    mla = MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=576,
        dtype="uint8" if fp8 else "bfloat16",  # type: ignore[arg-type]
        cache_dtype_str="fp8" if fp8 else "auto",
        kv_quant_mode="FP8_PER_TENSOR" if fp8 else "NONE",  # type: ignore[arg-type]
        max_tp_shards=1,
    )
    return kda, mla


def draft_spec(kind: str, mla: MLAAttentionSpec, tp: int, **fields: Any) -> KVCacheSpec:
    """One draft layer: "mla", or 16 KV heads of 64 in full ("full") or as a window ("window")."""
    if kind == "mla":
        spec = replace(mla, is_draft=True, non_causal_multi_token_decode=True)
        return replace(spec, **fields)
    common: dict[str, Any] = {
        "block_size": mla.block_size,
        "num_kv_heads": max(1, 16 // tp),
        "head_size": 64,
        "dtype": "bfloat16",
        "is_draft": True,
        "max_tp_shards": 16,
        **fields,
    }
    if kind == "full":
        return FullAttentionSpec(**common)
    return SlidingWindowSpec(**{"sliding_window": 2048, "dcp_sharded": False, **common})


def k3_layers(
    tp: int = 8, draft: str | None = None, fp8: bool = True, **draft_fields: Any
) -> dict[str, KVCacheSpec]:
    """All layers of K3 in model order, the draft's last."""
    kda, mla = k3_target(tp, fp8)
    layers: dict[str, KVCacheSpec] = {}
    for index in range(1, 94):
        is_mla = index % 4 == 0 or index == 93
        layers[f"model.layers.{index - 1}"] = mla if is_mla else kda
    if draft is not None:
        spec = draft_spec(draft, mla, tp, **draft_fields)
        layers |= {f"draft.{i}": spec for i in range(DRAFT_LAYERS)}
    return layers


def k3_context(tp: int = 8, **fields: Any) -> PlanContext:
    """K3 at its full length."""
    return PlanContext(**{"tp_size": tp, "max_model_len": MILLION, **fields})
