"""The torch reference: every numeric case of tests/data/decode.json, and hostile memory."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from k3backend.common import attention_reference as reference

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[1] / "data" / "decode.json").read_text(encoding="utf-8")
    )
}
SCALE = 192**-0.5


def paged(
    keys: list[torch.Tensor], block_size: int, fill: float = math.nan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay sequences into shuffled blocks; every unwritten cell is ``fill``, unused entries -1."""
    lens = torch.tensor([k.shape[0] for k in keys], dtype=torch.int32)
    columns = max(1, -(-int(lens.max()) // block_size)) + 1
    needed = [-(-k.shape[0] // block_size) for k in keys]
    order = torch.randperm(sum(needed) + 1, generator=torch.Generator().manual_seed(3)).tolist()
    cache = torch.full((len(order), block_size, 576), fill, dtype=keys[0].dtype)
    table = torch.full((len(keys), columns), -1, dtype=torch.int32)
    for request, (key, count) in enumerate(zip(keys, needed, strict=True)):
        for column in range(count):
            block = order.pop()
            table[request, column] = block
            part = key[column * block_size : (column + 1) * block_size]
            cache[block, : part.shape[0]] = part
    return cache, table, lens


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def direct(
    q: torch.Tensor, keys: torch.Tensor, seen: int, score_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row by torch.softmax and torch.logsumexp: another way to the same numbers."""
    scores = keys[:seen] @ q * score_scale
    return torch.softmax(scores, 0) @ keys[:seen, :512], torch.logsumexp(scores, 0) / math.log(2)


def test_decode_agrees_with_softmax_and_logsumexp() -> None:
    keys = [random(n, 576, seed=n) for n in (1, 9, 70)]
    cache, table, lens = paged(keys, 16)
    q = random(6, 3, 576, seed=99)
    out, lse2 = reference.decode(
        q, cache, table, lens, scale=SCALE, q_scale=0.7, k_scale=0.5, q_len=2,
        compute_dtype=torch.float64,
    )  # fmt: skip
    for request, key in enumerate(keys):
        for token in range(2):
            seen = key.shape[0] - 1 + token
            for head in range(3):
                row = request * 2 + token
                if seen == 0:
                    assert out[row, head].eq(0).all()
                    assert lse2[row, head] == -math.inf
                    continue
                want, want_lse = direct(q[row, head], key, seen, SCALE * 0.7 * 0.5)
                torch.testing.assert_close(out[row, head], want * 0.5)
                torch.testing.assert_close(lse2[row, head], want_lse)


def test_merge_reads_its_lse_in_base_two() -> None:
    case = CASES["lse-base"]
    out = torch.tensor([[[0.0]], [[10.0]]], dtype=torch.float64)
    lse2 = torch.log2(torch.tensor([[2.0], [8.0]], dtype=torch.float64))
    merged, total = reference.merge(out, lse2)
    assert merged.item() == pytest.approx(case["right"])
    assert total.item() == pytest.approx(math.log2(10))
    natural, _ = reference.merge(out, lse2 * math.log(2))
    assert natural.item() == pytest.approx(case["wrong"]["natural LSE read as base 2"])
    base_two, _ = reference.merge(out, lse2 / math.log(2))
    assert base_two.item() == pytest.approx(case["wrong"]["base 2 read as natural"])


def test_empty_shards_weigh_nothing_even_with_nan() -> None:
    case = CASES["empty-shard"]
    out = torch.full((8, 1, 1), math.nan, dtype=torch.float64)
    lse2 = torch.full((8, 1), -math.inf, dtype=torch.float64)
    out[3], lse2[3] = 1.0, 1.0
    merged, total = reference.merge(out, lse2)
    assert merged.item() == case["right"]
    assert total.item() == 1.0
    clean = torch.zeros_like(out)
    clean[3] = 1.0
    wrong, _ = reference.merge(clean, torch.where(lse2 == -math.inf, 0.0, lse2))
    assert wrong.item() == pytest.approx(case["wrong"]["empty shard given LSE 0"], abs=5e-5)


@pytest.mark.parametrize("shards", [0, 1, 8])
def test_merge_of_nothing_is_zero_and_minus_infinity(shards: int) -> None:
    merged, total = reference.merge(
        torch.full((shards, 2, 4), math.nan), torch.full((shards, 2), -math.inf)
    )
    assert merged.eq(CASES["all-shards-empty"]["right"]["out"]).all()
    assert total.eq(float(CASES["all-shards-empty"]["right"]["lse2"])).all()


def test_local_lengths_of_a_short_sequence() -> None:
    local = [
        int(reference.local_length(torch.tensor(5), world=8, rank=r, interleave=1))
        for r in range(8)
    ]
    assert local == CASES["local-lengths"]["right"]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave", [1, 4, 7])
def test_local_lengths_count_the_positions_a_rank_holds(world: int, interleave: int) -> None:
    for total in (0, 1, 5, 27, 28, 29, 100):
        holders = [position // interleave % world for position in range(total)]
        local = [
            int(reference.local_length(torch.tensor(total), world, rank, interleave))
            for rank in range(world)
        ]
        assert local == [holders.count(rank) for rank in range(world)]


def test_bound_of_each_query_token_under_dcp() -> None:
    case = CASES["per-query-bound"]
    total = torch.tensor([21])
    local = reference.local_length(total, 8, 3, 1)
    seen = reference.visible_keys(local, 8, causal_lens=total, cp=(8, 3, 1))
    assert seen[0].tolist() == case["right"]
    tail = local - 8 + 1 + torch.arange(8)
    assert tail.tolist() == case["wrong"]


def test_a_rank_with_keys_that_no_early_row_sees() -> None:
    case = CASES["local-but-invisible"]
    total = torch.tensor([9])
    keys = random(9, 576)
    q = random(8, 1, 576, seed=5)
    parts, lses, counts = [], [], []
    for rank in range(8):
        local = reference.local_length(total, 8, rank, 1)
        counts.append(
            int(reference.visible_keys(local, 8, causal_lens=total, cp=(8, rank, 1))[0, 0])
        )
        cache, table, lens = paged([keys[rank::8]], 4)
        assert lens.tolist() == local.tolist()
        out, lse2 = reference.decode(
            q, cache, table, lens, scale=SCALE, q_len=8, causal_lens=total, cp=(8, rank, 1),
            compute_dtype=torch.float64,
        )  # fmt: skip
        assert (lse2[0, 0] == -math.inf) == (counts[-1] == 0)
        parts.append(out)
        lses.append(lse2)
    assert counts == case["right"]
    merged, total_lse = reference.merge(torch.stack(parts), torch.stack(lses))
    cache, table, lens = paged([keys], 4)
    want, want_lse = reference.decode(
        q, cache, table, lens, scale=SCALE, q_len=8, compute_dtype=torch.float64
    )
    torch.testing.assert_close(merged, want)
    torch.testing.assert_close(total_lse, want_lse)


def test_padded_heads_have_the_lse_of_a_zero_query() -> None:
    cache, table, lens = paged([random(1000, 576)], 64)
    _, lse2 = reference.decode(
        torch.zeros(1, 16, 576, dtype=torch.float64), cache, table, lens, scale=SCALE,
        compute_dtype=torch.float64,
    )  # fmt: skip
    torch.testing.assert_close(lse2, torch.full_like(lse2, 9.96578), atol=5e-6, rtol=0)


def test_k_scale_scales_output_and_scores_but_not_the_lse_itself() -> None:
    keys = random(50, 576)
    cache, table, lens = paged([keys], 16)
    stored, _, _ = paged([keys / 0.5], 16)
    q = random(1, 2, 576, seed=1)
    want, want_lse = reference.decode(
        q, cache, table, lens, scale=SCALE, compute_dtype=torch.float64
    )
    out, lse2 = reference.decode(
        q, stored, table, lens, scale=SCALE, k_scale=0.5, compute_dtype=torch.float64
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse2, want_lse)
    forgotten, _ = reference.decode(
        q, stored, table, lens, scale=SCALE * 0.5, compute_dtype=torch.float64
    )
    torch.testing.assert_close(forgotten, want * 2.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pieces", [1, 2, 5, 16])
def test_pieces_merge_to_the_whole(dtype: torch.dtype, pieces: int) -> None:
    length = 37
    cache, table, lens = paged([random(length, 576).float().to(dtype)], 5)
    q = random(4, 3, 576, seed=2).float().to(dtype)
    want, want_lse = reference.decode(
        q, cache, table, lens, scale=SCALE, q_len=4, compute_dtype=torch.float64
    )
    seen = reference.visible_keys(lens, 4)[0].repeat_interleave(3)
    cuts = [length * i // pieces for i in range(pieces + 1)]
    parts = [
        reference.decode_piece(
            q.reshape(12, 576), cache, table[0], seen, start, end, SCALE, torch.float64
        )
        for start, end in itertools.pairwise(cuts)
    ]
    out, lse2 = reference.merge(
        torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    )
    torch.testing.assert_close(out.reshape(want.shape), want)
    torch.testing.assert_close(lse2.reshape(want_lse.shape), want_lse)


def test_strided_cache_and_long_table_entries_are_read_where_they_are() -> None:
    keys = random(40, 576)
    cache, table, lens = paged([keys], 16)
    wide = torch.full((cache.shape[0], 2, 16, 640), math.nan, dtype=torch.float64)
    wide[:, 1, :, :576] = cache
    q = random(1, 2, 576, seed=8)
    want = reference.decode(q, cache, table, lens, scale=SCALE, compute_dtype=torch.float64)
    table[0, -1] = 2147480000
    got = reference.decode(
        q, wide[:, 1, :, :576], table, lens, scale=SCALE, compute_dtype=torch.float64
    )
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right)
