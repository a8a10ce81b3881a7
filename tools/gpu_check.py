#!/usr/bin/env python3
"""Check the decode on a GPU: right first, then fast. One script for CUDA and ROCm.

    python tools/gpu_check.py --json result.json             both parts, in under ten minutes
    python tools/gpu_check.py --only correctness
    python tools/gpu_check.py --dry-run                      list what would run; no GPU needed
    TRITON_INTERPRET=1 python tools/gpu_check.py --dry-run   and run tiny checks in the interpreter

Speed is not measured where a check fails. Results are printed as they come and the JSON file is
renewed after each, so that an interrupted run leaves what it found. What the budget cuts off is
listed. Exit codes: 0 all right, 1 a check failed, 2 no GPU or bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3backend.cli.command_line import EXIT_DONE, EXIT_NO, CommandParser, guarded
from k3backend.cli.platform import installed_versions
from k3backend.common.errors import PlatformError

PROG = "gpu_check.py"
SCHEMA = "k3backend.gpu-check/1"
DEFAULT_BUDGET_S = 540
CORRECTNESS_SHARE = 0.5
"""Of the budget, where speed is measured too."""


class Record:
    """The growing result: printed, and written after every entry."""

    def __init__(self, path: str | None, budget_s: float) -> None:
        self.path = None if path is None else Path(path)
        self.start = time.monotonic()
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "device": None,
            "versions": installed_versions(),
            "budget_s": budget_s,
            "copy_bytes_s": None,
            "correctness": [],
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

    def add(self, section: str, entry: Any, line: str) -> None:
        """Keep and print one entry."""
        self.document[section].append(entry)
        self.write(line)

    def write(self, line: str) -> None:
        """Print a line and renew the file."""
        print(line, flush=True)
        self.document["seconds"] = round(self.elapsed_s, 1)
        if self.path is not None:
            self.path.write_text(json.dumps(self.document, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    return guarded(PROG, lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    parser = CommandParser(PROG, "Checks the decode on a GPU: correctness, then speed.")
    add = parser.add_argument
    add("--budget", type=_seconds, default=DEFAULT_BUDGET_S, metavar="S", help="seconds; 540")
    add("--json", metavar="FILE", help="write the result there, renewed after every entry")
    add("--only", choices=("correctness", "speed"), help="one of the two parts")
    add("--dry-run", action="store_true", help="list what would run")
    args = parser.parse_args(argv)
    record = Record(args.json, args.budget)
    if args.dry_run:
        return _dry_run(record, args.only)
    device = _gpu(record)
    limit = args.budget if args.only == "correctness" else args.budget * CORRECTNESS_SHARE
    if args.only != "speed":
        _correctness(record, device, limit)
    if not record.document["ok"]:
        record.write("a check failed: speed is not measured")
        return EXIT_NO
    if args.only != "correctness":
        _speed(record, device, args.budget)
    record.write(
        f"{len(record.document['correctness'])} checks right, "
        f"{len(record.document['speed'])} shapes timed, "
        f"{len(record.document['left_out'])} left out, {record.elapsed_s:.0f} s"
    )
    return EXIT_DONE


def _seconds(text: str) -> float:
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 86400:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not 1 to 86400 seconds; give some")


def _gpu(record: Record) -> Any:
    try:
        import torch
    except ImportError as error:
        raise PlatformError("torch is not installed; install its CUDA or ROCm build") from error
    if not torch.cuda.is_available():
        build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
        raise PlatformError(
            f"no GPU: torch {torch.__version__} is a {build} build and sees none; run this on a "
            "machine with one, or give --dry-run"
        )
    properties = torch.cuda.get_device_properties(0)
    from tools.gpu_correctness import Device

    if torch.version.hip:
        from k3backend.rocm.kv_balanced_mla.core import KvBalancedMla

        arch = properties.gcnArchName.split(":")[0]
        fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    else:
        from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla

        arch, fp8 = f"sm_{properties.major}{properties.minor}", torch.float8_e4m3fn
    record.document["device"] = {
        "name": properties.name,
        "arch": arch,
        "units": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }
    record.write(f"{properties.name}, {arch}, {properties.multi_processor_count} units")
    return Device("cuda", KvBalancedMla, fp8)


def _correctness(record: Record, device: Any, limit_s: float) -> None:
    from tools.gpu_correctness import checks, outcome

    for item in checks(device):
        if record.elapsed_s > limit_s:
            record.add("left_out", item.name, f"left out: {item.name}")
            continue
        found = outcome(item)
        record.document["ok"] &= found["ok"]
        verdict = "ok   " if found["ok"] else "WRONG"
        said = f": {found['message']}" if found["message"] else ""
        record.add("correctness", found, f"{verdict} {found['seconds']:6.2f} s  {item.name}{said}")


def _speed(record: Record, device: Any, limit_s: float) -> None:
    from tools.gpu_peers import peer_cases, time_peers
    from tools.gpu_speed import Pool, cases, copy_bandwidth, time_case

    copy = copy_bandwidth(device)
    record.document["copy_bytes_s"] = round(copy)
    record.write(f"copy: {copy / 1e12:.2f} TB/s read and written")
    pool = Pool(device)
    for case in peer_cases():
        for row in time_peers(pool, case, copy):
            record.add("peers", row, f"{row['peer']:<18} {_rates(row)}")
    record.write(f"{'':<46} {'us':>9} {'plan':>7} {'GB/s':>7} {'copy':>6} {'TFLOP/s':>8}")
    for case in cases():
        if record.elapsed_s > limit_s:
            record.add("left_out", case.name, f"left out: {case.name}")
            continue
        try:
            row = time_case(device, pool, case, copy)
        # One shape that cannot run must not hide the others; its reason is part of the result.
        except Exception as error:
            record.document["ok"] = False
            row = {"name": case.name, "why_not": f"{type(error).__name__}: {str(error)[:300]}"}
        record.add("speed", row, _rates(row))


def _rates(row: dict[str, Any]) -> str:
    if "why_not" in row:
        return f"{row['name']:<46} {row['why_not']}"
    eager = "" if row["timed"] == "graph" else "  (eager launches)"
    return (
        f"{row['name']:<46} {row['decode_us']:>9.1f} {row.get('plan_us', 0):>7.1f} "
        f"{row['gb_s']:>7.0f} {row['of_copy']:>6.1%} {row['tflop_s']:>8.1f}{eager}"
    )


def _dry_run(record: Record, only: str | None) -> int:
    import torch

    from k3backend.common.decode_checks import interpreting
    from k3backend.nvidia.kv_balanced_mla.core import KvBalancedMla
    from tools.gpu_correctness import Device, checks
    from tools.gpu_speed import cases

    gpu = Device("cuda", KvBalancedMla, torch.float8_e4m3fn)
    if only != "speed":
        for item in checks(gpu):
            record.add("left_out", item.name, f"would check: {item.name}")
    if only != "correctness":
        for case in cases():
            record.add(
                "left_out",
                case.name,
                f"would time: {case.name}, {case.kv_bytes / 2**30:.2f} GiB of KV",
            )
    if interpreting() and only != "speed":
        _correctness(record, Device("cpu", KvBalancedMla, torch.float8_e4m3fn), float("inf"))
    return EXIT_DONE if record.document["ok"] else EXIT_NO


if __name__ == "__main__":
    sys.exit(main())
