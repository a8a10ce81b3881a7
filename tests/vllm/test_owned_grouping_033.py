"""vLLM 0.33 asks its Kimi-K3, and this package's policy answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.kv_cache_layout import KVCacheLayout

from k3backend.common.errors import PlanError
from k3backend.common.group_policy import choose_grouping
from k3backend.common.plan_context import KernelBlocks, PlanContext
from k3backend.common.spec_file import load_spec_file, parse_spec_document
from k3backend.vllm_plugin import compat, grouping, kimi_k3_model, spec_dump
from k3backend.vllm_plugin.replay import ReplaySettings, scheduler_config
from k3backend.vllm_plugin.translate import from_vllm_spec
from tests.helpers.engine_runs import REPOSITORY, engine_environment
from tests.helpers.vllm033 import vllm033_path
from tests.helpers.vllm_planner import vllm_config, vllm_specs

pytestmark = pytest.mark.vllm

CASES = Path(__file__).parents[1] / "data" / "planning"
WRONG_DRAFTS = {
    "k3-mla-draft-undeclared-shards": [24 + 5, 23, 23, 23],
    "k3-label-alias": [24 + 5, 23, 23, 23],
    "k3-backend-alignment": [24 + 5, 23, 23, 23],
    "k3-gqa-window-tp8": [24, 23, 23, 23, 5],
    "k3-gqa-full-tp8": [24 + 5, 23, 23, 23],
}
"""Layers of each group, in any order, where vLLM's default gives twenty groups."""


class Model:
    """A model class that owns its grouping as this package's Kimi-K3 does."""


def hooked(document: dict[str, Any], backend: str | None = None) -> Any:
    """A configuration whose model owns its grouping, as vLLM's builder asks it."""
    config = vllm_config(document)
    owner = kimi_k3_model.owning(Model)
    config.model_config.supports_kv_cache_grouping = True
    config.model_config.architectures = ["KimiK3ForConditionalGeneration"]
    config.model_config.registry = SimpleNamespace(
        resolve_model_cls=lambda names, model_config: (owner, names[0])
    )
    config.parallel_config.pipeline_parallel_size = 1
    config.cache_config.enable_prefix_caching = True
    config.attention_config.backend_per_kind = {}
    config.attention_config.backend = SimpleNamespace(name=backend) if backend else None
    return config


def ask(document: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Any], list[Any]]:
    """The configuration, vLLM's specs, and the groups through vLLM's own entry point."""
    config = hooked(document, **options)
    specs, _ = vllm_specs(document)
    builder = planning.DefaultKVCacheConfigBuilder()
    return config, specs, planning.get_kv_cache_groups_from_builder(builder, config, specs)


@pytest.mark.parametrize("case", WRONG_DRAFTS)
@pytest.mark.parametrize("backend", ["KIMI_K3_MLA", None])
def test_a_wrong_draft_comes_out_as_the_policy_gives_it_and_materialises(case, backend):
    answer = json.loads((CASES / f"{case}.json").read_text())
    document = answer["specs"]
    config, specs, groups = ask(document, backend=backend)
    assert sorted(len(group.layer_names) for group in groups) == sorted(WRONG_DRAFTS[case])
    ours = {name: from_vllm_spec(spec) for name, spec in specs.items()}
    chosen = choose_grouping(ours, grouping.plan_context(config, ours)).groups
    assert [group.layer_names for group in groups] == [group.layer_names for group in chosen]
    builder = planning.DefaultKVCacheConfigBuilder()
    needed = planning._max_memory_usage_bytes_from_groups(builder, config, groups)
    assert needed < answer["expect"]["vllm"]["request_bytes"]
    # Core's marks, sizes and views, as after a start with room for one request.
    config.model_config.original_max_model_len = document["max_model_len"]
    block_bytes = planning._pool_bytes_per_block_from_builder(builder, config, groups)
    memory = needed + block_bytes
    (placed,) = planning.get_kv_cache_configs(config, [specs], [memory], groups)
    assert placed.num_blocks == memory // block_bytes
    assert {name for tensor in placed.kv_cache_tensors for name in tensor.layers} == set(specs)
    check_views(groups, builder.get_kv_cache_config_from_groups(config, groups, 3))


