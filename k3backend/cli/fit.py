"""``k3backend fit``: for a byte budget, the longest request, or how many of a given length.

The grouping may change with the length, since policies weigh it at the planning context. So the
longest length is one whose own plan fits: it is planned again at what the last plan could hold,
until that grows no more.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3backend.cli.arguments import (
    add_deployment_arguments,
    add_output_arguments,
    add_plan_arguments,
    add_plot_argument,
    planning_context,
)
from k3backend.cli.command_line import EXIT_DONE, EXIT_NO, Answer, CommandParser, UsageError
from k3backend.cli.deployment_plans import (
    PlanInput,
    deployment_inputs,
    describe,
    read_deployment,
)
from k3backend.cli.plots import checked_path, plot_plans
from k3backend.common.k3_model import Deployment
from k3backend.common.kv_capacity import longest_model_len
from k3backend.common.kv_plan import KvPlan
from k3backend.report.fit_document import fit_document, fit_set_document

if TYPE_CHECKING:
    from rich.console import Console

MAX_REPLANS = 8
"""Two or three settle every bundled model; each replan can only lengthen the answer."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the flags of ``fit``: those of ``layout``, of which it needs ``--memory``."""
    add_deployment_arguments(parser)
    add_plan_arguments(parser)
    add_plot_argument(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    """Fit the deployment into ``--memory``; EXIT_NO where not one request fits.

    Raises:
        UsageError: ``--memory`` is not given.
        InputError, PlanError: as ``layout``.
    """
    if args.memory is None:
        raise UsageError(
            "argument --memory: is missing; give the bytes of one rank's KV cache as GiB, for "
            "example --memory 60"
        )
    picture = checked_path(args.plot)
    deployment = read_deployment(args)
    context = planning_context(args, deployment.max_model_len)
    documents = {}
    planned = []
    for source in deployment_inputs(args, deployment):
        plan = source.plan()
        if args.max_model_len is None:
            source, plan = _longest(args, deployment, source, plan, context)
        planned.append((source, plan))
        documents[source.name] = fit_document(
            plan, source.platform, asked=args.max_model_len, limit=deployment.max_model_len
        )
    if picture is not None:
        plot_plans(picture, planned)
    fits = all(document["fits"] for document in documents.values())
    answer: dict[str, Any] = next(iter(documents.values()))
    if args.platform == "all":
        answer = fit_set_document(documents)

    def render(console: Console) -> None:
        from k3backend.report.fit_tables import print_fit, print_fit_set

        console.print(describe(deployment), style="bold")
        if args.platform == "all":
            print_fit_set(console, documents, answer["equal"])
        else:
            print_fit(console, answer, f"platform {answer['platform']}")

    return Answer(answer, render, EXIT_DONE if fits else EXIT_NO)


def _longest(
    args: argparse.Namespace,
    deployment: Deployment,
    source: PlanInput,
    plan: KvPlan,
    context: int | None,
) -> tuple[PlanInput, KvPlan]:
    """What was planned for the longest request that fits, or what is given where none does."""
    best, best_tokens = (source, plan), 0
    limit = deployment.max_model_len
    if not longest_model_len(plan.stages, plan.context, limit):
        # Short requests may want another grouping, with smaller blocks.
        _, plan = _plan_at(args, deployment, source, 1, context)
    for _ in range(MAX_REPLANS):
        tokens = longest_model_len(plan.stages, plan.context, limit)
        if tokens <= best_tokens:
            break
        shorter, plan = _plan_at(args, deployment, source, tokens, context)
        if longest_model_len(plan.stages, plan.context, tokens) == tokens:
            best, best_tokens = (shorter, plan), tokens
    return best


def _plan_at(
    args: argparse.Namespace,
    deployment: Deployment,
    source: PlanInput,
    tokens: int,
    context: int | None,
) -> tuple[PlanInput, KvPlan]:
    at_length = argparse.Namespace(**vars(args))
    at_length.platform = source.platform
    at_length.context = tokens if context is None else min(context, tokens)
    (shorter,) = deployment_inputs(at_length, replace(deployment, max_model_len=tokens))
    return shorter, shorter.plan()
