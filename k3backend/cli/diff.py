"""``k3backend diff A B``: what changed between two plans, per group and in total."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3backend.cli.arguments import POLICIES, add_output_arguments, one_of, word
from k3backend.cli.command_line import EXIT_DONE, EXIT_NO, Answer, CommandParser
from k3backend.common.errors import InputError
from k3backend.common.json_file import read_json_object
from k3backend.report.plan_difference import plan_difference
from k3backend.report.saved_layout import layout_documents
from k3backend.report.schemas import DIFF_SCHEMA

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of ``diff``."""
    what = "layout JSON (what layout or groups --json printed) or a spec file"
    parser.add_argument("a", type=word, metavar="A", help=what)
    parser.add_argument("b", type=word, metavar="B", help="the same")
    parser.add_argument(
        "--policy", type=one_of(POLICIES), metavar="NAME", help="for spec files; default k3"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    """Compare two saved plans; EXIT_NO where they differ. Raises InputError on unusable files."""
    left, right = _load(args.a, "A", args.policy), _load(args.b, "B", args.policy)
    comparisons = []
    for a_name, b_name in _pairs(left, right):
        difference = plan_difference(left[a_name], right[b_name])
        comparisons.append({"platforms": [a_name, b_name], **difference})
    equal = all(comparison["equal"] for comparison in comparisons)
    document = {
        "schema": DIFF_SCHEMA,
        "a": args.a,
        "b": args.b,
        "equal": equal,
        "comparisons": comparisons,
    }
    return Answer(document, lambda console: _render(console, document), _exit_code(equal))


def _exit_code(equal: bool) -> int:
    return EXIT_DONE if equal else EXIT_NO


def _load(path: str, argument: str, policy: str | None) -> dict[str, Mapping[str, Any]]:
    document = read_json_object(path, f"argument {argument}:")
    if str(document.get("schema", "")).startswith("k3backend.specs/"):
        from k3backend.cli.spec_plans import spec_document_plan

        layout = spec_document_plan(document, f"argument {argument}: {path!r}", policy)
        return {"specs": layout}
    return layout_documents(document, f"argument {argument}: {path!r}")


def _pairs(
    left: Mapping[str, Mapping[str, Any]], right: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Same platforms against each other; a plan of one platform against any other single one."""
    if len(left) == 1 and len(right) == 1:
        return [(next(iter(left)), next(iter(right)))]
    shared = [name for name in left if name in right]
    if not shared:
        raise InputError(
            f"argument B: holds plans for {', '.join(right)}, A for {', '.join(left)}, none for "
            "the same platform; save both with one --platform"
        )
    return [(name, name) for name in shared]


def _render(console: Console, document: Mapping[str, Any]) -> None:
    from k3backend.report.difference_tables import print_difference

    for comparison in document["comparisons"]:
        a, b = comparison["platforms"]
        names = a if a == b else f"{a} against {b}"
        print_difference(console, comparison, f"A {document['a']}, B {document['b']} ({names})")
