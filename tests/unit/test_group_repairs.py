"""What every policy does to specs and groups besides choosing: marks, labels, names in refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from k3backend.common.errors import PlanError
from k3backend.common.group_policy import candidate_groups, choose_grouping
from k3backend.common.k3_model import Deployment
from k3backend.common.kv_config import request_blocks
from k3backend.common.kv_groups import kv_tp_replicas, plan_groups
from k3backend.common.kv_labels import settle_dcp_sharding
from k3backend.common.kv_plan import make_plan
from k3backend.common.kv_spec import KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from k3backend.common.model_config import BUNDLED_DRAFTS
from k3backend.common.plan_context import LAYOUT_NAMES, PlanContext
from k3backend.common.spec_file import SpecFile, parse_spec_document
from k3backend.reference import mla_specs
from k3backend.report.layout_document import layout_document
from tests.helpers.k3_layers import k3_context, k3_layers
from tests.helpers.random_specs import random_document

PLANNING = Path(__file__).parents[1] / "data" / "planning"
POLICIES = ("k3", "vllm", "isolate")


def replicated_draft(name: str, **settings: Any) -> SpecFile:
    """A public case whose draft says that DCP does not shard its cache."""
    document = json.loads((PLANNING / f"{name}.json").read_text())["specs"]
    for entry in document["layers"]:
        if entry.get("is_draft"):
            entry["dcp_sharded"] = False
    return parse_spec_document({**document, **settings}, name)


def assert_marked(groups: list[KVCacheGroupSpec], specs: dict[str, KVCacheSpec]) -> None:
    for group in groups:
        holds = any(specs[name].is_draft for name in group.layer_names)
        assert group.is_eagle_group == group.kv_cache_spec.is_draft == holds
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            for name, spec in group.kv_cache_spec.kv_cache_specs.items():
                assert spec.is_draft == specs[name].is_draft


@pytest.mark.parametrize("draft", ["mla", "full", "window"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_marks_groups_with_a_draft_layer(policy: str, draft: str) -> None:
    specs, context = k3_layers(8, draft), k3_context(8)
    assert_marked(choose_grouping(specs, context, policy).groups, specs)
    for groups in candidate_groups(specs, context).values():
        assert_marked(groups, specs)
    document = layout_document(make_plan(specs, context, policy), None)
    assert sum(group["is_draft"] for group in document["groups"]) >= 1
    for group in document["groups"]:
        assert group["spec"]["is_draft"] == group["is_draft"]
        for layer_spec in group["spec"].get("layer_specs", ()):
            marks = {specs[name].is_draft for name in layer_spec["layers"]}
            assert marks == {layer_spec["is_draft"]}


def test_random_plans_are_marked() -> None:
    planned = 0
    for seed in range(150):
        file = parse_spec_document(random_document(seed))
        for policy in POLICIES:
            try:
                groups = choose_grouping(file.specs, file.context, policy).groups
            except ValueError:
                continue
            assert_marked(groups, file.specs)
            planned += any(group.is_eagle_group for group in groups)
    # Every eighth random model or so has a draft.
    assert planned >= 20


@pytest.mark.parametrize("name", ["k3-mla-draft", "k3-gqa-full-tp8"])
def test_with_one_dcp_rank_a_replicated_draft_joins_its_target(name: str) -> None:
    file = replicated_draft(name)
    plan = make_plan(file.specs, file.context)
    assert (len(plan.groups), plan.request.bytes) == (4, 18_216_714_240)
    (warning,) = [w for w in plan.warnings if "dcp_sharded" in w.message]
    assert warning.code == "label-alias"
    assert warning.message.startswith("draft.dcp_sharded False of 5 layers (draft.0")
    assert plan.kv_tp_replicas == kv_tp_replicas(
        plan_groups(file.specs, file.context), file.context
    )


@pytest.mark.parametrize("name", ["k3-mla-draft", "k3-gqa-full-tp8"])
def test_the_default_keeps_the_replicated_draft_apart_and_says_so(name: str) -> None:
    file = replicated_draft(name)
    plan = make_plan(file.specs, file.context, "vllm")
    assert list(plan.group_specs) == plan_groups(file.specs, file.context)
    assert len(plan.groups) == 20
    (warning,) = [w for w in plan.warnings if "dcp_sharded" in w.message]
    assert warning.code == "label-alias"


def test_with_more_dcp_ranks_sharding_is_no_label() -> None:
    file = replicated_draft("k3-mla-draft", dcp_size=8)
    assert settle_dcp_sharding(file.specs, 8) == (file.specs, [])
    plan = make_plan(file.specs, file.context)
    assert not any("dcp_sharded" in w.message for w in plan.warnings)
    drafts = [name for name, spec in file.specs.items() if spec.is_draft]
    for group in plan.group_specs:
        assert len({name in drafts for name in group.layer_names}) == 1


def test_an_undeclared_replicated_draft_needs_both_repairs() -> None:
    """A label and a missing declaration at once: either alone would still split 20 groups."""
    specs = {
        name: replace(spec, max_tp_shards=None, dcp_sharded=False) if spec.is_draft else spec
        for name, spec in k3_layers(8, "mla").items()
    }
    choice = choose_grouping(specs, k3_context(8))
    assert [len(group.layer_names) for group in choice.groups] == [23, 23, 23, 29]
    assert {w.code for w in choice.warnings} == {"label-alias", "undeclared-shards"}


def test_settled_sharding_changes_no_number() -> None:
    context = PlanContext(tp_size=8, max_model_len=65536)
    for seed in range(60):
        file = parse_spec_document(random_document(seed))
        settled, reports = settle_dcp_sharding(file.specs, 1)
        assert list(settled) == list(file.specs)
        changed = {name for report in reports for name in report.layer_names}
        for name, spec in file.specs.items():
            assert (settled[name] != spec) == (name in changed)
            assert settled[name].is_draft == spec.is_draft
            one, other = ([KVCacheGroupSpec([name], s)] for s in (spec, settled[name]))
            assert request_blocks(one, context) == request_blocks(other, context)
            assert spec.page_size_bytes == settled[name].page_size_bytes
            assert kv_tp_replicas(one, context) == kv_tp_replicas(other, context)


def test_refusals_name_layers_that_exist() -> None:
    """Every refusal of a bundled draft, in every layout and by every policy."""
    refused = 0
    for draft, tp_size in product(BUNDLED_DRAFTS, (1, 8)):
        specs = mla_specs.build_layer_specs(Deployment.load(draft=draft, tp_size=tp_size))
        for layout, policy in product(LAYOUT_NAMES, POLICIES):
            context = PlanContext(layout=layout, tp_size=tp_size, max_model_len=65536)
            try:
                make_plan(specs, context, policy)
            except ValueError as error:
                message = str(error)
                layers = re.findall(r"(?:language_)?model\.[\w.]+\d[\w.]*\w", message)
                assert layers, message
                assert set(layers) <= set(specs), message
                # No placeholder in place of a name.
                words = set(re.findall(r"\blayers? (\S+?)[,;:]?(?= |$)", message))
                assert words <= {*specs, "over", "has", "to"}, message
                refused += 1
    assert refused >= 12


def test_one_reason_is_given_once() -> None:
    with pytest.raises(PlanError) as raised:
        choose_grouping(k3_layers(8, "full"), k3_context(8, layout="LHBNC"))
    assert str(raised.value).count("cannot hold its padded page") == 1
