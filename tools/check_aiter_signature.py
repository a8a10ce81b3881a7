"""Check the signatures of an AITER wheel or source tree without importing or installing it.

    python tools/check_aiter_signature.py amd_aiter-0.1.7-py3-none-any.whl
    python tools/check_aiter_signature.py path/to/aiter --json

Says what that version lacks and what therefore cannot be asked of it. Exit code 0: this package can
call it; 1: a parameter that it needs is missing; 2: the source cannot be read.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from pathlib import Path

from rich.console import Console

from k3backend.report.tables import data_table
from k3backend.rocm.aiter_signature import ENTRY_POINTS, SignatureReport, check_signatures

SOURCES = ("aiter/mla.py", "aiter/ops/attention.py")
"""The files that define the entry points, in the wheel and in the repository alike."""


class SourceError(Exception):
    """The wheel or tree cannot be read. Carries one sentence."""


def read_signatures(place: Path) -> dict[str, tuple[str, ...]]:
    """Parameter names of the entry points that a wheel or a source tree defines.

    Raises:
        SourceError: no wheel or tree, or its sources are missing or not Python.
    """
    wanted = {entry.name for entry in ENTRY_POINTS}
    found: dict[str, tuple[str, ...]] = {}
    for name in SOURCES:
        try:
            tree = ast.parse(_text(place, name))
        except SyntaxError as error:
            raise SourceError(f"{place}: {name} does not parse: {error}") from error
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in wanted:
                arguments = node.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                found[node.name] = tuple(argument.arg for argument in every)
    return found


def _text(place: Path, name: str) -> str:
    try:
        if place.is_dir():
            return (place / name).read_text()
        with zipfile.ZipFile(place) as wheel:
            return wheel.read(name).decode()
    except (OSError, KeyError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise SourceError(f"{place}: no readable {name} ({error}); give a wheel or tree") from error


def print_report(console: Console, place: Path, report: SignatureReport) -> None:
    """Print what is missing and what is lacking."""
    console.print(
        f"{place.name}: {'cannot be called' if report.missing else 'can be called'}", style="bold"
    )
    for name in report.missing:
        console.print(f"missing: {name}")
    if report.lacks:
        columns = [("function", "left"), ("lacks", "left"), ("so", "text")]
        console.print(data_table(columns, report.lacks))
    elif not report.missing:
        console.print("lacks nothing that this package can use")


def main(arguments: list[str] | None = None) -> int:
    """Run the check and return the exit code."""
    parser = argparse.ArgumentParser(description="Check an AITER wheel's signatures by its source.")
    parser.add_argument("place", type=Path, help="a wheel file or a source tree")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(arguments)
    try:
        signatures = read_signatures(args.place)
    except SourceError as error:
        print(f"check_aiter_signature: error: {error}", file=sys.stderr)
        return 2
    report = check_signatures(signatures)
    if args.json:
        document = {
            "place": args.place.name,
            "ok": not report.missing,
            "missing": list(report.missing),
            "lacks": [
                {"function": function, "parameter": parameter, "so": so}
                for function, parameter, so in report.lacks
            ],
            "signatures": {name: list(names) for name, names in sorted(signatures.items())},
        }
        print(json.dumps(document, indent=1))
    else:
        print_report(Console(width=100, highlight=False), args.place, report)
    return 1 if report.missing else 0


if __name__ == "__main__":
    sys.exit(main())
