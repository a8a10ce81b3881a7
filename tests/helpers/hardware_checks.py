"""What runs on a real GPU: decodes of layers against float64, eager and in graphs.

The same functions run on the CPU in the interpreter with AITER's contract double, so that they are
known to work before someone with the hardware runs them.

Bounds for AITER are its own test criteria (op_tests/test_mla_persistent.py): cosine difference
below 3e-2 for fp8 and 1e-5 for bf16. The folded kernel is held to `decode_cases.check`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3backend.common import envs
from k3backend.common.layer_config import DecodeConfig
from tests.helpers.decode_cases import FP8, Case, Inputs, answer, build, check
from tests.helpers.decode_layers import Host

AITER_COSINE = {"fp8": 3e-2, "bf16": 1e-5}
LSE_TOLERANCE = 1e-2


def require_gpu(vendor: str) -> torch.device:
    """The vendor's GPU; without one a skip, or a failure where K3BACKEND_REQUIRE names it."""
    built = torch.version.hip if vendor == "rocm" else torch.version.cuda
    if built and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    reason = (
        f"no {vendor} GPU: torch {torch.__version__} (hip {torch.version.hip}, cuda "
        f"{torch.version.cuda}), {torch.cuda.device_count()} visible device(s)"
    )
    if envs.REQUIRE.get() == vendor:
        pytest.fail(f"K3BACKEND_REQUIRE={vendor}, but {reason}")
    pytest.skip(reason)


def on_device(inputs: Inputs, device: torch.device, fp8_dtype: torch.dtype) -> Inputs:
    """The inputs on a GPU, in its fp8 format (values that fnuz cannot hold are clamped)."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == FP8 and fp8_dtype != FP8:
            tensor = tensor.float().clamp(-240, 240).to(fp8_dtype)
        return tensor.to(device)

    causal_lens = None if inputs.causal_lens is None else inputs.causal_lens.to(device)
    return replace(
        inputs,
        q=move(inputs.q),
        kv_cache=move(inputs.kv_cache),
        block_table=inputs.block_table.to(device),
        seq_lens=inputs.seq_lens.to(device),
        causal_lens=causal_lens,
    )


def on_host(inputs: Inputs) -> Inputs:
    """The inputs on the CPU, in whatever format they have."""
    return on_device(inputs, torch.device("cpu"), FP8)


def scales_of(case: Case) -> Case:
    """bf16 tensors carry no scale."""
    changes = {}
    if case.q_dtype != FP8:
        changes["q_scale"] = 1.0
    if case.kv_dtype != FP8:
        changes["k_scale"] = 1.0
    return replace(case, **changes)


def layer_config(case: Case, device: torch.device, max_kv_tokens: int) -> DecodeConfig:
    """A config for one layer of this case."""
    return DecodeConfig(
        max_requests=len(case.lens),
        max_q_len=max(case.q_len, 8),
        device=device,
        dcp_size=case.cp[0],
        q_dtype="fp8" if case.q_dtype == FP8 else "bf16",
        max_kv_tokens=max_kv_tokens,
        interleave=lambda: case.cp[2],
    )


def check_layer(kind: Any, case: Case, device: torch.device, fp8_dtype: torch.dtype) -> Any:
    """Decode one case through a layer object and compare with float64. Returns the layer."""
    case = scales_of(case)
    inputs = on_device(build(case), device, fp8_dtype)
    layer = kind(case.heads // case.cp[0], config=layer_config(case, device, max(case.lens) + 1))
    step = Host(dcp_world=case.cp[0], dcp_rank=case.cp[1]).forward(inputs)
    out, lse2 = layer.decode(step.impl, inputs.q, inputs.kv_cache, step.metadata, step.layer)
    routes = getattr(layer, "routes", {})
    if any(route.calls_aiter for route in routes.values()):
        check_aiter(on_host(inputs), out.cpu(), lse2.cpu())
    else:
        check(on_host(inputs), out.cpu(), lse2.cpu())
    return layer


def check_aiter(inputs: Inputs, out: torch.Tensor, lse2: torch.Tensor) -> None:
    """AITER's own criteria, and this package's contract on rows without a visible key."""
    want, want_lse2 = answer(inputs)
    empty = want_lse2 == -math.inf
    assert not out.isnan().any()
    assert bool((out[empty] == 0).all())
    assert torch.equal(lse2 == -math.inf, empty)
    got = out.double()
    for row in range(want.shape[0]):
        if bool(empty[row].all()):
            continue
        # Per token, so that one wrong query position cannot hide among right ones (aiter#2720).
        cosine = torch.nn.functional.cosine_similarity(
            got[row].flatten(), want[row].flatten(), dim=0
        )
        bound = AITER_COSINE["fp8" if inputs.case.kv_dtype == FP8 else "bf16"]
        assert float(1 - cosine) < bound, f"token {row}: cosine difference {float(1 - cosine):.2e}"
    seen = ~empty
    assert torch.allclose(
        lse2[seen].double(), want_lse2[seen], atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE
    )


def check_graph(kind: Any, case: Case, device: torch.device, fp8_dtype: torch.dtype) -> None:
    """Capture a decode at length 1 (or the query length) and replay it at the case's lengths."""
    case = scales_of(case)
    inputs = on_device(build(case), device, fp8_dtype)
    layer = kind(case.heads, config=layer_config(case, device, max(case.lens) + 1))
    real = inputs.seq_lens.clone()
    short = torch.full_like(real, case.q_len)
    inputs.seq_lens.copy_(short)
    host = Host()
    for _ in range(2):
        step = host.forward(inputs)
        layer.decode(step.impl, inputs.q, inputs.kv_cache, step.metadata, step.layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    step = host.forward(inputs)
    with torch.cuda.graph(graph):
        out, lse2 = layer.decode(step.impl, inputs.q, inputs.kv_cache, step.metadata, step.layer)
    inputs.seq_lens.copy_(real)
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    replayed = out.cpu(), lse2.cpu()
    if any(route.calls_aiter for route in getattr(layer, "routes", {}).values()):
        check_aiter(on_host(inputs), *replayed)
    else:
        check(on_host(inputs), *replayed)
    if case.q_len > 1:
        first = replayed[0].reshape(len(case.lens), case.q_len, -1)
        assert bool((first[:, 0] != first[:, -1]).any()), "all query positions are the same"
