"""Every vendor builds the same layers into the same groups, for every bundled config."""

from __future__ import annotations

from itertools import product

import pytest

from k3backend.common.errors import PlanError
from k3backend.common.k3_model import Deployment
from k3backend.common.kv_groups import plan_groups
from k3backend.common.kv_spec import KVCacheSpec
from k3backend.common.model_config import BUNDLED_DRAFTS, BUNDLED_TARGETS
from k3backend.common.plan_context import PlanContext
from k3backend.nvidia import mla_specs as nvidia
from k3backend.reference import mla_specs as reference
from k3backend.rocm import mla_specs as rocm

VENDORS = (nvidia, rocm, reference)
DRAFTS = ("none", *BUNDLED_DRAFTS)
GRID = list(product(BUNDLED_TARGETS, DRAFTS, (1, 2, 4, 8, 16)))


def _planned(specs: dict[str, KVCacheSpec], context: PlanContext) -> object:
    """Groups as comparable values; a refusal is compared by its message."""
    try:
        groups = plan_groups(specs, context)
    except PlanError as error:
        return str(error)
    return [(group.layer_names, group.kv_cache_spec, group.is_eagle_group) for group in groups]


@pytest.mark.parametrize(("target", "draft", "tp_size"), GRID)
@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "fp8", "fp8_e4m3"])
def test_vendors_form_equal_groups(target: str, draft: str, tp_size: int, kv_dtype: str) -> None:
    deployment = Deployment.load(target, draft, tp_size=tp_size, kv_dtype=kv_dtype)
    context = PlanContext(tp_size=tp_size, max_model_len=deployment.max_model_len)
    specs = [vendor.build_layer_specs(deployment) for vendor in VENDORS]
    assert specs[0] == specs[1] == specs[2]
    assert list(specs[0]) == list(specs[1]) == list(specs[2])
    planned = [_planned(each, context) for each in specs]
    assert planned[0] == planned[1] == planned[2]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("dcp_size", "pp_size"), [(8, 1), (1, 2), (4, 3)])
def test_vendors_agree_under_other_parallelism(draft: str, dcp_size: int, pp_size: int) -> None:
    deployment = Deployment.load(draft=draft, dcp_size=dcp_size, pp_size=pp_size)
    specs = [vendor.build_layer_specs(deployment) for vendor in VENDORS]
    stages = [vendor.build_layer_stages(deployment) for vendor in VENDORS]
    assert specs[0] == specs[1] == specs[2]
    assert stages[0] == stages[1] == stages[2]


def test_checkpoints_change_the_distance_and_nothing_else() -> None:
    deployment = Deployment.load(draft="dspark-mla", prefill_checkpoint_blocks=1)
    context = PlanContext(tp_size=8, max_model_len=deployment.max_model_len)
    shapes = []
    for vendor in VENDORS:
        groups = plan_groups(vendor.build_layer_specs(deployment), context)
        shapes.append(
            [(group.layer_names, group.kv_cache_spec.page_size_bytes) for group in groups]
        )
    assert shapes[0] == shapes[1] == shapes[2]


def test_vendors_export_the_same_names() -> None:
    assert nvidia.__all__ == rocm.__all__ == reference.__all__
    for vendor in VENDORS:
        for name in vendor.__all__:
            assert hasattr(vendor, name)
        assert vendor.FACTS.prefill_checkpoint_blocks == 0
