"""The replay runs vLLM 0.33's scheduler over our groups; only the model is made up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from k3backend.common.errors import InputError, PluginError
from k3backend.common.kv_spec import KVCacheGroupSpec, MambaSpec, MLAAttentionSpec
from k3backend.common.plan_context import PlanContext
from k3backend.common.request_trace import TraceRequest, read_trace
from k3backend.vllm_plugin.replay import LayoutReplay, check_vllm
from k3backend.vllm_plugin.replay_report import ReplaySettings
from k3backend.vllm_plugin.translate import to_vllm_groups

pytestmark = pytest.mark.vllm

TRACE = "tests/data/mooncake_conversation_lengths.csv"
BLOCK_TOKENS = 1536
PAGE_BYTES = BLOCK_TOKENS * 576
CONTEXT = PlanContext(tp_size=8, max_model_len=1048576)


def kda() -> MambaSpec:
    return MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((4608, 10), (12, 128, 128)),
        dtypes=("bfloat16", "float32"),
        page_size_padded=PAGE_BYTES,
        mamba_cache_mode="align",
        num_speculative_blocks=7,
    )


def mla() -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=1,
        head_size=576,
        dtype="uint8",
        cache_dtype_str="fp8",
        max_tp_shards=1,
    )


def k3_groups(kda_width: int, mla_widths: tuple[int, ...]) -> list[KVCacheGroupSpec]:
    names = [f"kda.{i}" for i in range(69)]
    count = math.ceil(69 / kda_width)
    groups = [KVCacheGroupSpec(names[i::count], kda()) for i in range(count)]
    for number, width in enumerate(mla_widths):
        layers = [f"mla.{number}.{i}" for i in range(width)]
        groups.append(KVCacheGroupSpec(layers, mla()))
    return groups


def replay(
    groups: list[KVCacheGroupSpec],
    trace: list[TraceRequest],
    context: PlanContext = CONTEXT,
    blocks: int = 2000,
    **settings: object,
):
    width = max(len(group.layer_names) for group in groups)
    made = ReplaySettings(memory_bytes=blocks * width * PAGE_BYTES, **settings)  # type: ignore[arg-type]
    return LayoutReplay("test", to_vllm_groups(groups), context, made).run(trace)


def test_every_request_of_the_trace_ends() -> None:
    trace = read_trace(TRACE, 20)
    report = replay(k3_groups(23, (29,)), trace)
    assert report.requests_finished == 20
    assert report.requests_skipped == 0
    assert report.preemptions == 0
    # One prefill step at least per 8192 tokens, one decode step per further output token.
    assert report.steps >= max(item.output_tokens for item in trace)
    assert report.allocate_us["calls"] >= sum(item.output_tokens for item in trace) - 20


def test_blocks_by_group_follow_the_lengths() -> None:
    trace = [TraceRequest(0, 5 * BLOCK_TOKENS, 40)]
    report = replay(k3_groups(23, (29,)), trace)
    states = [facts["blocks_peak"] for facts in report.groups[:3]]
    # The running state and the seven speculative ones; align mode keeps at most one more.
    assert all(8 <= blocks <= 9 for blocks in states)
    assert report.groups[3]["blocks_peak"] == 6
    assert report.groups[3]["kind"] == "mla_attention"


def test_a_pool_that_is_too_small_preempts_and_still_finishes() -> None:
    trace = [TraceRequest(0, BLOCK_TOKENS, 3 * BLOCK_TOKENS) for _ in range(4)]
    groups = [KVCacheGroupSpec(["mla.0"], mla())]
    # Each ends with 4 blocks; all four start with 2, so 9 usable blocks admit and then preempt.
    report = replay(groups, trace, blocks=10)
    assert report.requests_finished == 4
    assert report.preemptions > 0
    assert report.pool_usage_peak == 1.0


def test_more_memory_admits_more() -> None:
    trace = [TraceRequest(0, 3 * BLOCK_TOKENS, 8) for _ in range(12)]
    groups = [KVCacheGroupSpec(["mla.0"], mla())]
    few = replay(groups, trace, blocks=13)
    many = replay(groups, trace, blocks=37)
    # 12 and 36 usable blocks, 4 blocks a request with its first output token.
    assert few.admitted_peak == 3
    assert many.admitted_peak == 9


def test_prefix_hits_end_at_block_multiples() -> None:
    shared = 2 * BLOCK_TOKENS + 700
    first = TraceRequest(0, shared + 10, 4)
    later = replace(first, timestamp_ms=10**6)
    report = replay(
        k3_groups(23, (29,)),
        [first, later],
        shared_prefix_tokens=shared,
        arrivals="trace",
    )
    assert report.prefix_hit_tokens == BLOCK_TOKENS
    assert report.hit_tokens % BLOCK_TOKENS == 0
    assert 0 < report.hit_tokens <= 2 * BLOCK_TOKENS


def test_prefix_caching_off_finds_nothing() -> None:
    trace = [TraceRequest(0, 5000, 4), TraceRequest(10**6, 5000, 4)]
    context = replace(CONTEXT, prefix_caching=False)
    report = replay(
        k3_groups(23, (29,)), trace, context, shared_prefix_tokens=5000, arrivals="trace"
    )
    assert report.hit_tokens == 0


def test_requests_that_can_never_run_are_skipped_and_counted() -> None:
    trace = [TraceRequest(0, 100, 4), TraceRequest(0, 40 * BLOCK_TOKENS, 4)]
    report = replay([KVCacheGroupSpec(["mla.0"], mla())], trace, blocks=20)
    assert report.requests_finished == 1
    assert report.requests_skipped == 1


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2"):
        replay([KVCacheGroupSpec(["mla.0"], mla())], [TraceRequest(0, 10, 1)], blocks=1)


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    with pytest.raises(PluginError, match=r"found 0\.32\.0"):
        check_vllm()
