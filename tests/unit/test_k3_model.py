"""The block and page arithmetic of a Kimi-K3 deployment, and what it refuses."""

from __future__ import annotations

import math

import pytest

from k3backend.common.cache_dtype import KV_DTYPES, resolve_cache_dtype
from k3backend.common.errors import InputError
from k3backend.common.k3_model import Deployment, pipeline_stages
from k3backend.common.model_config import BUNDLED_DRAFTS, BUNDLED_TARGETS, load_draft

TP_SIZES = (1, 2, 4, 8, 16)
BLOCKS = {  # 7 draft tokens: (bf16, fp8) blocks in tokens, the page in bytes
    16: (384, 768, 442_368),
    8: (768, 1536, 884_736),
    4: (1536, 3072, 1_769_472),
    2: (3072, 6144, 3_538_944),
    1: (6144, 12288, 7_077_888),
}
STATES_TP8 = {0: 814_080, 4: 850_944, 7: 878_592}
"""Bytes of the KDA state at TP 8 for 0, 4 and 7 draft tokens."""


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_block_and_page_with_seven_draft_tokens(tp_size: int, kv_dtype: str) -> None:
    bf16_block, fp8_block, page_bytes = BLOCKS[tp_size]
    deployment = Deployment.load(draft="dspark-mla", tp_size=tp_size, kv_dtype=kv_dtype)
    assert deployment.spec_tokens == 7
    assert deployment.block_tokens() == (fp8_block if kv_dtype == "fp8" else bf16_block)
    assert deployment.block_tokens() * deployment.mla_token_bytes == page_bytes


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("spec_tokens", [0, 4, 7])
def test_block_is_the_smallest_that_holds_the_state(
    tp_size: int, kv_dtype: str, spec_tokens: int
) -> None:
    deployment = Deployment.load(tp_size=tp_size, kv_dtype=kv_dtype, spec_tokens=spec_tokens)
    # 96 heads x 128: three convolved projections in bf16, one 128 x 128 float32 matrix per head.
    heads = 96 // tp_size
    conv_bytes = 3 * heads * 128 * (3 + spec_tokens) * 2
    state_bytes = conv_bytes + heads * 128 * 128 * 4
    token_bytes = 576 * (1 if kv_dtype == "fp8" else 2)
    block = deployment.block_tokens()
    assert deployment.kda_state_bytes == state_bytes
    assert block % 128 == 0
    assert (block - 128) * token_bytes < state_bytes <= block * token_bytes


@pytest.mark.parametrize(("spec_tokens", "state_bytes"), STATES_TP8.items())
def test_draft_tokens_are_rows_of_the_state(spec_tokens: int, state_bytes: int) -> None:
    assert Deployment.load(spec_tokens=spec_tokens).kda_state_bytes == state_bytes


def test_a_state_without_draft_rows_would_not_fit() -> None:
    """At TP 4, fp8, the block without the rows (2944) is smaller than the state with them."""
    without = Deployment.load(tp_size=4, spec_tokens=0)
    with_rows = Deployment.load(tp_size=4, spec_tokens=7)
    assert without.block_tokens() == 2944
    assert without.block_tokens() * 576 < with_rows.kda_state_bytes
    assert with_rows.block_tokens() == 3072


@pytest.mark.parametrize(
    ("asked", "block"),
    [(16, 1536), (64, 1536), (256, 1536), (768, 1536), (1024, 2048), (1536, 1536), (3072, 3072)],
)
def test_an_asked_block_is_a_granule_that_always_holds_the_state(asked: int, block: int) -> None:
    deployment = Deployment.load(block_size=asked, spec_tokens=7)
    assert deployment.block_tokens() == block
    codes = [code for code, _ in deployment.notes]
    assert codes == ([] if asked == block else ["block-size-raised"])


def test_checkpoints_bring_their_alignment_into_the_block() -> None:
    kept = {"spec_tokens": 7, "prefill_checkpoint_blocks": 1}
    assert Deployment.load(**kept).block_tokens(64) == 1536
    assert Deployment.load(**kept).block_tokens(192) == 1536
    assert Deployment.load(**kept).block_tokens(1000) == math.lcm(128, 1000)
    assert Deployment.load(spec_tokens=7).block_tokens(1000) == 1536
    assert Deployment.load(mamba_cache_mode="none", **kept).block_tokens(1000) == 1536


def test_layers_of_kimi_k3_stand_in_model_order() -> None:
    layers = Deployment.load(draft="dspark-mla").layers
    target = [layer for layer in layers if not layer.is_draft]
    mla = [number for number, layer in enumerate(target, 1) if layer.kind == "mla"]
    assert mla == [*range(4, 93, 4), 93]
    assert len(target) == 93
    assert [layer.kind for layer in layers[93:]] == ["mla"] * 5
    assert len({layer.name for layer in layers}) == 98
    assert layers[0].name == "language_model.model.layers.0.self_attn"
    assert layers[3].name == "language_model.model.layers.3.self_attn.attn"
    assert layers[93].name == "model.layers.93.self_attn"


def test_windows_of_a_gqa_draft_follow_its_layer_types() -> None:
    windowed = Deployment.load(draft="dspark-gqa-window").layers[93:]
    full = Deployment.load(draft="dspark-gqa-full").layers[93:]
    assert [(layer.kind, layer.sliding_window) for layer in windowed] == [("gqa", 2048)] * 5
    assert [(layer.kind, layer.sliding_window) for layer in full] == [("gqa", None)] * 5


