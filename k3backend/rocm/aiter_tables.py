"""The kernel tables of known AITER versions, and which of them an installed version gets.

Sources. "csv" and "asm_mla.cu" are AITER's files at e4048607a5, whose MLA files equal v0.1.20;
"wheel" is ``amd_aiter-0.1.7.post2.dev18``. aiter#N is an issue or pull request there. Nothing in
this module was run on hardware by this project.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from k3backend.common.errors import InputError
from k3backend.rocm.aiter_capabilities import (
    ANY,
    ARCHS,
    MAX_TABLE_Q_LEN,
    AiterTable,
    KernelRow,
    KnownFault,
    LookupKey,
)


def _rows(
    source: str, *entries: tuple[str, str, int, int, bool, str, str, str]
) -> tuple[KernelRow, ...]:
    """Expand entries whose last fields name the values of causal, lse and cprr: "0", "1", "01"."""
    return tuple(
        KernelRow(q, kv, heads, q_len, persistent, c == "1", e == "1", r == "1", source)
        for q, kv, heads, q_len, persistent, causal, lse, cprr in entries
        for c in causal
        for e in lse
        for r in cprr
    )


def _lookups(
    *entries: tuple[str, str, int, int, int, int, int],
) -> dict[LookupKey, tuple[int, int]]:
    """Expand (q dtype, kv dtype, heads, first q, last q, row heads, row q)."""
    return {
        (q, kv, heads, q_len): (row_heads, row_q)
        for q, kv, heads, first, last, row_heads, row_q in entries
        for q_len in range(first, last + 1)
    }


_FOLDS_REREAD = KnownFault(
    "vllm#54899", "folded heads re-read the KV once per 16 heads: 6x for 96", fold=True
)
_FP8_32_FOLD = KnownFault(
    "vllm#46952",
    "fp8 with 32 heads folded to 16 is wrong (cosine 0.69) in 0.1.16.post2",
    fold=True,
    q_dtype="fp8",
    heads=(32, 32),
)
_NOT_POWER_OF_TWO = KnownFault(
    "aiter#2720",
    "5, 6 or 7 query tokens give every position the same output under graph replay; the kernel "
    "that took them then is the non-persistent bf16 (16, 8)",
    persistent=False,
    q_dtype="bf16",
    heads=(16, 16),
    q_len=(5, 7),
)
_GFX942_BF16_16_8 = KnownFault(
    "aiter#5679",
    "bf16 (16, 8) is off by 0.11 to 0.16 in 0.1.21.post1 and main",
    persistent=False,
    q_dtype="bf16",
    heads=(16, 16),
    q_len=(5, 8),
)
_H32_RAGGED = KnownFault(
    "vllm _aiter_ops.py",
    "gfx950 bf16 with 32 heads mishandles ragged tails when the KV is split",
    persistent=False,
    q_dtype="bf16",
    heads=(32, 32),
)
_ONE_SPLIT_NO_LSE = KnownFault(
    "vllm _aiter_ops.py", "fp8 with one split writes no LSE", persistent=False, q_dtype="fp8"
)
_SHORT_LAST_PIECE = KnownFault(
    "aiter#2106, aiter#2128",
    "a last piece shorter than the query tokens gives NaN; fixed after 0.1.7",
    q_len=(2, 1 << 30),
)

_ROWS_0_1_7 = _rows(
    "wheel: csrc/py_itfs_cu/asm_mla.cu",
    ("bf16", "bf16", 16, 4, True, "1", "0", "0"),
    ("bf16", "fp8", 16, 4, True, "1", "0", "0"),
    ("fp8", "fp8", 16, 1, True, "1", "0", "0"),
    ("fp8", "fp8", 16, 2, True, "1", "0", "0"),
    ("fp8", "fp8", 16, 4, True, "1", "0", "0"),
    ("fp8", "fp8", 128, ANY, True, "1", "0", "0"),
    ("bf16", "bf16", 16, 1, False, "1", "0", "0"),
    ("bf16", "bf16", 16, 4, False, "1", "0", "0"),
    ("bf16", "bf16", 16, 8, False, "1", "0", "0"),
    ("bf16", "bf16", 128, ANY, False, "1", "0", "0"),
    ("fp8", "fp8", 16, 1, False, "1", "0", "0"),
    ("fp8", "fp8", 16, 2, False, "1", "0", "0"),
    ("fp8", "fp8", 16, 4, False, "1", "0", "0"),
    ("fp8", "fp8", 128, ANY, False, "1", "0", "0"),
)
_LOOKUPS_0_1_7 = _lookups(
    ("bf16", "bf16", 16, 1, 4, 16, 4),
    ("bf16", "fp8", 16, 1, 4, 16, 4),
    ("fp8", "fp8", 16, 1, 1, 16, 1),
    ("fp8", "fp8", 16, 2, 2, 16, 2),
    ("fp8", "fp8", 16, 3, 4, 16, 4),
    ("fp8", "fp8", 128, 1, 4, 128, ANY),
)

_ROWS_0_1_20_GFX950 = _rows(
    "csv: hsa/gfx950/mla/mla_asm.csv",
    ("fp8", "fp8", 8, 4, True, "10", "01", "0"),
    ("fp8", "fp8", 16, 1, True, "10", "01", "0"),
    ("fp8", "fp8", 16, 2, True, "1", "0", "0"),
    ("fp8", "fp8", 16, 4, True, "10", "01", "01"),
    ("fp8", "fp8", 32, 1, True, "1", "01", "0"),
    ("fp8", "fp8", 32, 4, True, "10", "01", "01"),
    ("bf16", "bf16", 16, 4, True, "1", "01", "0"),
    ("bf16", "bf16", 32, 4, True, "10", "01", "01"),
    ("bf16", "bf16", 64, 1, True, "10", "01", "01"),
    ("bf16", "fp8", 16, 4, True, "1", "0", "0"),
    ("bf16", "bf16", 8, 1, False, "1", "0", "0"),
    ("bf16", "bf16", 8, 2, False, "1", "0", "0"),
    ("bf16", "bf16", 16, 1, False, "1", "0", "0"),
    ("bf16", "bf16", 16, 4, False, "1", "0", "0"),
    ("bf16", "bf16", 16, 8, False, "1", "0", "0"),
    ("bf16", "bf16", 32, ANY, False, "1", "0", "0"),
    ("bf16", "bf16", 64, ANY, False, "1", "0", "0"),
    ("bf16", "bf16", 64, 1, False, "1", "0", "0"),
    ("bf16", "bf16", 128, ANY, False, "1", "0", "0"),
    ("fp8", "fp8", 8, 1, False, "1", "0", "0"),
    ("fp8", "fp8", 16, 1, False, "10", "0", "0"),
    ("fp8", "fp8", 16, 2, False, "1", "0", "0"),
    ("fp8", "fp8", 16, 4, False, "10", "0", "0"),
    ("fp8", "fp8", 128, ANY, False, "10", "0", "0"),
)
# asm_mla.cu:880-997: the remaps that run before the lookup. The kernel keeps the real head count.
_LOOKUPS_0_1_20_GFX950 = _lookups(
    ("fp8", "fp8", 8, 4, 4, 8, 4),
    ("fp8", "fp8", 16, 1, 1, 16, 1),
    ("fp8", "fp8", 16, 2, 2, 16, 2),
    ("fp8", "fp8", 16, 3, 4, 16, 4),
    ("fp8", "fp8", 16, 5, MAX_TABLE_Q_LEN, 32, 4),
    ("fp8", "fp8", 32, 1, 1, 32, 1),
    ("fp8", "fp8", 32, 2, 3, 16, 4),
    ("fp8", "fp8", 32, 4, MAX_TABLE_Q_LEN, 32, 4),
    ("fp8", "fp8", 64, 1, 1, 16, 4),
    ("fp8", "fp8", 64, 2, MAX_TABLE_Q_LEN, 32, 4),
    ("fp8", "fp8", 128, 1, MAX_TABLE_Q_LEN, 32, 4),
    ("bf16", "bf16", 16, 1, 7, 64, 1),
    ("bf16", "bf16", 16, 8, MAX_TABLE_Q_LEN, 32, 4),
    ("bf16", "bf16", 32, 1, 3, 64, 1),
    ("bf16", "bf16", 32, 4, MAX_TABLE_Q_LEN, 32, 4),
    ("bf16", "bf16", 64, 1, 1, 64, 1),
    ("bf16", "bf16", 64, 2, MAX_TABLE_Q_LEN, 32, 4),
    ("bf16", "bf16", 128, 1, MAX_TABLE_Q_LEN, 32, 4),
    ("bf16", "fp8", 16, 1, 4, 16, 4),
)

_ROWS_0_1_20_GFX942 = _rows(
    "csv: hsa/gfx942/mla/mla_asm.csv",
    ("bf16", "bf16", 8, 2, True, "1", "0", "0"),
    ("bf16", "bf16", 16, 4, True, "1", "0", "0"),
    ("bf16", "fp8", 16, 4, True, "1", "0", "0"),
    ("fp8", "fp8", 16, 1, True, "1", "0", "0"),
    ("fp8", "fp8", 16, 2, True, "1", "0", "0"),
    ("fp8", "fp8", 16, 4, True, "1", "0", "0"),
    ("fp8", "fp8", 64, 1, True, "1", "01", "0"),
    ("fp8", "fp8", 128, ANY, True, "1", "0", "0"),
    ("bf16", "bf16", 8, 1, False, "1", "0", "0"),
    ("bf16", "bf16", 16, 1, False, "1", "0", "0"),
    ("bf16", "bf16", 16, 4, False, "1", "0", "0"),
    ("bf16", "bf16", 16, 8, False, "1", "0", "0"),
    ("bf16", "bf16", 32, ANY, False, "1", "0", "0"),
    ("bf16", "bf16", 64, ANY, False, "1", "0", "0"),
    ("bf16", "bf16", 128, ANY, False, "1", "0", "0"),
    ("fp8", "fp8", 8, 1, False, "1", "0", "0"),
    ("fp8", "fp8", 16, 1, False, "1", "0", "0"),
    ("fp8", "fp8", 16, 2, False, "1", "0", "0"),
    ("fp8", "fp8", 16, 4, False, "1", "0", "0"),
    ("fp8", "fp8", 128, ANY, False, "1", "0", "0"),
)
_LOOKUPS_0_1_20_GFX942 = _lookups(
    ("bf16", "bf16", 8, 2, 2, 8, 2),
    ("bf16", "bf16", 16, 1, 4, 16, 4),
    ("bf16", "fp8", 16, 1, 4, 16, 4),
    ("fp8", "fp8", 16, 1, 1, 16, 1),
    ("fp8", "fp8", 16, 2, 2, 16, 2),
    ("fp8", "fp8", 16, 3, 4, 16, 4),
    ("fp8", "fp8", 64, 1, 1, 64, 1),
    ("fp8", "fp8", 128, 1, 4, 128, ANY),
)
# A 32-bit buffer resource spans 4 GiB (aiter#4156). The 64-bit loads of aiter#3921, #4156, #4341
# and #4452 are in 0.1.20's gfx950 kernels; gfx942's kernels are older than all of them.
_BUFFER_BYTES = 4 << 30
_CLUSTERS = {"gfx950": 256, "gfx942": 304}

_KNOWN: tuple[AiterTable, ...] = (
    *(
        AiterTable(
            version="0.1.7",
            arch=arch,
            verified=True,
            rows=_ROWS_0_1_7,
            lookups=_LOOKUPS_0_1_7,
            reduce_heads=frozenset({16, 128}),
            max_kv_bytes=_BUFFER_BYTES,
            clusters=_CLUSTERS[arch],
            narrow_groups=False,
            faults=(_SHORT_LAST_PIECE, _FOLDS_REREAD, _FP8_32_FOLD, _NOT_POWER_OF_TWO),
        )
        for arch in ARCHS
    ),
    AiterTable(
        version="0.1.20",
        arch="gfx950",
        verified=True,
        rows=_ROWS_0_1_20_GFX950,
        lookups=_LOOKUPS_0_1_20_GFX950,
        reduce_heads=frozenset({8, 16, 24, 32, 48, 64, 80, 96, 112, 128}),
        max_kv_bytes=None,
        clusters=_CLUSTERS["gfx950"],
        narrow_groups=True,
        faults=(_FOLDS_REREAD, _NOT_POWER_OF_TWO, _H32_RAGGED),
    ),
    AiterTable(
        version="0.1.20",
        arch="gfx942",
        verified=True,
        rows=_ROWS_0_1_20_GFX942,
        lookups=_LOOKUPS_0_1_20_GFX942,
        reduce_heads=frozenset({8, 16, 24, 32, 48, 64, 80, 96, 112, 128}),
        max_kv_bytes=_BUFFER_BYTES,
        clusters=_CLUSTERS["gfx942"],
        narrow_groups=False,
        faults=(_FOLDS_REREAD, _NOT_POWER_OF_TWO, _GFX942_BF16_16_8, _ONE_SPLIT_NO_LSE),
    ),
)
TABLES: Mapping[tuple[str, str], AiterTable] = {
    **{(table.version, table.arch): table for table in _KNOWN},
    # 0.1.21's files were not read: 0.1.20's rows, marked so. Reading them removes this line.
    **{
        ("0.1.21", table.arch): replace(table, version="0.1.21", verified=False)
        for table in _KNOWN
        if table.version == "0.1.20"
    },
}
KNOWN_VERSIONS: tuple[str, ...] = ("0.1.7", "0.1.20", "0.1.21")
"""Versions with a table, oldest first."""


@lru_cache(maxsize=64)
def table_for(aiter_version: str | None, arch: str) -> AiterTable:
    """The table of an installed version, or what is common to tables around an unknown one.

    ``None`` and every version that is not older than the last two tables take what those two have
    in common; an older version without a table takes what all tables have in common. Local and
    post-release parts ("0.1.20.post1", "0.1.21.post2+rocm7") belong to their release.

    Raises:
        InputError: the architecture has no table.
    """
    if arch not in ARCHS:
        raise InputError(f"arch={arch!r} is not one of {', '.join(ARCHS)}; pass the GPU's name")
    release = _release(aiter_version)
    exact = TABLES.get((".".join(map(str, release)), arch)) if release else None
    if exact is not None:
        return exact
    last_two = KNOWN_VERSIONS[-2:]
    older = release is not None and release < (_release(last_two[0]) or ())
    chosen = KNOWN_VERSIONS if older else last_two
    label = f"{aiter_version} (no table)" if aiter_version else "of unknown version"
    return _common([TABLES[version, arch] for version in chosen], label)


def _release(version: str | None) -> tuple[int, ...] | None:
    """(0, 1, 20) of "v0.1.20.post1" or "0.1.20-46-ge40486"; None where it does not parse."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)(?![\d])", (version or "").strip())
    return tuple(int(part) for part in found.groups()) if found else None


def _common(tables: Iterable[AiterTable], label: str) -> AiterTable:
    first, *rest = tuple(tables)
    rows, lookups, reduce_heads = first.rows, dict(first.lookups), first.reduce_heads
    limits = [first.max_kv_bytes]
    faults = list(first.faults)
    for table in rest:
        keys = {row.key for row in table.rows}
        rows = tuple(row for row in rows if row.key in keys)
        lookups = {k: v for k, v in lookups.items() if table.lookups.get(k) == v}
        reduce_heads &= table.reduce_heads
        limits.append(table.max_kv_bytes)
        faults += [fault for fault in table.faults if fault not in faults]
    known_limits = [limit for limit in limits if limit is not None]
    return replace(
        first,
        version=label,
        verified=False,
        rows=rows,
        lookups=lookups,
        reduce_heads=reduce_heads,
        max_kv_bytes=min(known_limits, default=None),
        narrow_groups=any(table.narrow_groups for table in (first, *rest)),
        faults=tuple(faults),
    )
