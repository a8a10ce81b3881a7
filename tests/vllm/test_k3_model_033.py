"""The Kimi-K3 deployment against vLLM 0.33's own block rule, state shapes, formats and stages."""

from __future__ import annotations

import ast
import importlib.util
import json
from contextlib import nullcontext
from dataclasses import fields
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config.vllm as vllm_config_module
import vllm.distributed.utils as vllm_distributed
import vllm.model_executor.layers.mamba.abstract as mamba_abstract
import vllm.model_executor.layers.mamba.mamba_utils as mamba_utils
import vllm.v1.kv_cache_interface as vllm_interface
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.models import ModelRegistry
from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention
from vllm.platforms.interface import Platform
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import k3backend
from k3backend.common.cache_dtype import KV_DTYPES, resolve_cache_dtype
from k3backend.common.k3_model import Deployment, pipeline_stages
from k3backend.common.kv_spec import MambaSpec, MLAAttentionSpec
from k3backend.common.model_config import BUNDLED_TARGETS, load_target
from k3backend.common.plan_context import KernelBlocks
from k3backend.nvidia import mla_specs as nvidia
from k3backend.reference import mla_specs as reference
from k3backend.rocm import mla_specs as rocm

pytestmark = pytest.mark.vllm

CONFIGS = Path(k3backend.__file__).parent / "data" / "configs"
VLLM_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def _vllm_state(deployment: Deployment) -> tuple[Any, Any]:
    """Shapes and dtypes of the KDA state by vLLM's calculators."""
    target = deployment.target
    shapes = MambaStateShapeCalculator.kda_state_shape(
        deployment.tp_size,
        target.kda_num_heads,
        target.kda_head_dim,
        conv_kernel_size=target.kda_conv_kernel,
        num_spec=deployment.spec_tokens,
    )
    dtypes = MambaStateDtypeCalculator.kda_state_dtype(getattr(torch, target.dtype), "auto", "auto")
    return shapes, dtypes


class _MLABackend:
    """What vLLM's block rule asks a backend: AITER's kernel blocks of one token, or 64."""

    def __init__(self, kernel_block: int | MultipleOf) -> None:
        self.kernel_block = kernel_block

    def get_supported_kernel_block_sizes(self) -> list[int | MultipleOf]:
        return [self.kernel_block]


