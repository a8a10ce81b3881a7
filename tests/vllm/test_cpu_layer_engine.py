"""vLLM's CPU layer with this decode, called directly: every dtype that vLLM serves on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from k3backend.vllm_plugin.cpu_backend import K3CpuMLAImpl

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("dtype", CPUMLABackend.supported_dtypes, ids=str)
def test_a_layer_decodes_in_the_dtype_of_its_model(dtype: torch.dtype) -> None:
    layer: Any = K3CpuMLAImpl.__new__(K3CpuMLAImpl)
    layer.scale = 1.0
    metadata: Any = SimpleNamespace(
        num_decodes=2,
        query_start_loc=torch.tensor([0, 1, 2]),
        causal=True,
        decode=SimpleNamespace(block_table=torch.tensor([[0], [1]]), seq_lens=torch.tensor([3, 7])),
    )
    cache = torch.ones(2, 16, 576, dtype=dtype)
    out, lse = layer.forward_mqa(torch.ones(2, 12, 576, dtype=dtype), cache, metadata, None)
    assert (out.dtype, lse) == (dtype, None)
    assert (out == 1).all()