def check_views(groups: list[Any], placed: Any) -> None:
    """Every layer of a group writes its own bytes."""
    raw = torch.zeros(placed.kv_cache_tensors[0].size, dtype=torch.int8)
    views: dict[str, Any] = {}
    for tensor in placed.kv_cache_tensors:
        group = next(g for g in groups if tensor.layers[0] in g.layer_names)
        spec = planning._get_per_layer_spec(group, tensor.layers[0])
        made = interface.create_kv_cache_views(raw, spec, 3, KVCacheLayout.LBNHC, tensor, None)
        views.update(zip(tensor.layers, made, strict=True))
    for group in groups:
        for number, name in enumerate(group.layer_names):
            views[name][:, 0, 0, 0] = number + 1
            views[name][:, -1, -1, -1] = number + 1
        for number, name in enumerate(group.layer_names):
            assert bool((views[name][:, 0, 0, 0] == number + 1).all())
            assert bool((views[name][:, -1, -1, -1] == number + 1).all())


def test_the_choice_and_its_repairs_are_logged_once(caplog):
    document = json.loads((CASES / "k3-mla-draft-undeclared-shards.json").read_text())["specs"]
    grouping._said.clear()
    with caplog.at_level("INFO", logger="k3backend"):
        ask(document)
        ask(document)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("4 KV cache groups" in line for line in lines) == 1
    assert any("max_tp_shards" in line for line in lines)


@pytest.mark.parametrize(("policy", "groups"), [("vllm", 20), ("isolate", 5), ("k3", 5)])
def test_the_environment_names_the_policy(monkeypatch, policy, groups):
    monkeypatch.setenv("K3BACKEND_GROUPING", policy)
    document = json.loads((CASES / "k3-gqa-window-tp8.json").read_text())["specs"]
    assert len(ask(document)[2]) == groups


def test_a_draft_that_no_grouping_holds_is_one_clear_error(monkeypatch):
    monkeypatch.setenv("K3BACKEND_GROUPING", "isolate")
    document = json.loads((CASES / "k3-gqa-window-tp8.json").read_text())["specs"]
    for entry in document["layers"]:
        if entry.get("is_draft"):
            entry["head_size"] = 1 << 20
    with pytest.raises(PlanError, match="page") as caught:
        ask(document)
    assert isinstance(caught.value, ValueError)


def test_plan_context_reads_a_real_configuration(monkeypatch):
    context = PlanContext(layout="BLHNC", tp_size=4, dcp_size=2, max_model_len=4096)
    config = scheduler_config(context, ReplaySettings(memory_bytes=1 << 30), 128)
    read = grouping.plan_context(config, {})
    for name in ("layout", "tp_size", "dcp_size", "max_model_len", "mamba_cache_mode"):
        assert getattr(read, name) == getattr(context, name), name
    assert read.prefix_caching is bool(config.cache_config.enable_prefix_caching)
    assert read.max_in_flight_tokens == config.max_in_flight_tokens
    monkeypatch.setenv("K3BACKEND_PLAN_CONTEXT", "9999999")
    assert grouping.plan_context(config, {}).context == 4096
    monkeypatch.setenv("K3BACKEND_PLAN_CONTEXT", "1000")
    assert grouping.plan_context(config, {}).planning_tokens == 1000