def _vllm_block_and_page(
    deployment: Deployment, checkpoint_alignment: int | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int | None]:
    """vLLM's own ``_align_hybrid_block_size`` on a record of the values that it reads."""
    shapes, dtypes = _vllm_state(deployment)
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: shapes,
        get_mamba_state_dtype_from_config=lambda _: dtypes,
    )
    name = VLLM_NAMES.get(deployment.kv_dtype, deployment.kv_dtype)
    cache_config = SimpleNamespace(
        cache_dtype=name,
        block_size=deployment.block_size or 16,
        mamba_cache_mode=deployment.mamba_cache_mode,
        mamba_page_size_padded=None,
        mamba_block_size=None,
        kv_cache_dtype_skip_layers=[],
    )
    config = SimpleNamespace(
        cache_config=cache_config,
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(
            dtype=getattr(torch, deployment.target.dtype),
            use_mla=True,
            architecture="KimiK3ForConditionalGeneration",
            get_num_kv_heads=lambda _: 1,
            get_head_size=lambda: deployment.target.latent_size,
        ),
    )
    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *_, **__: (model, None))
    monkeypatch.setattr(vllm_config_module, "set_current_vllm_config", lambda _: nullcontext())
    monkeypatch.setattr(
        mamba_abstract,
        "get_mamba_prefill_checkpoint_alignment",
        lambda _: checkpoint_alignment,
    )
    found = set()
    for kernel_block in (MultipleOf(1), MultipleOf(16), 64):
        backend = _MLABackend(kernel_block)
        monkeypatch.setattr(Platform, "_find_non_ssm_backends", lambda _, b=backend: [b])
        cache_config.block_size = deployment.block_size or 16
        cache_config.mamba_page_size_padded = None
        Platform._align_hybrid_block_size(config, backend)
        found.add((cache_config.block_size, cache_config.mamba_page_size_padded))
    assert len(found) == 1, "the block must not depend on the backend"
    return found.pop()


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("spec_tokens", [0, 1, 4, 7, 8])
@pytest.mark.parametrize("target", BUNDLED_TARGETS)
def test_block_and_page_are_vllms(
    target: str, tp_size: int, kv_dtype: str, spec_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = Deployment.load(
        target, tp_size=tp_size, kv_dtype=kv_dtype, spec_tokens=spec_tokens
    )
    block, padded = _vllm_block_and_page(deployment, None, monkeypatch)
    assert deployment.block_tokens() == block
    kda = next(
        spec for spec in rocm.build_target_specs(deployment).values() if isinstance(spec, MambaSpec)
    )
    assert (kda.block_size, kda.page_size_padded) == (block, padded)


@pytest.mark.parametrize("block_size", [16, 64, 256, 512, 1024, 1536, 2048, 3072])
@pytest.mark.parametrize(("mode", "alignment"), [("align", 16), ("align", 64), ("none", None)])
def test_an_asked_block_is_treated_as_vllm_treats_it(
    block_size: int, mode: Any, alignment: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = Deployment.load(
        block_size=block_size,
        mamba_cache_mode=mode,
        prefill_checkpoint_blocks=int(alignment is not None),
        spec_tokens=7,
    )
    block, _ = _vllm_block_and_page(deployment, alignment, monkeypatch)
    assert deployment.block_tokens(alignment or 1) == block


@pytest.mark.parametrize("orientation", ["DS", "SD"])
def test_state_shapes_and_dtypes_are_vllms(
    orientation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lays the convolution state out either way, by VLLM_SSM_CONV_STATE_LAYOUT; the bytes
    are the same. Ours is its DS form."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: orientation)
    for tp_size in (1, 8):
        deployment = Deployment.load(tp_size=tp_size, spec_tokens=7)
        (conv, recurrent), dtypes = _vllm_state(deployment)
        ours_conv, ours_recurrent = deployment.kda_state_shapes
        assert (ours_conv if orientation == "DS" else ours_conv[::-1]) == conv
        assert ours_recurrent == recurrent
        assert tuple(dtype.torch for dtype in deployment.kda_state_dtypes) == dtypes
        assert deployment.kda_state_bytes == prod(conv) * 2 + prod(recurrent) * 4


@pytest.mark.parametrize("name", [name for name in KV_DTYPES if name != "auto"])
def test_formats_are_vllms(name: str) -> None:
    vllm_name = VLLM_NAMES.get(name, name)
    ours = resolve_cache_dtype(name, "bfloat16", 576)
    assert ours.name == vllm_name
    assert ours.storage.torch == STR_DTYPE_TO_TORCH_DTYPE[vllm_name]
    assert ours.quant_mode.name == vllm_interface.get_kv_quant_mode(vllm_name).name


@pytest.mark.parametrize("kv_dtype", [name for name in KV_DTYPES if name not in VLLM_NAMES])
@pytest.mark.parametrize("is_draft", [False, True])
def test_mla_specs_are_those_of_vllms_layer(kv_dtype: str, is_draft: bool) -> None:
    """vLLM's K3 layer, asked for its spec without building it."""
    deployment = Deployment.load(draft="dspark-mla", kv_dtype=kv_dtype)
    layer = SimpleNamespace(
        kv_cache_dtype=kv_dtype, head_size=576, non_causal_multi_token_decode=is_draft
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(block_size=deployment.block_tokens()),
    )
    theirs = MultiHeadLatentAttention.get_kv_cache_spec(layer, config)
    build = nvidia.build_draft_specs if is_draft else nvidia.build_target_specs
    ours = next(spec for spec in build(deployment).values() if isinstance(spec, MLAAttentionSpec))
    for field in fields(theirs):
        if field.name == "is_draft":  # vLLM's runner marks drafts after the layer gave its spec
            continue
        their_value, our_value = getattr(theirs, field.name), getattr(ours, field.name)
        if field.name in ("kv_quant_mode", "cache_role"):
            their_value, our_value = their_value.name, our_value.name
        assert our_value == their_value, field.name


@pytest.mark.parametrize("name", BUNDLED_TARGETS)
def test_layer_kinds_are_those_of_vllms_config(name: str) -> None:
    document = json.loads((CONFIGS / f"{name}.json").read_text())
    text = document.get("text_config", document)
    config = KimiLinearConfig(**{k: v for k, v in text.items() if k not in ("architectures",)})
    target = load_target(name)
    mla = [index for index in range(target.num_layers) if not config.is_kda_layer(index)]
    assert list(target.mla_layers) == mla


@pytest.mark.parametrize("num_layers", [27, 93, 94, 95, 96])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 8, 27])
def test_pipeline_stages_are_vllms(num_layers: int, pp_size: int) -> None:
    theirs = []
    for stage in range(pp_size):
        start, end = vllm_distributed.get_pp_indices(num_layers, stage, pp_size)
        theirs += [stage] * (end - start)
    assert list(pipeline_stages(num_layers, pp_size)) == theirs


@pytest.mark.parametrize("vendor", [nvidia, rocm, reference], ids=lambda vendor: vendor.__name__)
def test_kernel_blocks_of_backends_are_vllms(vendor: Any) -> None:
    """Read from the source, since most of these backends import only on their own hardware."""
    for name, blocks in vendor.FACTS.backend_kernel_blocks.items():
        module, _, cls = AttentionBackendEnum[name].get_path().rpartition(".")
        assert blocks in _declared_kernel_blocks(module, cls), name


def _declared_kernel_blocks(module: str, cls: str) -> list[KernelBlocks]:
    """Every list of literals that the backend's method returns."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls]
    (method,) = [
        n
        for n in node.body
        if isinstance(n, ast.FunctionDef) and n.name == "get_supported_kernel_block_sizes"
    ]
    found = []
    for statement in ast.walk(method):
        if not isinstance(statement, ast.Return) or not isinstance(statement.value, ast.List):
            continue
        sizes = statement.value.elts
        if all(isinstance(size, ast.Constant) for size in sizes):
            found.append(KernelBlocks(sizes=tuple(size.value for size in sizes)))
        elif isinstance(sizes[0], ast.Call) and isinstance(sizes[0].args[0], ast.Constant):
            found.append(KernelBlocks(multiple_of=sizes[0].args[0].value))
    return found
