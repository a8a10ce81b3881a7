"""What ``register()`` does to vLLM 0.33, and what it does where something is wrong."""

from __future__ import annotations

import builtins
import importlib.metadata
import json
import logging
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import vllm.plugins
import vllm.version
from vllm.config import AttentionConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.worker.worker_base import WorkerWrapperBase

from k3backend.common.errors import InputError, PlatformError, PluginError
from k3backend.vllm_plugin import (
    compat,
    cpu_backend,
    nvidia_backend,
    register,
    registration,
    rocm_backend,
)
from tests.helpers.engine_runs import REPOSITORY, engine_environment
from tests.helpers.vllm033 import vllm033_path

pytestmark = pytest.mark.vllm

NAMES = ("KIMI_K3_MLA", "KIMI_K3_KV_BALANCED_MLA")
ARCHITECTURE = "KimiK3ForConditionalGeneration"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """vLLM and this package as in a process that has registered nothing; put back afterwards."""
    for name in ("DISABLE", "CPU", "PLATFORM", "GROUPING", "DUMP_SPECS"):
        monkeypatch.delenv(f"K3BACKEND_{name}", raising=False)
    maps = (
        AttentionBackendEnum._member_map_,
        AttentionBackendEnum._value2member_map_,
        registry._ATTN_OVERRIDES,
        ModelRegistry.models,
        MODELS_CONFIG_MAP,
    )
    kept = [dict(mapping) for mapping in maps]
    names = list(AttentionBackendEnum._member_names_)
    monkeypatch.setattr(vllm.platforms, "current_platform", CpuPlatform(), raising=False)
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", CpuPlatform.get_attn_backend_cls)
    monkeypatch.setattr(compat, "log_with_vllm", lambda: None)  # caplog listens at the root
    monkeypatch.setattr(logging.getLogger("k3backend"), "parent", logging.getLogger())
    monkeypatch.setattr(WorkerWrapperBase, "shutdown", WorkerWrapperBase.shutdown)
    monkeypatch.setattr(registration, "_registered", None)
    monkeypatch.setattr(registration, "_announced", False)
    for name in NAMES:
        forget(name)
    yield
    for name in NAMES:
        forget(name)
    for mapping, before in zip(maps, kept, strict=True):
        mapping.clear()
        mapping.update(before)
    AttentionBackendEnum._member_names_[:] = names


def forget(name: str) -> None:
    member = AttentionBackendEnum._member_map_.pop(name, None)
    if member is not None:
        AttentionBackendEnum._value2member_map_.pop(member.value, None)
        AttentionBackendEnum._member_names_.remove(name)
        registry._ATTN_OVERRIDES.pop(member, None)
        type.__delattr__(AttentionBackendEnum, name)


@pytest.fixture
def on(monkeypatch):
    """Let vLLM's platform say that it is another one."""

    def choose(platform: str) -> None:
        current = vllm.platforms.current_platform
        monkeypatch.setattr(current, "is_rocm", lambda: platform == "rocm", raising=False)
        monkeypatch.setattr(current, "is_cuda", lambda: platform == "nvidia", raising=False)

    return choose


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("nvidia", dict.fromkeys(NAMES, nvidia_backend)),
        ("rocm", {"KIMI_K3_MLA": rocm_backend}),
        ("reference", {"KIMI_K3_MLA": cpu_backend}),
    ],
)
def test_names_by_platform(on, platform, expected):
    on(platform)
    found = registration.register_all()
    assert found.platform == platform
    assert found.backends == tuple(expected)
    for name, module in expected.items():
        member = AttentionBackendEnum[name]
        assert member.get_path().startswith(f"{module.__name__}.")
        assert member.get_class().get_name() == name
        assert AttentionConfig(backend=name.lower()).backend is member
        per_kind = AttentionConfig(backend_per_kind={"mla_attention": name}).backend_per_kind
        assert per_kind == {"mla_attention": member}
    values = [AttentionBackendEnum[name].value for name in expected]
    assert len(set(values)) == len(values), "two members of one value are one to an enum"


