"""``k3backend explain``: which layers do not share a group, and what would join them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3backend.cli.arguments import (
    add_deployment_arguments,
    add_output_arguments,
    add_plan_arguments,
    add_plot_argument,
    refuse_deployment_flags,
    word,
)
from k3backend.cli.command_line import Answer, CommandParser
from k3backend.cli.deployment_plans import (
    PlanInput,
    deployment_inputs,
    describe,
    read_deployment,
)
from k3backend.cli.plots import checked_path, plot_plans
from k3backend.cli.spec_plans import spec_file_input
from k3backend.common.errors import InputError
from k3backend.common.kv_plan import KvPlan
from k3backend.common.kv_spec import KVCacheSpec
from k3backend.report.explanation import explain_plan
from k3backend.report.schemas import EXPLAIN_SET_SCHEMA

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: CommandParser) -> None:
    """Declare the flags of ``explain``: those of ``layout``, or a spec file."""
    parser.add_argument("--specs", type=word, metavar="FILE", help="a spec file, for any model")
    add_deployment_arguments(parser)
    add_plan_arguments(parser)
    add_plot_argument(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    """Explain the plan of a deployment or of a spec file. Raises K3Error where it cannot be."""
    picture = checked_path(args.plot)
    heading: str | None = None
    if args.specs is not None:
        refuse_deployment_flags(args)
        inputs = [spec_file_input(args.specs, args)]
    else:
        deployment = read_deployment(args)
        heading, inputs = describe(deployment), deployment_inputs(args, deployment)
    planned = [(item, item.plan()) for item in inputs]
    documents = {item.name: _explain(item, plan) for item, plan in planned}
    if picture is not None:
        plot_plans(picture, planned)
    equal = _all_equal(documents)
    answer: dict[str, Any] = next(iter(documents.values()))
    if args.platform == "all":
        answer = {"schema": EXPLAIN_SET_SCHEMA, "platforms": documents, "equal": equal}

    def render(console: Console) -> None:
        from k3backend.report.explanation_tables import print_explanation

        if heading is not None:
            console.print(heading, style="bold")
        if equal:
            print_explanation(console, next(iter(documents.values())), " = ".join(documents))
            return
        for name, document in documents.items():
            print_explanation(console, document, name)
            console.print()

    return Answer(answer, render)


def _explain(source: PlanInput, plan: KvPlan) -> dict[str, Any]:
    def replan(specs: Mapping[str, KVCacheSpec]) -> KvPlan:
        return replace(source, specs=dict(specs)).plan()

    try:
        return explain_plan(source.specs, plan, source.platform, replan)
    except InputError as error:
        raise InputError(f"{source.origin}{error}") from error


def _all_equal(documents: Mapping[str, Mapping[str, Any]]) -> bool:
    plans = [{**document, "platform": None} for document in documents.values()]
    return all(plan == plans[0] for plan in plans)
