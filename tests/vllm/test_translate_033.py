"""vLLM 0.33's specs and groups through this package and back, nothing lost."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from enum import Enum
from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core import kv_cache_planning as planning

from k3backend.common import kv_spec
from k3backend.common.errors import PluginError
from k3backend.common.kv_spec import KVCacheGroupSpec
from k3backend.vllm_plugin import translate

pytestmark = pytest.mark.vllm

ABSTRACT = {"KVCacheSpec", "AttentionSpec"}
SPEC_CLASSES = {
    name: cls
    for name, cls in vars(interface).items()
    if inspect.isclass(cls) and issubclass(cls, interface.KVCacheSpec) and name not in ABSTRACT
}
BASE: dict[str, Any] = {
    "block_size": 64,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.bfloat16,
    "sliding_window": 128,
    "attention_chunk_size": 256,
    "rswa_window": 128,
    "sink_len": 4,
    "shapes": ((4, 8), (2, 16)),
    "dtypes": (torch.bfloat16, torch.float32),
    "page_size": 4096,
    "blocks_per_request": 3,
}
ONE_HEAD = {"MLAAttentionSpec", "HiddenStateCacheSpec", "SlidingWindowMLASpec"}
OTHER: dict[str, Any] = {
    "block_size": 128,
    "dcp_sharded": True,
    "block_stride_alignment": 512,
    "is_draft": True,
    "num_kv_heads": 4,
    "head_size": 128,
    "dtype": torch.float8_e4m3fn,
    "max_tp_shards": 2,
    "head_size_v": 32,
    "kv_quant_mode": interface.KVQuantMode.FP8_PER_TENSOR,
    "page_size_padded": 1 << 20,
    "num_head_slots": 8,
    "state_content_bytes": 656,
    "tokens_per_state": 4,
    "sliding_window": 512,
    "attention_chunk_size": 1024,
    "non_causal": True,
    "cache_dtype_str": "fp8",
    "alignment": 576,
    "model_version": "deepseek_v4",
    "topk_buffer_width": 2048,
    "cache_role": interface.SparseCacheRole.INDEXER,
    "is_index_group_leader": True,
    "non_causal_multi_token_decode": True,
    "rswa_window": 512,
    "extra_retained_tokens": 3,
    "bounded_replay": True,
    "shapes": ((8, 8), (2, 16)),
    "dtypes": (torch.float32, torch.float32),
    "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
    "mamba_cache_mode": "align",
    "num_speculative_blocks": 7,
    "num_prefill_checkpoint_blocks": 1,
    "prefill_checkpoint_alignment": 64,
    "num_heads": 12,
    "tp_replicated": True,
    "sink_len": 8,
    "page_size": 8192,
    "blocks_per_request": 5,
}


def base_spec(name: str, **changed: Any) -> Any:
    """A spec of the class with every field without a default filled in."""
    cls = SPEC_CLASSES[name]
    if name == "UniformTypeKVCacheSpecs":
        layers = {"a": base_spec("FullAttentionSpec"), "b": base_spec("MLAAttentionSpec")}
        return cls(**{"block_size": 64, "kv_cache_specs": layers} | changed)
    required = [
        f.name
        for f in fields(cls)
        if f.init and f.default is MISSING and f.default_factory is MISSING
    ]
    values = {field_name: BASE[field_name] for field_name in required}
    if name in ONE_HEAD:
        values["num_kv_heads"] = 1
    return cls(**values | changed)


CASES = [
    (name, f.name)
    for name, cls in SPEC_CLASSES.items()
    for f in fields(cls)
    if f.init
    and f.name != "kv_cache_specs"
    # One latent vector per token is all that these caches hold; vLLM refuses more.
    and (f.name, name) not in {("num_kv_heads", latent) for latent in ONE_HEAD}
]


def equal_in_every_field(left: Any, right: Any) -> bool:
    """Also in those that equality leaves out."""
    return type(left) is type(right) and all(
        getattr(left, f.name) == getattr(right, f.name) for f in fields(left)
    )


@pytest.mark.parametrize("name", SPEC_CLASSES)
def test_every_class_comes_back(name):
    spec = base_spec(name)
    ours = translate.from_vllm_spec(spec)
    assert type(ours).__name__ == name
    assert ours.page_size_bytes == spec.page_size_bytes
    assert equal_in_every_field(translate.to_vllm_spec(ours), spec)


@pytest.mark.parametrize(("name", "field_name"), CASES)
def test_every_field_comes_back_from_another_value(name, field_name):
    """A field that was lost would come back at its default."""
    changed: dict[str, Any] = {field_name: OTHER[field_name]}
    spec = base_spec(name, **changed)
    back = translate.to_vllm_spec(translate.from_vllm_spec(spec))
    assert equal_in_every_field(back, spec)
    assert getattr(back, field_name) == OTHER[field_name]


@pytest.mark.parametrize("value", [MultipleOf(64), Fraction(1, 4)])
def test_values_of_other_types_come_back(value):
    name = "block_stride_alignment" if isinstance(value, MultipleOf) else "tokens_per_state"
    spec = base_spec("MLAAttentionSpec", **{name: value})
    back = translate.to_vllm_spec(translate.from_vllm_spec(spec))
    assert getattr(back, name) == value
    assert type(getattr(back, name)) is type(value)


@pytest.mark.parametrize("mode", list(interface.KVQuantMode))
def test_every_quantisation_mode_comes_back(mode):
    spec = base_spec("FullAttentionSpec", kv_quant_mode=mode)
    assert translate.to_vllm_spec(translate.from_vllm_spec(spec)).kv_quant_mode is mode


@pytest.mark.parametrize("mamba", [m for m in MambaAttentionBackendEnum if m.name != "CUSTOM"])
def test_every_mamba_type_comes_back(mamba):
    spec = base_spec("MambaSpec", mamba_type=mamba)
    assert translate.to_vllm_spec(translate.from_vllm_spec(spec)).mamba_type is mamba


def test_groups_keep_layers_order_and_marks():
    spec = kv_spec.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="bfloat16")
    draft = replace(spec, is_draft=True)
    groups = [KVCacheGroupSpec(["b", "a"], spec), KVCacheGroupSpec(["d"], draft)]
    translated = translate.to_vllm_groups(groups, {"a": spec, "b": spec, "d": draft})
    assert [group.layer_names for group in translated] == [["b", "a"], ["d"]]
    assert [group.is_eagle_group for group in translated] == [False, True]
    assert translated[1].kv_cache_spec.is_draft


# A later vLLM: one of its classes with a field more, under the name that vLLM gives the class.
def later(name: str, annotation: Any = int, default: Any = 0, **options: Any) -> type:
    base = SPEC_CLASSES[name]
    made = make_dataclass(
        name,
        [("added", annotation, field(default=default, kw_only=True, **options))],
        bases=(base,),
        frozen=True,
    )
    made.__module__ = base.__module__
    return made


@pytest.fixture
def later_mla(monkeypatch):
    cls = later("MLAAttentionSpec")
    monkeypatch.setattr(interface, "MLAAttentionSpec", cls)
    return lambda **values: cls(block_size=64, num_kv_heads=1, head_size=576,
                                dtype=torch.bfloat16, **values)  # fmt: skip


def test_an_added_field_is_kept_and_put_back(later_mla):
    layers = {f"layer.{i}": later_mla(added=3) for i in range(2)}
    assert translate.unknown_fields(layers["layer.0"]) == {"added": 3}
    ours = translate.from_vllm_spec(layers["layer.0"])
    (group,) = translate.to_vllm_groups([KVCacheGroupSpec(list(layers), ours)], originals=layers)
    assert group.kv_cache_spec == layers["layer.0"]


def test_an_added_field_in_a_group_that_keeps_a_spec_per_layer(later_mla):
    layers = {f"layer.{i}": later_mla(added=i) for i in range(2)}
    ours = {name: translate.from_vllm_spec(spec) for name, spec in layers.items()}
    uniform = kv_spec.UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=ours)
    (group,) = translate.to_vllm_groups([KVCacheGroupSpec(list(layers), uniform)], originals=layers)
    assert group.kv_cache_spec.kv_cache_specs == layers


def test_layers_that_differ_in_an_added_field_do_not_share_a_group(later_mla):
    layers = {"target": later_mla(added=1), "draft": later_mla(added=2)}
    ours = translate.from_vllm_spec(layers["target"])
    with pytest.raises(PluginError, match=r"target has \{'added': 1\}.*draft has \{'added': 2\}"):
        translate.to_vllm_groups([KVCacheGroupSpec(list(layers), ours)], originals=layers)


def test_an_added_field_at_its_default_or_outside_equality_is_left_out(later_mla):
    assert translate.unknown_fields(later_mla()) == {}
    marked = later("MLAAttentionSpec", compare=False)(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, added=1
    )
    assert translate.unknown_fields(marked) == {}


def test_an_added_field_that_changes_the_page_is_refused():
    @dataclass(frozen=True)
    class MLAAttentionSpec(interface.MLAAttentionSpec):
        scales_bytes: int = field(default=0, kw_only=True)

        @property
        def page_size_bytes(self) -> int:
            return super().page_size_bytes + self.scales_bytes

    spec = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, scales_bytes=256
    )
    with pytest.raises(PluginError, match=r"scales_bytes=256.*K3BACKEND_GROUPING=vllm"):
        translate.from_vllm_spec(spec)


def test_an_unknown_class_and_an_unknown_value_are_refused():
    class PagedSpec(interface.KVCacheSpec):
        pass

    with pytest.raises(PluginError, match="PagedSpec is a cache format that k3backend does not"):
        translate.from_vllm_spec(PagedSpec(block_size=16))
    later_modes = Enum("KVQuantMode", {"INT2": 99})
    with pytest.raises(PluginError, match=r"kv_quant_mode is KVQuantMode\.INT2, which k3backend"):
        translate.from_vllm_spec(base_spec("FullAttentionSpec", kv_quant_mode=later_modes.INT2))


def test_a_field_that_vllm_lacks_is_refused_unless_it_says_nothing():
    spec = kv_spec.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")
    assert translate.to_vllm_spec(spec).block_size == 64
    with pytest.raises(PluginError, match="storage_block_size"):
        translate.to_vllm_spec(replace(spec, storage_block_size=32))


def test_a_refused_merge_is_the_error_that_vllms_probe_catches(monkeypatch):
    """vLLM asks whether specs merge by merging them; its probe catches AssertionError alone."""
    specs = {
        "target": base_spec("MLAAttentionSpec", max_tp_shards=1),
        "draft": base_spec("MLAAttentionSpec"),
    }
    with pytest.raises(AssertionError, match="max_tp_shards"):
        translate.merge_vllm_specs(list(specs.values()))
    monkeypatch.setattr(
        interface.MLAAttentionSpec,
        "merge",
        classmethod(lambda cls, specs: translate.merge_vllm_specs(specs)),
    )
    assert not planning.is_kv_cache_spec_uniform(specs)
    assert planning.is_kv_cache_spec_uniform(dict.fromkeys(specs, specs["target"]))
