"""``k3backend replay``: a trace of request lengths through vLLM's scheduler under two layouts."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3backend.cli.arguments import (
    MAX_TOKENS,
    PLAN_FLAGS,
    POLICIES,
    add_deployment_arguments,
    add_output_arguments,
    add_plan_arguments,
    integer,
    one_of,
    shown,
    word,
)
from k3backend.cli.command_line import Answer, CommandParser, UsageError, given_flags
from k3backend.cli.deployment_plans import PlanInput, deployment_inputs, describe, read_deployment
from k3backend.cli.spec_plans import spec_file_input
from k3backend.common.request_trace import TraceRequest, read_trace
from k3backend.report.schemas import REPLAY_SCHEMA

if TYPE_CHECKING:
    from rich.console import Console

    from k3backend.vllm_plugin.replay import Progress
    from k3backend.vllm_plugin.replay_report import ReplaySettings

REPLAY_FLAGS = (
    "--memory",
    "--trace",
    "--against",
    "--max-requests",
    "--max-num-seqs",
    "--max-batched-tokens",
    "--shared-prefix",
    "--arrivals",
    "--step-ms",
)
DEFAULT_REQUESTS = 200
DEFAULT_NUM_SEQS = 256
DEFAULT_BATCHED_TOKENS = 8192


def add_arguments(parser: CommandParser) -> None:
    """Declare the flags of ``replay``: a trace, and those of ``layout`` or a spec file."""
    parser.add_argument("--specs", type=word, metavar="FILE", help="a spec file, for any model")
    add = parser.add_argument_group("replay").add_argument
    tokens = integer(1, MAX_TOKENS)
    add("--trace", type=word, metavar="CSV", required=True, help="timestamp_ms, input_tokens ...")
    add("--against", type=one_of(POLICIES), metavar="NAME", help="policy to compare with; vllm")
    add("--max-requests", type=tokens, metavar="N", help="requests of the trace; default 200")
    add("--max-num-seqs", type=tokens, metavar="N", help="requests at once; default 256")
    add("--max-batched-tokens", type=tokens, metavar="N", help="tokens of a step; default 8192")
    add(
        "--shared-prefix",
        type=integer(0, MAX_TOKENS),
        metavar="N",
        help="leading tokens that all prompts share; default 0",
    )
    add(
        "--arrivals",
        type=one_of(("burst", "trace")),
        metavar="burst|trace",
        help="all requests at once, or by their timestamps; default burst",
    )
    add("--step-ms", type=milliseconds, metavar="MS", help="length of a step for trace; 25")
    add_deployment_arguments(parser)
    add_plan_arguments(parser)
    add_output_arguments(parser)


def milliseconds(text: str) -> float:
    """Read milliseconds above 0 and below 1,000,000."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a time in milliseconds above 0 and below 1,000,000; give one"
        )
    return value


def run(args: argparse.Namespace) -> Answer:
    """Replay the trace under both policies. Raises K3Error where one cannot be planned or run."""
    heading, source = _source(args)
    trace = read_trace(args.trace, args.max_requests or DEFAULT_REQUESTS)
    if source.available_bytes is None:
        raise UsageError(
            "argument --memory: is missing; give the bytes of one rank's KV cache as GiB, for "
            "example --memory 60"
        )
    from k3backend.vllm_plugin.replay import check_vllm
    from k3backend.vllm_plugin.replay_report import ReplaySettings

    with contextlib.redirect_stdout(sys.stderr):
        version = check_vllm()
    settings = ReplaySettings(
        memory_bytes=source.available_bytes,
        max_num_seqs=args.max_num_seqs or DEFAULT_NUM_SEQS,
        max_batched_tokens=args.max_batched_tokens or DEFAULT_BATCHED_TOKENS,
        shared_prefix_tokens=args.shared_prefix or 0,
        arrivals=args.arrivals or "burst",
        step_ms=args.step_ms or 25.0,
    )
    policies = (source.policy, args.against or "vllm")
    # Whatever vLLM prints goes to stderr; stdout is the answer's alone.
    with contextlib.redirect_stdout(sys.stderr):
        layouts = [_replay(source, policy, settings, trace) for policy in policies]
    document = {
        "schema": REPLAY_SCHEMA,
        "vllm": version,
        "model_output": "made up: one token per request and step, no model is run",
        "trace": args.trace,
        "requests": len(trace),
        "memory_bytes": settings.memory_bytes,
        "max_num_seqs": settings.max_num_seqs,
        "max_batched_tokens": settings.max_batched_tokens,
        "shared_prefix_tokens": settings.shared_prefix_tokens,
        "arrivals": settings.arrivals,
        "layouts": layouts,
    }

    def render(console: Console) -> None:
        from k3backend.report.replay_tables import print_replay

        console.print(heading, style="bold")
        print_replay(console, document)

    return Answer(document, render)


def _source(args: argparse.Namespace) -> tuple[str, PlanInput]:
    if args.specs is not None:
        for flag in given_flags(args):
            if flag not in (*PLAN_FLAGS, *REPLAY_FLAGS):
                raise UsageError(
                    f"argument {flag}: does not go with --specs, whose file says it; remove one "
                    "of them"
                )
        source = spec_file_input(args.specs, args)
        if args.memory is not None:
            source = replace(source, available_bytes=args.memory)
        return args.specs, source
    if args.platform == "all":
        raise UsageError("argument --platform: replay takes one platform; name it, or leave it out")
    deployment = read_deployment(args)
    return describe(deployment), deployment_inputs(args, deployment)[0]


def _replay(
    source: PlanInput, policy: str, settings: ReplaySettings, trace: list[TraceRequest]
) -> dict[str, Any]:
    from k3backend.vllm_plugin.replay import LayoutReplay
    from k3backend.vllm_plugin.translate import to_vllm_groups

    plan = replace(source, policy=policy).plan()
    groups = to_vllm_groups(plan.group_specs, source.specs)
    with _progress(policy) as progress:
        report = LayoutReplay(policy, groups, source.context, settings).run(trace, progress)
    return report.document()


@contextlib.contextmanager
def _progress(policy: str) -> Iterator[Progress | None]:
    """A bar of finished requests on stderr where it is a terminal; else nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(f"policy {policy}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
