"""The record that each vendor exports as ``BACKEND``: the one type the dispatcher knows."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

VendorName = Literal["nvidia", "rocm", "reference"]
VENDOR_NAMES: tuple[VendorName, ...] = ("nvidia", "rocm", "reference")


@dataclass(frozen=True, slots=True)
class Backend:
    """One vendor: its name and its modules, which every vendor has under the same names.

    The modules load on first use, so that planning needs no torch and choosing touches no device.

    Attributes:
        name: "nvidia", "rocm" or "reference".
        package: import path of the vendor's package.
        summary: one line for ``k3backend platform``.
    """

    name: VendorName
    package: str
    summary: str

    @property
    def mla_specs(self) -> ModuleType:
        """``build_layer_specs`` and its parts: KV cache specs of target and draft layers."""
        return importlib.import_module(f"{self.package}.mla_specs")

    @property
    def gqa_draft(self) -> ModuleType:
        """``GQADraftKVCacheGrouping``: groups for a draft outside the MLA family."""
        return importlib.import_module(f"{self.package}.gqa_draft")

    @property
    def mla_decode(self) -> ModuleType:
        """``decode``: one decode step on tensors of this vendor. Imports torch."""
        return importlib.import_module(f"{self.package}.mla_decode")
