#!/usr/bin/env python
"""Let vLLM's CPU engine generate with this package's plan and decode, and with its own.

Writes a tiny MLA model (seeded weights, no download), starts vLLM twice on it, and compares every
token. Exit code 0 if they are equal, 1 if not, 2 where vLLM's CPU engine is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SHOWN_TOKENS = 8


def compare(folder: Path, *, heads: int, speculative: bool) -> int:
    """Run both sides and print the table. The exit code."""
    from rich.console import Console
    from rich.table import Table

    from tests.helpers.engine_runs import EngineRun, disagreements, prompts, run_engines
    from tests.helpers.tiny_mla_model import write_model

    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(f"writing a tiny MLA model with {heads} heads")
    model = str(write_model(folder / "model", heads=heads, rotary=False))

    def run(name: str, *, plugin: bool) -> tuple[EngineRun, str]:
        console.print(f"generating with {name} (a new engine, 15 s on an idle machine)")
        job = EngineRun(name, model, speculative=speculative and plugin, in_process=not plugin)
        (done,), log = run_engines([job], folder / name.split()[0], plugin=plugin)
        return done, log

    own, _ = run("vllm's decode", plugin=False)
    ours, log = run("k3backend's decode", plugin=True)

    table = Table(
        title="vLLM's CPU engine, greedy, " + ("n-gram drafts" if speculative else "plain")
    )
    for column in ("prompt tokens", f"vLLM's own (first {SHOWN_TOKENS})", "k3backend's", "equal"):
        table.add_column(column)
    for prompt, left, right in zip(prompts(), own.tokens, ours.tokens, strict=True):
        row = [" ".join(map(str, tokens[:SHOWN_TOKENS])) for tokens in (left, right)]
        table.add_row(
            str(len(prompt)), *row, f"{len(left)} of {len(left)}" if left == right else "NO"
        )
    console.print(table)
    found = re.findall(r"k3backend: \d+ decode calls, \d+ split pieces, \w+", log)
    console.print(f"vLLM's log says: {found[-1] if found else 'nothing of k3backend'}")
    different = disagreements(own, ours)
    for line in different:
        console.print(f"different: {line}")
    return 1 if different or not found else 0


def main() -> int:
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=12, help="attention heads (12)")
    parser.add_argument("--speculative", action="store_true", help="with n-gram drafts")
    args = parser.parse_args()
    if args.heads < 1:
        print(f"--heads {args.heads}: expected at least 1; give 12 or 16", file=sys.stderr)
        return 2
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed; run tools/test.sh once, which installs it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="k3backend-engine-") as folder:
        return compare(Path(folder), heads=args.heads, speculative=args.speculative)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    sys.exit(main())
