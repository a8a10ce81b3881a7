"""Kimi-K3 attention for vLLM: KV cache grouping and balanced MLA decode, one package per vendor.

Importing this package imports no submodule, no torch and no numpy. Public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from k3backend._version import __version__

if TYPE_CHECKING:
    from k3backend.decode import mla_decode
    from k3backend.statistics import stats

_PUBLIC = {
    "mla_decode": "k3backend.decode",
    "stats": "k3backend.statistics",
}

__all__ = ["__version__", "mla_decode", "stats"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
