"""Real ``config.json`` files as input, and every way in which one can be wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import k3backend
from k3backend.common.errors import InputError
from k3backend.common.model_config import (
    GQADraftConfig,
    MLADraftConfig,
    load_draft,
    load_target,
)

CONFIGS = Path(k3backend.__file__).parent / "data" / "configs"
MISSING = object()


def _bundled(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def _write(tmp_path: Path, document: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    return str(path)


def _changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with one nested field set, or taken away for MISSING."""
    changed = copy.deepcopy(document)
    *outer, last = path.split(".")
    inner = changed
    for key in outer:
        inner = inner[key]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return changed


def test_a_config_by_path_equals_the_bundled_one(tmp_path: Path) -> None:
    bundled = load_target("kimi-k3")
    by_path = load_target(_write(tmp_path, _bundled("kimi-k3")))
    by_folder = load_target(str(tmp_path))
    for loaded in (by_path, by_folder):
        assert loaded.mla_layers == bundled.mla_layers
        assert (loaded.latent_size, loaded.kda_num_heads, loaded.dtype) == (576, 96, "bfloat16")


def test_unknown_fields_of_a_real_config_are_ignored(tmp_path: Path) -> None:
    document = _bundled("kimi-k3")
    document["vision_config"] = {"patch_size": 14}
    document["text_config"]["num_experts"] = 896
    document["text_config"]["rope_scaling"] = None
    assert load_target(_write(tmp_path, document)).num_layers == 93


def test_the_dtype_is_found_under_its_old_name_and_outside_the_text_part(tmp_path: Path) -> None:
    document = _changed(_bundled("kimi-k3"), "text_config.dtype", MISSING)
    document["torch_dtype"] = "torch.float16"
    assert load_target(_write(tmp_path, document)).dtype == "float16"


def test_kimi_linear_has_its_fields_at_the_top() -> None:
    target = load_target("kimi-linear-48b")
    assert (target.num_layers, len(target.mla_layers), target.layer_prefix) == (27, 7, "model")
    assert target.mla_layers[-1] == 26


def test_bundled_drafts_have_the_facts_of_their_sources() -> None:
    facts = {
        "dspark-mla": (5, 64),
        "dspark-mla-96h": (5, 96),
        "dspark-mla-3l": (3, 96),
        "dspark-gqa-window": (5, 64),
        "dspark-gqa-full": (5, 64),
    }
    for name, (layers, heads) in facts.items():
        draft = load_draft(name)
        assert (draft.num_layers, draft.num_attention_heads) == (layers, heads)
        assert draft.target_num_layers == 93
        if isinstance(draft, MLADraftConfig):
            assert draft.latent_size == 576
        else:
            assert (draft.num_kv_heads, draft.head_dim) == (16, 64)


def test_a_mixed_gqa_draft_keeps_the_window_of_each_layer(tmp_path: Path) -> None:
    document = _bundled("dspark-gqa-window")
    document["layer_types"][1] = "full_attention"
    draft = load_draft(_write(tmp_path, document))
    assert isinstance(draft, GQADraftConfig)
    assert draft.windows == (2048, None, 2048, 2048, 2048)


def test_older_qwen_fields_say_which_layers_slide(tmp_path: Path) -> None:
    document = _changed(_bundled("dspark-gqa-window"), "layer_types", MISSING)
    document["max_window_layers"] = 3
    draft = load_draft(_write(tmp_path, document))
    assert isinstance(draft, GQADraftConfig)
    assert draft.windows == (None, None, None, 2048, 2048)


def test_a_dflash_draft_brings_its_own_window(tmp_path: Path) -> None:
    document = _bundled("dspark-gqa-full")
    document["dflash_config"] = {"use_swa": True, "swa_window_size": 512}
    for layer_types in (document["layer_types"], None):
        document["layer_types"] = layer_types
        draft = load_draft(_write(tmp_path, document))
        assert isinstance(draft, GQADraftConfig)
        assert draft.windows == (512,) * 5
    document["dflash_config"] = {"use_swa": True}
    _refused(load_draft, _write(tmp_path, document), "sliding_window")
    document["dflash_config"] = {"use_swa": 1}
    _refused(load_draft, _write(tmp_path, document), "dflash_config.use_swa")