def test_registering_again_changes_nothing():
    register()
    before = (AttentionBackendEnum["KIMI_K3_MLA"], ModelRegistry.models[ARCHITECTURE],
              MODELS_CONFIG_MAP[ARCHITECTURE], CpuPlatform.get_attn_backend_cls)  # fmt: skip
    register()
    after = (AttentionBackendEnum["KIMI_K3_MLA"], ModelRegistry.models[ARCHITECTURE],
             MODELS_CONFIG_MAP[ARCHITECTURE], CpuPlatform.get_attn_backend_cls)  # fmt: skip
    assert before == after


def test_a_name_that_vllm_has_is_left_alone(on, caplog):
    on("nvidia")
    registry.register_backend("KIMI_K3_KV_BALANCED_MLA", "vllm.its.own.Backend")
    with caplog.at_level(logging.INFO, logger="k3backend"):
        found = registration.register_all()
    assert found.backends == ("KIMI_K3_MLA",)
    member = AttentionBackendEnum["KIMI_K3_KV_BALANCED_MLA"]
    assert member.get_path() == "vllm.its.own.Backend"
    assert "KIMI_K3_KV_BALANCED_MLA (vllm.its.own.Backend); it is left alone" in caplog.text


def test_a_registration_that_failed_half_way_can_be_repeated(monkeypatch, caplog):
    failing = iter([True, False])
    own_grouping = registration._own_grouping

    def fail_once() -> str:
        if next(failing):
            raise PluginError("not this time")
        return own_grouping()

    monkeypatch.setattr(registration, "_own_grouping", fail_once)
    with pytest.raises(PluginError):
        register()
    hooks = (MODELS_CONFIG_MAP[ARCHITECTURE], CpuPlatform.get_attn_backend_cls)
    with caplog.at_level(logging.INFO, logger="k3backend"):
        found = registration.register_all()
    assert found.backends == ("KIMI_K3_MLA",)
    assert "left alone" not in caplog.text
    assert hooks == (MODELS_CONFIG_MAP[ARCHITECTURE], CpuPlatform.get_attn_backend_cls)


def test_cpu_slots_are_served_only_when_asked(monkeypatch):
    assert registration.register_all().slots == ()
    assert "k3backend" not in AttentionBackendEnum.CPU_MLA.get_path()
    monkeypatch.setattr(registration, "_registered", None)
    monkeypatch.setenv("K3BACKEND_CPU", "1")
    assert registration.register_all().slots == ("CPU_MLA", "AMX_MLA")
    for slot in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        assert slot.get_path().endswith("cpu_backend.K3CpuMLASlotBackend")


def test_disabled_changes_nothing(monkeypatch):
    monkeypatch.setenv("K3BACKEND_DISABLE", "1")
    monkeypatch.setenv("K3BACKEND_CPU", "1")
    models, hooks = dict(ModelRegistry.models), dict(MODELS_CONFIG_MAP)
    found = registration.register_all()
    assert found.platform is None
    assert found.why_not == "K3BACKEND_DISABLE is set"
    assert "KIMI_K3_MLA" not in AttentionBackendEnum.__members__
    assert models == ModelRegistry.models
    assert hooks == MODELS_CONFIG_MAP
    assert not AttentionBackendEnum.CPU_MLA.is_overridden()


def test_a_platform_that_is_not_served_is_left_alone(monkeypatch, caplog):
    current = vllm.platforms.current_platform
    monkeypatch.setattr(current, "is_cpu", lambda: False, raising=False)
    monkeypatch.setattr(current, "device_type", "xpu", raising=False)
    with caplog.at_level(logging.INFO, logger="k3backend"):
        register()
    assert "off, vLLM runs on xpu, which is not served" in caplog.text
    assert "KIMI_K3_MLA" not in AttentionBackendEnum.__members__


