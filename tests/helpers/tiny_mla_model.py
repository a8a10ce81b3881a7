"""A tiny DeepSeek-V2-shaped model with seeded weights at which attention decides the tokens.

Three dense layers of MLA with Kimi-K3's latent and rotary widths. With a dummy load's small weights
even a decode that returns zeros gives the same tokens; these are large enough that it does not.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS = 3
VOCAB = 512
KV_LORA_RANK = 512
ROPE_DIM = 64
NOPE_DIM = 128
V_DIM = 128


def write_model(folder: Path, *, heads: int, rotary: bool, seed: int = 0) -> Path:
    """Write config.json and model.safetensors.

    Args:
        folder: created if missing.
        heads: attention heads; the hidden size is 32 per head.
        rotary: False zeroes the rotary rows of q_proj and kv_a_proj, as Kimi-K3 has no rotary part.
        seed: of the weights.
    Returns:
        folder.
    """
    write_config(folder, heads=heads)
    save_file(_weights(heads, 32 * heads, rotary, seed), folder / "model.safetensors")
    return folder


def write_config(folder: Path, *, heads: int) -> Path:
    """Write config.json alone. Returns folder."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = 32 * heads
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_rope_head_dim": ROPE_DIM,
        "qk_nope_head_dim": NOPE_DIM,
        "v_head_dim": V_DIM,
        "first_k_dense_replace": LAYERS,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _weights(heads: int, hidden: int, rotary: bool, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB, hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(VOCAB, hidden, 3.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        q_proj = normal(heads * (NOPE_DIM + ROPE_DIM), hidden, 2.0)
        kv_a_proj = normal(KV_LORA_RANK + ROPE_DIM, hidden, 2.0)
        if not rotary:
            q_proj.view(heads, NOPE_DIM + ROPE_DIM, hidden)[:, NOPE_DIM:] = 0
            kv_a_proj[KV_LORA_RANK:] = 0
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": q_proj,
            f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": kv_a_proj,
            f"{prefix}.self_attn.kv_a_layernorm.weight": torch.ones(KV_LORA_RANK),
            f"{prefix}.self_attn.kv_b_proj.weight": normal(
                heads * (NOPE_DIM + V_DIM), KV_LORA_RANK, 2.0
            ),
            f"{prefix}.self_attn.o_proj.weight": normal(hidden, heads * V_DIM, 4.0),
            f"{prefix}.mlp.gate_proj.weight": normal(2 * hidden, hidden, 0.5),
            f"{prefix}.mlp.up_proj.weight": normal(2 * hidden, hidden, 0.5),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, 2 * hidden, 0.5),
        }
    return weights


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one word per token id, so that a server can answer in text."""
    words = {f"w{token}": token for token in range(VOCAB)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