def test_head_dim_may_be_left_to_the_hidden_size(tmp_path: Path) -> None:
    document = _changed(_bundled("dspark-gqa-full"), "head_dim", MISSING)
    draft = load_draft(_write(tmp_path, document))
    assert isinstance(draft, GQADraftConfig)
    assert draft.head_dim == 7168 // 64


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("model_type", "llama", "model_type"),
        ("model_type", MISSING, "model_type is missing"),
        ("model_type", 3, "model_type"),
        ("text_config", MISSING, "text_config is missing"),
        ("text_config", [], "text_config"),
        ("text_config.model_type", "llama", "text_config.model_type is 'llama'"),
        ("text_config.model_type", "kimi_k3", "expected kimi_linear"),
        ("text_config.model_type", 3, "text_config.model_type is 3"),
        ("text_config.num_hidden_layers", 0, "num_hidden_layers"),
        ("text_config.num_hidden_layers", 92, "holds layer 93"),
        ("text_config.num_hidden_layers", 95, "leave out layer 94 and 1 more"),
        ("text_config.num_hidden_layers", 10**9, "num_hidden_layers"),
        ("text_config.num_attention_heads", True, "num_attention_heads is True"),
        ("text_config.num_attention_heads", "96", "num_attention_heads"),
        ("text_config.kv_lora_rank", MISSING, "text_config.kv_lora_rank is missing"),
        ("text_config.kv_lora_rank", None, "kv_lora_rank"),
        ("text_config.kv_lora_rank", 512.0, "kv_lora_rank"),
        ("text_config.qk_rope_head_dim", -64, "qk_rope_head_dim"),
        ("text_config.max_position_embeddings", 2**41, "max_position_embeddings"),
        ("text_config.dtype", "int4", "dtype"),
        ("text_config.dtype", MISSING, "dtype is missing"),
        ("text_config.linear_attn_config", None, "linear_attn_config"),
        ("text_config.linear_attn_config.kda_layers", MISSING, "kda_layers is missing"),
        ("text_config.linear_attn_config.kda_layers", {}, "kda_layers"),
        ("text_config.linear_attn_config.kda_layers", [1, 2, 4], "layer 4 and so does"),
        ("text_config.linear_attn_config.kda_layers", [1, 2, 2], "layer 2 twice"),
        ("text_config.linear_attn_config.kda_layers", [1, 2], "leave out layer 3"),
        ("text_config.linear_attn_config.kda_layers", [0, 1], "holds layer 0"),
        ("text_config.linear_attn_config.kda_layers", ["1"], "kda_layers"),
        ("text_config.linear_attn_config.kda_layers", [True], "kda_layers"),
        ("text_config.linear_attn_config.num_heads", 2**30, "num_heads"),
        ("text_config.linear_attn_config.head_dim", MISSING, "head_dim"),
        ("text_config.linear_attn_config.short_conv_kernel_size", 0, "short_conv_kernel_size"),
        # One tap keeps no earlier token: there would be no convolution state.
        ("text_config.linear_attn_config.short_conv_kernel_size", 1, "short_conv_kernel_size"),
    ],
)
def test_a_wrong_target_config_is_refused_by_field(
    tmp_path: Path, path: str, value: object, named: str
) -> None:
    _refused(load_target, _write(tmp_path, _changed(_bundled("kimi-k3"), path, value)), named)


@pytest.mark.parametrize(
    ("base", "path", "value", "named"),
    [
        ("dspark-mla", "model_type", "kimi_k3", "--target"),
        ("dspark-mla", "num_hidden_layers", MISSING, "num_hidden_layers"),
        ("dspark-mla", "kv_lora_rank", [], "kv_lora_rank"),
        ("dspark-mla", "kv_lora_rank", 0, "kv_lora_rank"),
        ("dspark-mla", "qk_rope_head_dim", MISSING, "qk_rope_head_dim"),
        ("dspark-gqa-full", "num_key_value_heads", MISSING, "num_key_value_heads"),
        ("dspark-gqa-full", "num_key_value_heads", 24, "divisor of num_attention_heads"),
        ("dspark-gqa-full", "head_dim", "64", "head_dim"),
        ("dspark-gqa-full", "layer_types", ["full_attention"], "layer_types names 1 layers"),
        ("dspark-gqa-full", "layer_types", ["linear"] * 5, "layer_types holds"),
        ("dspark-gqa-full", "layer_types", [["full_attention"]] * 5, "layer_types holds"),
        ("dspark-gqa-full", "use_sliding_window", 1, None),
        ("dspark-gqa-window", "sliding_window", None, "sliding_window"),
        ("dspark-gqa-window", "sliding_window", 0, "sliding_window"),
        ("dspark-gqa-window", "use_sliding_window", False, "use_sliding_window"),
        ("dspark-gqa-window", "layer_types", MISSING, "layer_types is missing"),
    ],
)
def test_a_wrong_draft_config_is_refused_by_field(
    tmp_path: Path, base: str, path: str, value: object, named: str | None
) -> None:
    document = _changed(_bundled(base), path, value)
    if named is None:  # the older switch is read only where layer_types does not speak
        del document["layer_types"]
        named = path
    _refused(load_draft, _write(tmp_path, document), named)


def test_a_window_without_a_word_on_the_layers_is_refused(tmp_path: Path) -> None:
    document = _bundled("dspark-gqa-window")
    del document["layer_types"], document["use_sliding_window"]
    _refused(load_draft, _write(tmp_path, document), "layer_types")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": NaN}', '{"a": 1, "a": 2}', "\x00"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    _refused(load_target, str(path), "config.json")


def _refused(load: Any, path: str, named: str) -> None:
    with pytest.raises(InputError) as raised:
        load(path)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