def test_pipeline_stages_put_the_remainder_before_the_last_stage() -> None:
    assert [pipeline_stages(93, 2).count(stage) for stage in range(2)] == [47, 46]
    assert [pipeline_stages(95, 4).count(stage) for stage in range(4)] == [24, 24, 24, 23]
    assert [pipeline_stages(27, 4).count(stage) for stage in range(4)] == [7, 7, 7, 6]
    assert [pipeline_stages(93, 4).count(stage) for stage in range(4)] == [23, 23, 24, 23]
    assert list(pipeline_stages(93, 3)) == sorted(pipeline_stages(93, 3))
    assert pipeline_stages(5, 5) == (0, 1, 2, 3, 4)


def test_the_draft_lives_on_the_last_stage() -> None:
    layers = Deployment.load(draft="dspark-mla", pp_size=2).layers
    assert [layer.stage for layer in layers[:93]] == [0] * 47 + [1] * 46
    assert {layer.stage for layer in layers[93:]} == {1}


def test_defaults_come_from_the_target_and_the_draft() -> None:
    alone = Deployment.load()
    assert (alone.spec_tokens, alone.max_model_len) == (0, 1_048_576)
    assert (alone.tp_size, alone.kv_dtype, alone.mamba_cache_mode) == (8, "fp8", "align")
    assert Deployment.load(draft="none").draft is None
    assert Deployment.load("kimi-linear-48b").target.num_layers == 27
    assert Deployment.load(draft="dspark-mla-3l", spec_tokens=5).spec_tokens == 5


def test_every_bundled_config_makes_a_deployment() -> None:
    for target in BUNDLED_TARGETS:
        for draft in ("none", *BUNDLED_DRAFTS):
            deployment = Deployment.load(target, draft, tp_size=4)
            page = deployment.block_tokens() * deployment.mla_token_bytes
            assert page >= deployment.kda_state_bytes


def test_notes_tell_what_is_unusual() -> None:
    assert Deployment.load(draft="dspark-mla").notes == ()
    far = Deployment.load("kimi-linear-48b", "dspark-mla", max_model_len=2_000_000)
    assert [code for code, _ in far.notes] == ["beyond-trained-length", "draft-of-another-target"]


def test_cache_formats_store_what_vllm_stores() -> None:
    stored = {
        name: resolve_cache_dtype(name, "bfloat16", 576) for name in KV_DTYPES if name != "auto"
    }
    assert {name: found.storage.name for name, found in stored.items()} == {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "bfloat16": "bfloat16",
        "float16": "float16",
        "fp8": "uint8",
        "fp8_e4m3": "uint8",
        "fp8_e5m2": "uint8",
        "fp8_inc": "float8_e4m3fn",
        "fp8_ds_mla": "uint8",
    }
    assert {name for name, found in stored.items() if found.quant_mode.name == "NONE"} == {
        "bf16",
        "fp16",
        "half",
        "bfloat16",
        "float16",
    }
    assert stored["fp8_ds_mla"].token_bytes(576) == 656
    assert stored["bf16"].token_bytes(576) == 1152
    auto = resolve_cache_dtype("auto", "float16", 576)
    assert (auto.name, auto.storage.name, auto.quant_mode.name) == ("auto", "float16", "NONE")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tp_size": 0}, "--tp"),
        ({"tp_size": -8}, "--tp"),
        ({"tp_size": 10**9}, "--tp"),
        ({"tp_size": True}, "--tp"),
        ({"tp_size": 8.0}, "--tp"),
        ({"tp_size": 5}, "96"),
        ({"tp_size": 64, "draft": "dspark-mla-96h"}, "--tp"),
        ({"tp_size": 96, "draft": "dspark-mla"}, "query heads"),
        ({"tp_size": 3, "draft": "dspark-gqa-full"}, "--tp"),
        ({"dcp_size": 3}, "--dcp"),
        ({"dcp_size": 16}, "--dcp"),
        ({"pp_size": 0}, "--pp"),
        ({"pp_size": 94}, "--pp"),
        ({"kv_dtype": "fp9"}, "--kv-dtype"),
        ({"kv_dtype": None}, "--kv-dtype"),
        ({"kv_dtype": "nvfp4"}, "--kv-dtype"),
        ({"draft": "dspark-mla", "draft_kv_dtype": "int3"}, "--draft-kv-dtype"),
        ({"draft": "dspark-gqa-full", "kv_dtype": "fp8_ds_mla"}, "--draft-kv-dtype"),
        ({"spec_tokens": -1}, "--spec-tokens"),
        ({"spec_tokens": 10**6}, "--spec-tokens"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"max_model_len": 2**40 + 1}, "--max-model-len"),
        ({"max_model_len": float("nan")}, "--max-model-len"),
        ({"max_in_flight_tokens": 0}, "--max-in-flight-tokens"),
        ({"mamba_cache_mode": "all"}, "--mamba-cache-mode"),
        ({"prefill_checkpoint_blocks": -1}, "--prefill-checkpoint-blocks"),
        ({"block_size": 0}, "--block-size"),
        ({"block_size": 1000}, "--block-size"),
        ({"draft": "dspark-mla", "draft_max_tp_shards": 0}, "--draft-max-tp-shards"),
        ({"draft": "dspark-mla", "draft_max_tp_shards": "many"}, "--draft-max-tp-shards"),
        ({"target": "kimi-k2"}, "did you mean kimi-k3"),
        ({"target": "dspark-mla"}, "--draft"),
        ({"target": ""}, "--target"),
        ({"target": "no/such/config.json"}, "no/such/config.json"),
        ({"draft": "kimi-k3"}, "--target"),
        ({"draft": "dspark"}, "dspark-mla"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(InputError) as raised:
        Deployment.load(**arguments)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tp_beyond_the_kv_heads_replicates_them() -> None:
    draft = load_draft("dspark-gqa-full")
    assert draft.num_attention_heads == 64
    assert Deployment.load(draft="dspark-gqa-full", tp_size=32).tp_size == 32
