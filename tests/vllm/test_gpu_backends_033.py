"""The NVIDIA and ROCm attention backends against vLLM 0.33's classes, with a recorded kernel.

vLLM's configuration, metadata builder, workspace manager and MLA base classes are real. The kernel
is a torch double that decodes by the plan in the buffers and keeps what it was called with.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.worker import workspace

from k3backend.common.errors import UnsupportedDecodeError, WorkspaceError
from k3backend.vllm_plugin import mla_backend, nvidia_backend, rocm_backend
from tests.helpers.decode_cases import BF16, FP8, SCALE, Case, answer, build
from tests.helpers.tiny_mla_model import write_config
from tests.helpers.torch_core import WORKERS, TorchCore
from tests.helpers.vllm_host import Host, close, decode, layer_of

pytestmark = pytest.mark.vllm

BACKENDS = {
    "nvidia": nvidia_backend.K3NvidiaMLABackend,
    "nvidia, second name": nvidia_backend.K3KvBalancedMLABackend,
    "rocm": rocm_backend.K3RocmMLABackend,
}


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    return BACKENDS[request.param]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("model"), heads=12)


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """What the kernel was called with, decode by decode; plans too."""
    recorded: list[dict[str, Any]] = []

    class RecordedCore(TorchCore):
        def plan(self, *args: Any) -> None:
            recorded.append({"plan": args[0].clone()})
            super().plan(*args)

        def decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            names = ("q", "kv_cache", "block_table", "seq_lens", "scale", "k_scale")
            recorded.append({**dict(zip(names, args, strict=False)), **kwargs, "core": self})
            return super().decode(*args, **kwargs)

    def make_core(self: Any, q_len: int, causal: bool) -> RecordedCore:
        return RecordedCore(
            self.heads, q_len, self.config.max_requests, causal, "cpu", workers=WORKERS,
            q_dtype=self.config.q_dtype,
        )  # fmt: skip

    for module in (nvidia_backend, rocm_backend):
        monkeypatch.setattr(module.KvBalancedDecode, "make_core", make_core)
    return recorded


@pytest.fixture
def manager(monkeypatch) -> workspace.WorkspaceManager:
    """vLLM's workspace manager with two micro-batches and two lanes."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is none here
    monkeypatch.setattr(workspace, "_manager", None)
    workspace.init_workspace_manager(torch.device("cpu"), num_ubatches=2, num_lanes=2)
    return workspace.current_workspace_manager()


def test_what_the_backends_state(backend):
    builder, impl = backend.get_builder_cls(), backend.get_impl_cls()
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    assert builder.query_len_support is QueryLenSupport.UNIFORM
    assert builder.supports_non_causal_multi_token_decode
    assert builder.supports_non_causal_multi_token_dcp
    assert impl.can_return_lse_for_decode
    assert impl.lse_base_on_e is False
    assert impl.supports_dcp
    assert impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert backend.is_mla()
    assert backend.supports_non_causal()
    assert backend.supports_dcp()
    assert backend.supports_non_causal_dcp()
    assert not backend.supports_device_cpu_query_lens_mismatch()
    assert backend.supported_dtypes == [torch.bfloat16]
    assert backend.supported_kv_cache_dtypes == ["auto", "bfloat16", "fp8", "fp8_e4m3"]
    assert backend.get_supported_head_sizes() == [576]
    assert backend.get_supported_kernel_block_sizes() == [MultipleOf(1)]
    assert all(backend.supports_block_size(size) for size in (None, 16, 384, 1536, 1728, 12288))
    assert backend.supported_kv_cache_layouts() is None


def test_each_backend_is_named_as_it_is_registered():
    names = [backend.get_name() for backend in BACKENDS.values()]
    assert names == ["KIMI_K3_MLA", "KIMI_K3_KV_BALANCED_MLA", "KIMI_K3_MLA"]


@pytest.mark.parametrize(
    ("major", "minor", "served"), [(8, 0, False), (8, 9, False), (9, 0, True), (10, 0, True)]
)
def test_nvidia_capabilities(major, minor, served):
    found = nvidia_backend.K3NvidiaMLABackend.supports_compute_capability(
        DeviceCapability(major, minor)
    )
    assert found is served


def validate(host: Host, backend: Any, monkeypatch: Any, arch: str = "gfx950", **changed: Any):
    monkeypatch.setattr(rocm_backend, "gpu_arch", lambda device: arch)
    arguments: dict[str, Any] = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8",
        "block_size": 1536,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        "use_non_causal": True,
        "use_dcp": True,
    }
    with set_current_vllm_config(host.config):
        return backend.validate_configuration(**arguments | changed)


