"""What is said about a vLLM that is not a tested one, and about two of them."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import pytest
import vllm.version
from vllm.model_executor.layers.attention import mla_attention

from k3backend.vllm_plugin import vllm_interfaces

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _heard(monkeypatch):
    """caplog listens at the root."""
    monkeypatch.setattr(logging.getLogger("k3backend"), "parent", logging.getLogger())


def test_another_version_says_what_is_missing_and_what_is_new(monkeypatch, caplog):
    from dataclasses import dataclass

    import vllm.forward_context
    from vllm.v1 import kv_cache_interface as interface

    @dataclass(frozen=True)
    class RingSpec(interface.KVCacheSpec):
        pass

    RingSpec.__module__ = interface.__name__
    monkeypatch.setattr(interface, "RingSpec", RingSpec, raising=False)
    monkeypatch.setattr(vllm.version, "__version__", "0.34.0")
    monkeypatch.delattr(vllm.forward_context, "is_forward_context_available")
    vllm_interfaces.check_version()
    assert "vllm.forward_context.is_forward_context_available is missing" in caplog.text
    assert "cache format RingSpec is not known here" in caplog.text


def test_interfaces_of_another_kind_are_differences_and_no_traceback(monkeypatch, caplog):
    """A property where a function was, a module whose import ends otherwise, one that is gone."""
    from vllm.v1.worker.workspace import WorkspaceManager

    original = importlib.import_module

    def import_module(name: str, *args: Any) -> Any:
        if name == "vllm.v1.worker.ubatching":
            raise RuntimeError("needs a GPU")
        if name == "vllm.v1.kv_cache_interface":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, *args)

    monkeypatch.setattr(vllm_interfaces.importlib, "import_module", import_module)
    function = mla_attention.MLACommonImpl.forward_mqa
    monkeypatch.setattr(mla_attention.MLACommonImpl, "forward_mqa", property(function))
    monkeypatch.setattr(WorkspaceManager, "get_simultaneous", property(len))
    monkeypatch.setattr(vllm.version, "__version__", "0.34.0")
    vllm_interfaces.check_version()
    assert "MLACommonImpl.forward_mqa has no parameters to compare (TypeError" in caplog.text
    assert "_THREAD_ID_TO_CONTEXT is missing (RuntimeError: needs a GPU)" in caplog.text
    assert "kv_cache_interface.KVCacheSpec is missing (ModuleNotFoundError" in caplog.text
    assert "get_simultaneous" not in caplog.text, "only its presence is used"


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1+cu130"])
def test_tested_versions_are_quiet(monkeypatch, caplog, version):
    monkeypatch.setattr(vllm.version, "__version__", version)
    monkeypatch.setattr(sys, "path", sys.path[:1])
    vllm_interfaces.check_version()
    assert not caplog.text


def test_every_interface_is_there_in_this_version():
    assert vllm_interfaces.differences() == []


def test_two_vllms_are_named(monkeypatch, caplog, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name / "vllm").mkdir(parents=True)
        (tmp_path / name / "vllm" / "version.py").touch()
    path = [str(tmp_path / "first"), str(tmp_path), str(tmp_path / "second"),
            str(tmp_path / "first")]  # fmt: skip
    folders = vllm_interfaces.vllm_folders(path)
    assert folders == [tmp_path / name / "vllm" for name in ("first", "second")]
    monkeypatch.setattr(sys, "path", path)
    vllm_interfaces.check_version()
    assert f"from {folders[0]}, and there is another vLLM in {folders[1]}" in caplog.text
