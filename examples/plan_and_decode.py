"""Plan a batch of real request lengths and decode it: what the plan does, and that it is right.

    python examples/plan_and_decode.py [--lengths CSV] [--batch 8] [--first 0]

The lengths are prompts of a public conversation trace. The plan is made for MI355X's 256 compute
units; the decode runs here, on the CPU, through ``k3backend.mla_decode``, and is compared with
attention that was neither planned nor split.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

import k3backend
from k3backend.common import attention_reference
from k3backend.common.errors import InputError
from k3backend.common.split_plan import SplitCost, plan_splits

LENGTHS = Path(__file__).parents[1] / "tests" / "data" / "mooncake_conversation_lengths.csv"
HEADS, BLOCK_SIZE, SCALE = 12, 1536, 192**-0.5
WORKERS = 256
COLUMN = "input_tokens"
MAX_CACHE_BYTES = 5 * 10**9


def read_lengths(path: Path, first: int, batch: int) -> list[int]:
    """Prompt lengths, in tokens, of ``batch`` requests from row ``first`` on."""
    remedy = f"give a CSV file with a column {COLUMN}, or leave --lengths out"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if COLUMN not in (reader.fieldnames or ()):
                raise InputError(f"--lengths {path} has no column {COLUMN}: {remedy}")
            column = [row[COLUMN] for row in reader]
    except OSError as error:
        raise InputError(f"--lengths {path} cannot be read ({error.strerror}): {remedy}") from error
    except (UnicodeError, csv.Error) as error:
        raise InputError(f"--lengths {path} is no CSV file ({error}): {remedy}") from error
    if not 0 <= first < len(column):
        raise InputError(
            f"--first is {first}, but {path} has {len(column)} rows: give 0 to {len(column) - 1}"
            if column
            else f"--lengths {path} has no rows: {remedy}"
        )
    if not 1 <= batch <= len(column) - first:
        raise InputError(
            f"--batch is {batch}, but {path} has {len(column) - first} rows from row {first} on: "
            f"give 1 to {len(column) - first}"
        )
    return [
        _length(text, f"--lengths {path}: row {row}")
        for row, text in enumerate(column[first : first + batch], first)
    ]


def _length(text: str | None, where: str) -> int:
    try:
        length = int(text or "")
    except ValueError:
        length = 0
    if length < 1:
        raise InputError(f"{where} has {COLUMN} {text!r}: give a whole number of at least 1")
    return length


def check_memory(lengths: list[int]) -> None:
    """Refuse a batch whose cache is too large to be made up here."""
    sizes = [-(-n // BLOCK_SIZE) * BLOCK_SIZE * 576 * 2 for n in lengths]
    if sum(sizes) > MAX_CACHE_BYTES:
        fitting = sum(total <= MAX_CACHE_BYTES for total in itertools.accumulate(sizes))
        remedy = f"give 1 to {fitting}" if fitting else "choose another row with --first"
        raise InputError(
            f"--batch is {len(lengths)}, whose cache takes {sum(sizes) / 1e9:.1f} GB, but at most "
            f"{MAX_CACHE_BYTES / 1e9:.1f} GB are decoded on the CPU: {remedy}"
        )


def describe_plan(lengths: list[int]) -> str:
    """Pieces and balance of the plan for one query token per request."""
    cost = SplitCost.derived(HEADS)
    plan = plan_splits(lengths, row_tiles=1, num_workers=WORKERS, cost=cost)
    tiles = sum(-(-n // plan.tile_tokens) for n in lengths)
    dealt = [0.0] * WORKERS
    for request, n in enumerate(lengths):
        dealt[request % WORKERS] += -(-n // plan.tile_tokens) + cost.piece_tiles
    bound = max(
        (tiles + len(lengths) * cost.piece_tiles) / WORKERS,
        -(-tiles // WORKERS) + cost.piece_tiles,
    )
    return (
        f"{len(lengths)} requests of {min(lengths):,} to {max(lengths):,} tokens, {tiles:,} tiles, "
        f"{WORKERS} workers\n"
        f"plan: {len(plan.work)} pieces, {plan.num_slots} of them of split requests\n"
        f"fullest worker: {plan.makespan_tiles:.2f} tiles; lower bound {bound:.2f}; "
        f"whole requests, dealt to the workers in turn, would take {max(dealt):.2f}"
    )


def decode_batch(lengths: list[int]) -> tuple[float, int]:
    """Decode one token per request. Returns the largest error and the split pieces."""
    generator = torch.Generator().manual_seed(0)
    columns = [-(-n // BLOCK_SIZE) for n in lengths]
    order = torch.randperm(sum(columns), generator=generator, dtype=torch.int64)
    cache = torch.randn(sum(columns), BLOCK_SIZE, 576, dtype=torch.bfloat16, generator=generator)
    table = torch.full((len(lengths), max(columns)), -1, dtype=torch.int32)
    for request, (start, count) in enumerate(
        zip(torch.tensor([0, *columns]).cumsum(0).tolist(), columns, strict=False)
    ):
        table[request, :count] = order[start : start + count].to(torch.int32)
    q = torch.randn(len(lengths), HEADS, 576, generator=generator).to(torch.bfloat16)
    lens = torch.tensor(lengths, dtype=torch.int32)

    before = k3backend.stats().splits
    out, lse2 = k3backend.mla_decode(q, cache, table, lens, scale=SCALE, backend="reference")
    splits = k3backend.stats().splits - before

    want, want_lse2 = attention_reference.decode(q, cache, table, lens, scale=SCALE)
    if lse2 is None or not torch.allclose(lse2, want_lse2, atol=1e-4):
        raise SystemExit("the split decode's log-sum-exp differs from the unsplit one")
    return float((out.float() - want).abs().max()), splits


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan and the decode's error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="CSV with input_tokens")
    parser.add_argument("--batch", type=int, default=8, help="requests of the batch")
    parser.add_argument("--first", type=int, default=0, help="first row of the file")
    arguments = parser.parse_args(argv)
    try:
        lengths = read_lengths(arguments.lengths, arguments.first, arguments.batch)
        check_memory(lengths)
    except InputError as error:
        parser.error(str(error))
    print(describe_plan(lengths))
    error, splits = decode_batch(lengths)
    print(f"decoded on the CPU in {splits} split pieces; largest difference {error:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
