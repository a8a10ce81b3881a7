"""``k3backend layout``: how a Kimi-K3 target and its draft are grouped, per platform."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from k3backend.cli.arguments import (
    add_deployment_arguments,
    add_output_arguments,
    add_plan_arguments,
    add_plot_argument,
)
from k3backend.cli.command_line import Answer, CommandParser
from k3backend.cli.deployment_plans import deployment_inputs, describe, read_deployment
from k3backend.cli.plots import checked_path, plot_plans
from k3backend.report.layout_document import layout_set_document

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: CommandParser) -> None:
    """Declare the flags of ``layout``."""
    add_deployment_arguments(parser)
    add_plan_arguments(parser)
    add_plot_argument(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    """Plan the deployment. Raises InputError, PlanError or LayoutError where it cannot be."""
    picture = checked_path(args.plot)
    deployment = read_deployment(args)
    planned = [(source, source.plan()) for source in deployment_inputs(args, deployment)]
    documents = {source.name: source.document(plan) for source, plan in planned}
    if picture is not None:
        plot_plans(picture, planned)
    if args.platform == "all":
        answer: dict[str, Any] = layout_set_document(documents)
    else:
        answer = next(iter(documents.values()))

    def render(console: Console) -> None:
        from k3backend.report.layout_tables import print_layout, print_layout_set

        console.print(describe(deployment), style="bold")
        if args.platform == "all":
            print_layout_set(console, documents, answer["equal"])
        else:
            print_layout(console, answer, f"platform {answer['platform']}")

    return Answer(answer, render)
