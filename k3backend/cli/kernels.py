"""``k3backend kernels``: what the compiler makes of the production kernels, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from k3backend.cli.arguments import add_output_arguments, integer, one_of, shown, word
from k3backend.cli.command_line import EXIT_DONE, EXIT_NO, Answer, CommandParser, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from k3backend.common.launch_config import DtypeName
    from k3backend.report.kernel_bounds import Bounds
    from k3backend.report.kernel_report import KernelRow, Progress
    from k3backend.report.kernel_requests import Subject

MAX_JOBS = 64
DTYPES = ("fp8", "bf16")
"""Production is fp8; bf16 shows what the same decodes cost in bfloat16, without bounds."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the flags of ``kernels``."""
    add = parser.add_argument_group("kernels").add_argument
    add("--target", type=word, metavar="GPU,GPU", help="gfx950, gfx942, sm_90, sm_100; all")
    add("--kernel", type=word, metavar="TEXT", help="kernels whose name contains it, any case")
    add("--dtype", type=one_of(DTYPES), metavar="fp8|bf16", help="of query and cache; fp8")
    jobs = integer(1, MAX_JOBS)
    add("--jobs", type=jobs, metavar="N", help="compilations at a time; default: the CPUs")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    """Compile and report. Raises PlatformError where triton is missing."""
    chosen = choose_subjects(args.target, args.kernel, args.dtype or "fp8")
    rows, bounds, triton = compile_chosen(chosen, args.jobs)
    from k3backend.report.kernel_report import report_document

    document = report_document(rows, triton, bounds)

    def render(console: Console) -> None:
        from k3backend.report.kernel_tables import print_kernels

        print_kernels(console, document)

    return Answer(document, render, EXIT_NO if any(row.problems for row in rows) else EXIT_DONE)


def choose_subjects(
    target: str | None, kernel: str | None, dtype: DtypeName = "fp8"
) -> list[Subject]:
    """What ``--target`` and ``--kernel`` name. Raises UsageError where that is nothing."""
    from k3backend.report.kernel_report import choose
    from k3backend.report.kernel_requests import TARGETS

    targets: Sequence[str] = TARGETS if target is None else target.split(",")
    unknown = [name for name in targets if name not in TARGETS]
    if unknown or len(set(targets)) != len(targets):
        raise UsageError(
            f"argument --target: {shown(target or '')} is not a list of different GPUs among "
            f"{', '.join(TARGETS)}; give one or more, separated by commas"
        )
    chosen = choose(targets, kernel, dtype)
    if not chosen:
        names = ", ".join(dict.fromkeys(subject.name for subject in choose(targets, dtype=dtype)))
        raise UsageError(
            f"argument --kernel: {shown(kernel or '')} is in no kernel's name; give a part of "
            f"one of {names}"
        )
    return chosen


def compile_chosen(
    chosen: Sequence[Subject], jobs: int | None
) -> tuple[list[KernelRow], Bounds, str]:
    """Rows with the bounds they were compared with, and Triton's version."""
    from k3backend.report.kernel_bounds import load_bounds
    from k3backend.report.kernel_report import compile_rows
    from k3backend.report.kernel_requests import check_compiler

    triton = check_compiler()
    bounds = load_bounds(triton)
    # Whatever the compiler prints goes to stderr; stdout is the answer's alone.
    with contextlib.redirect_stdout(sys.stderr), _progress() as progress:
        return compile_rows(chosen, bounds, jobs, progress), bounds, triton


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar of finished compilations on stderr where it is a terminal; else nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("compiling", total=None)
        yield lambda done, total, name: bar.update(
            task, completed=done, total=total, description=name
        )