def test_kimi_k3_and_its_draft_are_accepted(model_folder, backend, monkeypatch):
    assert validate(Host(model_folder, q_len=8), backend, monkeypatch) == []


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"dtype": torch.float16}, "--dtype bfloat16"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "--kv-cache-dtype"),
        ({"use_batch_invariant": True}, "VLLM_BATCH_INVARIANT"),
        ({"use_pcp": True}, "PCP"),
        ({"head_size": 320}, "576"),
        ({"has_sink": True}, "sinks: choose another --attention-backend"),
        ({"use_mla": False}, "alone: choose another --attention-backend"),
        ({"use_sparse": True}, "every key: choose another --attention-backend"),
        ({"has_sliding_window": True}, "window: choose another --attention-backend"),
        ({"use_rswa": True}, "window: choose another --attention-backend"),
        ({"use_mm_prefix": True}, "choose another --attention-backend"),
        ({"use_per_head_quant_scales": True}, "choose another --attention-backend"),
        (
            {"use_adaptive_verification": True},
            '"enable_adaptive_verification": false in --speculative-config',
        ),
    ],
)
def test_a_refusal_names_the_option_to_change(model_folder, backend, monkeypatch, changed, remedy):
    (reason, *_) = validate(Host(model_folder), backend, monkeypatch, **changed)
    assert remedy in reason


def test_an_older_nvidia_gpu_is_refused_with_an_option(model_folder, monkeypatch):
    found = validate(
        Host(model_folder), nvidia_backend.K3NvidiaMLABackend, monkeypatch,
        device_capability=DeviceCapability(8, 0),
    )  # fmt: skip
    assert found == ["compute capability not supported (choose --attention-backend TRITON_MLA)"]


def test_limits_of_sizes_name_the_option_to_change(model_folder, backend, monkeypatch):
    host = Host(model_folder, q_len=66)
    host.config.scheduler_config.max_num_seqs = 2000
    host.config.parallel_config.decode_context_parallel_size = 16
    found = "; ".join(validate(host, backend, monkeypatch))
    assert "--max-num-seqs 1024" in found
    assert "num_speculative_tokens" in found
    assert "--tensor-parallel-size" in found
    assert "192" in found  # 12 heads x DCP 16


def test_an_amd_gpu_without_tables_is_refused(model_folder, monkeypatch):
    found = validate(Host(model_folder), rocm_backend.K3RocmMLABackend, monkeypatch, "gfx90a")
    assert found == [
        "the GPU is gfx90a, KIMI_K3_MLA runs on gfx950 and gfx942: choose "
        "--attention-backend TRITON_MLA"
    ]


def test_unsupported_layers_are_refused_with_every_reason(model_folder, backend, manager):
    with pytest.raises(UnsupportedDecodeError) as caught:
        Host(model_folder).impl(backend, sliding_window=128, attn_type="encoder")
    text = str(caught.value)
    assert "sliding_window is 128" in text
    assert "'encoder'" in text
    assert "--attention-backend" in text


def test_memory_is_claimed_while_the_layer_is_built(model_folder, backend, manager, calls):
    """For both micro-batches of the lane, once for all layers; nothing grows after the lock."""
    host = Host(model_folder)
    impl = host.impl(backend)
    sizes = [0 if w is None else w.numel() for w in manager._current_workspaces]
    assert [size > 0 for size in sizes] == [True, False, True, False]
    assert sizes[0] >= impl.balanced.workspace_bytes
    resources = [len(found) for found in manager._persistent_resources]
    host.impl(backend)
    with workspace.use_workspace_lane(1):  # where vLLM builds a DSpark draft
        host.impl(backend)
    assert [len(found) for found in manager._persistent_resources][:3:2] == resources[:3:2]
    assert all(found is not None for found in manager._current_workspaces)
    manager.lock()
    inputs = build(Case(lens=(70, 3)))
    out, _ = decode(host, impl, backend, inputs)
    assert close(out, inputs)
    assert [w.numel() for w in manager._current_workspaces][:1] == sizes[:1]


def test_a_layer_built_after_the_lock_says_so(model_folder, backend, manager, calls):
    manager.lock()
    with pytest.raises((WorkspaceError, AssertionError), match=r"before|warmup|locked"):
        Host(model_folder).impl(backend)


def test_a_layer_built_before_the_manager_says_what_to_call(model_folder, backend, monkeypatch):
    monkeypatch.setattr(workspace, "_manager", None)
    with pytest.raises(WorkspaceError, match="init_workspace_manager"):
        Host(model_folder).impl(backend)


