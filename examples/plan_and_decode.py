"""Plan a batch of real request lengths and decode it: what the plan does, and that it is right.

    python examples/plan_and_decode.py [--lengths CSV] [--batch 8] [--first 0]

The lengths are prompts of a public conversation trace. The plan is made for MI355X's 256 compute
units; the decode runs here, on the CPU, through ``k3backend.mla_decode``, and is compared with
attention that was neither planned nor split.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import torch

import k3backend
from k3backend.common import attention_reference
from k3backend.common.split_plan import SplitCost, plan_splits

LENGTHS = Path(__file__).parents[1] / "tests" / "data" / "mooncake_conversation_lengths.csv"
HEADS, BLOCK_SIZE, SCALE = 12, 1536, 192**-0.5
WORKERS = 256


def read_lengths(path: Path, first: int, batch: int) -> list[int]:
    """Prompt lengths, in tokens, of ``batch`` requests from row ``first`` on."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[first : first + batch]
    return [int(row["input_tokens"]) for row in rows]


def describe_plan(lengths: list[int]) -> str:
    """Pieces and balance of the plan for one query token per request."""
    cost = SplitCost.derived(HEADS)
    plan = plan_splits(lengths, row_tiles=1, num_workers=WORKERS, cost=cost)
    tiles = sum(-(-n // plan.tile_tokens) for n in lengths)
    whole = max(-(-n // plan.tile_tokens) for n in lengths) + cost.piece_tiles
    bound = max(
        (tiles + len(lengths) * cost.piece_tiles) / WORKERS,
        -(-tiles // WORKERS) + cost.piece_tiles,
    )
    return (
        f"{len(lengths)} requests of {min(lengths):,} to {max(lengths):,} tokens, {tiles:,} tiles, "
        f"{WORKERS} workers\n"
        f"plan: {len(plan.work)} pieces, {plan.num_slots} of them of split requests\n"
        f"fullest worker: {plan.makespan_tiles:.2f} tiles; lower bound {bound:.2f}; "
        f"one request per worker would take {whole:.2f}"
    )


def decode_batch(lengths: list[int]) -> tuple[float, int]:
    """Decode one token per request. Returns the largest error and the split pieces."""
    generator = torch.Generator().manual_seed(0)
    columns = [-(-n // BLOCK_SIZE) for n in lengths]
    order = torch.randperm(sum(columns), generator=generator, dtype=torch.int64)
    cache = torch.randn(sum(columns), BLOCK_SIZE, 576, generator=generator).to(torch.bfloat16)
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
    lengths = read_lengths(arguments.lengths, arguments.first, arguments.batch)
    print(describe_plan(lengths))
    error, splits = decode_batch(lengths)
    print(f"decoded on the CPU in {splits} split pieces; largest difference {error:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
