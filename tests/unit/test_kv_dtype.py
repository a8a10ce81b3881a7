"""Dtype names, quantisation formats and stride alignments."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from k3backend.common import kv_dtype
from k3backend.common.errors import InputError
from k3backend.common.kv_dtype import DType, KVQuantMode, MultipleOf, get_kv_quant_mode


def test_every_known_dtype_is_torchs() -> None:
    names = list(kv_dtype._ITEMSIZE_BYTES)
    for name in names:
        dtype = DType.of(name)
        assert dtype.torch is getattr(torch, name)
        assert dtype.itemsize == dtype.torch.itemsize
        assert DType.of(dtype.torch) is dtype
    assert len(names) >= 20


def test_a_dtype_equals_its_torch_dtype_and_its_name_only() -> None:
    bf16 = DType.of("bfloat16")
    assert bf16 == torch.bfloat16
    assert torch.bfloat16 == bf16
    assert bf16 == "bfloat16"
    assert bf16 == DType("bfloat16", 2)
    assert hash(bf16) == hash(DType("bfloat16", 2)) == hash("bfloat16")
    assert bf16 != torch.float16
    assert bf16 != "float16"
    assert bf16 != 2
    assert DType.of("half") == "float16" == DType.of("float16")
    assert DType.of("float") == "float"
    assert pickle.loads(pickle.dumps(bf16)) is bf16
    assert copy.deepcopy(bf16) is bf16


@pytest.mark.parametrize("value", ["fp8", "torch.bfloat16", "", 2, None, torch.int4, float])
def test_an_unknown_dtype_is_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"is not known; give a torch dtype or one of bool"):
        DType.of(value)


def test_planning_modules_import_no_torch_and_no_numpy() -> None:
    names = ["kv_dtype", "kv_spec", "kv_merge", "spec_file", "plan_context"]
    code = "".join(f"import k3backend.common.{name}\n" for name in names)
    code += "import sys; print(sorted({'torch', 'numpy', 'triton', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_quantisation_mode_has_a_value_of_its_own() -> None:
    members = KVQuantMode.__members__
    assert len({mode.value for mode in members.values()}) == len(members) == 16
    assert KVQuantMode.CUSTOM is not KVQuantMode.OCTAVE_K3V4


def test_each_mode_is_in_at_most_one_family() -> None:
    families = {
        "is_per_token_head": 3,
        "is_nvfp4": 1,
        "is_turboquant": 4,
        "is_octave": 3,
        "is_ultraquant": 1,
        "is_custom_mode": 1,
    }
    for name, size in families.items():
        assert sum(getattr(mode, name) for mode in KVQuantMode) == size, name
    for mode in KVQuantMode:
        assert sum(getattr(mode, name) for name in families) <= 1
    assert not KVQuantMode.NVFP4_DS_MLA.is_nvfp4
    assert [mode for mode in KVQuantMode if not mode.is_quantized] == [KVQuantMode.NONE]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("auto", "NONE"),
        ("bfloat16", "NONE"),
        ("fp8", "FP8_PER_TENSOR"),
        ("fp8_e4m3", "FP8_PER_TENSOR"),
        ("fp8_e5m2", "FP8_PER_TENSOR"),
        ("fp8_ds_mla", "FP8_PER_TENSOR"),
        ("fp8_per_token_head", "FP8_PER_TOKEN_HEAD"),
        ("int8_per_token_head", "INT8_PER_TOKEN_HEAD"),
        ("int4_per_token_head", "INT4_PER_TOKEN_HEAD"),
        ("nvfp4", "NVFP4"),
        ("nvfp4_4over6", "NVFP4"),
        ("nvfp4_ds_mla", "NVFP4_DS_MLA"),
        ("turboquant_k8v4", "TURBOQUANT_K8V4"),
        ("turboquant_3bit_nc", "TURBOQUANT_3BIT_NC"),
        ("octave_k3v3", "OCTAVE_K3V3"),
        ("octave_k3v3_compact", "OCTAVE_K3V3_COMPACT"),
        ("ultraquant_4bit", "ULTRAQUANT_4BIT"),
    ],
)
def test_longer_names_win(name: str, mode: str) -> None:
    assert get_kv_quant_mode(name) is KVQuantMode[mode]
    assert kv_dtype.is_quantized_kv_cache(name) == (mode != "NONE")
    per_token_head = kv_dtype.kv_cache_uses_per_token_head_scales(name)
    assert per_token_head == mode.endswith("PER_TOKEN_HEAD")


@pytest.mark.parametrize("name", ["", "int8", "turboquant_k9", "custom", "FP8", None, 8])
def test_an_unknown_cache_dtype_is_refused(name: object) -> None:
    with pytest.raises(InputError, match="is not known; give one of auto"):
        get_kv_quant_mode(name)  # type: ignore[arg-type]


def test_multiple_of_takes_positive_integers() -> None:
    assert MultipleOf(16) == MultipleOf(16) != MultipleOf(32)
    assert repr(MultipleOf(16)) == "MultipleOf(16)"
    for value in (0, -1, True, 1.5, "16"):
        with pytest.raises(InputError, match="expected an integer >= 1"):
            MultipleOf(value)  # type: ignore[arg-type]
