"""The MLA attention backend of both GPU vendors: what it states about itself, and its layer.

vLLM's common MLA classes keep prefill, the cache and the up-projection. The decode of a layer is
one vendor object (``KvBalancedDecode``) that claims its memory while the layer is built.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf, max_decode_query_len
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from k3backend.common.attention_reference import HEAD_DIM
from k3backend.common.decode_checks import MAX_HEADS, MAX_PLANNED_REQUESTS, MAX_Q_LEN
from k3backend.common.errors import UnsupportedDecodeError
from k3backend.common.layer_config import CACHE_DTYPES, DecodeConfig
from k3backend.common.layer_decode import BalancedDecode
from k3backend.vllm_plugin import compat
from k3backend.vllm_plugin.decode_batch import announce_decode, one_query

OTHER = "choose another --attention-backend"
REMEDIES = {
    "head_size not supported": f"the latent and rotary widths must sum to {HEAD_DIM}: {OTHER}",
    "dtype not supported": "set --dtype bfloat16",
    "kv_cache_dtype not supported": "set --kv-cache-dtype auto, bfloat16, fp8 or fp8_e4m3",
    "partial multimodal token full attention not supported": OTHER,
    "non-MLA not supported": f"this decode is for MLA layers alone: {OTHER}",
    "attention sinks not supported": f"this decode has no sinks: {OTHER}",
    "sparse not supported": f"this decode reads every key: {OTHER}",
    "per-head quant scales not supported": OTHER,
    "compute capability not supported": "choose --attention-backend TRITON_MLA",
    "sliding window not supported": f"this decode has no window: {OTHER}",
    "R-SWA not supported": f"this decode has no window: {OTHER}",
    "batch invariance not supported": "unset VLLM_BATCH_INVARIANT: splits follow the batch",
    "PCP not supported": "set --prefill-context-parallel-size 1",
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification": (
        'set "enable_adaptive_verification": false in --speculative-config'
    ),
}
"""What to do about the reasons that vLLM gives without saying it."""


@dataclass
class K3MLADecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's decode metadata and, on the host, where each request's query tokens start.

    Attributes:
        query_start_loc_cpu: [requests + 1] int32, on the host.
        interleave: keys that a DCP rank holds in a row.
    """

    query_start_loc_cpu: torch.Tensor | None = None
    interleave: int = 1


@dataclass
class K3MLAMetadata(MLACommonMetadata[K3MLADecodeMetadata]):
    """vLLM's MLA metadata with the decode part above."""


class K3MLAMetadataBuilder(MLACommonMetadataBuilder[K3MLAMetadata]):
    """vLLM's builder, told what this decode can do.

    Every request of a decode batch has the same number of query tokens; causal batches and
    non-causal draft blocks, both also under DCP; captured as uniform batches.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            metadata_cls=K3MLAMetadata,
            # What this means there: several causal tokens per request are right under DCP.
            supports_dcp_with_varlen=True,
        )

    def _build_decode(self, **parts: Any) -> K3MLADecodeMetadata:
        return K3MLADecodeMetadata(
            block_table=parts["block_table_tensor"],
            seq_lens=parts["seq_lens_device"],
            dcp_tot_seq_lens=parts["dcp_tot_seq_lens_device"],
            query_start_loc_cpu=parts["query_start_loc_cpu"],
            interleave=int(self.vllm_config.parallel_config.cp_kv_cache_interleave_size),
        )


class K3MLABackend(MLACommonBackend):
    """What vLLM asks before it takes a backend; the same for both vendors where not overridden."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The name that it is registered under."""
        return "KIMI_K3_MLA"

    @staticmethod
    def get_builder_cls() -> type[K3MLAMetadataBuilder]:
        """The metadata builder."""
        return K3MLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any: the kernels address tokens through the block table, powers of two or not."""
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Always."""
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """512 latent and 64 rotary."""
        return [HEAD_DIM]

    @classmethod
    def supports_non_causal(cls) -> bool:
        """The mask is an argument of the kernel."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: query lengths are read on the host, where adaptive verification does not change."""
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """vLLM's reasons against this backend, each with what to change, and the limits' own."""
        found = super().validate_configuration(*args, **kwargs)
        reasons = [f"{reason} ({REMEDIES[reason]})" if reason in REMEDIES else reason
                   for reason in found]  # fmt: skip
        return reasons + size_problems(get_current_vllm_config())


