"""From a deployment to the KV cache spec of every layer: one builder for target and draft.

Target MLA and draft MLA come from the same call with the same block, format and replication, so
they merge into one group by construction; only ``non_causal_multi_token_decode`` (and the mark that
it is a draft) differs. The values are those that vLLM 0.33's layers give, with two declarations
that its GQA layers leave out: how many TP shards the cache has, and that a window is not sharded
by context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3backend.common.cache_dtype import CacheDtype
from k3backend.common.k3_model import Deployment, Layer
from k3backend.common.kv_spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MambaType,
    MLAAttentionSpec,
    SlidingWindowSpec,
    replace_as,
)
from k3backend.common.model_config import GQADraftConfig, MLADraftConfig, TargetConfig
from k3backend.common.plan_context import KernelBlocks


@dataclass(frozen=True, slots=True)
class VendorCacheFacts:
    """What a vendor's backends want of the cache.

    Attributes:
        checkpoint_alignment_tokens: where its KDA prefill can save a state inside a prompt.
        prefill_checkpoint_blocks: such states per KDA group that planning assumes.
        mla_kernel_blocks, draft_kernel_blocks: kernel blocks that the default backend of the MLA
            layers (target and MLA draft) and of a GQA draft takes.
        backend_kernel_blocks: the same for each backend of vLLM 0.33 by its name.
    """

    checkpoint_alignment_tokens: int
    prefill_checkpoint_blocks: int
    mla_kernel_blocks: KernelBlocks
    draft_kernel_blocks: KernelBlocks
    backend_kernel_blocks: dict[str, KernelBlocks]


def target_specs(deployment: Deployment, facts: VendorCacheFacts) -> dict[str, KVCacheSpec]:
    """Layer name -> spec of the target's layers, in model order."""
    return _specs(deployment, facts, is_draft=False)


def draft_specs(deployment: Deployment, facts: VendorCacheFacts) -> dict[str, KVCacheSpec]:
    """Layer name -> spec of the draft's layers, in model order; empty without a draft."""
    return _specs(deployment, facts, is_draft=True)


def layer_specs(deployment: Deployment, facts: VendorCacheFacts) -> dict[str, KVCacheSpec]:
    """Layer name -> spec of all layers: the target's, then the draft's."""
    return {**target_specs(deployment, facts), **draft_specs(deployment, facts)}


def layer_stages(deployment: Deployment) -> dict[str, int]:
    """Layer name -> pipeline stage, for all layers."""
    return {layer.name: layer.stage for layer in deployment.layers}


def _specs(
    deployment: Deployment, facts: VendorCacheFacts, *, is_draft: bool
) -> dict[str, KVCacheSpec]:
    block_size = deployment.block_tokens(facts.checkpoint_alignment_tokens)
    built: dict[tuple[str, int | None], KVCacheSpec] = {}
    specs: dict[str, KVCacheSpec] = {}
    for layer in deployment.layers:
        if layer.is_draft != is_draft:
            continue
        key = (layer.kind, layer.sliding_window)
        if key not in built:
            built[key] = _spec(deployment, facts, layer, block_size)
        specs[layer.name] = built[key]
    return specs


def _spec(
    deployment: Deployment, facts: VendorCacheFacts, layer: Layer, block_size: int
) -> KVCacheSpec:
    if layer.kind == "kda":
        return _kda_spec(deployment, facts, block_size)
    if not layer.is_draft:
        return _mla_spec(deployment.target, deployment.cache_dtype, block_size, 1, is_draft=False)
    if isinstance(deployment.draft, GQADraftConfig):
        return _gqa_spec(deployment, deployment.draft, layer.sliding_window, block_size)
    return _mla_spec(
        deployment.draft or deployment.target,
        deployment.draft_cache_dtype,
        block_size,
        _draft_shards(deployment, 1),
        is_draft=True,
    )


def _mla_spec(
    model: TargetConfig | MLADraftConfig,
    cache_dtype: CacheDtype,
    block_size: int,
    max_tp_shards: int | None,
    *,
    is_draft: bool,
) -> MLAAttentionSpec:
    """The spec of an MLA layer, target's or draft's.

    The latent is one head that every TP rank holds whole: one shard, unless told otherwise.
    """
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=model.latent_size,
        dtype=cache_dtype.storage,
        cache_dtype_str=cache_dtype.name,
        kv_quant_mode=cache_dtype.quant_mode,
        state_content_bytes=cache_dtype.packed_token_bytes,
        max_tp_shards=max_tp_shards,
        non_causal_multi_token_decode=is_draft,
        is_draft=is_draft,
    )


def _kda_spec(deployment: Deployment, facts: VendorCacheFacts, block_size: int) -> MambaSpec:
    """The state of a KDA layer, padded to the target's MLA page.

    Without prefix caching of states ("none") one block lasts for the whole request.
    """
    page_bytes = block_size * deployment.mla_token_bytes
    padded = page_bytes != deployment.kda_state_bytes
    keeps_checkpoints = deployment.prefill_checkpoint_blocks > 0
    return MambaSpec(
        block_size=(
            block_size if deployment.mamba_cache_mode == "align" else deployment.max_model_len
        ),
        shapes=deployment.kda_state_shapes,
        dtypes=deployment.kda_state_dtypes,
        page_size_padded=page_bytes if padded else None,
        mamba_type=MambaType.GDN_ATTN,
        mamba_cache_mode=deployment.mamba_cache_mode,
        num_speculative_blocks=deployment.spec_tokens,
        num_prefill_checkpoint_blocks=deployment.prefill_checkpoint_blocks,
        prefill_checkpoint_alignment=(
            facts.checkpoint_alignment_tokens if keeps_checkpoints else None
        ),
    )


def _gqa_spec(
    deployment: Deployment, draft: GQADraftConfig, sliding_window: int | None, block_size: int
) -> KVCacheSpec:
    """The spec of a GQA draft layer: full attention, or a window that keeps only its tokens.

    Context parallelism can deal out tokens only where at least that many ranks hold the same
    heads, and never those of a window.
    """
    cache_dtype = deployment.draft_cache_dtype
    ranks_with_same_heads = max(1, deployment.tp_size // draft.num_kv_heads)
    full = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=max(1, draft.num_kv_heads // deployment.tp_size),
        head_size=draft.head_dim,
        dtype=cache_dtype.storage,
        kv_quant_mode=cache_dtype.quant_mode,
        max_tp_shards=_draft_shards(deployment, draft.num_kv_heads),
        dcp_sharded=ranks_with_same_heads % deployment.dcp_size == 0,
        is_draft=True,
    )
    if sliding_window is None:
        return full
    return replace_as(
        full,
        SlidingWindowSpec,
        drop=("attention_chunk_size", "non_causal"),
        sliding_window=sliding_window,
        dcp_sharded=False,
    )


def _draft_shards(deployment: Deployment, declared: int) -> int | None:
    shards = deployment.draft_max_tp_shards
    return declared if shards == "declared" else shards
