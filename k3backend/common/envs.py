"""Every ``K3BACKEND_*`` environment variable: name, default, meaning. Nothing else reads them.

An empty value means unset. Values are read at the time of the call, so a test or a launcher may
change them; what is fixed once (the platform) is fixed by the module that says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from k3backend.common.errors import InputError


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: its name, what it does, its default (as text) and the choices, if closed."""

    name: str
    meaning: str
    default: str | None = None
    choices: tuple[str, ...] = ()

    def get(self) -> str | None:
        """The value, or the default where unset or empty. Raises InputError on a bad choice."""
        raw = os.environ.get(self.name, "").strip()
        if not raw:
            return self.default
        if self.choices and raw not in self.choices:
            raise InputError(
                f"{self.name}={_shown(raw)} is not one of {', '.join(self.choices)}; "
                "set one of these or unset it"
            )
        return raw

    def flag(self) -> bool:
        """The value as a switch: 1/true/on/yes or 0/false/off/no."""
        raw = (self.get() or "0").lower()
        if raw in {"1", "true", "on", "yes"}:
            return True
        if raw in {"0", "false", "off", "no"}:
            return False
        raise InputError(f"{self.name}={_shown(raw)} is not a switch; set 1 or 0, or unset it")

    def number(self) -> float | None:
        """The value as a finite non-negative number, or None where unset without a default."""
        raw = self.get()
        if raw is None:
            return None
        try:
            value = float(raw)
        except ValueError:
            value = float("nan")
        if not 0 <= value < float("inf"):
            raise InputError(f"{self.name}={_shown(raw)} is not a number >= 0; correct or unset it")
        return value

    def positive_int(self) -> int | None:
        """The value as an integer from 1 to 2^63 - 1; None where unset without a default."""
        raw = self.get()
        if raw is None:
            return None
        digits = raw.isascii() and raw.isdigit() and len(raw) <= _MOST_DIGITS
        if not digits or not 1 <= int(raw) < 1 << 63:
            raise InputError(
                f"{self.name}={_shown(raw)} is not an integer from 1 to {(1 << 63) - 1}; correct "
                "or unset it"
            )
        return int(raw)


_MOST_DIGITS = 40
"""Leading zeros included; Python refuses to convert thousands."""


def _shown(raw: str) -> str:
    """A value as a message shows it: quoted, and cut where it is long."""
    return repr(raw) if len(raw) <= 60 else f"{raw[:60]!r}..."


PLATFORM = EnvVar(
    "K3BACKEND_PLATFORM",
    "the vendor to use; wins over detection and never falls back",
    choices=("nvidia", "rocm", "reference"),
)
DISABLE = EnvVar("K3BACKEND_DISABLE", "1 turns the vLLM plugin off", default="0")
CPU = EnvVar(
    "K3BACKEND_CPU", "1 serves vLLM's CPU MLA slot with this package's decode", default="0"
)
GROUPING = EnvVar(
    "K3BACKEND_GROUPING",
    "grouping policy inside vLLM; k3 or isolate also replaces a model's own grouping",
    choices=("k3", "vllm", "isolate"),
)
GROUP_COST = EnvVar(
    "K3BACKEND_GROUP_COST",
    "what one more group costs, as a fraction of the request bytes",
    default="0.00225",
)
SPLIT_GAIN = EnvVar(
    "K3BACKEND_SPLIT_GAIN",
    "a grouping with more groups than the default must need at most this share of its bytes",
    default="0.95",
)
PLAN_CONTEXT = EnvVar("K3BACKEND_PLAN_CONTEXT", "tokens of context at which groupings are compared")
DUMP_SPECS = EnvVar(
    "K3BACKEND_DUMP_SPECS", "file to which a live engine's specs are written (spec-file schema)"
)
REQUIRE = EnvVar(
    "K3BACKEND_REQUIRE",
    "hardware that the tests must find; turns their skips into failures",
    choices=("nvidia", "rocm"),
)

ALL: tuple[EnvVar, ...] = (
    PLATFORM,
    DISABLE,
    CPU,
    GROUPING,
    GROUP_COST,
    SPLIT_GAIN,
    PLAN_CONTEXT,
    DUMP_SPECS,
    REQUIRE,
)
