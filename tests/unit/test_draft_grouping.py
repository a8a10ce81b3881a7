"""The grouping hook that a model's class calls: when it plans, when it leaves the default."""

from __future__ import annotations

import importlib

import pytest

from k3backend.common.draft_grouping import GQADraftKVCacheGrouping, needs_policy
from k3backend.common.errors import InputError
from k3backend.common.kv_groups import plan_groups
from k3backend.dispatch import BACKEND
from tests.helpers.k3_layers import k3_context, k3_layers

VENDORS = ("nvidia", "rocm", "reference")


def test_every_vendor_exports_the_same_hook() -> None:
    hooks = [importlib.import_module(f"k3backend.{vendor}.gqa_draft") for vendor in VENDORS]
    assert {module.GQADraftKVCacheGrouping for module in hooks} == {GQADraftKVCacheGrouping}
    assert BACKEND.gqa_draft.GQADraftKVCacheGrouping is GQADraftKVCacheGrouping


@pytest.mark.parametrize("draft", ["window", "full"])
def test_a_draft_of_another_family_is_planned(draft: str) -> None:
    specs, context = k3_layers(8, draft), k3_context(8)
    assert needs_policy(specs, context)
    groups = GQADraftKVCacheGrouping.get_kv_cache_groups(context, specs)
    assert len(groups) == (5 if draft == "window" else 4)
    isolated = GQADraftKVCacheGrouping.get_kv_cache_groups(context, specs, "isolate")
    assert [len(group.layer_names) for group in isolated] == [23, 23, 23, 24, 5]


@pytest.mark.parametrize(
    ("draft", "layout"), [(None, "LBNHC"), ("mla", "LBNHC"), ("window", "BLHNC"), ("full", "BLHNC")]
)
def test_the_default_stands_where_nothing_is_to_repair(draft: str | None, layout: str) -> None:
    specs, context = k3_layers(8, draft), k3_context(8, layout=layout)
    assert not needs_policy(specs, context)
    groups = GQADraftKVCacheGrouping.get_kv_cache_groups(context, specs)
    assert groups == plan_groups(specs, context)


def test_a_draft_without_a_target_is_no_draft_beside_anything() -> None:
    specs = {name: spec for name, spec in k3_layers(8, "full").items() if spec.is_draft}
    context = k3_context(8)
    assert not needs_policy(specs, context)
    groups = GQADraftKVCacheGrouping.get_kv_cache_groups(context, specs)
    assert groups == plan_groups(specs, context)


def test_the_environment_names_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    specs, context = k3_layers(8, "full"), k3_context(8)
    monkeypatch.setenv("K3BACKEND_GROUPING", "vllm")
    assert len(GQADraftKVCacheGrouping.get_kv_cache_groups(context, specs)) == 20
    assert len(GQADraftKVCacheGrouping.get_kv_cache_groups(context, specs, "k3")) == 4
    monkeypatch.setenv("K3BACKEND_GROUPING", "best")
    with pytest.raises(InputError, match="K3BACKEND_GROUPING"):
        GQADraftKVCacheGrouping.get_kv_cache_groups(context, specs)


def test_a_draft_that_cannot_fit_is_a_value_error() -> None:
    specs = k3_layers(8, "window", num_kv_heads=4096)
    with pytest.raises(ValueError, match=r"its own page is \d+ B") as caught:
        GQADraftKVCacheGrouping.get_kv_cache_groups(k3_context(8), specs)
    assert "SlidingWindowSpec(" in str(caught.value)


def test_the_choice_says_why() -> None:
    choice = GQADraftKVCacheGrouping.choose(k3_context(8), k3_layers(8, "full"))
    assert "4 groups" in choice.reason
    assert sum(candidate.chosen for candidate in choice.candidates) == 1
