"""The decode object of a layer: plan reuse, lanes, memory, capture, limits, and the metadata."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3backend.common import attention_reference as reference
from k3backend.common.errors import InputError, UnsupportedDecodeError, WorkspaceError
from k3backend.common.layer_config import DecodeConfig, read_config
from k3backend.common.query_lengths import read_query_length
from k3backend.common.workspace import OwnWorkspace
from tests.helpers.decode_cases import BF16, FP8, SCALE, Case, Inputs, build
from tests.helpers.torch_core import TorchCore, TorchDecode

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[1] / "data" / "decode.json").read_text(encoding="utf-8")
    )
}


class Context:
    """Stands for a forward context: identity is all that counts."""


def config(**changes: Any) -> DecodeConfig:
    base: dict[str, Any] = {"max_requests": 8, "max_q_len": 8, "device": "cpu"}
    return DecodeConfig(**(base | changes))


def metadata_of(inputs: Inputs, **changes: Any) -> Any:
    case = inputs.case
    requests = len(case.lens)
    base: dict[str, Any] = {
        "num_decodes": requests,
        "num_decode_tokens": requests * case.q_len,
        "num_prefills": 0,
        "max_query_len": case.q_len,
        "causal": case.causal,
        "decode": SimpleNamespace(
            block_table=inputs.block_table,
            seq_lens=inputs.seq_lens,
            dcp_tot_seq_lens=inputs.causal_lens,
        ),
    }
    return SimpleNamespace(**(base | changes))


def layer_of(case: Case) -> Any:
    return SimpleNamespace(_q_scale_float=case.q_scale, _k_scale_float=case.k_scale)


def impl_of(world: int = 1, rank: int = 0, **changes: Any) -> Any:
    base: dict[str, Any] = {"scale": SCALE, "dcp_world_size": world, "dcp_rank": rank}
    return SimpleNamespace(**(base | changes))


def expected(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    case = inputs.case
    q_scale = case.q_scale if case.q_dtype == FP8 else 1.0
    k_scale = case.k_scale if case.kv_dtype == FP8 else 1.0
    return reference.decode(
        inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, scale=SCALE,
        q_scale=q_scale, k_scale=k_scale, q_len=case.q_len, causal=case.causal,
        causal_lens=inputs.causal_lens, cp=case.cp, compute_dtype=torch.float64,
    )  # fmt: skip


def assert_right(inputs: Inputs, out: torch.Tensor, lse2: torch.Tensor | None = None) -> None:
    want, want_lse = expected(inputs)
    # A bfloat16 output of a float32 computation: half a step is 2**-9 of the value.
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-16)
    if lse2 is not None:
        torch.testing.assert_close(lse2.double(), want_lse, rtol=2**-20, atol=2**-18)


MIXED = Case(lens=(0, 1, 300, 65), heads=12, q_len=4, block_size=48)


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [(FP8, FP8), (BF16, BF16), (BF16, FP8)])
def test_scales_apply_to_what_was_quantised(q_dtype: Any, kv_dtype: Any) -> None:
    inputs = build(Case(lens=(90, 3), heads=4, q_dtype=q_dtype, kv_dtype=kv_dtype))
    decode = TorchDecode(4, config(q_dtype="fp8" if q_dtype == FP8 else "bf16"))
    layer = layer_of(inputs.case)
    out, lse2 = decode.decode(impl_of(), inputs.q, inputs.kv_cache, metadata_of(inputs), layer)
    assert lse2 is None
    assert_right(inputs, out)


def test_a_byte_cache_is_read_as_fp8() -> None:
    inputs = build(MIXED)
    raw = inputs.kv_cache.view(torch.uint8)
    out, lse2 = TorchDecode(12, config()).decode(
        impl_of(need_to_return_lse_for_decode=True), inputs.q, raw, metadata_of(inputs),
        layer_of(MIXED),
    )  # fmt: skip
    assert_right(inputs, out, lse2)


def test_layers_of_a_forward_share_one_plan() -> None:
    inputs = build(MIXED)
    current = [Context()]
    shared = config(workspace=OwnWorkspace("cpu"), forward_context=lambda: current[0])
    layers = [TorchDecode(12, shared) for _ in range(3)]

    def forward() -> list[int]:
        for layer in layers:
            # Each layer may see its own metadata object within one forward context.
            out, _ = layer.decode(
                impl_of(), inputs.q, inputs.kv_cache, metadata_of(inputs), layer_of(MIXED)
            )
            assert_right(inputs, out)
        return [layer.plans for layer in layers]

    assert forward() == [1, 0, 0]
    current[0] = Context()
    assert forward() == [2, 0, 0]


def test_metadata_identifies_a_forward_where_there_is_no_context() -> None:
    inputs = build(MIXED)
    layer = TorchDecode(12, config())
    step = metadata_of(inputs)
    for _ in range(2):
        layer.decode(impl_of(), inputs.q, inputs.kv_cache, step, layer_of(MIXED))
    assert layer.plans == 1
    layer.decode(impl_of(), inputs.q, inputs.kv_cache, metadata_of(inputs), layer_of(MIXED))
    assert layer.plans == 2


def test_lengths_that_change_in_place_are_planned_again() -> None:
    case = Case(lens=(300, 65), heads=12, block_size=48)
    inputs = build(case)
    layer = TorchDecode(12, config())
    step = metadata_of(inputs)
    layer.decode(impl_of(), inputs.q, inputs.kv_cache, step, layer_of(case))
    inputs.seq_lens.copy_(torch.tensor([7, 64], dtype=torch.int32))
    out, _ = layer.decode(impl_of(), inputs.q, inputs.kv_cache, step, layer_of(case))
    assert layer.plans == 2
    assert_right(inputs, out)


def test_a_plan_that_fails_is_not_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(lens=(300, 65), heads=12, block_size=48)
    first, second = build(case), build(replace(case, lens=(7, 290), seed=1))
    context = Context()
    shared = config(workspace=OwnWorkspace("cpu"), forward_context=lambda: context)
    layers = [TorchDecode(12, shared) for _ in range(2)]

    def decode(layer: TorchDecode, inputs: Inputs) -> None:
        out, _ = layer.decode(
            impl_of(), inputs.q, inputs.kv_cache, metadata_of(inputs), layer_of(inputs.case)
        )
        assert_right(inputs, out)

    decode(layers[0], first)
    with monkeypatch.context() as broken:
        broken.setattr(TorchCore, "plan", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
        for inputs in (second, second):
            with pytest.raises(RuntimeError, match="no"):
                decode(layers[0], inputs)
    decode(layers[1], second)
    decode(layers[0], first)
    assert [layer.plans for layer in layers] == [2, 1]


@pytest.mark.parametrize("in_context", [True, False])
def test_inference_mode_never_decodes_with_a_stale_plan(in_context: bool) -> None:
    case = Case(lens=(300, 65), heads=12, block_size=48)
    current = [Context()]
    shared = config(
        workspace=OwnWorkspace("cpu"),
        forward_context=lambda: current[0] if in_context else None,
    )
    layers = [TorchDecode(12, shared) for _ in range(2)]
    with torch.inference_mode():
        inputs = build(case)
        assert inputs.seq_lens.is_inference()
        step = metadata_of(inputs)
        for lens in ((300, 65), (7, 64)):
            current[0] = Context()
            inputs.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
            for layer in layers:
                out, _ = layer.decode(impl_of(), inputs.q, inputs.kv_cache, step, layer_of(case))
                assert_right(inputs, out)
    # Without a context nothing says that the lengths are still those of the plan.
    assert [layer.plans for layer in layers] == ([2, 0] if in_context else [2, 2])


def test_memory_that_is_handed_out_again_is_not_the_same_lengths() -> None:
    case = Case(lens=(300, 65), heads=12, block_size=48)
    context = Context()
    layer = TorchDecode(12, config(forward_context=lambda: context))
    for seed in range(4):
        inputs = build(replace(case, lens=(300 - 90 * seed, 65), seed=seed))
        out, _ = layer.decode(
            impl_of(), inputs.q, inputs.kv_cache, metadata_of(inputs), layer_of(inputs.case)
        )
        assert_right(inputs, out)
        del inputs
    assert layer.plans == 4


def test_lanes_do_not_share_a_plan() -> None:
    long, short = build(Case(lens=(300, 65), heads=12)), build(Case(lens=(1, 2), heads=12, seed=1))
    workspace = OwnWorkspace("cpu")
    context = Context()
    shared = config(workspace=workspace, forward_context=lambda: context)
    target = TorchDecode(12, shared)
    with workspace.lane("draft"):
        draft = TorchDecode(12, shared)
    workspace.lock()
    for _ in range(2):
        out, _ = target.decode(
            impl_of(), long.q, long.kv_cache, metadata_of(long), layer_of(long.case)
        )
        assert_right(long, out)
        with workspace.lane("draft"):
            out, _ = draft.decode(
                impl_of(), short.q, short.kv_cache, metadata_of(short), layer_of(short.case)
            )
        assert_right(short, out)


def test_memory_is_claimed_when_the_layer_is_built(caplog: pytest.LogCaptureFixture) -> None:
    workspace = OwnWorkspace("cpu")
    with caplog.at_level(logging.INFO, logger="k3backend"):
        first = TorchDecode(12, config(workspace=workspace))
        TorchDecode(12, config(workspace=workspace))
    claimed = workspace.scratch_bytes
    assert claimed >= first.workspace_bytes
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "decode scratch" in lines[0]
    workspace.lock()
    inputs = build(MIXED)
    first.decode(impl_of(), inputs.q, inputs.kv_cache, metadata_of(inputs), layer_of(MIXED))
    assert workspace.scratch_bytes == claimed
    with pytest.raises(WorkspaceError, match="build every decode layer"):
        TorchDecode(6, config(workspace=workspace))


def test_a_host_manager_that_is_locked_is_a_workspace_error() -> None:
    class Locked:
        def get_persistent_resource(self, key: Any, factory: Any) -> Any:
            raise AssertionError("Workspace is locked")

        def get_simultaneous(self, *_: Any) -> Any:
            raise AssertionError("Workspace is locked")

    with pytest.raises(WorkspaceError, match="before the workspace is locked"):
        TorchDecode(12, config(workspace=Locked()))


def test_a_shape_that_appears_inside_capture_is_an_error_and_a_known_one_plans_anew() -> None:
    inputs = build(MIXED)
    capturing = [True]
    layer = TorchDecode(12, config(capturing=lambda: capturing[0]))
    step = metadata_of(inputs)

    def decode() -> None:
        out, _ = layer.decode(impl_of(), inputs.q, inputs.kv_cache, step, layer_of(MIXED))
        assert_right(inputs, out)

    with pytest.raises(WorkspaceError, match=r"4 requests x 4 query tokens.*first time.*capture"):
        decode()
    capturing[0] = False
    decode()
    assert layer.plans == 1
    capturing[0] = True
    decode()
    # The plan made outside the capture is not part of the graph.
    assert layer.plans == 2


def test_dcp_reads_the_interleave_on_every_call() -> None:
    interleave = [1]
    layer = TorchDecode(3, config(dcp_size=4, interleave=lambda: interleave[0]))
    for width in (1, 16):
        interleave[0] = width
        case = Case(lens=(5, 100, 33), heads=12, q_len=8, block_size=16, cp=(4, 2, width))
        inputs = build(case)
        out, lse2 = layer.decode(
            impl_of(4, 2), inputs.q, inputs.kv_cache, metadata_of(inputs), layer_of(case)
        )
        assert lse2 is not None
        assert_right(inputs, out, lse2)
        assert (lse2 == -math.inf).any()


def test_non_causal_draft_blocks_see_everything() -> None:
    case = Case(lens=(90, 3), heads=12, q_len=7, causal=False)
    inputs = build(case)
    out, _ = TorchDecode(12, config()).decode(
        impl_of(), inputs.q, inputs.kv_cache, metadata_of(inputs), layer_of(case)
    )
    assert_right(inputs, out)


def refused(match: str, layer: TorchDecode, inputs: Inputs, **changes: Any) -> str:
    q = changes.pop("q", inputs.q)
    cache = changes.pop("kv_cache", inputs.kv_cache)
    step = metadata_of(inputs, **changes)
    with pytest.raises(UnsupportedDecodeError, match=match) as error:
        layer.decode(impl_of(), q, cache, step, layer_of(inputs.case))
    assert isinstance(error.value, ValueError)
    return str(error.value)


def test_limits_at_construction_name_the_numbers() -> None:
    with pytest.raises(UnsupportedDecodeError) as error:
        TorchDecode(96, config(dcp_size=2, max_q_len=65, max_requests=2000))
    text = str(error.value)
    assert "heads is 192, expected 1 to 128" in text
    assert "q_len is 65, expected 1 to 64" in text
    assert "max_requests is 2000, expected 1 to 1024" in text


def test_eight_and_six_query_tokens_are_not_uniform() -> None:
    assert CASES["uniform-tokens"]["right"].startswith("refused")
    inputs = build(Case(lens=(30, 40), heads=12, q_len=7))
    layer = TorchDecode(12, config())
    starts = torch.tensor([0, 8, 14], dtype=torch.int32)
    refused("not uniform: 14 tokens", layer, inputs, query_start_loc_cpu=starts)
    refused("not uniform: 14 tokens", layer, inputs, max_query_len=8)


def test_each_limit_of_a_step_has_its_message() -> None:
    inputs = build(Case(lens=(30, 40), heads=12, q_len=2))
    layer = TorchDecode(12, config(max_requests=2, max_q_len=2))
    refused("q is a tuple", layer, inputs, q=(inputs.q[..., :512], inputs.q[..., 512:]))
    refused(r"expected .*float8_e4m3fn or", layer, inputs, q=inputs.q.float())
    refused("q has shape", layer, inputs, q=inputs.q[:, :6].contiguous())
    strided = torch.zeros(4, 12, 600).to(FP8)[..., :576]
    refused("q is not contiguous", layer, inputs, q=strided)
    refused("kv_cache has shape", layer, inputs, kv_cache=inputs.kv_cache[..., :512])
    refused("is not one of", layer, inputs, kv_cache=inputs.kv_cache.to(BF16))
    refused("metadata.decode is None", layer, inputs, decode=None)
    wide = build(Case(lens=(30, 40, 9), heads=12, q_len=2))
    refused("3 requests, built for at most 2", layer, wide)
    deep = build(Case(lens=(30, 40), heads=12, q_len=3))
    refused("3 query tokens per request, built for at most 2", layer, deep)
    large = build(Case(lens=(30, 40, 9), heads=12, q_len=3))
    assert "3 requests, built for at most 2" in refused("3 query tokens", layer, large)
    both = refused("3 requests", layer, wide, q=wide.q.float())
    assert "expected torch.float8_e4m3fn" in both
    with pytest.raises(UnsupportedDecodeError, match="DCP world is 2, built for 1"):
        layer.decode(
            impl_of(2, 0), inputs.q, inputs.kv_cache,
            metadata_of(inputs, causal=False), layer_of(inputs.case),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"q": lambda x: torch.cat([x.view(torch.uint8)] * 2, -1)[..., :576].view(FP8)},
            "q is not c",
        ),
        ({"q": lambda x: x.repeat(1, 1, 2)[..., ::2]}, "q is not contiguous"),
        ({"q": lambda x: (x[..., :512], x[..., 512:])}, "q is a tuple"),
        ({"seq_lens": lambda x: x.long()}, "seq_lens is torch.int64"),
        ({"seq_lens": lambda x: torch.stack([x, x], 1)[:, 0]}, "seq_lens is not contiguous"),
        ({"block_table": lambda x: x.long()}, "block_table is torch.int64"),
        ({"block_table": lambda x: x[:1]}, "block_table has shape"),
        ({"block_table": lambda x: x.T.contiguous().T}, "contiguous columns"),
        ({"causal_lens": lambda x: torch.stack([x, x], 1)[:, 0]}, "causal_lens is not contiguous"),
        ({"scale": lambda x: 0.0}, "scale is 0.0"),
        ({"scale": lambda x: math.nan}, "scale is nan"),
        ({"k_scale": lambda x: -1.0}, "k_scale is -1.0"),
    ],
)
def test_a_shape_that_ran_before_is_checked_again(change: dict[str, Any], match: str) -> None:
    case = Case(lens=(300, 650), heads=12, q_len=2, block_size=48, cp=(2, 0, 1))
    inputs = build(case)
    assert inputs.causal_lens is not None
    layer = TorchDecode(6, config(dcp_size=2))
    layer.decode(impl_of(2), inputs.q, inputs.kv_cache, metadata_of(inputs), layer_of(case))
    # As the kernels do, the core trusts its caller from here on.
    for core in layer._lane().cores.values():
        core.decode = lambda *_, **__: torch.empty(0)  # type: ignore[method-assign, assignment]
    ((name, how),) = change.items()
    good: dict[str, Any] = {
        "q": inputs.q, "seq_lens": inputs.seq_lens, "block_table": inputs.block_table,
        "causal_lens": inputs.causal_lens, "scale": SCALE, "k_scale": 1.0,
    }  # fmt: skip
    given = good | {name: how(good[name])}
    step = metadata_of(
        inputs,
        decode=SimpleNamespace(
            block_table=given["block_table"], seq_lens=given["seq_lens"],
            dcp_tot_seq_lens=given["causal_lens"],
        ),
    )  # fmt: skip
    scales = SimpleNamespace(_q_scale_float=1.0, _k_scale_float=given["k_scale"])
    with pytest.raises(UnsupportedDecodeError, match=match):
        layer.decode(impl_of(2, scale=given["scale"]), given["q"], inputs.kv_cache, step, scales)


def test_query_length_is_read_from_the_host_only() -> None:
    def read(requests: int, tokens: int, **fields: Any) -> Any:
        fields = {"decode": SimpleNamespace(), "num_prefills": 0} | fields
        return read_query_length(
            SimpleNamespace(num_decodes=requests, num_decode_tokens=tokens, **fields)
        )

    assert read(2, 16, query_start_loc=torch.tensor([0, 8, 16])).tokens == 8
    padded = read(4, 16, query_start_loc_cpu=[0, 8, 16, 16, 16])
    assert (padded.tokens, padded.requests, padded.problems) == (8, 2, ())
    mixed = read(2, 2, query_start_loc_cpu=[0, 1, 2, 900], num_prefills=1)
    assert (mixed.tokens, mixed.requests, mixed.problems) == (1, 2, ())
    assert read(2, 14, decode=SimpleNamespace(max_query_len=8)).problems
    assert read(2, 16, decode=SimpleNamespace(max_query_len=8)).tokens == 8
    assert "add query_start_loc_cpu" in read(2, 16).problems[0]
    assert "add query_start_loc_cpu" in read(2, 2, max_query_len=900, num_prefills=1).problems[0]
    assert "cover 1 requests" in read(2, 8, query_start_loc_cpu=[0, 8]).problems[0]


def test_config_with_vllm_attributes() -> None:
    parallel = SimpleNamespace(decode_context_parallel_size=2, cp_kv_cache_interleave_size=1)
    like_vllm = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=32),
        speculative_config=SimpleNamespace(num_speculative_tokens=7),
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="fp8_e4m3"),
        device_config=SimpleNamespace(device="cpu"),
    )
    found = read_config(like_vllm)
    assert (found.max_requests, found.max_q_len, found.dcp_size) == (32, 8, 2)
    assert found.q_dtype == "fp8"
    assert found.interleave() == 1
    parallel.cp_kv_cache_interleave_size = 64
    assert found.interleave() == 64
    with pytest.raises(InputError, match="no attribute 'parallel_config'"):
        read_config(SimpleNamespace())