@pytest.mark.parametrize("q_len", [1, 8])
def test_fp8_queries_and_cache(model_folder, backend, manager, calls, q_len):
    """As vLLM hands them over: fp8 query, cache stored as uint8, scales on the layer."""
    host = Host(model_folder, q_len=q_len)
    impl = host.impl(backend)
    inputs = build(Case(lens=(200, 64, 65, 9), q_len=q_len))
    metadata = host.metadata(backend, inputs)
    stored = inputs.kv_cache.view(torch.uint8)
    with host.forward():
        out, lse = impl.forward_mqa(inputs.q, stored, metadata, layer_of(inputs.case))
    (call,) = [call for call in calls if "q" in call]
    assert call["q"].shape == (4 * q_len, 12, 576)
    assert call["q"].dtype == FP8
    assert call["q"].is_contiguous()
    assert call["kv_cache"].dtype == FP8
    assert call["kv_cache"].data_ptr() == stored.data_ptr()
    assert call["block_table"].dtype == torch.int32
    assert call["scale"] == pytest.approx(SCALE * 0.9 * 0.6)
    assert call["k_scale"] == pytest.approx(0.6)
    assert call["cp"] == (1, 0, 1)
    assert call["causal_lens"] is None
    assert (call["core"].q_len, call["core"].heads, call["core"].causal) == (q_len, 12, True)
    assert out.dtype == BF16
    assert out.shape == (4 * q_len, 12, 512)
    assert lse is None, "one rank needs no log-sum-exp"
    assert close(out, inputs)


def test_bf16_in_two_parts(model_folder, backend, manager, calls):
    host = Host(model_folder, cache_dtype="bfloat16")
    impl = host.impl(backend)
    inputs = build(Case(lens=(130, 1), q_dtype=BF16, kv_dtype=BF16, q_scale=1.0, k_scale=1.0))
    metadata = host.metadata(backend, inputs)
    with host.forward():
        out, _ = impl.forward_mqa(
            (inputs.q[..., :512], inputs.q[..., 512:]), inputs.kv_cache, metadata,
            SimpleNamespace(_q_scale_float=7.0, _k_scale_float=7.0),
        )  # fmt: skip
    (call,) = [call for call in calls if "q" in call]
    assert torch.equal(call["q"], inputs.q)
    assert call["scale"] == pytest.approx(SCALE), "scales of tensors that were not quantised"
    assert close(out, inputs)


def test_dcp_fields_are_read_on_every_call(model_folder, backend, manager, calls, monkeypatch):
    """World and rank from vLLM's group; the interleave from the configuration, which a
    disaggregated start changes after the layers are built."""
    monkeypatch.setattr(
        parallel_state, "_DCP", SimpleNamespace(world_size=8, rank_in_group=3), raising=False
    )
    host = Host(model_folder, q_len=4)
    host.config.parallel_config.decode_context_parallel_size = 8
    impl = host.impl(backend)
    monkeypatch.setattr(parallel_state, "_DCP", None)
    assert impl.balanced.heads == 96
    for interleave in (1, 16):
        host.config.parallel_config.cp_kv_cache_interleave_size = interleave
        inputs = build(Case(lens=(300, 9, 4), heads=96, q_len=4, cp=(8, 3, interleave)))
        out, lse = decode(host, impl, backend, inputs)
        call = [call for call in calls if "q" in call][-1]
        assert call["cp"] == (8, 3, interleave)
        assert torch.equal(call["causal_lens"], torch.tensor([300, 9, 4], dtype=torch.int32))
        assert torch.equal(call["seq_lens"], inputs.seq_lens)
        expected, lse2 = answer(inputs)
        assert lse.shape == (12, 96)
        assert lse.dtype == torch.float32
        seen = lse2 > -math.inf
        assert torch.equal(lse > -math.inf, seen), "rows that see no local key"
        assert not bool(seen.all()) or interleave == 1
        assert torch.allclose(lse[seen].double(), lse2[seen], atol=1e-4)
        assert torch.allclose(out.double(), expected, rtol=2.0**-8, atol=2.0**-8)


def test_an_interleave_raised_after_the_build_has_room(model_folder, backend, manager, monkeypatch):
    """A disaggregated start raises it up to the block size; lengths end anywhere in a run."""
    monkeypatch.setattr(
        parallel_state, "_DCP", SimpleNamespace(world_size=8, rank_in_group=3), raising=False
    )
    host = Host(model_folder)
    host.config.parallel_config.decode_context_parallel_size = 8
    host.config.model_config.max_model_len = 600  # one round of 8 x 64 keys, and one run more
    config = host.impl(backend).balanced.config
    assert config.max_interleave == 64
    lengths = torch.arange(601, dtype=torch.int32)
    most = {
        run: int(get_dcp_local_seq_lens(lengths, 8, None, run).max())
        for run in (1, 2, 4, 8, 16, 32, 64)
    }
    assert most[1] == 75
    assert most[64] == 128
    assert max(most.values()) <= config.max_kv_tokens < 600


