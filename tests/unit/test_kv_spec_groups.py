"""Uniform groups, custom classes, kinds, and the group and config types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from k3backend.common import kv_spec as ks
from k3backend.common.errors import InputError, PlanError, ShapeError, SpecError
from k3backend.common.plan_context import PlanContext

GQA: dict[str, Any] = {"block_size": 64, "num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16"}
FULL = ks.FullAttentionSpec(**GQA)
LATENT = ks.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="uint8")
WINDOW = ks.SlidingWindowSpec(**GQA, sliding_window=128)
LATENT_WINDOW = ks.SlidingWindowMLASpec(
    block_size=64, num_kv_heads=1, head_size=576, dtype="uint8", sliding_window=128
)
STATE = ks.MambaSpec(block_size=64, shapes=((8, 8),), dtypes=("float32",))
CHUNKED = ks.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=128)
TAIL = ks.KpoolTailSpec(**GQA, sliding_window=4)


def _uniform(*specs: ks.KVCacheSpec) -> bool:
    named = {f"l{index}": spec for index, spec in enumerate(specs)}
    return ks.UniformTypeKVCacheSpecs.is_uniform_type(named)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (FULL, LATENT),
        (LATENT, FULL),
        (FULL, dataclasses.replace(FULL, num_kv_heads=2)),
        (FULL, ks.RSWASpec(**GQA, rswa_window=8)),
        (FULL, ks.SinkFullAttentionSpec(**GQA, sink_len=8)),
        (WINDOW, dataclasses.replace(WINDOW, num_kv_heads=2)),
        (CHUNKED, dataclasses.replace(CHUNKED, num_kv_heads=2)),
        (TAIL, dataclasses.replace(TAIL, sliding_window=5)),
        (STATE, dataclasses.replace(STATE, mamba_type="LINEAR")),
    ],
)
def test_layers_that_need_the_same_slots_are_uniform(
    left: ks.KVCacheSpec, right: ks.KVCacheSpec
) -> None:
    assert _uniform(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (FULL, dataclasses.replace(FULL, block_size=32)),
        (FULL, dataclasses.replace(FULL, dcp_sharded=False)),
        (FULL, WINDOW),
        (WINDOW, FULL),
        (FULL, STATE),
        (WINDOW, dataclasses.replace(WINDOW, sliding_window=64)),
        (LATENT_WINDOW, WINDOW),
        (LATENT_WINDOW, dataclasses.replace(LATENT_WINDOW, bounded_replay=True)),
        (CHUNKED, dataclasses.replace(CHUNKED, attention_chunk_size=64)),
        (TAIL, WINDOW),
        (STATE, dataclasses.replace(STATE, num_speculative_blocks=1)),
        (STATE, dataclasses.replace(STATE, num_prefill_checkpoint_blocks=1)),
        (STATE, dataclasses.replace(STATE, prefill_checkpoint_alignment=64)),
        (STATE, dataclasses.replace(STATE, page_size_padded=512)),
        (STATE, dataclasses.replace(STATE, tp_replicated=True)),
    ],
)
def test_layers_that_need_other_slots_are_not(left: ks.KVCacheSpec, right: ks.KVCacheSpec) -> None:
    assert not _uniform(left, right)
    assert ks.UniformTypeKVCacheSpecs.from_specs({"a": left, "b": right}) is None


def test_a_uniform_group_adds_pages_and_needs_the_most_blocks() -> None:
    sparse = dataclasses.replace(LATENT, cache_role="INDEXER", head_size=128)
    group = ks.UniformTypeKVCacheSpecs.from_specs(
        {"a": FULL, "b": LATENT, "c": LATENT, "d": sparse}
    )
    assert group is not None
    assert group.page_size_bytes == 64 * (2048 + 576 + 576 + 128)
    context = PlanContext(max_model_len=1000)
    assert group.max_memory_usage_pages(context) == 16
    assert group.max_memory_usage_bytes(context) == 16 * group.page_size_bytes
    assert group.max_num_blocks_per_req(context, 1000) == 16
    assert group.get_max_layers_per_page_size() == 2
    assert ks.get_kv_cache_spec_kind(group) is ks.KVCacheSpecKind.FULL_ATTENTION
    assert ks.spec_kind_name(group) == "full_attention"
    assert ks.is_full_attention_spec(group)
    assert list(ks.iter_layer_specs(group)) == [FULL, LATENT, LATENT, sparse]
    twin = ks.UniformTypeKVCacheSpecs(64, dict(group.kv_cache_specs))
    assert group == twin
    assert hash(group) == hash(twin)
    assert group != ks.UniformTypeKVCacheSpecs(64, {"a": FULL})


def test_a_uniform_group_needs_one_number_of_columns() -> None:
    replicated = dataclasses.replace(FULL, dcp_sharded=False)
    group = ks.UniformTypeKVCacheSpecs(64, {"a": FULL, "b": replicated})
    context = PlanContext(max_model_len=6400, tp_size=4, dcp_size=4)
    with pytest.raises(PlanError, match="layer a needs 25 columns and layer b needs 100") as caught:
        group.max_num_blocks_per_req(context, 6400)
    assert caught.value.layer_name == "b"


def test_an_empty_group_and_a_class_without_base_are_refused() -> None:
    with pytest.raises(SpecError, match="expected at least one layer"):
        ks.UniformTypeKVCacheSpecs.is_uniform_type({})
    with pytest.raises(SpecError, match="expected at least one"):
        ks.UniformTypeKVCacheSpecs(16, {})
    with pytest.raises(SpecError, match="expected a KVCacheSpec"):
        ks.UniformTypeKVCacheSpecs(16, {"a": 3})  # type: ignore[dict-item]
    with pytest.raises(SpecError, match="EncoderOnlyAttentionSpec takes part in no group"):
        _uniform(ks.EncoderOnlyAttentionSpec(**GQA))


@pytest.fixture
def custom_class() -> Iterator[type[ks.FullAttentionSpec]]:
    @ks.register_kv_cache_spec(uniform_type_base_spec=ks.FullAttentionSpec)
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class TailedSpec(ks.FullAttentionSpec):
        tail_len: int = 1

    yield TailedSpec
    del ks.KVCacheSpecRegistry._bases[TailedSpec]


def test_a_registered_class_stands_with_its_base(
    custom_class: type[ks.FullAttentionSpec],
) -> None:
    custom: Any = custom_class
    assert _uniform(FULL, custom(**GQA, tail_len=3))
    assert custom(**GQA) != custom(**GQA, tail_len=3)
    assert hash(custom(**GQA)) == hash(custom(**GQA))
    assert ks.get_kv_cache_spec_kind(custom(**GQA)) is ks.KVCacheSpecKind.FULL_ATTENTION
    with pytest.raises(SpecError, match="tail_len is 0, expected an integer >= 1"):
        custom(**GQA, tail_len=0)
    ks.KVCacheSpecRegistry.register(custom, ks.FullAttentionSpec)
    with pytest.raises(SpecError, match="register a class once"):
        ks.KVCacheSpecRegistry.register(custom, custom)
    with pytest.raises(SpecError, match="does not derive from its base"):
        ks.KVCacheSpecRegistry.register(custom, ks.MambaSpec)


def test_kinds_and_windows() -> None:
    kind = ks.get_kv_cache_spec_kind
    assert kind(LATENT) is ks.KVCacheSpecKind.MLA_ATTENTION
    assert kind(LATENT_WINDOW) is ks.KVCacheSpecKind.SLIDING_WINDOW_MLA
    assert kind(ks.RSWASpec(**GQA, rswa_window=8)) is ks.KVCacheSpecKind.FULL_ATTENTION
    assert kind(TAIL) is ks.KVCacheSpecKind.SLIDING_WINDOW
    assert kind(ks.CircularBufferSpec(**GQA)) is ks.KVCacheSpecKind.UNKNOWN
    mixed = ks.UniformTypeKVCacheSpecs(64, {"a": FULL, "b": STATE})
    assert kind(mixed) is ks.KVCacheSpecKind.UNKNOWN
    assert not ks.is_full_attention_spec(mixed)
    window = ks.get_kv_cache_spec_sliding_window
    assert window(WINDOW) == 128
    assert window(dataclasses.replace(FULL, sliding_window=128)) is None
    assert window(ks.UniformTypeKVCacheSpecs(64, {"a": WINDOW, "b": LATENT_WINDOW})) == 128
    assert window(ks.UniformTypeKVCacheSpecs(64, {"a": WINDOW, "b": FULL})) is None


def _config(*groups: ks.KVCacheGroupSpec, **fields: Any) -> ks.KVCacheConfig:
    return ks.KVCacheConfig(10, [], list(groups), **fields)


def test_transfer_groups() -> None:
    ring = ks.CircularBufferSpec(**GQA)
    config = _config(
        ks.KVCacheGroupSpec(["a", "b"], FULL),
        ks.KVCacheGroupSpec(["c"], FULL, enable_kv_transfer=False),
        ks.KVCacheGroupSpec(["d"], ring),
        ks.KVCacheGroupSpec(["e"], FULL, host_resident=True),
    )
    assert config.transfer_group_ids == (0, 2, 3)
    assert [group.layer_names for group in config.transfer_groups] == [["a", "b"], ["d"], ["e"]]
    assert config.transfer_group_index_by_layer == {"a": 0, "b": 0, "d": 1, "e": 2}
    assert config.prefix_cacheable_group_ids == (0, 3)
    assert [group.layer_names for group in config.prefix_cacheable_groups] == [["a", "b"], ["e"]]
    assert config.host_group_ids == (3,)
    assert config.select_transfer_block_ids([[1], [2], [3], [4]]) == ([1], [3], [4])
    for wrong in ([], [[1]] * 3, [[1]] * 5):
        with pytest.raises(InputError, match=f"has {len(wrong)} entries, expected 4"):
            config.select_transfer_block_ids(wrong)


def test_host_pool_blocks() -> None:
    device = ks.KVCacheTensor(100, ["a"], 10, 10)
    host = ks.KVCacheTensor(100, ["b"], 10, 10, host_resident=True)
    config = _config(hisparse_host_num_blocks=99)
    assert (config.num_blocks_of(device), config.num_blocks_of(host)) == (10, 99)
    with pytest.raises(InputError, match="hisparse_host_num_blocks is None"):
        _config().num_blocks_of(host)


@pytest.mark.parametrize(
    ("specs", "mamba", "mixed"),
    [
        ([FULL, WINDOW], False, False),
        ([FULL, LATENT], False, True),
        ([FULL, dataclasses.replace(FULL, kv_quant_mode="NVFP4")], False, True),
        ([FULL, STATE], True, False),
        ([ks.UniformTypeKVCacheSpecs(64, {"a": FULL, "b": LATENT})], False, True),
    ],
)
def test_zeroing(specs: list[ks.KVCacheSpec], mamba: bool, mixed: bool) -> None:
    config = _config(*(ks.KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)))
    assert config.has_mamba_layers == mamba
    assert config.has_mixed_precision_kv_cache == mixed
    assert config.needs_kv_cache_zeroing == (mamba or mixed)


def test_host_groups_do_not_mix_precisions() -> None:
    config = _config(
        ks.KVCacheGroupSpec(["a"], FULL), ks.KVCacheGroupSpec(["b"], LATENT, host_resident=True)
    )
    assert not config.needs_kv_cache_zeroing


def test_group_kernel_blocks_is_a_view() -> None:
    cache = torch.arange(12 * 3).view(12, 3)
    grouped = ks.group_kernel_blocks(cache, 4)
    assert grouped.shape == (4, 3, 3)
    assert grouped.data_ptr() == cache.data_ptr()
    assert torch.equal(grouped[1, 2], cache[5])
    strided = ks.group_kernel_blocks(cache[:, :2], 4)
    assert torch.equal(strided[3, 0], cache[9, :2])
    assert ks.group_kernel_blocks(cache, 12) is cache
    for blocks in (0, 5, 24):
        with pytest.raises(ShapeError, match="12 kernel blocks, expected a multiple"):
            ks.group_kernel_blocks(cache, blocks)
