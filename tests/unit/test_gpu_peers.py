"""The calls of tools/gpu_peers.py, on functions with the signatures of the projects' sources."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.helpers import gpu_shapes
from tests.helpers.decode_cases import BF16
from tests.helpers.gpu_shapes import no_watch, use_small_pool
from tools import gpu_peers, gpu_speed
from tools.gpu_speed import SpeedCase, make_problem


@pytest.fixture
def small_pool(monkeypatch):
    return use_small_pool(monkeypatch)


def test_a_peer_that_is_missing_or_fails_says_so(monkeypatch, small_pool):
    def broken(problem):
        raise ValueError("takes no such shape")

    peers = {"absent": ("no_such_package", 1, broken), "broken": ("json", 1, broken)}
    monkeypatch.setattr(gpu_peers, "PEERS", peers)
    case = SpeedCase(8, 1, "bf16", "x", (600,))
    rows = [gpu_peers.time_peer(name, small_pool, case, no_watch()) for name in peers]
    assert [row["why_not"] for row in rows] == [
        "left out, because no_such_package is not installed",
        "left out, because of ValueError: takes no such shape",
    ]


def package(monkeypatch, name, **functions):
    """An importable module that stands for another project's, with these functions."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:depth]))
        module.__spec__ = SimpleNamespace(name=module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if depth > 1:
            monkeypatch.setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module,
                                raising=False)  # fmt: skip
    for function, body in functions.items():
        setattr(sys.modules[name], function, body)


def test_flash_mla_is_called_by_its_signature(monkeypatch, small_pool):
    """flash_mla/flash_mla_interface.py and csrc/api/dense_decode.h of 9241ae3."""
    problems = []

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
        num_splits=None, softmax_scale=None, causal=False,
    ):  # fmt: skip
        problem = problems[0]
        assert q.shape == (2, 4, 12, 576)
        assert k_cache.shape[1:] == (64, 1, 576)
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        assert (head_dim_v, tile_scheduler_metadata, num_splits) == (512, "plan", None)
        assert softmax_scale == gpu_speed.SCALE
        assert causal
        return gpu_shapes.right_output(problem).view(2, 4, 12, 512), None

    package(
        monkeypatch, "flash_mla",
        get_mla_metadata=lambda *_: ("plan", None),
        flash_mla_with_kvcache=flash_mla_with_kvcache,
    )  # fmt: skip
    check_peer(monkeypatch, small_pool, "FlashMLA", 4, problems)


def test_flashinfer_is_called_by_its_signature(monkeypatch, small_pool):
    """flashinfer/mla/_core.py of fb28d72."""
    problems = []

    class BatchMLAPagedAttentionWrapper:
        def __init__(self, float_workspace_buffer, backend="auto"):
            assert float_workspace_buffer.dtype == torch.uint8

        def plan(
            self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
            head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type,
        ):  # fmt: skip
            for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
                assert tensor.dtype == torch.int32
            assert qo_indptr.tolist() == [0, 4, 8]
            assert kv_indptr.tolist() == [0, 10, 12]
            assert len(kv_indices) == 12
            assert kv_len_arr.tolist() == [600, 77]
            assert (num_heads, head_dim_ckv, head_dim_kpe, page_size) == (12, 512, 64, 64)
            assert (causal, sm_scale) == (True, gpu_speed.SCALE)
            assert q_data_type == kv_data_type == BF16

        def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
            assert q_nope.shape == (8, 12, 512)
            assert q_pe.shape == (8, 12, 64)
            assert ckv_cache.shape[1:] == (64, 512)
            assert kpe_cache.shape[1:] == (64, 64)
            return gpu_shapes.right_output(problems[0])

    package(
        monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper
    )
    check_peer(monkeypatch, small_pool, "FlashInfer", 4, problems)


def test_vllm_is_called_by_its_signature(monkeypatch, small_pool):
    """vllm/v1/attention/ops/triton_decode_attention.py and backends/mla/triton_mla.py of 0.33.0."""
    problems = []

    def decode_attention_fwd(
        q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits,
        sm_scale, page_size=1, logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False,
    ):  # fmt: skip
        assert k_buffer.shape[1:] == (64, 1, 576)
        assert v_buffer.shape[1:] == (64, 1, 512)
        assert o.shape == (8, 12, 512)
        assert lse.shape == (8, 12)
        assert attn_logits.shape == (8, 12, num_kv_splits, 513)
        assert attn_logits.dtype == torch.float32
        # A row per query token, each with the keys that it sees.
        assert req_to_token.shape[0] == 8
        assert b_seq_len.tolist() == [597, 598, 599, 600, 74, 75, 76, 77]
        assert (sm_scale, page_size, is_mla) == (gpu_speed.SCALE, 64, True)
        assert k_scale.item() == v_scale.item() == 1, "None is made on the host in every call"
        o.copy_(gpu_shapes.right_output(problems[0]))

    package(
        monkeypatch, "vllm.v1.attention.ops.triton_decode_attention",
        decode_attention_fwd=decode_attention_fwd,
    )  # fmt: skip
    for name in ("vllm.v1.attention.backends", "vllm.v1.attention.backends.mla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    backend = ModuleType("vllm.v1.attention.backends.mla.triton_mla")
    backend._compute_num_kv_splits = lambda max_seq_len, sm_count: 2
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    check_peer(monkeypatch, small_pool, "vLLM Triton", 4, problems)


def test_aiter_is_called_by_its_signature(monkeypatch, small_pool):
    """aiter/mla.py of e404860: pages of one token, 16 heads."""
    problems = []

    def mla_decode_fwd(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q,
        page_size=1, nhead_kv=1, sm_scale=None,
    ):  # fmt: skip
        problem = problems[0]
        assert q.shape == (8, 16, 576)
        assert kv_buffer.shape[1:] == (1, 1, 576)
        assert o.shape == (8, 16, 512)
        for tensor in (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens):
            assert tensor.dtype == torch.int32
        assert qo_indptr.tolist() == [0, 4, 8]
        assert kv_indptr.tolist() == [0, 600, 677]
        assert kv_last_page_lens.tolist() == [1, 1]
        assert (max_seqlen_q, page_size, nhead_kv, sm_scale) == (4, 1, 1, gpu_speed.SCALE)
        keys = problem.cache[problem.table[0].long()].reshape(-1, 576)[:600]
        assert torch.equal(kv_buffer.view(-1, 576)[kv_indices[:600].long()], keys)
        o.copy_(gpu_shapes.right_output(problem))

    package(monkeypatch, "aiter.mla", mla_decode_fwd=mla_decode_fwd)
    check_peer(monkeypatch, small_pool, "AITER (16 heads)", 4, problems)


def check_peer(monkeypatch, pool, name, q_len, problems):
    """The peer is timed where its output is right, and has no rates where it is wrong."""
    case = SpeedCase(8, q_len, "bf16", "x", (600, 77))

    def kept(*args):
        problems[:] = [make_problem(*args)]
        return problems[0]

    monkeypatch.setattr(gpu_peers, "make_problem", kept)
    row = gpu_peers.time_peer(name, pool, case, no_watch())
    assert row.get("why_not") is None, row
    assert row["gb_s"] == pytest.approx(677 * 1152 / 10e-6 / 1e9, abs=0.1), "12 heads are counted"
    assert row["heads"] == 12
    right = gpu_shapes.right_output
    monkeypatch.setattr(gpu_shapes, "right_output", lambda problem: right(problem) * 0.9)
    wrong = gpu_peers.time_peer(name, pool, case, no_watch())
    assert "off float32" in wrong["wrong"]
    assert "gb_s" not in wrong
