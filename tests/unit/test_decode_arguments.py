"""Arguments that once crashed, gave garbage, or failed deep inside: one clear refusal, or right."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import k3backend
from k3backend.common.errors import InputError, UnsupportedDecodeError
from k3backend.common.layer_config import DecodeConfig, read_config
from k3backend.nvidia.kv_balanced_mla import core as nvidia
from k3backend.nvidia.kv_balanced_mla.decode import KvBalancedDecode
from k3backend.rocm.kv_balanced_mla import core as rocm
from tests.helpers.decode_cases import FP8, SCALE, Case, build, check
from tests.helpers.decode_layers import Host

VENDORS = {"nvidia": nvidia, "rocm": rocm}
BACKENDS = ("reference", "nvidia", "rocm")


def reasons(backend: str, **changes: Any) -> str:
    """Why two requests of 30 and 70 keys, 2 tokens each, are refused after a change."""
    inputs = build(Case(lens=(30, 70), heads=12, q_len=2))
    given: dict[str, Any] = {
        "q": inputs.q, "kv_cache": inputs.kv_cache, "block_table": inputs.block_table,
        "seq_lens": inputs.seq_lens, "scale": SCALE, "q_len": 2,
    } | changes  # fmt: skip
    positional = [given.pop(name) for name in ("q", "kv_cache", "block_table", "seq_lens")]
    with pytest.raises(UnsupportedDecodeError) as error:
        k3backend.mla_decode(*positional, backend=backend, **given)
    return "\n".join(error.value.reasons)


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def far_rows() -> torch.Tensor:
    """A cache of one block of 100 rows that lie 21 MiB apart, on pages that nobody touches."""
    memory = np.frombuffer(mmap.mmap(-1, 100 * (21 << 20)), dtype=np.uint8)
    return torch.from_numpy(memory).view(FP8).as_strided((1, 100, 576), (0, 21 << 20, 1))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scale beyond float32": ({"scale": 1e39}, "scale is 1e+39, expected 1e-30 to 1e+30"),
    "scale at its top": ({"scale": 1e38}, "float32 scores would overflow"),
    "q_scale": ({"q_scale": 1e39}, "q_scale is 1e+39"),
    "k_scale": ({"k_scale": 1e39}, "k_scale is 1e+39"),
    "scale of a huge integer": ({"scale": 10**400}, "scale is 1000000"),
    "product too large": ({"scale": 1e20, "q_scale": 1e20}, "scale x q_scale x k_scale is 1e+40"),
    "product too small": ({"scale": 1e-20, "q_scale": 1e-20}, "scale x q_scale x k_scale is 1"),
    "world times interleave": (
        {"cp": (16, 0, 2**28), "causal_lens": lens(480, 1120)}, "world x interleave is 4294967296"
    ),
    "huge interleave": ({"cp": (2, 0, 10**30), "causal_lens": lens(60, 140)}, "key positions"),
    "negative causal length": (
        {"cp": (2, 0, 1), "causal_lens": lens(-60, 140)}, "causal_lens[0] is -60"
    ),
    "local lengths as causal ones": (
        {"cp": (2, 0, 1), "causal_lens": lens(30, 70)},
        "causal_lens[0] is 30, of which rank 0 of 2 holds 15 keys (interleave 1), but seq_lens[0]",
    ),
    "causal of text": ({"causal": "no"}, "causal is 'no', expected True or False"),
    "causal of None": ({"causal": None}, "causal is None"),
    "causal of an array": ({"causal": np.array([True, False])}, "causal is array"),
    "bools in cp": ({"cp": (True, False, True)}, "three integers"),
    "no blocks": ({"kv_cache": torch.zeros(0, 64, 576).to(FP8)}, "kv_cache has no block"),
    "sparse table": ({"block_table": torch.zeros(2, 2).to_sparse()}, "torch.sparse_coo tensor"),
    "list of lengths": ({"seq_lens": [30, 70]}, "seq_lens is a list, expected a torch.Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_one_call_refuses(name: str, backend: str) -> None:
    change, text = REFUSED[name]
    assert text in reasons(backend, **change)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_rows_that_32_bits_do_not_reach_are_refused(backend: str) -> None:
    text = reasons(backend, kv_cache=far_rows())
    assert "kv_cache has 100 rows 22020096 elements apart: a block spans 2179990080" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_meta_and_nested_tensors(backend: str) -> None:
    meta = {
        name: torch.zeros(shape, dtype=dtype, device="meta")
        for name, shape, dtype in (
            ("q", (4, 12, 576), FP8), ("kv_cache", (3, 64, 576), FP8),
            ("block_table", (2, 2), torch.int32), ("seq_lens", (2,), torch.int32),
        )
    }  # fmt: skip
    assert "on the meta device" in reasons(backend, **meta)
    nested = torch.nested.nested_tensor([torch.zeros(2, 12, 576), torch.zeros(2, 12, 576)])
    assert "q is a nested tensor" in reasons(backend, q=nested)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_limit_of_row_tiles_is_the_same_for_every_backend(backend: str) -> None:
    q = torch.zeros(129 * 64, 128, 576, dtype=FP8)
    table = torch.zeros(129, 1, dtype=torch.int32)
    text = reasons(
        backend, q=q, kv_cache=torch.zeros(1, 64, 576).to(FP8), block_table=table,
        seq_lens=torch.zeros(129, dtype=torch.int32), q_len=64,
    )  # fmt: skip
    assert "129 requests of 8192 rows (heads x q_len), 128 tiles of 64 each" in text


def test_numbers_of_numpy_are_numbers() -> None:
    inputs = build(Case(lens=(30, 70), heads=6, q_len=2, cp=(2, 0, 1)))
    call = (inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens)
    plain = k3backend.mla_decode(
        *call, scale=0.5, q_len=2, cp=(2, 0, 1), causal_lens=inputs.causal_lens,
        backend="reference",
    )  # fmt: skip
    numpy = k3backend.mla_decode(
        *call, scale=np.float16(0.5), q_len=np.int64(2), cp=tuple(np.array([2, 0, 1])),
        causal=np.True_, causal_lens=inputs.causal_lens, backend="reference",
    )  # fmt: skip
    assert torch.equal(plain[0], numpy[0])


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["nvidia", "rocm"])
def test_kernels_take_numbers_of_numpy(backend: str) -> None:
    case = Case(lens=(9, 21), heads=2, q_len=2, cp=(2, 0, 1))
    inputs = build(case)
    out, lse2 = k3backend.mla_decode(
        inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens,
        scale=np.float64(SCALE), q_scale=np.float64(case.q_scale), k_scale=case.k_scale,
        q_len=np.int64(2), cp=tuple(np.array([2, 0, 1])), causal_lens=inputs.causal_lens,
        backend=backend,
    )  # fmt: skip
    check(inputs, out, lse2)


@pytest.mark.parametrize("vendor", VENDORS)
def test_cores_refuse_what_is_no_shape(vendor: str) -> None:
    module = VENDORS[vendor]
    bad: list[tuple[tuple[Any, ...], str]] = [
        (("12", 8, 4), "heads is '12', expected an integer from 1 to 128"),
        ((None, 8, 4), "heads is None"),
        ((12.0, 8, 4), "heads is 12.0"),
        ((12, 8, "4"), "max_requests is '4'"),
        ((12, 8, 2.5), "max_requests is 2.5"),
        ((12, 8, None), "max_requests is None"),
    ]
    for shape, text in bad:
        for function in (module.work_list_len, module.workspace_bytes):
            with pytest.raises(UnsupportedDecodeError) as error:
                function(*shape, 4)
            assert text in str(error.value)
        with pytest.raises(UnsupportedDecodeError) as error:
            module.KvBalancedMla(*shape, True, "cpu")
        assert text in str(error.value)
    for device in ("foo", None, 1.5):
        with pytest.raises(UnsupportedDecodeError, match=r"expected a torch\.device"):
            module.KvBalancedMla(12, 8, 4, True, device)
        assert module.supports(12, 1, device) is False
    assert module.supports(12.5, 1, "cpu") is False
    assert module.max_planned_requests("12", 8) == 0
    with pytest.raises(UnsupportedDecodeError, match="workers is 1000000"):
        module.workspace_bytes(12, 8, 4, 10**6)
    with pytest.raises(UnsupportedDecodeError, match="q_dtype is 'fp16'"):
        module.KvBalancedMla(12, 8, 4, True, "cpu", q_dtype="fp16")


def test_core_refuses_what_is_no_tensor() -> None:
    inputs = build(Case(lens=(30, 70), heads=12, q_len=2))
    core = nvidia.KvBalancedMla(12, 2, 4, True, "cpu")
    counts, work, workspace = core.new_buffers()
    good: dict[str, Any] = {
        "q": inputs.q, "kv_cache": inputs.kv_cache, "block_table": inputs.block_table,
        "seq_lens": inputs.seq_lens, "scale": 1.0, "k_scale": 1.0, "counts": counts, "work": work,
        "workspace": workspace, "out": None, "lse": None, "causal_lens": None,
    }  # fmt: skip
    names = [name for name in good if name not in ("scale", "k_scale")]
    for name in names:
        for value in ([1, 2], np.zeros(3), 5):
            with pytest.raises(UnsupportedDecodeError) as error:
                core.decode(**good | {name: value})
            assert f"{name} is a {type(value).__name__}, expected" in str(error.value)
    for name in ("kv_cache", "block_table", "seq_lens", "counts", "work", "workspace"):
        with pytest.raises(UnsupportedDecodeError, match=f"{name} is a NoneType"):
            core.decode(**good | {name: None})
    with pytest.raises(UnsupportedDecodeError, match="seq_lens is a list"):
        core.plan([30, 70], counts, work)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["core", "layer"])
def test_blocks_outside_of_the_cache_are_found_on_the_cpu(kind: str) -> None:
    inputs = build(Case(lens=(20,), heads=2, block_size=16))
    for table, longer, text in (
        (lens(0, 2), 20, "block_table[0, 1] is 2, expected a block from 0 to 1"),
        (lens(0, -1), 20, "block_table[0, 1] is -1"),
        (lens(0, 10**8), 20, "block_table[0, 1] is 100000000"),
        (lens(0, 1), 4000, "block_table has 2 columns, expected at least 250"),
    ):
        cache = torch.ones(2, 16, 576).to(FP8)
        inputs.seq_lens.fill_(longer)
        step = build(Case(lens=(longer,), heads=2, block_size=16))
        call: Callable[[], Any]
        if kind == "core":
            core = nvidia.KvBalancedMla(2, 1, 4, True, "cpu")
            buffers = core.new_buffers()
            core.plan(inputs.seq_lens, *buffers[:2])
            arguments = (inputs.q, cache, table[None], inputs.seq_lens, 1.0, 1.0, *buffers)
            call = partial(core.decode, *arguments)
        else:
            layer = KvBalancedDecode(2, config=DecodeConfig(4, device="cpu"))
            forward = Host().forward(step)
            forward.metadata.decode.block_table = table[None]
            call = partial(
                layer.decode, forward.impl, step.q, cache, forward.metadata, forward.layer
            )
        with pytest.raises(UnsupportedDecodeError) as error:
            call()
        assert text in str(error.value)


def vllm_like(cache_dtype: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4), speculative_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        device_config=SimpleNamespace(device="cpu"),
    )  # fmt: skip


def test_cache_dtypes_that_no_kernel_reads_are_refused() -> None:
    assert read_config(vllm_like("fp8_e4m3")).q_dtype == "fp8"
    assert read_config(vllm_like("auto")).q_dtype == "bf16"
    for name in ("fp8_e5m2", "fp8_ds_mla", "int8_per_token_head", "nonsense", None, ["fp8"]):
        with pytest.raises(InputError, match=r"cache_config\.cache_dtype is"):
            read_config(vllm_like(name))


def test_config_services_must_be_functions() -> None:
    for name in ("forward_context", "interleave", "capturing"):
        with pytest.raises(InputError, match=f"{name} is 5, expected a function"):
            DecodeConfig(4, device="cpu", **{name: 5})  # type: ignore[arg-type]


def test_layers_name_what_their_arguments_lack() -> None:
    step = build(Case(lens=(30, 70), heads=12))
    layer = KvBalancedDecode(12, config=DecodeConfig(4, device="cpu"))
    good = Host().forward(step)
    empty = SimpleNamespace()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"impl": empty}, "impl (a SimpleNamespace) has no attribute 'scale'"),
        ({"metadata": empty}, "metadata (a SimpleNamespace) has no attribute 'num_decodes'"),
        ({"layer": None}, "layer (a NoneType) has no attribute '_q_scale_float'"),
        ({"kv_cache": None}, "kv_cache is a NoneType, expected a torch.Tensor"),
        ({"kv_cache": np.zeros(3)}, "kv_cache is a ndarray"),
    ]
    for change, text in bad:
        arguments = {
            "impl": good.impl, "q": step.q, "kv_cache": step.kv_cache,
            "metadata": good.metadata, "layer": good.layer,
        } | change  # fmt: skip
        with pytest.raises(UnsupportedDecodeError) as error:
            layer.decode(**arguments)
        assert text in str(error.value)
    good.metadata.query_start_loc_cpu = torch.tensor([4, 5, 6])
    with pytest.raises(UnsupportedDecodeError, match="begin at 4, expected 0"):
        layer.decode(good.impl, step.q, step.kv_cache, good.metadata, good.layer)
    good.metadata.decode.seq_lens = None
    with pytest.raises(UnsupportedDecodeError, match="seq_lens is a NoneType"):
        layer.decode(good.impl, step.q, step.kv_cache, good.metadata, good.layer)
    with pytest.raises(UnsupportedDecodeError, match="num_heads is '12'"):
        KvBalancedDecode("12", config=DecodeConfig(4, device="cpu"))  # type: ignore[arg-type]
