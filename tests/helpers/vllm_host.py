"""A vLLM 0.33 configuration with MLA layers and decode steps in it, for contract tests.

Everything is vLLM's own: configuration, metadata builders, forward context. Layers hold only what a
builder or a decode reads of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.helpers.decode_cases import SCALE, Case, Inputs, answer

LAYER = "model.layers.3.self_attn.attn"
MAX_REQUESTS = 8


class Host:
    """One vLLM configuration, and layers and steps in it."""

    def __init__(self, folder: Any, *, cache_dtype: str = "fp8", q_len: int = 1) -> None:
        self.config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, max_model_len=1024, dtype="bfloat16"
            ),
            cache_config=CacheConfig(block_size=64, cache_dtype=cache_dtype),
            scheduler_config=SchedulerConfig(
                max_num_seqs=MAX_REQUESTS,
                max_num_batched_tokens=1024,
                max_model_len=1024,
                is_encoder_decoder=False,
            ),
            device_config=DeviceConfig("cpu"),
        )
        if q_len > 1:
            self.config.speculative_config = SimpleNamespace(  # type: ignore[assignment]
                num_speculative_tokens=q_len - 1,
                parallel_drafting=False,
                method="dspark",
                attention_backend=None,
                enable_adaptive_verification=False,
            )
        self.config.cache_config.cache_dtype = cache_dtype  # type: ignore[assignment]

    def impl(self, backend: Any, **changed: Any) -> Any:
        arguments: dict[str, Any] = {
            "num_heads": 12,
            "head_size": 576,
            "scale": SCALE,
            "num_kv_heads": 1,
            "alibi_slopes": None,
            "sliding_window": None,
            "kv_cache_dtype": self.config.cache_config.cache_dtype,
            "logits_soft_cap": None,
            "attn_type": "decoder",
            "kv_sharing_target_layer_name": None,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "qk_head_dim": 192,
            "v_head_dim": 128,
            "kv_b_proj": None,
        }
        with set_current_vllm_config(self.config):
            return backend.get_impl_cls()(**arguments | changed)

    def builder(self, backend: Any, *, draft: bool = False) -> Any:
        layer = SimpleNamespace(
            q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, num_heads=12, impl=SimpleNamespace(num_heads=12),
            non_causal_multi_token_decode=draft,
            prefill_backend=SimpleNamespace(clone=lambda: SimpleNamespace()),
        )  # fmt: skip
        self.config.compilation_config.static_forward_context[LAYER] = layer
        spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8)
        with set_current_vllm_config(self.config):
            return backend.get_builder_cls()(spec, [LAYER], self.config, torch.device("cpu"))

    def metadata(self, backend: Any, inputs: Inputs, **changed: Any) -> Any:
        """A step of these inputs, built by the backend's builder as vLLM's runner has it built."""
        case = inputs.case
        requests = len(case.lens)
        starts = torch.arange(0, requests * case.q_len + 1, case.q_len, dtype=torch.int32)
        dcp = case.cp[0] > 1
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=inputs.causal_lens if dcp else inputs.seq_lens,
            num_reqs=requests,
            num_actual_tokens=requests * case.q_len,
            max_query_len=case.q_len,
            max_seq_len=max(case.lens),
            block_table_tensor=inputs.block_table,
            slot_mapping=torch.zeros(requests * case.q_len, dtype=torch.int64),
            causal=case.causal,
            dcp_local_seq_lens=inputs.seq_lens if dcp else None,
        )
        for name, value in changed.items():
            setattr(common, name, value)
        builder = self.builder(backend, draft=not case.causal)
        if dcp:
            builder.dcp_world_size = case.cp[0]
        return builder.build(0, common)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with set_current_vllm_config(self.config), set_forward_context(None, self.config):
            yield


def layer_of(case: Case) -> Any:
    return SimpleNamespace(_q_scale_float=case.q_scale, _k_scale_float=case.k_scale)


def decode(host: Host, impl: Any, backend: Any, inputs: Inputs, **changed: Any) -> Any:
    metadata = host.metadata(backend, inputs, **changed)
    with host.forward():
        return impl.forward_mqa(inputs.q, inputs.kv_cache, metadata, layer_of(inputs.case))


def close(out: torch.Tensor, inputs: Inputs) -> bool:
    """bfloat16's rounding of a float32 result, half a step, doubled for the accumulation."""
    expected, _ = answer(inputs)
    return torch.allclose(out.double(), expected, rtol=2.0**-8, atol=2.0**-8)
