"""``k3backend groups --specs FILE``: how any model's layers are grouped, from a spec file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from k3backend.cli.arguments import (
    add_output_arguments,
    add_plan_arguments,
    add_plot_argument,
    word,
)
from k3backend.cli.command_line import EXIT_DONE, EXIT_NO, Answer, CommandParser
from k3backend.cli.deployment_plans import PlanInput
from k3backend.cli.plots import checked_path, plot_plans
from k3backend.cli.spec_plans import spec_file_input
from k3backend.common.errors import K3Error
from k3backend.common.kv_plan import KvPlan

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: CommandParser) -> None:
    """Declare the flags of ``groups``."""
    parser.add_argument(
        "--specs",
        type=word,
        action="append",
        required=True,
        metavar="FILE",
        help="a spec file; may be repeated",
    )
    add_plan_arguments(parser)
    add_plot_argument(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    """Plan each file. One file that cannot be planned raises; among several it is an error entry.

    Raises:
        K3Error: the only file cannot be read or planned.
    """
    picture = checked_path(args.plot)
    paths: list[str] = args.specs
    planned: list[tuple[PlanInput, KvPlan]] = []
    documents = [_plan_or_error(path, args, planned, alone=len(paths) == 1) for path in paths]
    if picture is not None and planned:
        plot_plans(picture, planned)
    failed = any("error" in document for document in documents)

    def render(console: Console) -> None:
        from k3backend.report.layout_tables import print_layout

        for index, (path, document) in enumerate(zip(paths, documents, strict=True)):
            if index:
                console.print()
            if "error" in document:
                console.print(path, style="bold")
                console.print(f"error: {document['error']}", style="red")
            else:
                print_layout(console, document, path)

    answer = documents[0] if len(documents) == 1 else documents
    return Answer(answer, render, EXIT_NO if failed else EXIT_DONE)


def _plan_or_error(
    path: str, args: argparse.Namespace, planned: list[tuple[PlanInput, KvPlan]], alone: bool
) -> dict[str, Any]:
    """The plan's document; the plan itself goes to ``planned``."""
    try:
        source = spec_file_input(path, args)
        plan = source.plan()
        planned.append((source, plan))
        return source.document(plan)
    except K3Error as error:
        if alone:
            raise
        return {"error": " ".join(str(error).split())}
