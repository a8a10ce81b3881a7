"""vLLM's CPU MLA slot, served by this package's planned and split decode.

vLLM's CPU backend keeps prefill and the cache; only the decode is replaced, for one query token per
request and for the several tokens of a speculative step. ``K3BACKEND_CPU=1`` puts it in place of
vLLM's own; ``--attention-backend KIMI_K3_MLA`` selects it by name.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from k3backend.decode import mla_decode
from k3backend.vllm_plugin.decode_batch import (
    announce_decode,
    decode_query_len,
    one_query,
    report_progress,
)


class K3CpuMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's MLA metadata, with the tokens of a speculative step kept in the decode."""

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM


class K3CpuMLABackend(CPUMLABackend):
    """The CPU MLA backend with this package's decode, for any block size."""

    @staticmethod
    def get_name() -> str:
        """The name that it is registered under."""
        return "KIMI_K3_MLA"

    @staticmethod
    def get_impl_cls() -> type[K3CpuMLAImpl]:
        """The layer's implementation."""
        return K3CpuMLAImpl

    @staticmethod
    def get_builder_cls() -> type[K3CpuMLAMetadataBuilder]:
        """The metadata builder."""
        return K3CpuMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any block size; vLLM's own kernel takes 16 alone."""
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Always."""
        return True


class K3CpuMLASlotBackend(K3CpuMLABackend):
    """The same under the name of the slot that it takes, which vLLM's CPU code knows."""

    @staticmethod
    def get_name() -> str:
        """The slot's name."""
        return "CPU_MLA"


class K3CpuMLAImpl(CPUMLAImpl):
    """vLLM's CPU MLA layer; decode goes through the split plan and the combine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; says once per process that this decode is in place."""
        super().__init__(*args, **kwargs)
        announce_decode("reference")

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode the batch's first ``num_decodes`` requests.

        Args:
            q: [decode tokens, heads, 576], or its parts (512 latent, 64 rotary).
            kv_c_and_k_pe_cache: [blocks, block_size, 576].
        Returns:
            out [decode tokens, heads, 512] of q's dtype, and no LSE: one rank holds every key.
        Raises:
            UnsupportedDecodeError: the requests do not have the same number of query tokens.
        """
        q = one_query(q)
        dtype = q.dtype
        if dtype == torch.float16:  # float32 queries read a float16 cache as it is
            q = q.float()
        decode = attn_metadata.decode
        starts = attn_metadata.query_start_loc[: attn_metadata.num_decodes + 1]
        out, _ = mla_decode(
            q,
            kv_c_and_k_pe_cache,
            decode.block_table.to(torch.int32),
            decode.seq_lens.to(torch.int32),
            scale=self.scale,
            q_len=decode_query_len(starts.tolist(), "KIMI_K3_MLA on the CPU"),
            causal=attn_metadata.causal,
            return_lse=False,
            backend="reference",
        )
        report_progress()
        return out.to(dtype), None