def test_a_drafts_layers_follow_the_targets_interleave(
    model_folder, backend, manager, calls, monkeypatch
):
    """vLLM builds them with a copy of the parallel configuration, and raises the target's later."""
    monkeypatch.setattr(
        parallel_state, "_DCP", SimpleNamespace(world_size=8, rank_in_group=3), raising=False
    )
    host, draft = Host(model_folder, q_len=4), Host(model_folder, q_len=4)
    for each in (host, draft):
        each.config.parallel_config.decode_context_parallel_size = 8
    impl = draft.impl(backend)
    monkeypatch.setattr(parallel_state, "_DCP", None)
    host.config.parallel_config.cp_kv_cache_interleave_size = 16
    inputs = build(Case(lens=(300, 9), heads=96, q_len=4, cp=(8, 3, 16)))
    out, _ = decode(host, impl, backend, inputs)
    (call,) = [call for call in calls if "q" in call]
    assert call["cp"] == (8, 3, 16)
    assert close(out, inputs)


def test_a_non_causal_draft_block(model_folder, backend, manager, calls):
    host = Host(model_folder, q_len=8)
    impl = host.impl(backend)
    inputs = build(Case(lens=(100, 33), q_len=7, causal=False))
    out, _ = decode(host, impl, backend, inputs)
    (call,) = [call for call in calls if "q" in call]
    assert call["core"].causal is False
    assert close(out, inputs)


def test_layers_of_one_forward_share_a_plan(model_folder, backend, manager, calls):
    host = Host(model_folder)
    layers = [host.impl(backend) for _ in range(3)]
    inputs = build(Case(lens=(500, 20)))
    for _ in range(2):
        metadata = host.metadata(backend, inputs)
        with host.forward():
            for impl in layers:
                impl.forward_mqa(inputs.q, inputs.kv_cache, metadata, layer_of(inputs.case))
    assert ["plan" if "plan" in call else "decode" for call in calls] == [
        "plan", "decode", "decode", "decode", "plan", "decode", "decode", "decode",
    ]  # fmt: skip


def test_requests_of_eight_and_six_tokens_are_not_seven_each(model_folder, backend, manager, calls):
    host = Host(model_folder, q_len=8)
    impl = host.impl(backend)
    inputs = build(Case(lens=(50, 60), q_len=7))
    metadata = host.metadata(backend, inputs)
    metadata.decode.query_start_loc_cpu = torch.tensor([0, 8, 14], dtype=torch.int32)
    with host.forward(), pytest.raises(UnsupportedDecodeError, match="not uniform"):
        impl.forward_mqa(inputs.q, inputs.kv_cache, metadata, layer_of(inputs.case))


def test_every_reason_of_a_step_is_listed(model_folder, backend, manager, calls):
    host = Host(model_folder)
    impl = host.impl(backend)
    inputs = build(Case(lens=(50, 60), heads=16, q_dtype=BF16, kv_dtype=BF16))
    metadata = host.metadata(backend, inputs)
    cache = inputs.kv_cache.half()
    with host.forward(), pytest.raises(UnsupportedDecodeError) as caught:
        impl.forward_mqa(inputs.q, cache, metadata, layer_of(inputs.case))
    assert len(caught.value.reasons) >= 2
    assert not any("q" in call for call in calls)


def test_capture_before_a_warm_up_is_an_error(model_folder, backend, manager, calls, monkeypatch):
    host = Host(model_folder)
    impl = host.impl(backend)
    inputs = build(Case(lens=(50,)))
    capturing = {"now": True}
    object.__setattr__(impl.balanced.config, "capturing", lambda: capturing["now"])
    with pytest.raises(WorkspaceError, match="run this shape once before capturing"):
        decode(host, impl, backend, inputs)
    capturing["now"] = False
    decode(host, impl, backend, inputs)
    capturing["now"] = True
    out, _ = decode(host, impl, backend, inputs)
    assert close(out, inputs)


def test_a_cache_in_vllms_packed_format_is_not_taken_for_fp8():
    """``fp8_ds_mla`` packs scales into 656 bytes a token; the decode reads 576."""
    assert "fp8_ds_mla" not in mla_backend.K3MLABackend.supported_kv_cache_dtypes
