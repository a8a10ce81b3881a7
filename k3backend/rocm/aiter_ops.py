"""The only module that imports AITER; how its MLA decode is called is `aiter_plan`'s."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from k3backend.common.errors import PlatformError
from k3backend.rocm.aiter_capabilities import ABSENT
from k3backend.rocm.aiter_signature import (
    DECODE,
    ENTRY_POINTS,
    SignatureReport,
    check_signatures,
)

DISTRIBUTION = "amd-aiter"
"""PyPI's ``aiter`` is another package."""
OTHER_KERNELS = ("AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_USE_OPUS")
"""AITER's switches that put kernels in place which the tables do not describe."""


@dataclass(frozen=True, slots=True)
class Aiter:
    """An installed AITER whose signatures were checked.

    Attributes:
        version: of the distribution.
        signatures: what its functions take, and what it lacks.
    """

    version: str
    signatures: SignatureReport
    decode_fwd: Callable[..., Any]
    metadata_info: Callable[..., Any]
    metadata: Callable[..., Any]


def installed_version() -> str:
    """The version of the installed AITER without importing it, or "absent"."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


@lru_cache(maxsize=1)
def load_aiter() -> Aiter:
    """Import AITER and check its signatures, once a process.

    Raises:
        PlatformError: it is not installed, does not import, lacks a parameter, or is switched to
            kernels that the capability tables do not describe.
    """
    version = installed_version()
    if version == ABSENT:
        raise PlatformError(
            f"AITER is not installed (no distribution {DISTRIBUTION}); install it or take the "
            "folded kernel"
        )
    for name in OTHER_KERNELS:
        if os.environ.get(name, "").strip() not in {"", "0"}:
            raise PlatformError(
                f"{name}={os.environ[name]!r} replaces AITER's MLA kernels by others that were not "
                "checked; unset it"
            )
    try:
        root = importlib.import_module("aiter")
        mla = importlib.import_module("aiter.mla")
    except Exception as error:
        raise PlatformError(f"AITER {version} does not import: {error}") from error
    functions = {
        entry.name: getattr(mla if entry is DECODE else root, entry.name, None)
        for entry in ENTRY_POINTS
    }
    report = check_signatures(
        {
            name: tuple(inspect.signature(function).parameters)
            for name, function in functions.items()
            if function is not None
        }
    )
    if report.missing:
        raise PlatformError(
            f"AITER {version} lacks {', '.join(report.missing)}; install a version that has it"
        )
    decode_fwd, metadata_info, metadata = functions.values()
    return Aiter(version, report, decode_fwd, metadata_info, metadata)  # type: ignore[arg-type]
