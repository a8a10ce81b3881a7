"""Routes on ROCm: total over the grid, and never outside what AITER has."""

from __future__ import annotations

from itertools import product

import pytest

from k3backend.common.errors import InputError
from k3backend.rocm.aiter_capabilities import ARCHS, DTYPES, PADDED_HEADS
from k3backend.rocm.aiter_tables import KNOWN_VERSIONS, TABLES, table_for
from k3backend.rocm.decode_routes import MAX_SCRATCH_BYTES, folded_kv_reads
from k3backend.rocm.mla_decode import Route, choose_route, route_table
from tests.helpers.aiter_launcher import launcher_runs, query_tiles

VERSIONS = (None, "0.1.7", "0.1.20", "0.1.21")


def route(**changes: object) -> Route:
    """The route of K3's single-token decode at TP8 in fp8 on gfx950, with changes."""
    shape: dict[str, object] = {
        "heads": 12,
        "q_len": 1,
        "q_dtype": "fp8",
        "kv_dtype": "fp8",
        "causal": True,
        "dcp": 1,
        "arch": "gfx950",
        "need_lse": False,
        "aiter_version": "0.1.20",
    }
    return choose_route(**{**shape, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_point_is_routed_and_none_reaches_aiter_outside_its_rows(
    version: str | None, arch: str
) -> None:
    oracle_version = "0.1.7" if version == "0.1.7" else "0.1.20"
    via_aiter = 0
    for heads, q_len, q, kv, causal, dcp, lse in product(
        range(1, 129), range(1, 9), DTYPES, DTYPES, (True, False), range(1, 17), (True, False)
    ):
        if dcp > 1 and not lse:
            continue  # the same point: context parallelism needs the LSE, see below
        chosen = choose_route(
            heads=heads,
            q_len=q_len,
            q_dtype=q,
            kv_dtype=kv,
            causal=causal,
            dcp=dcp,
            arch=arch,
            need_lse=lse,
            aiter_version=version,
        )
        assert chosen.reason
        if "aiter" not in chosen.name:
            assert (chosen.name, chosen.padded_heads) == ("folded", heads)
            continue
        via_aiter += 1
        cprr = causal and q_len > 1 and dcp > 1
        padded = chosen.padded_heads
        assert padded >= heads
        assert ("cprr" in chosen.name) == cprr
        assert launcher_runs(
            oracle_version, arch, q, kv, padded, q_len, causal, lse or dcp > 1, cprr
        ), (heads, q_len, q, kv, causal, dcp, lse, chosen)
        reads = query_tiles(oracle_version, arch, q, kv, padded, q_len)
        assert chosen.kv_reads == reads
        assert reads == 1 or folded_kv_reads(heads, q_len, q, kv, arch) > 1
        assert 2 * 303 * reads * q_len * padded * 2048 < 1.2 * MAX_SCRATCH_BYTES
    assert via_aiter > 100  # the choice still finds AITER's kernels


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_tables_hold_exactly_the_launchers_kernels(version: str, arch: str) -> None:
    oracle_version = "0.1.7" if version == "0.1.7" else "0.1.20"
    table = TABLES[version, arch]
    for heads, q_len, q, kv, causal, lse, cprr in product(
        PADDED_HEADS, range(1, 9), DTYPES, DTYPES, *[(True, False)] * 3
    ):
        row = table.row_for(
            q_dtype=q,
            kv_dtype=kv,
            heads=heads,
            q_len=q_len,
            causal=causal,
            lse=lse,
            cprr=cprr,
        )
        wanted = launcher_runs(oracle_version, arch, q, kv, heads, q_len, causal, lse, cprr)
        if version == "0.1.7" and heads == 128 and q_len > 4:
            wanted = False  # not read out of that launcher
        assert (row is not None) == wanted, (heads, q_len, q, kv, causal, lse, cprr)


def test_unknown_versions_take_what_the_last_two_tables_share() -> None:
    for arch in ARCHS:
        shared = {row.key for row in TABLES["0.1.20", arch].rows} & {
            row.key for row in TABLES["0.1.21", arch].rows
        }
        for version in (None, "0.2.0", "0.1.22.dev1", "nightly"):
            table = table_for(version, arch)
            assert {row.key for row in table.rows} == shared
            assert not table.verified


def test_older_versions_without_a_table_take_what_all_tables_share() -> None:
    table = table_for("0.1.16.post2", "gfx950")
    for version in KNOWN_VERSIONS:
        assert {row.key for row in table.rows} <= {
            row.key for row in TABLES[version, "gfx950"].rows
        }
    assert route(aiter_version="0.1.16.post2", heads=16).calls_aiter
    assert not route(aiter_version="0.1.16.post2", heads=32).calls_aiter
    assert not route(aiter_version="0.1.16.post2", heads=16, q_len=4).calls_aiter


def test_release_suffixes_belong_to_their_release() -> None:
    assert table_for("0.1.20.post1", "gfx950") is TABLES["0.1.20", "gfx950"]
    assert table_for("v0.1.20-46-ge4048607a5", "gfx950") is TABLES["0.1.20", "gfx950"]
    assert table_for("0.1.21.post2+rocm7.0", "gfx950") is TABLES["0.1.21", "gfx950"]
    assert table_for("0.1.7.post2.dev18", "gfx942") is TABLES["0.1.7", "gfx942"]


def test_0_1_21_is_0_1_20_and_says_that_it_was_not_verified() -> None:
    old, new = route(), route(aiter_version="0.1.21.post2")
    assert (new.name, new.padded_heads) == (old.name, old.padded_heads)
    assert old.verified
    assert not new.verified
    assert "not read" in new.reason


def test_context_parallelism_needs_the_lse_whatever_is_asked() -> None:
    for heads, q_len, causal in product((12, 96), range(1, 9), (True, False)):
        with_lse, without = (
            route(heads=heads, q_len=q_len, causal=causal, dcp=8, need_lse=lse)
            for lse in (True, False)
        )
        assert with_lse == without


def test_absent_aiter_is_folded() -> None:
    assert route(aiter_version="absent").reason == "AITER is not installed"


# The holes and wrong results of the facts, one test each.


def test_no_version_has_twelve_heads() -> None:
    for table in TABLES.values():
        assert not any(row.heads == 12 for row in table.rows)
        assert 12 not in table.reduce_heads
    assert route().padded_heads == 16


def test_fp8_two_tokens_non_causal_is_not_given_as_16_heads() -> None:
    assert (
        TABLES["0.1.20", "gfx950"].row_for(
            q_dtype="fp8", kv_dtype="fp8", heads=16, q_len=2, causal=False, lse=False, cprr=False
        )
        is None
    )
    chosen = route(q_len=2, causal=False)
    assert chosen.padded_heads == 32  # remapped to the (16, 4) row, which has a mask-free kernel
    assert not route(q_len=2, causal=False, arch="gfx942").calls_aiter


def test_fp8_two_tokens_with_lse_is_not_given_as_16_heads() -> None:
    assert route(q_len=2).padded_heads == 16
    assert route(q_len=2, need_lse=True).padded_heads == 32


def test_bf16_query_over_fp8_kv_stops_at_four_causal_tokens_without_lse() -> None:
    mixed = {"q_dtype": "bf16", "kv_dtype": "fp8"}
    assert route(**mixed, q_len=4).calls_aiter
    assert not route(**mixed, q_len=5).calls_aiter
    assert not route(**mixed, q_len=4, causal=False).calls_aiter
    assert not route(**mixed, q_len=1, need_lse=True).calls_aiter
    assert not route(**mixed, q_len=1, heads=17).calls_aiter


def test_vllm_51232_bf16_query_over_fp8_kv_draft_never_reaches_aiter() -> None:
    for q_len, arch, version in product(range(2, 9), ARCHS, VERSIONS):
        assert not route(
            q_dtype="bf16",
            kv_dtype="fp8",
            causal=False,
            q_len=q_len,
            arch=arch,
            aiter_version=version,
        ).calls_aiter


def test_fp8_query_over_bf16_kv_has_no_kernel_in_aiter() -> None:
    for heads, q_len, arch in product((12, 16, 128), (1, 4, 8), ARCHS):
        chosen = route(heads=heads, q_len=q_len, q_dtype="fp8", kv_dtype="bf16", arch=arch)
        assert not chosen.calls_aiter


def test_gfx942_has_no_non_causal_decode() -> None:
    for heads, q_len, dtype in product((8, 12, 16, 64, 128), range(2, 9), DTYPES):
        assert not route(
            heads=heads, q_len=q_len, q_dtype=dtype, kv_dtype=dtype, causal=False, arch="gfx942"
        ).calls_aiter


def test_gfx942_fp8_stops_at_four_tokens() -> None:
    assert route(arch="gfx942", q_len=4).calls_aiter
    for heads, q_len in product((12, 16, 64, 128), range(5, 9)):
        assert not route(arch="gfx942", heads=heads, q_len=q_len).calls_aiter


def test_gfx942_fp8_has_an_lse_only_as_64_heads_and_one_token() -> None:
    assert route(arch="gfx942", need_lse=True).padded_heads == 64
    assert not route(arch="gfx942", need_lse=True, q_len=2).calls_aiter
    assert not route(arch="gfx942", need_lse=True, heads=65).calls_aiter


def test_gfx942_has_no_causal_decode_across_dcp_ranks() -> None:
    for q_len in range(2, 9):
        assert not route(arch="gfx942", heads=96, q_len=q_len, dcp=8).calls_aiter


def test_aiter_5679_gfx942_bf16_eight_tokens_is_wrong() -> None:
    for heads, q_len, version in product((1, 12, 16), range(5, 9), VERSIONS):
        assert not route(
            arch="gfx942",
            heads=heads,
            q_len=q_len,
            q_dtype="bf16",
            kv_dtype="bf16",
            aiter_version=version,
        ).calls_aiter
    assert any(f.source == "aiter#5679" for f in TABLES["0.1.20", "gfx942"].faults)


def test_aiter_2720_and_5679_are_of_a_mode_that_no_route_uses() -> None:
    named = {"aiter#2720", "aiter#5679"}
    for table in TABLES.values():
        for fault in table.faults:
            if fault.source in named:
                assert fault.persistent is False
        # The kernel that took 5 to 7 tokens, bf16 (16, 8), exists in the split mode alone.
        assert not any(row.persistent and (row.heads, row.q_len) == (16, 8) for row in table.rows)


def test_vllm_46952_fp8_32_heads_are_never_folded_to_16() -> None:
    assert not route(heads=32, aiter_version="0.1.16.post2").calls_aiter
    assert route(heads=32, aiter_version="0.1.7").padded_heads == 128  # a native kernel, no fold
    assert route(heads=32).padded_heads == 32


@pytest.mark.parametrize("heads", [24, 48, 80, 96, 112])
def test_vllm_54899_heads_that_aiter_folds_are_never_passed(heads: int) -> None:
    for q_len, dtype, arch, version in product(range(1, 9), DTYPES, ARCHS, VERSIONS):
        chosen = route(
            heads=heads,
            q_len=q_len,
            q_dtype=dtype,
            kv_dtype=dtype,
            arch=arch,
            aiter_version=version,
        )
        assert not (chosen.calls_aiter and chosen.padded_heads == heads)


def test_96_gathered_heads_are_padded_to_128() -> None:
    for dtype in DTYPES:
        verify = route(heads=96, q_len=4, q_dtype=dtype, kv_dtype=dtype, dcp=8)
        assert (verify.name, verify.padded_heads) == ("aiter_persistent_cprr", 128)
        one = route(heads=96, q_len=1, q_dtype=dtype, kv_dtype=dtype, dcp=8)
        assert (one.name, one.padded_heads) == ("aiter_persistent", 128)


def test_two_verify_tokens_across_dcp_ranks_skip_the_16_head_row() -> None:
    assert route(heads=12, q_len=2, dcp=8).padded_heads == 32
    assert route(heads=12, q_len=2, dcp=8).name == "aiter_persistent_cprr"


def test_dcp_masks_need_interleave_one() -> None:
    assert not route(heads=96, q_len=4, dcp=8, kv_interleave=16).calls_aiter
    assert route(heads=96, q_len=1, dcp=8, kv_interleave=16).calls_aiter


def test_aiter_4156_caches_above_4_gib_need_the_64_bit_kernels() -> None:
    over = (4 << 30) + 1
    assert route(kv_cache_bytes=over).calls_aiter
    assert not route(kv_cache_bytes=over, arch="gfx942").calls_aiter
    assert not route(kv_cache_bytes=over, aiter_version="0.1.7").calls_aiter
    assert route(kv_cache_bytes=over - 1, arch="gfx942").calls_aiter


def test_aiter_2106_0_1_7_takes_one_token_only() -> None:
    assert route(aiter_version="0.1.7").calls_aiter
    for q_len in range(2, 9):
        chosen = route(aiter_version="0.1.7", q_len=q_len)
        assert not chosen.calls_aiter
    assert "aiter#2106" in route(aiter_version="0.1.7", q_len=4).reason


def test_0_1_7_has_no_lse() -> None:
    for heads, dtype, arch in product((12, 16, 128), DTYPES, ARCHS):
        assert not route(
            aiter_version="0.1.7",
            heads=heads,
            q_dtype=dtype,
            kv_dtype=dtype,
            arch=arch,
            need_lse=True,
        ).calls_aiter


def test_sglang_24762_partial_outputs_stay_below_4_gib() -> None:
    chosen = route(heads=96, q_len=8, dcp=8)
    assert not chosen.calls_aiter
    assert "sglang#24762" in chosen.reason


def test_a_single_read_beats_two_of_aiter() -> None:
    chosen = route(heads=12, q_len=7, q_dtype="bf16", kv_dtype="bf16", causal=False)
    assert (chosen.name, chosen.kv_reads) == ("folded", 1)
    assert "twice" in chosen.reason


def test_fp8_64_heads_are_planned_in_blocks_of_32() -> None:
    assert route(heads=64).kv_granularity == 32
    assert route(heads=16).kv_granularity == 16
    assert route(heads=64, q_dtype="bf16", kv_dtype="bf16").kv_granularity == 16


def test_k3_tp8_with_dspark_reads_the_kv_once() -> None:
    for draft_heads, version in product((96, 64), VERSIONS):
        rows = route_table(tp=8, spec_tokens=7, draft_heads=draft_heads, aiter_version=version)
        assert len(rows) == 2 * 2 * 3
        for row in rows:
            assert row.route.kv_reads == 1, row


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"heads": 0}, "heads=0"),
        ({"heads": True}, "heads=True"),
        ({"q_len": -1}, "q_len=-1"),
        ({"q_len": 1.0}, "q_len=1.0"),
        ({"dcp": 0}, "dcp=0"),
        ({"q_dtype": "fp16"}, "q_dtype='fp16'"),
        ({"kv_dtype": "uint8"}, "kv_dtype='uint8'"),
        ({"arch": "gfx90a"}, "arch='gfx90a'"),
        ({"causal": 1}, "causal=1"),
        ({"need_lse": None}, "need_lse=None"),
        ({"aiter_version": 7}, "aiter_version=7"),
        ({"kv_interleave": 0}, "kv_interleave=0"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes=0"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named.replace("(", r"\(")):
        route(**change)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"tp": 5, "spec_tokens": 7}, "tp=5"),
        ({"tp": 8, "spec_tokens": -1}, "spec_tokens=-1"),
        ({"tp": 8, "spec_tokens": 7, "dcp": 3}, "dcp=3"),
    ],
)
def test_route_table_refuses_sizes_that_do_not_divide(sizes: dict[str, int], named: str) -> None:
    with pytest.raises(InputError, match=named):
        route_table(**sizes)


def test_long_blocks_are_folded() -> None:
    assert not route(heads=16, q_len=9).calls_aiter
    assert not route(heads=129).calls_aiter
