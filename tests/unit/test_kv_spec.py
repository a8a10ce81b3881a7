"""The spec family: pages, memory of a request, predicates, equality, field checks."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from fractions import Fraction
from typing import Any

import pytest
import torch

from k3backend.common import kv_spec as ks
from k3backend.common.errors import SpecError
from k3backend.common.plan_context import PlanContext

GQA: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16"}
MLA: dict[str, Any] = {"block_size": 1536, "num_kv_heads": 1, "head_size": 576, "dtype": "uint8"}
KDA: dict[str, Any] = {
    "block_size": 1536,
    "shapes": ((4608, 10), (12, 128, 128)),
    "dtypes": ("bfloat16", "float32"),
    "num_speculative_blocks": 7,
}
PAGE = 16 * 8 * 128 * 2
EXAMPLES: dict[str, ks.KVCacheSpec] = {
    "full_attention": ks.FullAttentionSpec(**GQA),
    "mla_attention": ks.MLAAttentionSpec(**MLA),
    "hidden_state_cache": ks.HiddenStateCacheSpec(**MLA),
    "rswa": ks.RSWASpec(**GQA, rswa_window=128),
    "chunked_local_attention": ks.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=1024),
    "sliding_window": ks.SlidingWindowSpec(**GQA, sliding_window=1024, dcp_sharded=False),
    "circular_buffer": ks.CircularBufferSpec(**GQA),
    "sliding_window_mla": ks.SlidingWindowMLASpec(**MLA, sliding_window=128, dcp_sharded=False),
    "kpool_tail": ks.KpoolTailSpec(**GQA, sliding_window=4, dcp_sharded=False),
    "mamba": ks.MambaSpec(**KDA),
    "encoder_only_attention": ks.EncoderOnlyAttentionSpec(**GQA),
    "cross_attention": ks.CrossAttentionSpec(**GQA),
    "sink_full_attention": ks.SinkFullAttentionSpec(**GQA, sink_len=4),
}


def test_the_examples_cover_the_family() -> None:
    assert {name: type(spec) for name, spec in EXAMPLES.items()} == ks.SPEC_CLASSES
    assert all(ks.spec_kind_name(spec) == name for name, spec in EXAMPLES.items())


@pytest.mark.parametrize(
    ("kind", "pages"),
    [
        ("full_attention", 6250),
        ("mla_attention", 66),
        ("hidden_state_cache", 66),
        ("rswa", 6250),
        # ceil((1024 + 8192) / 16)
        ("chunked_local_attention", 576),
        # ceil((1023 + 8192) / 16) + 1
        ("sliding_window", 577),
        ("circular_buffer", 1),
        # ceil((127 + 8192) / 1536) + 1
        ("sliding_window_mla", 7),
        ("kpool_tail", 1),
        ("mamba", 9),
        ("encoder_only_attention", 0),
        # ceil(1500 / 16)
        ("cross_attention", 94),
        ("sink_full_attention", 6250),
    ],
)
def test_pages_of_one_request(kind: str, pages: int) -> None:
    context = PlanContext(max_model_len=100_000, max_num_encoder_input_tokens=1500)
    spec = EXAMPLES[kind]
    assert spec.max_memory_usage_bytes(context) == pages * spec.page_size_bytes


def test_bounded_caches_need_no_more_than_the_request() -> None:
    context = PlanContext(max_model_len=100)
    for kind, pages in (("chunked_local_attention", 7), ("sliding_window", 8)):
        spec = EXAMPLES[kind]
        assert spec.max_memory_usage_bytes(context) == pages * spec.page_size_bytes


def test_mamba_memory_follows_the_mode_of_the_context() -> None:
    spec = ks.MambaSpec(**KDA, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=64)
    for mode, pages, columns in (("align", 10, 8), ("none", 8, 8), ("all", 8, 8)):
        context = PlanContext(max_model_len=1536, mamba_cache_mode=mode, tp_size=8, dcp_size=8)
        assert spec.max_memory_usage_bytes(context) == pages * spec.page_size_bytes
        assert spec.max_num_blocks_per_req(context, 1536) == columns
    context = PlanContext(max_model_len=1536)
    assert spec.max_num_blocks_per_req(context, 1537) == 2 + 7


def test_dcp_divides_what_it_shards() -> None:
    context = PlanContext(max_model_len=1 << 20, tp_size=8, dcp_size=8)
    sharded, replicated = ks.MLAAttentionSpec(**MLA), ks.MLAAttentionSpec(**MLA, dcp_sharded=False)
    assert sharded.max_memory_usage_bytes(context) == 86 * sharded.page_size_bytes
    assert replicated.max_memory_usage_bytes(context) == 683 * replicated.page_size_bytes
    assert sharded.max_num_blocks_per_req(context, 1 << 20) == 86
    assert replicated.max_num_blocks_per_req(context, 1 << 20) == 683
    window = ks.SlidingWindowSpec(**GQA, sliding_window=64)
    with pytest.raises(SpecError, match="a window is not sharded over DCP ranks"):
        window.max_memory_usage_bytes(context)


def test_pages() -> None:
    assert EXAMPLES["full_attention"].page_size_bytes == PAGE
    assert EXAMPLES["mla_attention"].page_size_bytes == 884_736
    assert ks.FullAttentionSpec(**GQA, head_size_v=32).page_size_bytes == 16 * 8 * 96 * 2
    assert ks.FullAttentionSpec(**GQA, num_head_slots=1).page_size_bytes == PAGE // 8
    assert ks.FullAttentionSpec(**GQA, state_content_bytes=100).page_size_bytes == 12_800
    compressed = ks.MLAAttentionSpec(**MLA, tokens_per_state=4)
    assert (compressed.num_states, compressed.page_size_bytes) == (384, 221_184)
    several = ks.FullAttentionSpec(**GQA, tokens_per_state=Fraction(1, 4))
    assert (several.num_states, several.page_size_bytes) == (64, 4 * PAGE)
    assert type(several.num_states) is int
    padded = ks.FullAttentionSpec(**GQA, page_size_padded=PAGE + 10)
    assert (padded.page_size_bytes, padded.real_page_size_bytes) == (PAGE + 10, PAGE)
    state = ks.MambaSpec(**KDA, page_size_padded=884_736)
    assert (state.page_size_bytes, state.real_page_size_bytes) == (884_736, 878_592)
    assert state.num_states == 1


def test_an_mla_page_is_padded_to_its_alignment() -> None:
    fields = {**MLA, "block_size": 64}
    spec = ks.MLAAttentionSpec(**fields, alignment=1000)
    assert (spec.page_size_bytes, spec.page_size_padded) == (37_000, 37_000)
    assert spec.copy_with_new_block_size(128).page_size_bytes == 74_000
    # 125 x 576 is a multiple of 1000, so the padding of the old block must go.
    assert spec.copy_with_new_block_size(125).page_size_padded is None
    assert ks.MLAAttentionSpec(**fields, alignment=576).page_size_padded is None
    window = ks.SlidingWindowMLASpec(**fields, sliding_window=8, alignment=1000)
    assert window.copy_with_new_block_size(125).page_size_bytes == 72_000
    explicit = ks.MLAAttentionSpec(**fields, page_size_padded=40_000)
    assert explicit.copy_with_new_block_size(32).page_size_padded == 40_000


def test_stride_alignment() -> None:
    assert ks.MLAAttentionSpec(**MLA).get_block_stride_alignment() == 1
    assert (
        ks.MLAAttentionSpec(**MLA, block_stride_alignment=512).get_block_stride_alignment() == 512
    )
    kernel = ks.MLAAttentionSpec(**MLA, block_stride_alignment=ks.MultipleOf(64))
    assert kernel.get_block_stride_alignment() == 64 * 576
    whole = ks.MLAAttentionSpec(**MLA, block_stride_alignment=ks.MultipleOf(1536))
    assert whole.get_block_stride_alignment() == 1


def test_predicates() -> None:
    ring, tail = EXAMPLES["circular_buffer"], EXAMPLES["kpool_tail"]
    replayed = ks.SlidingWindowMLASpec(**MLA, sliding_window=128, bounded_replay=True)
    assert [s for s in EXAMPLES.values() if not s.prefix_cacheable] == [ring, tail]
    assert [s for s in EXAMPLES.values() if not s.uses_slot_mapping] == [ring, tail]
    assert all(spec.has_layer_views for spec in EXAMPLES.values())
    assert not replayed.prefix_cacheable
    assert (replayed.prefix_replay_tokens, ring.prefix_replay_tokens) == (128, 0)
    unaligned = [s for s in EXAMPLES.values() if s.block_table_token_alignment is None]
    assert unaligned == [ring, EXAMPLES["mamba"]]
    context = PlanContext(max_model_len=5000)
    assert ring.max_num_blocks_per_req(context, 5000) == 1
    assert tail.max_num_blocks_per_req(context, 5000) == 1


def test_hisparse_pages() -> None:
    context = PlanContext(max_model_len=5000, max_in_flight_tokens=100)
    hot = ks.HiSparseHotSpec(block_size=16, page_size=1000, blocks_per_request=3)
    resident = ks.HiSparseResidentSpec(block_size=16, page_size=1000)
    assert hot.max_memory_usage_bytes(context) == 3000
    assert resident.max_memory_usage_bytes(context) == 7000
    for spec in (hot, resident):
        assert not spec.prefix_cacheable
        assert not spec.has_layer_views
    assert not hot.uses_slot_mapping


def test_values_are_equal_hashable_and_copyable() -> None:
    for spec in EXAMPLES.values():
        for twin in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
            assert twin == spec
            assert hash(twin) == hash(spec)
    assert len(set(EXAMPLES.values())) == len(EXAMPLES)
    draft = dataclasses.replace(EXAMPLES["mla_attention"], is_draft=True)
    assert draft == EXAMPLES["mla_attention"]
    assert hash(draft) == hash(EXAMPLES["mla_attention"])
    assert ks.FullAttentionSpec(**{**GQA, "dtype": torch.bfloat16}) == EXAMPLES["full_attention"]
    assert EXAMPLES["mla_attention"] != EXAMPLES["hidden_state_cache"]


@pytest.mark.parametrize("name", ["block_size", "num_kv_heads", "head_size", "dcp_sharded"])
def test_each_field_counts_in_equality(name: str) -> None:
    spec = EXAMPLES["full_attention"]
    value = getattr(spec, name)
    changed = dataclasses.replace(spec, **{name: not value if value is True else value * 2})
    assert changed != spec
    assert hash(changed) != hash(spec)


def test_specs_are_frozen() -> None:
    for spec in EXAMPLES.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            spec.block_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "field", "message"),
    [
        (lambda: ks.FullAttentionSpec(**{**GQA, "block_size": 0}), "block_size", "is 0, expected"),
        (lambda: ks.FullAttentionSpec(**{**GQA, "block_size": -4}), "block_size", "the tokens of"),
        (lambda: ks.FullAttentionSpec(**{**GQA, "block_size": True}), "block_size", "is True"),
        (lambda: ks.FullAttentionSpec(**{**GQA, "block_size": 1.5}), "block_size", "is 1.5"),
        (lambda: ks.FullAttentionSpec(**{**GQA, "head_size": "64"}), "head_size", "is '64'"),
        (lambda: ks.FullAttentionSpec(**{**GQA, "dtype": "fp9"}), "dtype", "is not known"),
        (lambda: ks.FullAttentionSpec(**GQA, kv_quant_mode="FP9"), "kv_quant_mode", "one of NONE"),
        (lambda: ks.FullAttentionSpec(**GQA, kv_quant_mode=1), "kv_quant_mode", "is 1"),
        (lambda: ks.FullAttentionSpec(**GQA, dcp_sharded=1), "dcp_sharded", "True or False"),
        (lambda: ks.FullAttentionSpec(**GQA, is_draft="no"), "is_draft", "True or False"),
        (lambda: ks.FullAttentionSpec(**GQA, max_tp_shards=0), "max_tp_shards", "or None"),
        (lambda: ks.FullAttentionSpec(**GQA, tokens_per_state=0), "tokens_per_state", "is 0"),
        (lambda: ks.FullAttentionSpec(**GQA, tokens_per_state=-1), "tokens_per_state", "is -1"),
        (
            lambda: ks.FullAttentionSpec(**GQA, tokens_per_state=Fraction(3, 2)),
            "tokens_per_state",
            "a Fraction below 1",
        ),
        (lambda: ks.FullAttentionSpec(**GQA, tokens_per_state=32), "block_size", "holds no state"),
        (
            lambda: ks.FullAttentionSpec(**GQA, page_size_padded=PAGE - 1),
            "page_size_padded",
            f"at least the real page of {PAGE} bytes",
        ),
        (
            lambda: ks.FullAttentionSpec(**GQA, block_stride_alignment=0),
            "block_stride_alignment",
            "MultipleOf(tokens)",
        ),
        (lambda: ks.FullAttentionSpec(**GQA, sliding_window=0), "sliding_window", "is 0"),
        (
            lambda: ks.SlidingWindowSpec(**GQA, sliding_window=None),
            "sliding_window",
            "expected an integer >= 1; give",
        ),
        (
            lambda: ks.SlidingWindowSpec(**GQA, sliding_window=8, extra_retained_tokens=-1),
            "extra_retained_tokens",
            ">= 0",
        ),
        (lambda: ks.MLAAttentionSpec(**MLA, cache_role="both"), "cache_role", "one of SPARSE"),
        (lambda: ks.MLAAttentionSpec(**MLA, cache_dtype_str=""), "cache_dtype_str", "non-empty"),
        (lambda: ks.MLAAttentionSpec(**MLA, head_size_v=-1), "head_size_v", ">= 0"),
        (
            lambda: ks.SlidingWindowMLASpec(**MLA, sliding_window=8, model_version="v5"),
            "model_version",
            "None or 'deepseek_v4'",
        ),
        (lambda: ks.RSWASpec(**GQA, rswa_window=0), "rswa_window", "is 0"),
        (lambda: ks.MambaSpec(**{**KDA, "shapes": ()}), "shapes", "one shape per state tensor"),
        (lambda: ks.MambaSpec(**{**KDA, "shapes": ((4, 0), (2,))}), "shapes", "integers >= 1"),
        (lambda: ks.MambaSpec(**{**KDA, "dtypes": ("uint8",)}), "dtypes", "2 dtypes"),
        (lambda: ks.MambaSpec(**{**KDA, "dtypes": ("uint8", "u")}), "dtypes", "is not known"),
        (lambda: ks.MambaSpec(**KDA, page_size_padded=878_591), "page_size_padded", "878592"),
        (lambda: ks.MambaSpec(**KDA, mamba_cache_mode="some"), "mamba_cache_mode", "one of none"),
        (lambda: ks.MambaSpec(**KDA, mamba_type=""), "mamba_type", "one of MAMBA1"),
        (lambda: ks.MambaSpec(**KDA, tokens_per_state=0), "tokens_per_state", "is 0"),
        (lambda: ks.HiSparseResidentSpec(block_size=1, page_size=0), "page_size", "is 0"),
    ],
)
def test_a_bad_field_is_named(make: Any, field: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.field == field
    assert field in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_abstract_spec_says_what_it_lacks() -> None:
    spec = ks.KVCacheSpec(16)
    for name in ("num_heads", "tokens_per_state", "state_content_size_bytes", "page_size_bytes"):
        with pytest.raises(NotImplementedError, match="KVCacheSpec has no"):
            getattr(spec, name)
    assert spec.max_num_blocks_per_req(PlanContext(max_model_len=1), 17) == 2


def test_a_local_spec_becomes_another_class() -> None:
    window = ks.SlidingWindowSpec(**GQA, sliding_window=64, extra_retained_tokens=3)
    full = ks.replace_as(
        window, ks.FullAttentionSpec, drop=("extra_retained_tokens",), block_size=32
    )
    assert full == ks.FullAttentionSpec(**{**GQA, "block_size": 32}, sliding_window=64)
    with pytest.raises(SpecError, match="name it in drop") as caught:
        ks.replace_as(window, ks.FullAttentionSpec)
    assert caught.value.field == "extra_retained_tokens"
    with pytest.raises(SpecError, match="window"):
        ks.replace_as(full, ks.FullAttentionSpec, window=3)


def test_prefill_checkpoint_position() -> None:
    position = ks.get_mamba_prefill_checkpoint_position
    assert position(1024, 64, False) == 960
    assert position(1025, 64, False) == 1024
    assert position(1024, 64, True) == 960
    assert position(1024, 64, False, 65) == 896
    assert position(10, 64, True) == 0


def test_prefill_checkpoint_validity() -> None:
    valid = ks.is_mamba_prefill_checkpoint_valid
    assert valid(64, 400, 128, 64, 64, 64)
    assert not valid(64, 400, 128, 64, 64, None)
    assert not valid(65, 400, 129, 64, 64, 64)
    assert not valid(64, 400, 128, 64, 64, 48)
    assert not valid(64, 128, 128, 64, 64, 64)
    with pytest.raises(SpecError, match="prefill checkpoints"):
        valid(64, 400, 128, 64, 64, 0)
