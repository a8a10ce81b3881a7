"""Every warning code: the plan that earns it, and one that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3backend.common.grouping_choice import PlanWarning
from k3backend.common.kv_plan import make_plan
from k3backend.common.kv_spec import FullAttentionSpec, KVCacheSpec, MambaSpec, MultipleOf
from k3backend.common.plan_context import PlanContext
from k3backend.common.plan_warnings import plan_warnings
from tests.helpers.k3_layers import k3_context, k3_layers


def warnings(
    specs: dict[str, KVCacheSpec], context: PlanContext, policy: str = "k3"
) -> dict[str, str]:
    plan = make_plan(specs, context, policy)
    codes = [warning.code for warning in plan.warnings]
    assert len(codes) == len(set(codes)) or codes.count("label-alias") > 1
    return {warning.code: warning.message for warning in plan.warnings}


def test_padding_over_ten_percent_names_the_group() -> None:
    message = warnings(k3_layers(16, "full", fp8=False), k3_context(16))["padding"]
    assert message.startswith("13.5% of the bytes")
    assert "padding" not in warnings(k3_layers(8, "mla"), k3_context(8))


def test_isolated_draft_is_priced() -> None:
    full = warnings(k3_layers(8, "full"), k3_context(8), "isolate")["draft-isolated"]
    # 683 blocks leave 19 of 24 pages of 884,736 B idle, of 1,393 blocks in all.
    assert f"{683 * 19 * 884_736:,} B" in full
    assert "38.8%" in full
    assert "draft-isolated" not in warnings(k3_layers(8, "window"), k3_context(8), "isolate")
    assert "draft-isolated" not in warnings(k3_layers(8, "full"), k3_context(8))


def test_undeclared_shards_are_named_under_every_policy() -> None:
    specs = k3_layers(8, "mla", max_tp_shards=None)
    repaired = warnings(specs, k3_context(8))["undeclared-shards"]
    assert "draft.max_tp_shards" in repaired
    assert "1 was taken" in repaired
    default = warnings(specs, k3_context(8), "vllm")["undeclared-shards"]
    assert "draft.max_tp_shards" in default
    assert "keeps such layers apart" in default
    assert "undeclared-shards" not in warnings(k3_layers(8, "mla"), k3_context(8), "vllm")


def test_undeclared_shards_of_other_caches_are_named_and_not_guessed() -> None:
    plain = FullAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=64,
        dtype="bfloat16",  # type: ignore[arg-type]
        max_tp_shards=4,
    )
    silent = replace(plain, max_tp_shards=None, is_draft=True)
    specs: dict[str, KVCacheSpec] = {"a": plain, "b": plain, "draft.0": silent}
    context = PlanContext(tp_size=8, max_model_len=4096)
    plan = make_plan(specs, context)
    assert plan.kv_tp_replicas == 1
    assert len(plan.groups) == 1
    (warning,) = plan.warnings
    assert warning.code == "undeclared-shards"
    assert "draft.max_tp_shards is not declared (None) by draft.0 while a declares 4" in (
        warning.message
    )


def test_label_aliases_are_named_under_every_policy() -> None:
    specs = k3_layers(8, "mla", cache_dtype_str="fp8_e4m3")
    for policy in ("k3", "vllm"):
        message = warnings(specs, k3_context(8), policy)["label-alias"]
        assert "cache_dtype_str" in message
        assert "'fp8_e4m3'" in message
    aligned = k3_layers(8, "mla", block_stride_alignment=MultipleOf(64))
    assert "block_stride_alignment" in warnings(aligned, k3_context(8))["label-alias"]


@pytest.mark.parametrize(("tokens", "gains"), [(500, False), (2000, False), (20_000, True)])
def test_fp8_at_short_contexts(tokens: int, gains: bool) -> None:
    found = warnings(k3_layers(8, "mla"), k3_context(8, context=tokens))
    assert ("fp8-no-gain" not in found) == gains
    if not gains:
        assert f"{tokens:,} tokens" in found["fp8-no-gain"]


def test_fp8_is_not_mentioned_for_two_byte_caches() -> None:
    found = warnings(k3_layers(8, "mla", fp8=False), k3_context(8, context=500))
    assert "fp8-no-gain" not in found


def test_prefix_hits_at_block_multiples() -> None:
    message = warnings(k3_layers(8, "mla"), k3_context(8))["prefix-hit-granularity"]
    assert "multiples of 1,536 tokens" in message
    off = k3_context(8, prefix_caching=False)
    assert "prefix-hit-granularity" not in warnings(k3_layers(8, "mla"), off)
    plain = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16")  # type: ignore[arg-type]
    assert warnings({"a": plain, "b": plain}, PlanContext(max_model_len=4096)) == {}


def test_a_draft_over_several_groups_is_said() -> None:
    specs, context = k3_layers(8, "full"), k3_context(8, context=60_000)
    assert "draft-split" in warnings(specs, context)
    assert "draft-split" not in warnings(specs, k3_context(8))
    assert "draft-split" not in warnings(specs, context, "isolate")


def test_known_codes_are_not_repeated() -> None:
    specs, context = k3_layers(8, "mla", max_tp_shards=None), k3_context(8)
    plan = make_plan(specs, context, "vllm")
    known = PlanWarning("undeclared-shards", "said already")
    found = plan_warnings(plan.group_specs, specs, context, [known])
    assert [w for w in found if w.code == "undeclared-shards"] == [known]


def test_a_model_without_groups_has_no_warnings() -> None:
    assert plan_warnings([], {}, k3_context(8)) == []


def test_states_alone_have_no_fp8_to_speak_of() -> None:
    kda = k3_layers(8)["model.layers.0"]
    assert isinstance(kda, MambaSpec)
    specs = {"a": kda, "b": replace(kda)}
    assert "fp8-no-gain" not in warnings(specs, k3_context(8))