def test_the_line_says_what_was_registered_and_where(caplog, monkeypatch):
    monkeypatch.setenv("K3BACKEND_CPU", "1")
    with caplog.at_level(logging.INFO, logger="k3backend"):
        register()
        register()
    (line,) = [r.getMessage() for r in caplog.records if "attention backends" in r.getMessage()]
    assert "in vLLM 0.33.0" in line
    assert "platform reference, attention backends KIMI_K3_MLA" in line
    assert "serving CPU_MLA and AMX_MLA" in line
    assert "Kimi-K3's KV cache groups: policy k3" in line


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("", "policy k3, unless the model owns them"),
        ("vllm", "policy vllm, unless the model owns them"),
        ("k3", "policy k3"),
        ("isolate", "policy isolate"),
    ],
)
def test_the_line_says_which_policies_replace_a_models_own(monkeypatch, asked, said):
    monkeypatch.setenv("K3BACKEND_GROUPING", asked)
    assert registration.register_all().grouping == said


def test_a_process_that_registers_before_vllm_logs_says_it_later(caplog):
    """Where a spawned process unpickles its configuration first."""
    with caplog.at_level(logging.WARNING, logger="k3backend"):
        register()
    assert "attention backends" not in caplog.text
    with caplog.at_level(logging.INFO, logger="k3backend"):
        register()
    assert "attention backends" in caplog.text


@pytest.mark.parametrize("forced", ["nvidia", "rocm"])
def test_a_platform_that_is_not_vllms_is_refused(monkeypatch, forced):
    monkeypatch.setenv("K3BACKEND_PLATFORM", forced)
    with pytest.raises(PlatformError, match=f"K3BACKEND_PLATFORM={forced}, but vLLM's platform"):
        register()


def test_a_bad_switch_is_refused(monkeypatch):
    monkeypatch.setenv("K3BACKEND_CPU", "maybe")
    with pytest.raises(InputError, match="K3BACKEND_CPU='maybe'"):
        register()


def cpu_selection() -> Any:
    """What vLLM's CPU platform is asked with for a layer of the tiny models."""
    return AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True
    )


def test_the_named_backend_is_taken_on_the_cpu():
    register()
    member = AttentionBackendEnum["KIMI_K3_MLA"]
    path = CpuPlatform.get_attn_backend_cls(member, cpu_selection(), num_heads=12)
    assert path == member.get_path()
    own = CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CPU_MLA, cpu_selection())
    assert own.endswith("CPUMLABackend"), "vLLM's own is still there for who names it"


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"kv_cache_dtype": "fp8"}, ValueError, "--kv-cache-dtype fp8"),
        ({"use_sparse": True}, NotImplementedError, "Sparse"),
    ],
)
def test_what_the_cpu_cannot_do_is_refused_by_vllm_for_the_named_backend_too(changed, error, text):
    register()
    member = AttentionBackendEnum["KIMI_K3_MLA"]
    config = cpu_selection()._replace(**changed)
    with pytest.raises(error, match=text):
        CpuPlatform.get_attn_backend_cls(member, attn_selector_config=config, num_heads=12)


def test_layers_that_are_not_mla_keep_vllms_backend_on_the_cpu():
    register()
    member = AttentionBackendEnum["KIMI_K3_MLA"]
    path = CpuPlatform.get_attn_backend_cls(
        member, attn_selector_config=cpu_selection()._replace(use_mla=False, head_size=128)
    )
    assert path == AttentionBackendEnum.CPU_ATTN.get_path()


def k3_config(backend: Any, draft: Any = "none", **per_kind: str) -> Any:
    speculative = None if draft == "none" else SimpleNamespace(attention_backend=draft)
    return SimpleNamespace(
        attention_config=AttentionConfig(backend=backend, backend_per_kind=per_kind),
        speculative_config=speculative,
    )


def adjust(config: Any) -> dict[str, Any]:
    MODELS_CONFIG_MAP[ARCHITECTURE].verify_and_update_config(config)
    found: dict[str, Any] = config.attention_config.backend_per_kind
    return found


