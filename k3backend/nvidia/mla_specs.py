"""KV cache specs on NVIDIA: the shared builder with what NVIDIA backends want of the cache.

vLLM 0.33 can prefill KDA with FlashKDA, which saves states at multiples of 16 tokens and then keeps
one checkpoint block per KDA group; planning assumes none unless told (``--prefill-checkpoint-blocks
1``: 713 blocks instead of 710 per request of 1,048,576 tokens at TP 8, fp8).
"""

from __future__ import annotations

from k3backend.common.draft_alignment import DraftRepair, align_draft_spec
from k3backend.common.k3_model import Deployment
from k3backend.common.kv_spec import KVCacheSpec
from k3backend.common.layer_specs import (
    VendorCacheFacts,
    draft_specs,
    layer_specs,
    layer_stages,
    target_specs,
)
from k3backend.common.plan_context import KernelBlocks

FACTS = VendorCacheFacts(
    checkpoint_alignment_tokens=16,
    prefill_checkpoint_blocks=0,
    mla_kernel_blocks=KernelBlocks.parse("any"),
    draft_kernel_blocks=KernelBlocks.parse("multiple:16"),
    backend_kernel_blocks={
        "FLASHMLA": KernelBlocks.parse("64"),
        "FLASH_ATTN_MLA": KernelBlocks.parse("multiple:16"),
        "FLASHINFER_MLA": KernelBlocks.parse("32,64"),
        "TOKENSPEED_MLA": KernelBlocks.parse("32,64"),
        "CUTLASS_MLA": KernelBlocks.parse("128"),
        "TRITON_MLA": KernelBlocks.parse("multiple:16"),
        "FLASH_ATTN": KernelBlocks.parse("multiple:16"),
        "FLASHINFER": KernelBlocks.parse("16,32,64"),
        "TRITON_ATTN": KernelBlocks.parse("multiple:16"),
    },
)


def build_target_specs(deployment: Deployment) -> dict[str, KVCacheSpec]:
    """Layer name -> spec of the target's layers, in model order."""
    return target_specs(deployment, FACTS)


def build_draft_specs(deployment: Deployment) -> dict[str, KVCacheSpec]:
    """Layer name -> spec of the draft's layers, in model order; empty without a draft."""
    return draft_specs(deployment, FACTS)


def build_layer_specs(deployment: Deployment) -> dict[str, KVCacheSpec]:
    """Layer name -> spec of all layers: the target's, then the draft's."""
    return layer_specs(deployment, FACTS)


def build_layer_stages(deployment: Deployment) -> dict[str, int]:
    """Layer name -> pipeline stage, for the same layers."""
    return layer_stages(deployment)


__all__ = [
    "FACTS",
    "DraftRepair",
    "align_draft_spec",
    "build_draft_specs",
    "build_layer_specs",
    "build_layer_stages",
    "build_target_specs",
]