@pytest.mark.parametrize(
    ("alignment", "backend", "blocks"),
    [
        (None, "KIMI_K3_MLA", KernelBlocks()),
        (None, "KIMI_K3_KV_BALANCED_MLA", KernelBlocks()),
        (None, "FLASH_ATTN_MLA", KernelBlocks(multiple_of=16)),
        (None, None, KernelBlocks(multiple_of=16)),
        ({"multiple_of": 64}, None, KernelBlocks(sizes=(64,))),
    ],
)
def test_kernel_blocks_follow_what_backends_wrote_into_the_specs(alignment, backend, blocks):
    document = json.loads((CASES / "k3-mla-draft.json").read_text())["specs"]
    for entry in document["layers"]:
        if entry["kind"] == "mla_attention" and not entry.get("is_draft"):
            entry["block_stride_alignment"] = alignment
    specs, _ = vllm_specs(document)
    ours = {name: from_vllm_spec(spec) for name, spec in specs.items()}
    assert grouping.plan_context(hooked(document, backend), ours).mla_kernel_block == blocks


def test_pipeline_stages_are_vllms():
    """Cut by vLLM's own rule; a draft runs on the last rank."""
    document = json.loads((CASES / "k3-mla-draft.json").read_text())["specs"]
    specs, _ = vllm_specs(document)
    targets = [from_vllm_spec(spec) for spec in specs.values() if not spec.is_draft]
    draft = next(from_vllm_spec(spec) for spec in specs.values() if spec.is_draft)
    layers = {f"language_model.model.layers.{i}.attn": spec for i, spec in enumerate(targets)}
    config = hooked(document)
    assert grouping.pipeline_stages(config, layers) is None
    config.parallel_config.pipeline_parallel_size = 2
    config.model_config.get_total_num_hidden_layers = lambda: 93
    stages = grouping.pipeline_stages(config, layers | {"draft.layers.0.attn": draft})
    assert stages is not None
    first = get_pp_indices(93, 0, 2)[1]
    assert [stages[name] for name in layers] == [0] * first + [1] * (93 - first)
    assert stages["draft.layers.0.attn"] == 1
    assert grouping.pipeline_stages(config, {"unnamed": targets[0]}) is None


class OwnsAlready:
    """A later vLLM's Kimi-K3."""

    @classmethod
    def get_kv_cache_groups(cls, vllm_config: Any, kv_cache_spec: Any) -> str:
        return "its own"


@pytest.mark.parametrize(("policy", "kept"), [("", True), ("vllm", True), ("k3", False)])
def test_a_class_that_owns_its_grouping_is_left_alone_unless_asked(monkeypatch, policy, kept):
    monkeypatch.setenv("K3BACKEND_GROUPING", policy)
    assert (kimi_k3_model.owning(OwnsAlready) is OwnsAlready) is kept


def test_spec_dump_is_a_spec_file_of_the_same_layers(tmp_path):
    document = json.loads((CASES / "k3-gqa-full-tp8.json").read_text())["specs"]
    config = hooked(document)
    specs, _ = vllm_specs(document)
    first, second = dict(list(specs.items())[:50]), dict(list(specs.items())[50:])
    target = tmp_path / "specs.json"
    spec_dump.write_spec_file(target, config, [first, first, second, second], [5 << 30, 4 << 30])
    read = load_spec_file(target)
    expected = parse_spec_document(document)
    assert list(read.specs) == list(specs)
    assert read.specs == expected.specs
    assert [s.is_draft for s in read.specs.values()] == [s.is_draft for s in specs.values()]
    assert read.available_bytes == 4 << 30
    assert [read.stages[name] for name in specs] == [0] * 50 + [1] * (len(specs) - 50)


def test_layers_that_cannot_be_grouped_are_dumped_before_vllm_refuses(monkeypatch, tmp_path):
    import vllm.v1.engine.core as core

    target = tmp_path / "specs.json"
    monkeypatch.setenv("K3BACKEND_DUMP_SPECS", str(target))
    document = json.loads((CASES / "k3-gqa-full-tp8.json").read_text())["specs"]
    specs, _ = vllm_specs(document)

    def refuse(vllm_config: Any, kv_cache_specs: Any) -> Any:
        raise NotImplementedError("these layers do not group")

    monkeypatch.setattr(core, "get_global_kv_cache_groups", refuse)
    monkeypatch.setattr(core, "get_kv_cache_configs", core.get_kv_cache_configs)
    compat.watch_collected_specs(spec_dump.dump_collected_specs)
    with pytest.raises(NotImplementedError):
        core.get_global_kv_cache_groups(hooked(document), [specs])
    read = load_spec_file(target)
    assert list(read.specs) == list(specs)
    assert read.available_bytes is None


