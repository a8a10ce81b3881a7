"""Names of the installed vLLM, fetched so that a missing one is an error that says what to do."""

from __future__ import annotations

import importlib
from typing import Any

from k3backend.common import envs
from k3backend.common.errors import PluginError

SUPPORTED = ("0.32", "0.33")


def vllm_version() -> str:
    """Version of the vLLM code that this process imports, such as "0.33.0"."""
    version = importlib.import_module("vllm.version")
    return str(getattr(version, "__version__", "unknown"))


def vllm_name(module: str, name: str) -> Any:
    """``module.name`` of the installed vLLM.

    Raises:
        PluginError: vLLM lacks it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"vLLM {vllm_version()} has no {module}.{name} ({error}), which k3backend needs; "
            f"install vLLM {' or '.join(SUPPORTED)}, or set {envs.DISABLE.name}=1 to run vLLM "
            "without k3backend"
        ) from error
