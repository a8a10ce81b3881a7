"""The symptoms that ``compat`` corrects, shown on the installed vLLM.

A test of a symptom that fails says that vLLM has changed: its function in ``compat`` can go.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.plugins
import vllm.version
from vllm.logger import DEFAULT_LOGGING_CONFIG
from vllm.model_executor.models.registry import _LazyRegisteredModel
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.utils import shutdown
from vllm.v1.worker import workspace
from vllm.v1.worker.worker_base import WorkerWrapperBase

from k3backend.common import decode_counters
from k3backend.common.errors import WorkspaceError
from k3backend.vllm_plugin import compat

pytestmark = pytest.mark.vllm


@pytest.fixture
def member():
    """An attention backend added to vLLM's enum as vLLM adds one, taken out afterwards."""
    name = "K3BACKEND_CANARY"
    added = AttentionBackendEnum.register(name, "k3backend.vllm_plugin.cpu_backend.Canary")
    yield added
    AttentionBackendEnum._member_map_.pop(name)
    AttentionBackendEnum._value2member_map_.pop(added.value)
    AttentionBackendEnum._member_names_.remove(name)
    type.__delattr__(AttentionBackendEnum, name)


def test_symptom_vllm_gives_no_handler_to_its_plugins():
    assert set(DEFAULT_LOGGING_CONFIG["loggers"]) == {"vllm"}


def test_lines_go_where_vllms_go(monkeypatch):
    logger, seen = logging.getLogger("k3backend"), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    vllm_logger, handler = logging.getLogger("vllm"), Keep()
    monkeypatch.setattr(logger, "parent", logging.getLogger())
    monkeypatch.setattr(vllm_logger, "level", logging.INFO)
    vllm_logger.addHandler(handler)
    try:
        assert not logging.getLogger("k3backend.vllm_plugin").isEnabledFor(logging.INFO)
        compat.log_with_vllm()
        logging.getLogger("k3backend.vllm_plugin").info("a line")
    finally:
        vllm_logger.removeHandler(handler)
    assert seen == ["a line"]


def test_symptom_an_added_member_pickles_by_value(member):
    loaded = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    done = subprocess.run(
        [sys.executable, "-c", loaded], input=pickle.dumps(member), capture_output=True, check=False
    )
    assert done.returncode != 0
    assert b"is not a valid AttentionBackendEnum" in done.stderr


def test_the_member_pickles_by_name(member):
    compat.make_backend_member_picklable(member)
    text = pickle.dumps(member)
    assert b"backend_member" in text
    assert b"cpu_backend" not in text


def test_symptom_the_cpu_platform_ignores_an_added_backend(member):
    config = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True
    )
    assert CpuPlatform.get_attn_backend_cls(member, config) != member.get_path()


def test_symptom_facts_of_a_model_are_kept_whatever_vllms_version_is(monkeypatch, tmp_path):
    source = tmp_path / "model.py"
    source.write_text("class Model: pass\n")
    model = _LazyRegisteredModel("k3backend.vllm_plugin.kimi_k3_model", "Model")

    def key() -> tuple[str, str]:
        return model._get_cache_filename(), model._get_modelinfo_module_hash(source)

    before = key()
    monkeypatch.setattr(vllm.version, "__version__", "0.99.0")
    assert key() == before


def test_the_registered_class_name_depends_on_vllms_version(monkeypatch):
    assert compat.model_class_name() == "kimi_k3_on_vllm_0_33_0"
    monkeypatch.setattr(vllm.version, "__version__", "0.33.1+cu130")
    assert compat.model_class_name() == "kimi_k3_on_vllm_0_33_1_cu130"


def test_symptom_the_targets_backend_does_not_reach_a_k3_draft():
    from vllm.v1.worker.gpu.spec_decode.dspark import utils

    draft = SimpleNamespace(hf_config=SimpleNamespace(model_type="k3_dspark"))
    target = AttentionBackendEnum.TRITON_MLA
    assert utils._resolve_dspark_attention_backend(draft, None, target) is None


def test_symptom_asking_early_for_the_workspace_is_an_assertion(monkeypatch):
    monkeypatch.setattr(workspace, "_manager", None)
    with pytest.raises(AssertionError):
        workspace.current_workspace_manager()
    with pytest.raises(WorkspaceError, match="before the model is built"):
        compat.workspace_manager()


def test_symptom_a_layer_claims_in_its_own_micro_batch_alone():
    manager = workspace.WorkspaceManager(torch.device("cpu"), num_ubatches=2)
    parameters = inspect.signature(manager.get_persistent_resource).parameters
    assert list(parameters) == ["key", "factory"]
    manager.get_persistent_resource("key", object)
    assert [len(found) for found in manager._persistent_resources] == [1, 0]
    visited = []
    for micro_batch in compat.each_micro_batch(manager):
        visited.append(micro_batch)
        manager.get_persistent_resource("other", object)
    assert visited == [0, 1]
    assert [len(found) for found in manager._persistent_resources] == [2, 1]
    from vllm.v1.worker.ubatching import dbo_enabled

    assert not dbo_enabled(), "the thread is left as it was found"


def _slow_to_stop(ready: Any) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    ready.set()
    time.sleep(30)


def test_symptom_a_process_that_is_slow_to_stop_is_killed():
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_slow_to_stop, args=(ready,))
    process.start()
    assert ready.wait(60)
    shutdown([process], timeout=0.2)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


def test_the_line_comes_when_the_worker_begins_to_stop(monkeypatch, caplog):
    order: list[str] = []
    monkeypatch.setattr(logging.getLogger("k3backend"), "parent", logging.getLogger())
    monkeypatch.setattr(WorkerWrapperBase, "shutdown", lambda self: order.append("vLLM's"))
    compat.log_decodes_when_worker_stops()
    compat.log_decodes_when_worker_stops()
    decode_counters.count_decode("reference", 3)
    with caplog.at_level(logging.INFO, logger="k3backend"):
        WorkerWrapperBase.shutdown(SimpleNamespace())
        WorkerWrapperBase.shutdown(SimpleNamespace())
    lines = [r.getMessage() for r in caplog.records if "split pieces" in r.getMessage()]
    assert len(lines) == 1, "once, not at each stop"
    assert order == ["vLLM's", "vLLM's"]


def test_symptom_vllm_has_no_plugin_group_that_sees_specs():
    groups = {name for name in dir(vllm.plugins) if name.endswith("_GROUP")}
    assert groups == {
        "DEFAULT_PLUGINS_GROUP",
        "ENDPOINT_PLUGINS_GROUP",
        "IO_PROCESSOR_PLUGINS_GROUP",
        "PLATFORM_PLUGINS_GROUP",
        "STAT_LOGGER_PLUGINS_GROUP",
    }
