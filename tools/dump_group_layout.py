#!/usr/bin/env python3
"""Show how a Kimi-K3 target and its draft are grouped, the platforms side by side.

Takes the flags of `k3backend layout` and calls the same code; `--platform` is `all` unless given.

    python tools/dump_group_layout.py --draft dspark-mla --tp 8 --kv-dtype fp8 --policy vllm
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3backend.cli import layout
from k3backend.cli.command_line import Answer, CommandParser, guarded, print_answer

PROG = "dump_group_layout.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the groups; exit codes are those of `k3backend layout`."""
    return guarded(PROG, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = CommandParser(PROG, "Shows the KV cache groups of a deployment per platform.")
    layout.add_arguments(parser)
    args = parser.parse_args(list(argv))
    if args.platform is None:
        args.platform = "all"
    return print_answer(_side_by_side(layout.run(args), args), as_json=args.json)


def _side_by_side(answer: Answer, args: argparse.Namespace) -> Answer:
    if args.platform != "all":
        return answer
    from k3backend.report.layout_tables import print_side_by_side

    document = answer.document
    return replace(
        answer,
        render=lambda console: print_side_by_side(
            console, document["platforms"], document["equal"]
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
