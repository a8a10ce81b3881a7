"""Tiers: which tests a process may run follows from its environment, never from a silent skip.

``tools/test.sh`` starts one process per tier. A process that lacks a tier's environment (the Triton
interpreter, vLLM 0.33's code, vLLM's engine) deselects that tier's tests and says how many.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable

import pytest


def _vllm_version() -> str:
    try:
        import vllm.version
    except ImportError:
        return ""
    return str(vllm.version.__version__)


def _wrong_tier(item: pytest.Item, vllm_version: Callable[[], str]) -> str | None:
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if bool(item.get_closest_marker("interpreter")) != interpreting:
        return "TRITON_INTERPRET=1 goes with the interpreter tier alone"
    if "vllm" not in item.path.parent.parts[-1:]:
        return None
    engine = item.get_closest_marker("engine") is not None
    version = vllm_version()
    if engine and not version.startswith("0.32"):
        return "the engine tier runs with vLLM 0.32 installed"
    if not engine and not version.startswith("0.33"):
        return "tests/vllm runs with vLLM 0.33's code first on PYTHONPATH"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what belongs to another tier's process."""
    cache: list[str] = []

    def version() -> str:
        if not cache:
            cache.append(_vllm_version())
        return cache[0]

    kept, dropped = [], []
    for item in items:
        (dropped if _wrong_tier(item, version) else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_configure() -> None:
    """Interpreted tests take a third less time with this; nothing else depends on it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.helpers.interpreter_patching import patch_once_per_launch

        patch_once_per_launch()


def pytest_report_header() -> str:
    """Name what this process tests with."""
    names = ("torch", "triton", "numpy")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    mode = "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "no interpreter"
    return f"k3backend tests with {', '.join(found)}, {mode}"