def test_the_draft_gets_the_targets_backend(caplog):
    register()
    member = AttentionBackendEnum["KIMI_K3_MLA"]
    with caplog.at_level(logging.INFO, logger="k3backend"):
        assert adjust(k3_config("KIMI_K3_MLA", None)) == {"mla_attention": member}
    assert "MLA layers of the draft use KIMI_K3_MLA, as the target's" in caplog.text
    assert adjust(k3_config("KIMI_K3_MLA")) == {}, "no draft"
    assert adjust(k3_config("TRITON_MLA", None)) == {}, "not this package's backend"
    assert adjust(k3_config(None, None)) == {}, "vLLM chooses"
    kept = adjust(k3_config("KIMI_K3_MLA", None, mla_attention="TRITON_MLA"))
    assert kept == {"mla_attention": AttentionBackendEnum.TRITON_MLA}


def test_a_draft_with_a_backend_of_its_own_keeps_it_and_that_is_said(caplog):
    register()
    assert adjust(k3_config("KIMI_K3_MLA", AttentionBackendEnum.TOKENSPEED_MLA)) == {}
    assert "may not share KV cache groups" in caplog.text
    caplog.clear()
    adjust(k3_config("KIMI_K3_MLA", AttentionBackendEnum["KIMI_K3_MLA"]))
    assert not caplog.text


def test_a_backend_by_kind_that_beats_the_drafts_own_is_said(caplog):
    register()
    own = AttentionBackendEnum.TOKENSPEED_MLA
    by_kind = {"mla_attention": AttentionBackendEnum.TRITON_MLA}
    config = k3_config("KIMI_K3_MLA", own, mla_attention="TRITON_MLA")
    caplog.clear()
    assert adjust(config) == by_kind
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line == (
        "k3backend: backend_per_kind gives the draft's MLA layers TRITON_MLA; attention_backend "
        "TOKENSPEED_MLA of --speculative-config does not reach them"
    )
    caplog.clear()
    config.speculative_config.draft_model_config = SimpleNamespace(use_mla=False)
    assert adjust(config) == by_kind, "a draft without MLA layers keeps its backend"
    adjust(k3_config("KIMI_K3_MLA", by_kind["mla_attention"], mla_attention="TRITON_MLA"))
    adjust(k3_config("KIMI_K3_MLA", None, mla_attention="TRITON_MLA"))
    assert not caplog.text


def test_vllms_own_adjustments_for_kimi_k3_still_happen():
    register()
    quantisation = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    config = SimpleNamespace(quantization_config=quantisation)
    model = SimpleNamespace(hf_config=config, hf_text_config=config, model_arch_config=config)
    MODELS_CONFIG_MAP[ARCHITECTURE].verify_and_update_model_config(model)
    assert quantisation["quant_method"] == "mxfp4"


UNPICKLE = """
import pickle, sys
member = pickle.load(open(sys.argv[1], "rb"))
print(member.name, member.get_path())
"""


