#!/usr/bin/env python3
"""The static kernel report, its bounds, its documents, and the same numbers of other projects.

    python tools/kernel_report.py                    what `k3backend kernels` prints; same flags
    python tools/kernel_report.py --update-bounds    record today's numbers as bounds
    python tools/kernel_report.py --peers            vLLM's and AITER's Triton decodes beside ours
    python tools/kernel_report.py --write-docs       renew the tables of docs/kernels.md

--peers compiles what is installed: vllm, and amd-aiter (`pip install --no-deps amd-aiter`).
--write-docs takes both tables; without AITER its rows are missing, so install it first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3backend.cli import kernels
from k3backend.cli.command_line import (
    EXIT_DONE,
    Answer,
    CommandParser,
    UsageError,
    guarded,
    print_answer,
)
from k3backend.report import kernel_bounds, kernel_documents
from k3backend.report.kernel_report import KernelRow, read_facts
from k3backend.report.kernel_requests import TARGETS, check_compiler

PROG = "kernel_report.py"
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
PEERS_SCHEMA = "k3backend.kernel-peers/1"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes are those of ``k3backend kernels``."""
    return guarded(PROG, lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    parser = CommandParser(PROG, "Reports what the compiler makes of the production kernels.")
    kernels.add_arguments(parser)
    add = parser.add_argument_group("instead of the report").add_argument
    add("--update-bounds", action="store_true", help="record the numbers as bounds; all kernels")
    add("--peers", action="store_true", help="compile vLLM's and AITER's Triton decodes too")
    add("--write-docs", action="store_true", help="renew the tables of docs/kernels.md")
    args = parser.parse_args(argv)
    modes = [name for name in ("update_bounds", "peers", "write_docs") if getattr(args, name)]
    if len(modes) > 1:
        raise UsageError("--update-bounds, --peers and --write-docs exclude each other; give one")
    if modes and modes != ["peers"] and (args.target or args.kernel or args.dtype):
        raise UsageError(
            f"--{modes[0].replace('_', '-')} records all kernels; leave out --target, --kernel and "
            "--dtype"
        )
    if args.update_bounds:
        return _update_bounds(args.jobs)
    if args.write_docs:
        return _write_docs(args.jobs)
    answer = _peer_answer(args) if args.peers else kernels.run(args)
    return print_answer(answer, as_json=args.json)


def _update_bounds(jobs: int | None) -> int:
    rows, _, triton = kernels.compile_chosen(kernels.choose_subjects(None, None), jobs)
    recorded: dict[str, dict[str, dict[str, int]]] = {}
    for row in rows:
        target, name = row.subject.target, row.subject.name
        recorded.setdefault(target, {})[name] = kernel_bounds.bounded_numbers(target, row.facts)
    kernel_bounds.save_bounds(triton, recorded)
    print(
        f"recorded {len(rows)} kernels of triton {triton}; look at the difference before you commit"
    )
    return EXIT_DONE


def _write_docs(jobs: int | None) -> int:
    start = time.monotonic()
    rows, _, triton = kernels.compile_chosen(kernels.choose_subjects(None, None), jobs)
    peers = peer_documents(TARGETS)
    text = DOCUMENT.read_text()
    for name, table in (
        ("kernels", kernel_documents.kernel_tables(rows)),
        ("roofline", kernel_documents.roofline_table(rows)),
        ("peers", kernel_documents.peer_table(_ours(rows) + peers)),
    ):
        text = kernel_documents.with_section(text, name, table)
    DOCUMENT.write_text(text)
    print(f"wrote {DOCUMENT.name} with triton {triton} in {time.monotonic() - start:.0f} s")
    return EXIT_DONE


def _peer_answer(args: argparse.Namespace) -> Answer:
    chosen = kernels.choose_subjects(args.target, args.kernel or "decode", args.dtype or "fp8")
    targets = list(dict.fromkeys(subject.target for subject in chosen))
    rows, _, triton = kernels.compile_chosen(chosen, args.jobs)
    found = _ours(rows) + peer_documents(targets)
    document = {"schema": PEERS_SCHEMA, "triton": triton, "kernels": found}
    return Answer(document, lambda console: kernel_documents.print_peers(console, found))


def _ours(compiled: Sequence[KernelRow]) -> list[dict[str, Any]]:
    found = []
    for row in compiled:
        shape, launch = row.subject.shape, row.subject.launch
        if row.subject.kind != "decode" or shape is None or launch is None:
            continue
        if (shape.heads, shape.q_len, shape.causal, shape.cp) not in {
            (12, 1, True, False),
            (12, 8, True, False),
        }:
            continue
        rows = shape.heads * shape.q_len
        found.append(
            kernel_documents.peer_document(
                "k3backend",
                f"{shape.q_len} x 12, {shape.q_dtype} / {shape.kv_dtype}",
                row.subject.target,
                row.facts,
                tile_tokens=launch.tile_tokens,
                rows=rows / launch.row_tiles(rows),
                reads=launch.row_tiles(rows) * 8 // shape.q_len,
                kv_element_bytes=1 if shape.kv_dtype == "fp8" else 2,
            )
        )
    return found


def peer_documents(targets: Sequence[str]) -> list[dict[str, Any]]:
    """Other projects' decodes as JSON values."""
    check_compiler()
    from tools.kernel_peers import peers

    return [
        kernel_documents.peer_document(
            peer.project,
            f"1 x 12, {peer.request.name}",
            target,
            read_facts(peer.request),
            tile_tokens=peer.tile_tokens,
            rows=peer.rows,
            reads=peer.reads,
            kv_element_bytes=peer.kv_element_bytes,
        )
        for target in targets
        for peer in peers(target)
    ]


if __name__ == "__main__":
    sys.exit(main())
