"""Merging specs, vLLM's merge with its quirks, and explaining differences."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest

from k3backend.common import kv_merge as km
from k3backend.common import kv_spec as ks
from k3backend.common.errors import InputError, KvMergeError

GQA: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16"}
FULL = ks.FullAttentionSpec(**GQA)
RSWA = ks.RSWASpec(**GQA, rswa_window=128)
SINK = ks.SinkFullAttentionSpec(**GQA, sink_len=4)
WINDOW = ks.SlidingWindowSpec(**GQA, sliding_window=64)
LATENT: dict[str, Any] = {
    "block_size": 1536,
    "num_kv_heads": 1,
    "head_size": 576,
    "dtype": "uint8",
    "cache_dtype_str": "fp8",
    "kv_quant_mode": "FP8_PER_TENSOR",
}
TARGET = ks.MLAAttentionSpec(**LATENT, max_tp_shards=1)
DRAFT = replace(TARGET, is_draft=True, non_causal_multi_token_decode=True)
LATENT_WINDOW = ks.SlidingWindowMLASpec(**LATENT, sliding_window=128)
STATE = ks.MambaSpec(block_size=16, shapes=((8, 8),), dtypes=("float32",))


def _merges(*specs: ks.KVCacheSpec) -> bool:
    """Whether they merge, which must not depend on order."""
    answers = {km.mergeable(order) for order in itertools.permutations(specs)}
    assert len(answers) == 1
    return answers.pop()


def test_a_k3_target_and_its_draft_share_one_spec() -> None:
    merged = km.merge_specs([TARGET] * 24 + [DRAFT] * 5)
    assert isinstance(merged, ks.MLAAttentionSpec)
    assert merged == DRAFT
    assert merged.non_causal_multi_token_decode
    assert merged.is_draft
    assert not km.merge_specs([TARGET, TARGET]).is_draft


def test_full_attention_takes_one_window_or_one_chunk_size() -> None:
    windowed = replace(FULL, sliding_window=64)
    chunked = replace(FULL, attention_chunk_size=64)
    non_causal = replace(FULL, non_causal=True)
    merged = km.merge_specs([FULL, windowed, non_causal])
    assert merged == replace(windowed, non_causal=True)
    assert km.merge_specs([chunked, FULL]) == chunked
    assert not _merges(windowed, replace(FULL, sliding_window=32))
    assert not _merges(chunked, replace(FULL, attention_chunk_size=32))
    assert not _merges(FULL, windowed, chunked)
    with pytest.raises(KvMergeError, match="'attention_chunk_size 64' against 'sliding_window 64'"):
        km.merge_specs([chunked, windowed])
    both = replace(windowed, attention_chunk_size=64)
    assert km.merge_specs([both, replace(both, non_causal=True)]).attention_chunk_size == 64
    for lacking in (FULL, windowed, chunked):
        assert not _merges(both, lacking)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (FULL, RSWA),
        (FULL, SINK),
        (RSWA, SINK),
        (FULL, TARGET),
        (TARGET, ks.HiddenStateCacheSpec(**LATENT, max_tp_shards=1)),
        (FULL, WINDOW),
        (WINDOW, LATENT_WINDOW),
        (FULL, STATE),
    ],
)
def test_classes_do_not_mix(left: ks.KVCacheSpec, right: ks.KVCacheSpec) -> None:
    assert not _merges(left, right)
    with pytest.raises(KvMergeError) as caught:
        km.merge_specs([left, right], ["a", "b"])
    error = caught.value
    assert (error.field, error.layer_names) == ("kind", ("a", "b"))
    assert (error.left, error.right) == (ks.spec_kind_name(left), ks.spec_kind_name(right))


OTHER_VALUES: dict[str, Any] = {
    "block_size": 3072,
    "dcp_sharded": False,
    "block_stride_alignment": 64,
    "max_tp_shards": 2,
    "num_kv_heads": 2,
    "head_size": 512,
    "dtype": "bfloat16",
    "head_size_v": 64,
    "kv_quant_mode": "NVFP4",
    "page_size_padded": 3_000_000,
    "num_head_slots": 3,
    "state_content_bytes": 600,
    "tokens_per_state": 2,
    "cache_dtype_str": "auto",
    "topk_buffer_width": 2048,
    "alignment": 512,
    "model_version": "deepseek_v4",
    "storage_block_size": 64,
    "cache_role": "INDEXER",
    "is_index_group_leader": True,
    "extra_retained_tokens": 1,
    "bounded_replay": True,
}


@pytest.mark.parametrize("spec", [TARGET, LATENT_WINDOW], ids=["full", "window"])
def test_every_field_of_an_mla_spec_keeps_layers_apart(spec: ks.KVCacheSpec) -> None:
    reconciled = {"sliding_window", "attention_chunk_size", "non_causal"}
    names = set(ks.compared_field_names(type(spec)))
    names -= reconciled | {"non_causal_multi_token_decode"}
    assert len(names) >= 18
    for name in sorted(names):
        other = replace(spec, **{name: OTHER_VALUES[name]})
        assert not _merges(spec, other), name
        with pytest.raises(KvMergeError) as caught:
            km.merge_specs([spec, spec, other], ["a", "b", "c"])
        assert name == caught.value.field or name == "alignment"
        assert caught.value.layer_names == ("a", "c")


def test_windows_states_rings_and_chunks_merge_only_when_equal() -> None:
    specs = (
        (WINDOW, {"sliding_window": 32}),
        (WINDOW, {"extra_retained_tokens": 2}),
        (SINK, {"sink_len": 8}),
        (RSWA, {"rswa_window": 8}),
        (STATE, {"num_speculative_blocks": 1}),
        (STATE, {"tp_replicated": True}),
        (STATE, {"shapes": ((4, 16),)}),
        (ks.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=8), {"attention_chunk_size": 9}),
        (ks.CircularBufferSpec(**GQA), {"block_size": 8}),
        (ks.CrossAttentionSpec(**GQA), {"head_size": 8}),
    )
    for spec, change in specs:
        assert _merges(spec, replace(spec))
        assert not _merges(spec, replace(spec, **change)), change


def test_no_spec_is_refused() -> None:
    for function in (
        km.merge_specs,
        km.mergeable,
        km.vllm_merge,
        km.vllm_mergeable,
        km.vllm_uniform,
    ):
        with pytest.raises(InputError, match="specs is empty"):
            function([])


def test_a_new_field_is_kept_and_compared_without_a_rule() -> None:
    @dataclass(frozen=True, kw_only=True)
    class TailedSpec(ks.FullAttentionSpec):
        tail_len: int = 1

    specs = [TailedSpec(**GQA, tail_len=3), TailedSpec(**GQA, tail_len=3, non_causal=True)]
    merged = km.merge_specs(specs)
    assert isinstance(merged, TailedSpec)
    assert merged.tail_len == 3
    assert not _merges(specs[0], TailedSpec(**GQA, tail_len=4))


# What vLLM 0.33.0 does, one test per quirk; tests/vllm compares the same functions with its code.


def _vllm_refuses(specs: list[ks.KVCacheSpec], exception: str, field: str) -> None:
    with pytest.raises(KvMergeError) as caught:
        km.vllm_merge(specs)
    assert (caught.value.vllm_exception, caught.value.field) == (exception, field)
    assert not km.vllm_mergeable(specs)
    if exception == "ValueError":
        with pytest.raises(KvMergeError, match=field):
            km.vllm_uniform(specs)
    else:
        assert not km.vllm_uniform(specs)


def test_quirk_1_full_attention_swallows_its_subclasses() -> None:
    assert km.vllm_merge([FULL, RSWA]) == FULL
    assert km.vllm_merge([FULL, SINK]) == FULL
    assert km.vllm_merge([SINK, RSWA, FULL]) == SINK
    assert km.vllm_merge([SINK, replace(SINK, sink_len=8)]) == SINK
    _vllm_refuses([RSWA, FULL], "AssertionError", "kind")
    _vllm_refuses([RSWA, replace(RSWA, rswa_window=8)], "AssertionError", "rswa_window")


def test_quirk_2_two_windows_end_the_uniform_probe() -> None:
    windows = [replace(FULL, sliding_window=64), replace(FULL, sliding_window=32)]
    _vllm_refuses([*windows], "ValueError", "sliding_window")
    _vllm_refuses([windows[0], replace(windows[1], head_size=32)], "ValueError", "sliding_window")
    chunks = [replace(FULL, attention_chunk_size=64), replace(SINK, attention_chunk_size=32)]
    _vllm_refuses([*chunks], "ValueError", "attention_chunk_size")
    _vllm_refuses([windows[0], TARGET, windows[1]], "AssertionError", "kind")


def test_quirk_3_a_window_and_a_chunk_size_refuse() -> None:
    both = replace(FULL, sliding_window=64, attention_chunk_size=64)
    _vllm_refuses([both], "AssertionError", "sliding_window")
    pair: list[ks.KVCacheSpec] = [
        replace(FULL, sliding_window=64),
        replace(FULL, attention_chunk_size=64),
    ]
    _vllm_refuses(pair, "AssertionError", "sliding_window")


def test_quirks_4_and_5_a_forgotten_field_refuses_even_a_single_layer() -> None:
    _vllm_refuses([replace(SINK, tokens_per_state=2)], "AssertionError", "tokens_per_state")
    _vllm_refuses([replace(TARGET, head_size_v=64)], "AssertionError", "head_size_v")
    assert km.mergeable([replace(SINK, tokens_per_state=2)])
    assert km.mergeable([replace(TARGET, head_size_v=64)])


def test_quirk_6_mla_drops_what_it_does_not_compare() -> None:
    odd = replace(TARGET, sliding_window=8, non_causal=True, alignment=576)
    assert km.vllm_merge([odd, TARGET]) == TARGET
    hidden = ks.HiddenStateCacheSpec(**LATENT, max_tp_shards=1)
    assert type(km.vllm_merge([hidden, TARGET])) is ks.HiddenStateCacheSpec
    assert type(km.vllm_merge([TARGET, hidden])) is ks.MLAAttentionSpec
    assert not _merges(TARGET, odd)


def test_quirk_7_a_latent_window_takes_other_formats() -> None:
    other = replace(
        LATENT_WINDOW, head_size=192, dtype="bfloat16", block_size=64, kv_quant_mode="NONE"
    )
    reset = replace(LATENT_WINDOW, kv_quant_mode="NONE")
    assert km.vllm_merge([LATENT_WINDOW, other]) == reset
    assert km.vllm_merge([other, LATENT_WINDOW]) == other
    assert not _merges(LATENT_WINDOW, other)


def test_quirk_8_custom_is_octave() -> None:
    custom = replace(FULL, kv_quant_mode="CUSTOM")
    octave = replace(FULL, kv_quant_mode="OCTAVE_K3V4")
    assert km.vllm_mergeable([custom, octave])
    assert km.vllm_same_key(custom) == octave
    assert km.vllm_same_key(FULL) is FULL
    assert km.vllm_same_key(STATE) is STATE
    assert not _merges(custom, octave)


def test_quirk_9_the_draft_mark_is_lost() -> None:
    assert not km.vllm_merge([DRAFT, TARGET]).is_draft
    state = replace(STATE, is_draft=True)
    assert km.vllm_merge([state, STATE]).is_draft


def test_the_k3_draft_merges_in_vllm_too() -> None:
    assert km.vllm_uniform([TARGET, DRAFT])
    assert km.vllm_merge([TARGET, DRAFT]) == DRAFT
    with pytest.raises(KvMergeError, match=r"max_tp_shards is 1 against None \(layers t, d\)"):
        km.vllm_merge([TARGET, replace(DRAFT, max_tp_shards=None)], ["t", "d"])


def _kinds(left: ks.KVCacheSpec, right: ks.KVCacheSpec) -> dict[str, tuple[str, bool]]:
    return {d.field: (d.kind.value, d.blocks) for d in km.explain_difference(left, right)}


def test_an_undeclared_shard_count_is_a_matter_of_sharing() -> None:
    differences = km.explain_difference(TARGET, replace(DRAFT, max_tp_shards=None))
    assert [(d.field, d.left, d.right) for d in differences] == [
        ("max_tp_shards", 1, None),
        ("non_causal_multi_token_decode", False, True),
    ]
    assert _kinds(TARGET, replace(DRAFT, max_tp_shards=None)) == {
        "max_tp_shards": ("sharing", True),
        "non_causal_multi_token_decode": ("policy", False),
    }


def test_equal_specs_have_no_difference() -> None:
    assert km.explain_difference(TARGET, replace(TARGET, is_draft=True)) == []


@pytest.mark.parametrize(
    ("left", "right", "kinds"),
    [
        (TARGET, replace(TARGET, dcp_sharded=False), {"dcp_sharded": ("sharing", True)}),
        (STATE, replace(STATE, tp_replicated=True), {"tp_replicated": ("sharing", True)}),
        (TARGET, replace(TARGET, head_size=512), {"head_size": ("format", True)}),
        (TARGET, replace(TARGET, block_size=64), {"block_size": ("format", True)}),
        (
            TARGET,
            replace(TARGET, dtype="bfloat16", kv_quant_mode="NONE", cache_dtype_str="auto"),
            {
                "dtype": ("format", True),
                "kv_quant_mode": ("format", True),
                "cache_dtype_str": ("format", True),
            },
        ),
        (WINDOW, replace(WINDOW, sliding_window=8), {"sliding_window": ("policy", True)}),
        (
            LATENT_WINDOW,
            replace(LATENT_WINDOW, bounded_replay=True),
            {"bounded_replay": ("policy", True)},
        ),
        (FULL, replace(FULL, sliding_window=8), {"sliding_window": ("policy", False)}),
        (
            replace(FULL, attention_chunk_size=8),
            replace(FULL, sliding_window=8),
            {"sliding_window": ("policy", True), "attention_chunk_size": ("policy", True)},
        ),
        (FULL, WINDOW, {"kind": ("policy", True), "sliding_window": ("policy", True)}),
        (
            FULL,
            STATE,
            {
                "kind": ("format", True),
                "dcp_sharded": ("sharing", True),
                "tokens_per_state": ("format", True),
            },
        ),
        (TARGET, replace(TARGET, cache_dtype_str="fp8_e4m3"), {"cache_dtype_str": ("label", True)}),
        (
            TARGET,
            replace(TARGET, block_stride_alignment=ks.MultipleOf(64)),
            {"block_stride_alignment": ("label", True)},
        ),
        (
            replace(TARGET, block_stride_alignment=ks.MultipleOf(32)),
            replace(TARGET, block_stride_alignment=ks.MultipleOf(64)),
            {"block_stride_alignment": ("label", True)},
        ),
        (
            replace(TARGET, block_stride_alignment=64),
            replace(TARGET, block_stride_alignment=ks.MultipleOf(64)),
            {"block_stride_alignment": ("format", True)},
        ),
        (
            TARGET,
            replace(TARGET, block_stride_alignment=5000),
            {"block_stride_alignment": ("format", True)},
        ),
        (TARGET, replace(TARGET, page_size_padded=884_736), {"page_size_padded": ("label", True)}),
        (TARGET, replace(TARGET, page_size_padded=900_000), {"page_size_padded": ("format", True)}),
        (TARGET, replace(TARGET, alignment=576), {"alignment": ("label", True)}),
        (FULL, replace(FULL, num_head_slots=8), {"num_head_slots": ("label", True)}),
        (FULL, replace(FULL, state_content_bytes=256), {"state_content_bytes": ("label", True)}),
        (FULL, replace(FULL, state_content_bytes=128), {"state_content_bytes": ("format", True)}),
    ],
)
def test_differences_and_their_kinds(
    left: ks.KVCacheSpec, right: ks.KVCacheSpec, kinds: dict[str, tuple[str, bool]]
) -> None:
    assert _kinds(left, right) == kinds
    assert _kinds(right, left) == kinds
    assert km.mergeable([left, right]) == (not any(blocks for _, blocks in kinds.values()))
