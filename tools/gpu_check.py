#!/usr/bin/env python3
"""Check the decode on a GPU: right first, then fast. One script for CUDA and ROCm.

    python tools/gpu_check.py --json result.json             both parts, in under ten minutes
    python tools/gpu_check.py --only correctness
    python tools/gpu_check.py --dry-run                      list what would run; no GPU needed
    TRITON_INTERPRET=1 python tools/gpu_check.py --interpret tiny checks on the CPU, nothing timed

Checks and compilations run side by side in a few processes, timings one after the other in one. A
process that dies or hangs loses its entry alone. A shape is timed whatever the checks found, but
has rates only where its own output is right. Results are printed as they come and the JSON file is
renewed after each, so that an interrupted run leaves what it found. What the budget cuts off is
listed. Exit codes: 0 all right, 1 a check or a shape failed, 2 no GPU or bad usage.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3backend.cli.arguments import integer
from k3backend.cli.command_line import EXIT_DONE, EXIT_NO, CommandParser, guarded
from k3backend.cli.platform import installed_versions
from k3backend.common.errors import PlatformError

PROG = "gpu_check.py"
SCHEMA = "k3backend.gpu-check/2"
DEFAULT_BUDGET_S = 540
CORRECTNESS_SHARE = 0.5
"""Of the budget, where speed is measured too. Checks that run then may end."""
COMPILE_SHARE = 0.7
"""Of the budget, after which nothing is compiled ahead: timings compile what they need."""
CHECK_S, COMPILE_S, TIMING_S = 150.0, 150.0, 120.0
"""Seconds of one entry, compilations included, before its process is taken for hung."""
MAX_JOBS = 12


class Record:
    """The growing result: printed, and written after every entry."""

    def __init__(self, path: str | None, budget_s: float) -> None:
        self.path = None if path is None else Path(path)
        self.start = time.monotonic()
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "finished": False,
            "device": None,
            "versions": installed_versions(),
            "budget_s": budget_s,
            "copy_bytes_s": None,
            "correctness": [],
            "compilations": [],
            "speed": [],
            "peers": [],
            "left_out": [],
            "ok": True,
            "seconds": 0.0,
        }

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def at(self, share: float) -> float:
        """The time, on the clock of ``time.monotonic``, when that much of the budget is gone."""
        budget_s: float = self.document["budget_s"]
        return self.start + share * budget_s

    def add(self, section: str, entry: Any, line: str) -> None:
        """Keep and print one entry."""
        self.document[section].append(entry)
        self.write(line)

    def write(self, line: str) -> None:
        """Renew the file, whole at any moment, then print: a printed entry is in the file."""
        self.document["seconds"] = round(self.elapsed_s, 1)
        if self.path is not None:
            fresh = self.path.with_name(f"{self.path.name}.new")
            fresh.write_text(json.dumps(self.document, indent=1, allow_nan=False) + "\n")
            fresh.replace(self.path)
        print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    return guarded(PROG, lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    parser = CommandParser(PROG, "Checks the decode on a GPU: correctness, then speed.")
    add, seconds = parser.add_argument, integer(1, 86400)
    add("--budget", type=seconds, default=DEFAULT_BUDGET_S, metavar="S", help="seconds; 540")
    add("--json", metavar="FILE", help="write the result there, renewed after every entry")
    add("--only", choices=("correctness", "speed"), help="one of the two parts")
    add("--jobs", type=integer(1, 64), metavar="N", help="processes that check; of 4 CPUs 3")
    add("--dry-run", action="store_true", help="list what would run")
    add("--interpret", action="store_true", help="tiny checks in Triton's interpreter, on the CPU")
    args = parser.parse_args(argv)
    record = Record(args.json, args.budget)
    try:
        from tools import gpu_bench
    except ImportError as error:
        raise PlatformError(f"{error}; install torch and triton, with CUDA or ROCm") from error
    if args.dry_run:
        return _dry_run(record, args.only)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        return run(record, gpu_bench.open_interpreter, gpu_bench.tiny_names(), "correctness", 1)
    gpu_bench.require_gpu()
    jobs = args.jobs or min(MAX_JOBS, max(1, (os.cpu_count() or 2) * 3 // 4))
    return run(record, gpu_bench.open_gpu, gpu_bench.gpu_names(), args.only, jobs)


def run(
    record: Record, open_bench: Callable[[], Any], names: Any, only: str | None, jobs: int
) -> int:
    """Run the entries in workers.

    Args:
        open_bench: makes a worker's ``gpu_workers.Bench``; can be pickled.
        names: ``gpu_bench.Names``. only: "correctness", "speed" or None. jobs: workers that check.
    """
    from tools.gpu_workers import Workers

    with Workers(open_bench) as workers:
        if not workers.open(1):
            raise PlatformError(
                f"{workers.refusal}; run this on a machine with a GPU, or give --dry-run"
            )
        facts = record.document["device"] = workers.facts or {}
        record.write(
            ", ".join(str(facts[key]) for key in ("name", "arch", "units") if key in facts)
        )
        if only != "speed":
            share = 1.0 if only == "correctness" else CORRECTNESS_SHARE
            _section(record, workers, names.checks, _add_check, jobs, CHECK_S, share)
        if only != "correctness":
            _section(
                record,
                workers,
                names.compilations,
                _add_compilation,
                jobs,
                COMPILE_S,
                COMPILE_SHARE,
            )
            record.write(
                f"{'':<40} {'us':>9} {'warm':>9} {'plan':>7} {'GB/s':>7} {'copy':>6} TFLOP/s"
            )
            _section(record, workers, names.timings, _add_timing, 1, TIMING_S, 1.0)
    document = record.document
    document["finished"] = True
    wrong = [entry for entry in document["correctness"] if not entry["ok"]]
    timed = [row for row in document["speed"] if "gb_s" in row]
    record.write(
        f"{len(document['correctness']) - len(wrong)} checks right, {len(wrong)} wrong, "
        f"{len(timed)} of {len(document['speed'])} shapes timed, "
        f"{len(document['left_out'])} left out, {record.elapsed_s:.0f} s"
    )
    return EXIT_DONE if document["ok"] else EXIT_NO


def _section(
    record: Record,
    workers: Any,
    names: Sequence[str],
    add: Callable[[Record, str, dict[str, Any]], None],
    jobs: int,
    entry_s: float,
    share: float,
) -> None:
    """Run entries side by side and record each; list those that the budget left out."""
    left = dict.fromkeys(names)
    ended = workers.run(
        names, count=jobs, entry_s=entry_s, starts_until=record.at(share), ends_by=record.at(1.0)
    )
    for end in ended:
        if end.cut_off:
            continue
        del left[end.name]
        found = {"why_not": end.why_not} if end.result is None else end.result
        add(record, end.name.partition(" ")[2], found)
    for name in left:
        record.add("left_out", name, f"left out: {name}")


def _add_check(record: Record, name: str, found: dict[str, Any]) -> None:
    if "why_not" in found:
        found = {"name": name, "ok": False, "message": found["why_not"], "seconds": 0.0}
    record.document["ok"] &= found["ok"]
    verdict = "ok   " if found["ok"] else "WRONG"
    said = f": {found['message']}" if found["message"] else ""
    record.add("correctness", found, f"{verdict} {found['seconds']:6.2f} s  {name}{said}")


def _add_compilation(record: Record, name: str, found: dict[str, Any]) -> None:
    """Only failures are told: the shape's timing says the rest."""
    entry = {"name": name, **found}
    if "why_not" in found:
        record.add("compilations", entry, f"does not run: {name}: {found['why_not']}")
    else:
        record.document["compilations"].append(entry)


