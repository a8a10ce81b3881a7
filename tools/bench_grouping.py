"""Time to group Kimi-K3's 98 layers: this planner and vLLM 0.33.0's, in one process.

Usage: python tools/bench_grouping.py [--case k3-mla-draft] [--rounds 200]

Needs vLLM 0.33's code (tools/test.sh installs it into .vllm-0.33). Every round plans new spec
objects, one per layer, as an engine gets them from its workers; making them is not timed. The
planners take turns, and the medians are compared. Exit code 1 where this planner is slower.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def timed_us(function: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - start) / 1000


def compare(case: str, rounds: int) -> tuple[float, float]:
    """Median microseconds per plan: this planner's, vLLM's."""
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups

    from k3backend.common.kv_groups import plan_groups
    from k3backend.common.spec_file import parse_spec_document
    from tests.helpers.vllm_planner import vllm_config, vllm_specs

    path = REPOSITORY / "tests" / "data" / "planning" / f"{case}.json"
    document: dict[str, Any] = json.loads(path.read_text())["specs"]
    config = vllm_config(document)
    context = parse_spec_document(document, case).context
    # The layers of one entry may share an object; an engine's layers have their own.
    single = dict(document, layers=list(_single_layers(document["layers"])))
    ours, theirs = [], []
    for _ in range(rounds):
        our_specs = parse_spec_document(single, case).specs
        their_specs = vllm_specs(document)[0]
        ours.append(timed_us(lambda specs=our_specs: plan_groups(specs, context)))
        theirs.append(timed_us(lambda specs=their_specs: get_kv_cache_groups(config, specs)))
    return statistics.median(ours), statistics.median(theirs)


def _single_layers(entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        for index in range(entry["count"]):
            yield {**entry, "count": 1, "prefix": f"{entry['prefix']}{index}."}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="k3-mla-draft", help="name of a planning case")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sys.path.insert(0, str(REPOSITORY))
    from tests.helpers.vllm033 import vllm033_path

    folder = vllm033_path()
    if folder is None:
        print("vLLM 0.33's code is not installed; run tools/test.sh once", file=sys.stderr)
        return 2
    sys.path.insert(0, str(folder))
    ours_us, theirs_us = compare(arguments.case, arguments.rounds)
    print(
        f"{arguments.case}: k3backend {ours_us:.0f} us, vLLM {theirs_us:.0f} us, "
        f"{theirs_us / ours_us:.1f} times as fast (median of {arguments.rounds}, "
        f"{platform.machine()}, Python {platform.python_version()}, torch {version('torch')})"
    )
    return 0 if ours_us < theirs_us else 1


if __name__ == "__main__":
    sys.exit(main())
