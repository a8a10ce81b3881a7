"""Specs of K3 layers: one group for target and MLA draft, foreign drafts repaired or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest

from k3backend.common.errors import KvMergeError, SpecError
from k3backend.common.k3_model import Deployment
from k3backend.common.kv_config import pool_block_bytes, request_blocks, request_bytes
from k3backend.common.kv_dtype import KVQuantMode, MultipleOf
from k3backend.common.kv_groups import kv_tp_replicas, plan_groups
from k3backend.common.kv_merge import merge_specs
from k3backend.common.kv_spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from k3backend.common.model_config import BUNDLED_DRAFTS
from k3backend.common.plan_context import PlanContext
from k3backend.common.spec_file import parse_spec_document
from k3backend.nvidia import mla_specs as nvidia
from k3backend.rocm.mla_specs import (
    align_draft_spec,
    build_draft_specs,
    build_layer_specs,
    build_layer_stages,
    build_target_specs,
)

CASES = Path(__file__).resolve().parents[1] / "data" / "planning"
MLA_DRAFTS = [name for name in BUNDLED_DRAFTS if "mla" in name]


def _context(deployment: Deployment, **changes: object) -> PlanContext:
    fixed = {
        "tp_size": deployment.tp_size,
        "dcp_size": deployment.dcp_size,
        "pp_size": deployment.pp_size,
        "max_model_len": deployment.max_model_len,
        "max_in_flight_tokens": deployment.max_in_flight_tokens,
        "mamba_cache_mode": deployment.mamba_cache_mode,
    }
    return PlanContext(**{**fixed, **changes})


def _mla_pair(**sizes: object) -> tuple[MLAAttentionSpec, MLAAttentionSpec]:
    """One target and one draft MLA spec of a deployment."""
    deployment = Deployment.load(draft="dspark-mla", **sizes)
    targets = [
        spec
        for spec in build_target_specs(deployment).values()
        if isinstance(spec, MLAAttentionSpec)
    ]
    (draft,) = set(build_draft_specs(deployment).values())
    assert isinstance(draft, MLAAttentionSpec)
    return targets[0], draft


def test_kimi_k3_with_an_mla_draft_forms_four_groups() -> None:
    deployment = Deployment.load(draft="dspark-mla", max_model_len=1_048_576)
    context = _context(deployment)
    groups = plan_groups(build_layer_specs(deployment), context)
    assert [len(group.layer_names) for group in groups] == [23, 23, 23, 29]
    assert {group.kv_cache_spec.block_size for group in groups} == {1536}
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {884_736}
    assert pool_block_bytes(groups, context) == 25_657_344
    assert sum(request_blocks(groups, context)) == 710
    assert request_bytes(groups, context) == 18_216_714_240
    assert kv_tp_replicas(groups, context) == 1


def test_an_undeclared_draft_splits_kimi_k3_into_twenty_groups() -> None:
    deployment = Deployment.load(
        draft="dspark-mla", max_model_len=1_048_576, draft_max_tp_shards=None
    )
    context = _context(deployment)
    groups = plan_groups(build_layer_specs(deployment), context)
    assert len(groups) == 20
    assert pool_block_bytes(groups, context) == 4_423_680
    assert sum(request_blocks(groups, context)) == 4224
    assert request_bytes(groups, context) == 18_685_624_320


def test_flashkda_checkpoints_cost_three_blocks() -> None:
    deployment = Deployment.load(draft="dspark-mla", prefill_checkpoint_blocks=1)
    context = _context(deployment)
    groups = plan_groups(nvidia.build_layer_specs(deployment), context)
    assert sum(request_blocks(groups, context)) == 713
    assert request_bytes(groups, context) == 18_293_686_272


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("spec_tokens", [0, 4, 7])
def test_every_page_of_kimi_k3_has_one_size(tp_size: int, kv_dtype: str, spec_tokens: int) -> None:
    deployment = Deployment.load(
        draft="dspark-mla", tp_size=tp_size, kv_dtype=kv_dtype, spec_tokens=spec_tokens
    )
    specs = build_layer_specs(deployment)
    page = deployment.block_tokens() * deployment.mla_token_bytes
    assert {spec.page_size_bytes for spec in specs.values()} == {page}
    assert {spec.block_size for spec in specs.values()} == {deployment.block_tokens()}
    groups = plan_groups(specs, _context(deployment))
    assert [len(group.layer_names) for group in groups] == [23, 23, 23, 29]


@pytest.mark.parametrize("draft", MLA_DRAFTS)
@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("tp_size", "dcp_size"), [(1, 1), (8, 1), (8, 8), (16, 4)])
def test_target_and_mla_draft_differ_in_causality_alone(
    draft: str, kv_dtype: str, tp_size: int, dcp_size: int
) -> None:
    deployment = Deployment.load(draft=draft, kv_dtype=kv_dtype, tp_size=tp_size, dcp_size=dcp_size)
    target = next(
        spec
        for spec in build_target_specs(deployment).values()
        if isinstance(spec, MLAAttentionSpec)
    )
    for spec in build_draft_specs(deployment).values():
        differing = {
            field.name
            for field in fields(spec)
            if getattr(spec, field.name) != getattr(target, field.name)
        }
        assert differing == {"non_causal_multi_token_decode", "is_draft"}
        assert spec.max_tp_shards == target.max_tp_shards == 1
        merged = merge_specs([target, spec])
        assert merged.non_causal_multi_token_decode
        assert merged.is_draft


def test_values_are_those_of_vllms_kimi_k3_layers() -> None:
    target, draft = _mla_pair()
    assert (target.num_kv_heads, target.head_size, target.head_size_v) == (1, 576, 0)
    assert (target.dtype.name, target.cache_dtype_str) == ("uint8", "fp8")
    assert target.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR
    assert (target.dcp_sharded, target.is_draft, draft.is_draft) == (True, False, True)
    kda = next(
        spec
        for spec in build_target_specs(Deployment.load(spec_tokens=7)).values()
        if isinstance(spec, MambaSpec)
    )
    assert kda.shapes == ((4608, 10), (12, 128, 128))
    assert [dtype.name for dtype in kda.dtypes] == ["bfloat16", "float32"]
    assert (kda.real_page_size_bytes, kda.page_size_bytes) == (878_592, 884_736)
    assert (kda.num_speculative_blocks, kda.prefill_checkpoint_alignment) == (7, None)


def test_without_state_caching_one_kda_block_lasts_for_the_request() -> None:
    deployment = Deployment.load(mamba_cache_mode="none", max_model_len=100_000)
    specs = build_target_specs(deployment)
    kda = next(spec for spec in specs.values() if isinstance(spec, MambaSpec))
    assert (kda.block_size, kda.mamba_cache_mode) == (100_000, "none")
    groups = plan_groups(specs, _context(deployment))
    assert request_blocks(groups, _context(deployment)) == [1, 1, 1, 66]


def test_checkpoint_distance_is_the_vendors() -> None:
    deployment = Deployment.load(prefill_checkpoint_blocks=1)
    distances = set()
    for build in (nvidia.build_target_specs, build_target_specs):
        spec = next(iter(build(deployment).values()))
        assert isinstance(spec, MambaSpec)
        distances.add(spec.prefill_checkpoint_alignment)
    assert distances == {16, 64}


@pytest.mark.parametrize(
    ("tp_size", "heads", "shards"), [(1, 16, 16), (8, 2, 16), (16, 1, 16), (32, 1, 16)]
)
def test_a_gqa_draft_declares_its_kv_heads(tp_size: int, heads: int, shards: int) -> None:
    for draft, cls in (
        ("dspark-gqa-full", FullAttentionSpec),
        ("dspark-gqa-window", SlidingWindowSpec),
    ):
        deployment = Deployment.load(draft=draft, tp_size=tp_size)
        (spec,) = set(build_draft_specs(deployment).values())
        assert type(spec) is cls
        assert (spec.num_kv_heads, spec.head_size, spec.max_tp_shards) == (heads, 64, shards)
        assert spec.block_size == deployment.block_tokens()


def test_context_parallelism_shards_a_gqa_draft_only_over_ranks_with_the_same_heads() -> None:
    def sharded(draft: str, tp_size: int, dcp_size: int) -> bool:
        deployment = Deployment.load(draft=draft, tp_size=tp_size, dcp_size=dcp_size)
        (spec,) = set(build_draft_specs(deployment).values())
        return spec.dcp_sharded

    assert sharded("dspark-gqa-full", 8, 1)
    assert not sharded("dspark-gqa-full", 8, 8)
    assert sharded("dspark-gqa-full", 32, 2)
    assert not sharded("dspark-gqa-full", 32, 4)
    assert not sharded("dspark-gqa-window", 8, 1)
    assert sharded("dspark-mla", 8, 8)


def test_the_drafts_format_follows_the_target_unless_told() -> None:
    def draft_spec(draft: str, **formats: str) -> KVCacheSpec:
        (spec,) = set(build_draft_specs(Deployment.load(draft=draft, **formats)).values())
        return spec

    assert draft_spec("dspark-mla", kv_dtype="fp8_e4m3").cache_dtype_str == "fp8_e4m3"
    assert draft_spec("dspark-gqa-full", kv_dtype="fp8").dtype == "uint8"
    told = draft_spec("dspark-gqa-full", kv_dtype="fp8", draft_kv_dtype="bf16")
    assert (told.dtype.name, told.kv_quant_mode) == ("bfloat16", KVQuantMode.NONE)


def test_the_draft_may_declare_what_it_is_told() -> None:
    for told in (None, 4):
        deployment = Deployment.load(draft="dspark-mla", draft_max_tp_shards=told)
        assert {spec.max_tp_shards for spec in build_draft_specs(deployment).values()} == {told}
        mla = [
            s for s in build_target_specs(deployment).values() if isinstance(s, MLAAttentionSpec)
        ]
        assert {spec.max_tp_shards for spec in mla} == {1}


def test_stages_name_the_same_layers_as_the_specs() -> None:
    deployment = Deployment.load(draft="dspark-mla", pp_size=2)
    stages = build_layer_stages(deployment)
    assert list(stages) == list(build_layer_specs(deployment))
    assert list(stages.values()) == [0] * 47 + [1] * 46 + [1] * 5


def test_an_aligned_draft_is_untouched() -> None:
    target, draft = _mla_pair()
    assert align_draft_spec(target, draft) == (draft, ())


@pytest.mark.parametrize(
    ("changes", "repairs"),
    [
        ({"max_tp_shards": None}, [("max_tp_shards", None, 1, "undeclared replication")]),
        ({"cache_dtype_str": "fp8_e4m3"}, [("cache_dtype_str", "fp8_e4m3", "fp8", "label")]),
        (
            {"block_stride_alignment": MultipleOf(64)},
            [("block_stride_alignment", MultipleOf(64), None, "label")],
        ),
        (
            {"max_tp_shards": None, "cache_dtype_str": "fp8_e4m3"},
            [
                ("max_tp_shards", None, 1, "undeclared replication"),
                ("cache_dtype_str", "fp8_e4m3", "fp8", "label"),
            ],
        ),
    ],
)
def test_labels_and_undeclared_replication_are_repaired_and_reported(
    changes: dict[str, object], repairs: list[tuple[object, ...]]
) -> None:
    target, draft = _mla_pair()
    aligned, report = align_draft_spec(target, replace(draft, is_draft=False, **changes))
    assert [(r.field, r.was, r.now, r.reason) for r in report] == repairs
    assert aligned == draft
    assert aligned.is_draft
    merge_specs([target, aligned])


@pytest.mark.parametrize(
    ("changes", "named", "meaning"),
    [
        ({"block_size": 768}, "block_size", "bytes"),
        ({"dtype": "bfloat16", "kv_quant_mode": "NONE"}, "dtype", "bytes"),
        ({"cache_dtype_str": "fp8_e5m2"}, "cache_dtype_str", "bytes"),
        ({"head_size": 512}, "head_size", "bytes"),
        ({"max_tp_shards": 8}, "max_tp_shards", "ranks"),
        ({"dcp_sharded": False}, "dcp_sharded", "ranks"),
        ({"block_stride_alignment": 7}, "block_stride_alignment", "bytes"),
    ],
)
def test_a_real_difference_is_refused_with_its_meaning(
    changes: dict[str, object], named: str, meaning: str
) -> None:
    target, draft = _mla_pair()
    with pytest.raises(KvMergeError, match=meaning) as raised:
        align_draft_spec(target, replace(draft, **changes))
    assert raised.value.field == named
    assert "target against draft" in str(raised.value)


def test_replication_of_sharded_heads_is_never_made_up() -> None:
    """None on a cache of several heads may mean that they are sharded; only one latent is whole."""
    target = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", max_tp_shards=1
    )
    with pytest.raises(KvMergeError, match="max_tp_shards"):
        align_draft_spec(target, replace(target, max_tp_shards=None))
    latent, draft = _mla_pair()
    with pytest.raises(KvMergeError, match="max_tp_shards"):
        align_draft_spec(replace(latent, max_tp_shards=None), draft)


@pytest.mark.parametrize("nothing", [None, {}, "MLAAttentionSpec", MLAAttentionSpec])
def test_what_is_no_spec_is_refused_by_name(nothing: object) -> None:
    target, draft = _mla_pair()
    with pytest.raises(SpecError, match="draft is"):
        align_draft_spec(target, nothing)
    with pytest.raises(SpecError, match="target is"):
        align_draft_spec(nothing, draft)


def test_a_gqa_draft_is_no_mla_draft() -> None:
    target, _ = _mla_pair()
    draft = next(iter(build_draft_specs(Deployment.load(draft="dspark-gqa-full")).values()))
    with pytest.raises(KvMergeError, match="also differ in"):
        align_draft_spec(target, draft)


def test_building_specs_imports_no_torch() -> None:
    code = (
        "import sys; from k3backend.common.k3_model import Deployment; "
        "from k3backend.rocm.mla_specs import build_layer_specs; "
        "build_layer_specs(Deployment.load(draft='dspark-mla')); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("k3-mla-draft", {"draft": "dspark-mla"}),
        ("k3-mla-draft-128k", {"draft": "dspark-mla-96h", "max_model_len": 131_072}),
        ("k3-mla-draft-undeclared-shards", {"draft": "dspark-mla", "draft_max_tp_shards": None}),
        ("k3-mla-draft-tp16", {"draft": "dspark-mla", "tp_size": 16, "kv_dtype": "auto"}),
        ("k3-no-draft-tp16", {"spec_tokens": 7, "tp_size": 16, "kv_dtype": "auto"}),
        ("k3-dcp8-all-sharded", {"draft": "dspark-mla", "dcp_size": 8}),
    ],
)
def test_specs_are_those_that_public_reports_name(case: str, sizes: dict[str, object]) -> None:
    """The cases hold layers as reports give them: kinds in a row, and without the KDA backend."""
    file = json.loads((CASES / f"{case}.json").read_text())
    reported = parse_spec_document(file["specs"], case)
    deployment = Deployment.load(**sizes)
    built = [
        replace(spec, mamba_type="MAMBA2") if isinstance(spec, MambaSpec) else spec
        for spec in build_layer_specs(deployment).values()
    ]
    assert Counter(built) == Counter(reported.specs.values())
    assert sum(spec.is_draft for spec in built) == sum(
        spec.is_draft for spec in reported.specs.values()
    )