def _add_timing(record: Record, name: str, found: dict[str, Any]) -> None:
    document = record.document
    if "copy_bytes_s" in found:
        document["copy_bytes_s"] = found["copy_bytes_s"]
        record.write(f"copy: {found['copy_bytes_s'] / 1e12:.2f} TB/s read and written")
        return
    peer, colon, shape = name.partition(": ")
    row = ({"peer": peer, "name": shape} if colon else {"name": name or "copy"}) | found
    if "gb_s" in row and document["copy_bytes_s"]:
        row["of_copy"] = round(row["gb_s"] * 1e9 / document["copy_bytes_s"], 4)
    if not colon:
        document["ok"] &= "gb_s" in row
    record.add("peers" if colon else "speed", row, rates_line(row))


def rates_line(row: dict[str, Any]) -> str:
    """A row of ``speed`` or ``peers`` for people."""
    name = f"{row.get('peer', '')} {row['name']}".strip()
    if "why_not" in row:
        return f"{name:<40} {row['why_not']}"
    line = (
        f"{name:<40} {row['decode_us']:>9.1f} {row['warm_us']:>9.1f} {row.get('plan_us', 0):>7.1f} "
    )
    if "wrong" in row:
        return f"{line}WRONG: {row['wrong']}"
    share = f"{row['of_copy']:>6.1%}" if "of_copy" in row else f"{'':>6}"
    how = "" if row["timed"] == "graph" else f"  ({row['timed']})"
    return f"{line}{row['gb_s']:>7.0f} {share} {row['tflop_s']:>7.1f}{how}"


def _dry_run(record: Record, only: str | None) -> int:
    from tools.gpu_bench import SPEED, gpu_names
    from tools.gpu_speed import cases

    names = gpu_names()
    shapes = {f"{SPEED} {case.name}": case for case in cases()}
    if only != "speed":
        for name in names.checks:
            record.add("left_out", name, f"would check: {name.partition(' ')[2]}")
    if only != "correctness":
        for name in names.timings:
            size = f", {shapes[name].kv_bytes / 2**30:.2f} GiB of KV" if name in shapes else ""
            record.add("left_out", name, f"would time: {name.removeprefix(SPEED + ' ')}{size}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