def spawned(*args: str, folder: Any, **more: str) -> subprocess.CompletedProcess[str]:
    env = engine_environment(folder, plugin=True, cpu_slots=False) | more
    env["PYTHONPATH"] = os.pathsep.join([str(vllm033_path()), env["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-c", *args],
        env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_a_spawned_process_reads_the_member_before_it_loads_plugins(tmp_path, dumps):
    register()
    file = tmp_path / "member.pickle"
    file.write_bytes(dumps(AttentionBackendEnum["KIMI_K3_MLA"]))
    done = spawned(UNPICKLE, str(file), folder=tmp_path)
    assert done.stdout.split() == [
        "KIMI_K3_MLA",
        "k3backend.vllm_plugin.cpu_backend.K3CpuMLABackend",
    ], done.stderr[-2000:]


def test_the_member_survives_copies_in_its_own_process():
    register()
    member = AttentionBackendEnum["KIMI_K3_MLA"]
    assert pickle.loads(pickle.dumps(member)) is member
    assert pickle.loads(pickle.dumps(AttentionConfig(backend="KIMI_K3_MLA"))).backend is member


COST = """
import json, sys, time
import vllm.engine.arg_utils  # where vLLM first loads plugins
before = set(sys.modules)
start = time.process_time()
from vllm.plugins import load_general_plugins
load_general_plugins()
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def test_register_costs_little_and_imports_nothing_heavy(tmp_path):
    done = spawned(COST, folder=tmp_path, VLLM_PLUGINS="k3backend")
    assert done.returncode == 0, done.stderr[-2000:]
    seconds, modules = json.loads(done.stdout.strip().splitlines()[-1])
    assert "k3backend.vllm_plugin.registration" in modules
    heavy = ("triton", "aiter", "vllm.models.", "vllm.v1.attention.backends.mla", "vllm.v1.worker",
             "vllm.model_executor.layers", "k3backend.nvidia", "k3backend.rocm", "k3backend.decode",
             "k3backend.common.kernels", "k3backend.vllm_plugin.kimi_k3_model")  # fmt: skip
    assert [name for name in modules if name.startswith(heavy)] == []
    assert len(modules) < 60
    assert seconds < 1.0, "about 0.15 s of CPU time; a heavy import takes several"


def load_plugins(monkeypatch: Any) -> None:
    """As vLLM loads general plugins at a start, with this package's entry point alone."""
    point = importlib.metadata.EntryPoint(
        "k3backend", "k3backend.vllm_plugin:register", "vllm.general_plugins"
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (point,))
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()


def test_the_entry_point_registers(monkeypatch):
    load_plugins(monkeypatch)
    assert "KIMI_K3_MLA" in AttentionBackendEnum.__members__


def test_a_plugin_that_does_not_import_stops_the_start(monkeypatch):
    """vLLM swallows errors of importing an entry point; ours is imported inside the call."""
    original = builtins.__import__

    def broken(name: str, *args: Any) -> Any:
        if name == "k3backend.vllm_plugin.registration":
            raise ImportError("no module named 'packaging'")
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(PluginError, match=r"packaging.*reinstall k3backend"):
        load_plugins(monkeypatch)


def test_a_name_that_vllm_lacks_stops_the_start(monkeypatch):
    monkeypatch.delattr(registry, "register_backend")
    with pytest.raises(PluginError) as caught:
        load_plugins(monkeypatch)
    text = str(caught.value)
    assert "vLLM 0.33.0 has no vllm.v1.attention.backends.registry.register_backend" in text
    assert "K3BACKEND_DISABLE=1" in text


def test_a_backend_that_is_not_registered_is_not_replaced_by_another():
    with pytest.raises(ValueError, match="KIMI_K3_MLA"):
        AttentionConfig(backend="KIMI_K3_MLA")


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0rc1", "0.31.2", "dev"])
def test_another_version_warns_with_what_differs_and_works(monkeypatch, caplog, version):
    monkeypatch.setattr(vllm.version, "__version__", version)
    found = registration.register_all()
    assert found.backends == ("KIMI_K3_MLA",)
    assert f"tested with vLLM 0.32 and 0.33 and this is {version}" in caplog.text
    assert "no interface that k3backend uses" in caplog.text


def test_specs_are_seen_before_the_grouping_and_with_the_bytes(monkeypatch):
    import vllm.v1.engine.core as core

    seen = []
    monkeypatch.setattr(core, "get_global_kv_cache_groups", lambda *args: ("groups", *args))
    monkeypatch.setattr(core, "get_kv_cache_configs", lambda *args: ("configs", *args))
    for _ in range(2):  # the second one finds the hooks in place
        compat.watch_collected_specs(lambda *args: seen.append(args))
    assert core.get_global_kv_cache_groups("config", "specs") == ("groups", "config", "specs")
    assert core.get_kv_cache_configs("config", "specs", "memory", "groups") == (
        "configs", "config", "specs", "memory", "groups",
    )  # fmt: skip
    assert seen == [("config", "specs", []), ("config", "specs", "memory")]