def test_a_dump_that_fails_is_said_and_the_engine_goes_on(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("K3BACKEND_DUMP_SPECS", str(tmp_path / "missing" / "specs.json"))
    document = json.loads((CASES / "k3-gqa-full-tp8.json").read_text())["specs"]
    specs, _ = vllm_specs(document)
    spec_dump.dump_collected_specs(hooked(document), [specs], [1 << 30])
    assert "K3BACKEND_DUMP_SPECS" in caplog.text


INSPECT = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.models.registry import ModelRegistry
model = ModelRegistry.models["KimiK3ForConditionalGeneration"]
facts = model.inspect_model_cls()
print(json.dumps({
    "name": model.class_name,
    "owns": facts.supports_kv_cache_grouping,
    "hybrid": facts.is_hybrid,
    "state": facts.has_inner_state,
    "multimodal": facts.supports_multimodal,
    "loaded": "vllm.models.kimi_k3" in sys.modules,
}))
if len(sys.argv) > 1:
    cls = model.load_model_cls()
    from vllm.models.kimi_k3 import KimiK3ForConditionalGeneration as base
    assert cls.__name__ == "KimiK3ForConditionalGeneration" and cls is not base
    assert issubclass(cls, base) and cls._processor_factory is base._processor_factory
    assert model.load_model_cls() is cls
"""


def inspect(folder: Path, *args: str, plugin: bool = True) -> dict[str, Any]:
    env = engine_environment(folder / "run", plugin=plugin)
    env["PYTHONPATH"] = os.pathsep.join([str(vllm033_path()), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", INSPECT, *args],
        env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.timeout(1500)
def test_vllms_inspection_sees_that_the_model_owns_its_grouping(tmp_path):
    """In a subprocess of vLLM's own, whose answer vLLM keeps on disk."""
    found = inspect(tmp_path)
    assert found == {
        "name": "kimi_k3_on_vllm_0_33_0",
        "owns": True,
        "hybrid": True,
        "state": True,
        "multimodal": True,
        "loaded": False,
    }
    (kept,) = (tmp_path / "vllm-cache" / "modelinfos").glob("*k3backend*.json")
    facts = json.loads(kept.read_text())
    assert facts["modelinfo"]["supports_kv_cache_grouping"] is True
    facts["modelinfo"]["is_hybrid"] = False
    kept.write_text(json.dumps(facts))
    assert inspect(tmp_path, "load")["hybrid"] is False, "the disk cache was not read"
    # With the plugin off on the same disk, vLLM's own class is another entry and owns nothing.
    off = inspect(tmp_path, plugin=False)
    assert (off["name"], off["owns"]) == ("KimiK3ForConditionalGeneration", False)


def test_draft_groups_are_left_for_vllms_core_to_mark():
    document = json.loads((CASES / "k3-mla-draft.json").read_text())["specs"]
    config, specs, _ = ask(document)
    groups = grouping.owned_groups(config, specs)
    assert not any(group.is_eagle_group for group in groups)


def test_prefill_context_parallelism_takes_vllms_planner_and_says_so(caplog):
    document = json.loads((CASES / "k3-gqa-full-tp8.json").read_text())["specs"]
    config, specs, _ = ask(document)
    config.parallel_config.prefill_context_parallel_size = 2
    with caplog.at_level("WARNING"):
        groups = grouping.owned_groups(config, specs)
    own = planning.get_kv_cache_groups(config, specs)
    assert [g.layer_names for g in groups] == [g.layer_names for g in own]
    assert "prefill context parallelism (2 ranks)" in caplog.text
