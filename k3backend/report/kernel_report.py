"""The static report: compile production kernels, read the machine code, judge it.

Compilations run in processes of their own, a few at a time. Triton's cache (a folder keyed by
source, options and compiler version) saves repeated ones; it does not change what comes out.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from k3backend.common.errors import K3Error
from k3backend.common.launch_config import DtypeName
from k3backend.report.chips import CHIPS
from k3backend.report.kernel_bounds import Bounds, bound_problems
from k3backend.report.kernel_checks import (
    decode_problems,
    kv_reads,
    matrix_work,
    resource_problems,
)
from k3backend.report.kernel_facts import NO_FACTS, KernelFacts
from k3backend.report.kernel_requests import Subject, check_compiler, compile_request, subjects
from k3backend.report.schemas import KERNELS_SCHEMA

if TYPE_CHECKING:
    from k3backend.common.kernels.static_compile import KernelRequest

MAX_JOBS = 8

Progress = Callable[[int, int, str], None]
"""Called with compilations done, their number, and the name of the last."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one compilation.

    Attributes:
        facts: None where the compiler refused; ``error`` then says why.
        expected: part of the name of the matrix instruction that has to be there.
    """

    facts: KernelFacts | None
    expected: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One compiled kernel.

    Attributes:
        subject: what was compiled. facts: what came out.
        problems: what is wrong with it; empty where all is well.
    """

    subject: Subject
    facts: KernelFacts
    problems: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """JSON values of ``k3backend.kernels/1``."""
        facts, subject = self.facts, self.subject
        document: dict[str, Any] = {
            "name": subject.name,
            "target": subject.target,
            "config": subject.config,
            "registers": facts.registers,
            "spilled_registers": facts.spilled_registers,
            "scalar_spills": facts.scalar_spills,
            "scratch_bytes": facts.scratch_bytes,
            "lds_bytes": facts.lds_bytes,
            "workgroups_per_cu": CHIPS[subject.target].workgroups_per_unit(facts),
            "matrix_instructions": dict(facts.matrix_instructions),
            "global_load_bytes": {str(width): count for width, count in facts.loads},
            "main_loop": {
                "instructions": facts.loop.instructions,
                "matrix": facts.loop.matrix,
                "lds": facts.loop.lds,
                "global": facts.loop.global_,
            },
            "tensor_memory_columns": facts.tensor_memory_columns,
            "instructions": facts.instructions,
            "ok": not self.problems,
            "problems": list(self.problems),
        }
        if subject.kind == "decode" and subject.shape is not None and subject.launch is not None:
            document["kv_reads"] = round(kv_reads(subject.shape, subject.launch, facts), 3)
            work = matrix_work(subject.launch, facts)
            document["matrix_work"] = None if work is None else round(work, 3)
        return document


def choose(
    targets: Sequence[str], wanted: str | None = None, dtype: DtypeName = "fp8"
) -> list[Subject]:
    """Subjects of the targets whose name contains ``wanted``."""
    return [
        subject
        for target in targets
        for subject in subjects(target, dtype)
        if wanted is None or wanted.lower() in subject.name.lower()
    ]


def compile_rows(
    chosen: Sequence[Subject],
    bounds: Bounds,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[KernelRow]:
    """Compile and judge, in the order of ``chosen``.

    Args:
        bounds: numbers that must not get worse.
        jobs: processes; None takes one per CPU that this process may use, at most MAX_JOBS.
    Raises:
        PlatformError: triton or one of its tools is missing.
    """
    check_compiler()
    outcomes: dict[Subject, Outcome] = {}
    for subject, outcome in _compiled(chosen, jobs or _cpus()):
        outcomes[subject] = outcome
        if progress is not None:
            progress(len(outcomes), len(chosen), f"{subject.target} {subject.name}")
    return [judge(subject, outcomes[subject], bounds) for subject in chosen]


def judge(subject: Subject, outcome: Outcome, bounds: Bounds) -> KernelRow:
    """Facts with every problem that they show."""
    facts, expected = outcome.facts, outcome.expected
    if facts is None:
        return KernelRow(subject, NO_FACTS, (f"does not compile: {outcome.error}",))
    problems = resource_problems(subject.kind, subject.target, facts)
    if subject.kind == "decode" and subject.shape is not None and subject.launch is not None:
        problems += decode_problems(subject.target, subject.shape, subject.launch, facts, expected)
    if subject.bounded:
        problems += bound_problems(bounds, subject.target, subject.name, facts)
    return KernelRow(subject, facts, tuple(problems))


def report_document(rows: Sequence[KernelRow], triton: str, bounds: Bounds) -> dict[str, Any]:
    """The whole report as JSON values."""
    return {
        "schema": KERNELS_SCHEMA,
        "triton": triton,
        "bounds": {"triton": bounds.triton, "compared": bounds.compared},
        "kernels": [row.document() for row in rows],
    }


def compile_subject(subject: Subject) -> Outcome:
    """Compile one subject in this process."""
    request = compile_request(subject)
    try:
        return Outcome(read_facts(request), request.expected)
    except K3Error:
        raise
    # Triton raises many kinds, some of which cannot cross a process boundary.
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = [line.strip(" ^") for line in str(cause).splitlines()]
        reason = next((line for line in reversed(lines) if line), "no message")
        return Outcome(None, request.expected, f"{type(cause).__name__}: {reason[:300]}")


def _compile_quietly(subject: Subject) -> Outcome:
    """compile_subject in a process of its own: a failing pass prints the whole program on stderr,
    of which the line that says why is kept."""
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            outcome = compile_subject(subject)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        if outcome.error is None:
            return outcome
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    why = next((line for line in lines if "Assertion" in line or "error:" in line), None)
    return outcome if why is None else replace(outcome, error=f"{outcome.error}; {why[:300]}")


def read_facts(request: KernelRequest) -> KernelFacts:
    """Compile a request in this process and read its machine code."""
    with warnings.catch_warnings():
        # Triton 3.9 announces a default of 3.10, which this package does not allow yet.
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        compiled = request.compile()
    metadata = compiled.metadata
    if "amdgcn" in compiled.asm:
        from k3backend.report.amd_code import WAVE_LANES, amd_facts

        return amd_facts(
            compiled.asm["amdgcn"], metadata.shared, request.options["num_warps"] * WAVE_LANES
        )
    from k3backend.common.kernels.disassembly import disassemble
    from k3backend.report.nvidia_code import WARP_LANES, nvidia_facts

    code = disassemble(compiled.asm["cubin"])
    return nvidia_facts(
        code.resources,
        code.sass,
        compiled.asm["ptx"],
        metadata.shared,
        request.options["num_warps"] * WARP_LANES,
        metadata.tmem_size or 0,
    )


def _compiled(chosen: Sequence[Subject], jobs: int) -> Iterator[tuple[Subject, Outcome]]:
    if min(jobs, len(chosen)) <= 1:
        for subject in chosen:
            yield subject, compile_subject(subject)
        return
    # Fresh processes: a fork would copy the threads of whatever the caller has loaded.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(chosen)), mp_context=context) as pool:
        running = {pool.submit(_compile_quietly, subject): subject for subject in chosen}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _cpus() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_JOBS)