def size_problems(config: VllmConfig) -> list[str]:
    """The decode's limits that a configuration breaks, each with the option to change."""
    reasons = []
    requests = config.scheduler_config.max_num_seqs
    if requests > MAX_PLANNED_REQUESTS:
        reasons.append(
            f"max_num_seqs is {requests}, at most {MAX_PLANNED_REQUESTS} requests are planned at "
            f"once: set --max-num-seqs {MAX_PLANNED_REQUESTS}"
        )
    tokens = max_decode_query_len(config)
    if tokens > MAX_Q_LEN:
        reasons.append(
            f"a step has up to {tokens} query tokens per request, at most {MAX_Q_LEN} are "
            "decoded: lower num_speculative_tokens in --speculative-config"
        )
    parallel = config.parallel_config
    dcp = parallel.decode_context_parallel_size
    model = config.model_config
    heads = model.get_num_attention_heads(parallel) * dcp if model is not None else 0
    if heads > MAX_HEADS:
        reasons.append(
            f"{heads} query heads reach one rank ({heads // dcp} x DCP {dcp}), at most "
            f"{MAX_HEADS} are decoded: raise --tensor-parallel-size or lower "
            "--decode-context-parallel-size"
        )
    return reasons


class K3MLAImpl(MLACommonImpl[K3MLAMetadata]):
    """One MLA layer. A vendor says which decode object it owns."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    lse_base_on_e: bool = False  # base 2: DCP's combine takes exp2 of it

    platform: ClassVar[str]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        """As every MLA implementation of vLLM. Claims the decode's memory in the current lane.

        Raises:
            UnsupportedDecodeError: the layer wants what this decode has not; every reason.
            WorkspaceError: the workspace is locked already.
        """
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        wanted = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        reasons = [f"{name} is {value}, expected None" for name, value in wanted.items() if value]
        if attn_type != "decoder":
            reasons.append(f"attn_type is {attn_type!r}, expected 'decoder'")
        if reasons:
            raise UnsupportedDecodeError(
                "KIMI_K3_MLA", [*reasons, "choose another --attention-backend for this model"]
            )
        vllm_config = get_current_vllm_config()
        self._interleave = int(vllm_config.parallel_config.cp_kv_cache_interleave_size)
        self.balanced = self._claim_decode(vllm_config)
        announce_decode(self.platform)

    @abstractmethod
    def make_decode(self, config: DecodeConfig) -> BalancedDecode:
        """The vendor's decode object for ``self.num_heads``."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: K3MLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode the batch's first requests.

        Args:
            q: [decode tokens, heads x DCP, 576], fp8 (divided by q_scale) over an fp8 cache, else
                bfloat16; or its parts (512 latent, 64 rotary).
            kv_c_and_k_pe_cache: [blocks, block_size, 576]; uint8 is read as fp8.
        Returns:
            out [decode tokens, heads x DCP, 512] bfloat16, in the latent space.
            lse [decode tokens, heads x DCP] float32, base 2, under DCP; else None.
        Raises:
            UnsupportedDecodeError: every reason why the batch cannot be decoded.
            WorkspaceError: the shape appears first inside graph capture.
        """
        if attn_metadata.decode is not None:
            self._interleave = attn_metadata.decode.interleave
        return self.balanced.decode(self, one_query(q), kv_c_and_k_pe_cache, attn_metadata, layer)

    def _claim_decode(self, vllm_config: VllmConfig) -> BalancedDecode:
        config = replace(
            decode_config(vllm_config, self.dcp_world_size, self.kv_cache_dtype),
            # A disaggregated start changes it after the model is built. A draft's layers are built
            # with a copy of the parallel configuration, so the step's metadata says it.
            interleave=lambda: self._interleave,
        )
        claimed = [self.make_decode(config) for _ in compat.each_micro_batch(config.workspace)]
        return claimed[0]


def decode_config(
    vllm_config: VllmConfig, dcp_world_size: int, kv_cache_dtype: str
) -> DecodeConfig:
    """Sizes and services that the decode of one layer takes from vLLM.

    Raises:
        WorkspaceError: vLLM has no workspace manager yet.
    """
    dcp = max(dcp_world_size, 1)
    longest = vllm_config.model_config.max_model_len
    run = _longest_run(vllm_config)
    device = vllm_config.device_config.device
    return DecodeConfig(
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        max_q_len=max_decode_query_len(vllm_config),
        device=device,
        dcp_size=dcp,
        q_dtype="fp8" if is_quantized_kv_cache(kv_cache_dtype) else "bf16",
        # A rank holds at most its share and one run of keys.
        max_kv_tokens=min(longest, -(-longest // dcp) + run),
        max_interleave=run if dcp > 1 else 0,
        workspace=compat.workspace_manager(),
        forward_context=_forward_context,
    )


def _longest_run(vllm_config: VllmConfig) -> int:
    """The largest DCP interleave that a start may still choose, in tokens.

    A disaggregated start raises it after the layers are built, to ``dcp_kv_cache_interleave_size``
    or to the smallest block of a group.
    """
    parallel = vllm_config.parallel_config
    return max(
        parallel.cp_kv_cache_interleave_size,
        parallel.dcp_kv_cache_interleave_size,
        vllm_config.cache_config.block_size or 1,
    )


def _forward_context() -> object:
    """The running forward, or None outside of one."""
    return get_forward_context() if is_forward_context_available() else None
