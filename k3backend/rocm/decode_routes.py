"""Which kernel decodes a shape on ROCm: a pure choice over the AITER tables.

A route that calls AITER is one that a table row covers, that reads the KV no more often than it
must, and that meets no known fault. Everything else is the folded kernel's, which has no holes.
Imports neither aiter, torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from k3backend.common.errors import InputError
from k3backend.rocm.aiter_capabilities import (
    ABSENT,
    ARCHS,
    DTYPES,
    MAX_TABLE_Q_LEN,
    PADDED_HEADS,
    AiterTable,
)
from k3backend.rocm.aiter_tables import table_for
from k3backend.rocm.launch_config import decode_launch

AITER = "aiter_persistent"
AITER_CPRR = "aiter_persistent_cprr"
FOLDED = "folded"
MAX_SCRATCH_BYTES = 4 << 30
"""Partial outputs of an AITER call stay below this: a 4 GiB buffer faulted (sglang#24762)."""


@dataclass(frozen=True, slots=True)
class Route:
    """The kernel for one shape, and why.

    Attributes:
        name: "aiter_persistent", "aiter_persistent_cprr" (masks on global positions) or "folded".
        padded_heads: heads that the kernel is given; the rows above the real heads are dropped.
        reason: one sentence.
        kv_reads: how often one request's KV is read.
        kv_granularity: tokens in a block of AITER's planner; 0 for the folded kernel.
        verified: the AITER rows were read in this version's own files (folded: True).
    """

    name: str
    padded_heads: int
    reason: str
    kv_reads: int = 1
    kv_granularity: int = 0
    verified: bool = True

    @property
    def calls_aiter(self) -> bool:
        """Whether this route calls AITER."""
        return self.name != FOLDED


def choose_route(
    *,
    heads: int,
    q_len: int,
    q_dtype: str,
    kv_dtype: str,
    causal: bool,
    dcp: int,
    arch: str,
    need_lse: bool,
    aiter_version: str | None = None,
    kv_interleave: int = 1,
    kv_cache_bytes: int | None = None,
) -> Route:
    """The kernel that decodes this shape. Pure; every valid shape has a route.

    Args:
        heads: query heads of one call, after the DCP gather (12 a rank x 8 ranks = 96).
        q_len: query tokens of each request.
        q_dtype, kv_dtype: "fp8" or "bf16".
        causal: token i of the block sees the keys up to itself; no effect at one token.
        dcp: decode context parallel ranks; above 1 the LSE is needed whatever ``need_lse`` says.
        arch: "gfx950" or "gfx942".
        need_lse: the caller reads the LSE.
        aiter_version: of the installed AITER; None: not known; "absent": not installed.
        kv_interleave: consecutive tokens that one DCP rank holds.
        kv_cache_bytes: bytes of one layer's KV cache, where known.

    Raises:
        InputError: an argument is out of range, naming it.
    """
    _check_counts(heads=heads, q_len=q_len, dcp=dcp, kv_interleave=kv_interleave)
    for name, value, choices in (
        ("q_dtype", q_dtype, DTYPES),
        ("kv_dtype", kv_dtype, DTYPES),
        ("arch", arch, ARCHS),
    ):
        if value not in choices:
            raise InputError(f"{name}={value!r} is not one of {', '.join(choices)}; pass one")
    for name, flag in (("causal", causal), ("need_lse", need_lse)):
        if not isinstance(flag, bool):
            raise InputError(f"{name}={flag!r} is not True or False; pass one")
    if aiter_version is not None and not isinstance(aiter_version, str):
        raise InputError(f"aiter_version={aiter_version!r} is not a version string or None")
    if kv_cache_bytes is not None:
        _check_counts(kv_cache_bytes=kv_cache_bytes)
    point = (heads, q_len, q_dtype, kv_dtype, arch)
    if aiter_version == ABSENT:
        return _folded(*point, "AITER is not installed")

    table = table_for(aiter_version, arch)
    masked = causal and q_len > 1
    if table.max_kv_bytes is not None and (kv_cache_bytes or 0) > table.max_kv_bytes:
        return _folded(
            *point,
            f"this AITER addresses {table.max_kv_bytes >> 30} GiB of KV on {arch} (aiter#4156), "
            f"the layer's cache has {kv_cache_bytes} bytes",
        )
    if masked and dcp > 1 and kv_interleave != 1:
        return _folded(
            *point,
            f"AITER masks across DCP ranks at KV interleave 1 only, not {kv_interleave}",
        )
    return _choose(
        heads,
        q_len,
        q_dtype,
        kv_dtype,
        masked,
        masked and dcp > 1,
        need_lse or dcp > 1,
        arch,
        aiter_version,
    )


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r} is not an integer >= 1; pass the real number")


@lru_cache(maxsize=1 << 18)
def _choose(
    heads: int,
    q_len: int,
    q_dtype: str,
    kv_dtype: str,
    masked: bool,
    cprr: bool,
    lse: bool,
    arch: str,
    aiter_version: str | None,
) -> Route:
    table = table_for(aiter_version, arch)
    point = (heads, q_len, q_dtype, kv_dtype, arch)
    if q_len > MAX_TABLE_Q_LEN:
        return _folded(*point, f"the tables of AITER stop at {MAX_TABLE_Q_LEN} query tokens")
    refusals: list[str] = []
    without_row: list[int] = []
    for padded in (size for size in PADDED_HEADS if size >= heads):
        row = table.row_for(
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            heads=padded,
            q_len=q_len,
            causal=masked,
            lse=lse,
            cprr=cprr,
        )
        if row is None:
            without_row.append(padded)
            continue
        refusal = _refusal(table, heads, padded, q_len, q_dtype, kv_dtype)
        if refusal is not None:
            refusals.append(f"({padded}, {q_len}) {refusal}")
            continue
        reads = table.kv_reads(q_dtype, kv_dtype, padded, q_len)
        padding = "" if padded == heads else f", {heads} heads padded to {padded}"
        doubt = "" if table.verified else "; rows not read in this version"
        return Route(
            name=AITER_CPRR if cprr else AITER,
            padded_heads=padded,
            reason=f"AITER {table.version} has row ({row.heads}, {row.q_len or 'any'}){padding}, "
            f"reads the KV {_times(reads)}{doubt}",
            kv_reads=reads,
            # The fp8 64-head kernel works on 32 keys at a time (test_mla_persistent.py:1282).
            kv_granularity=32 if padded == 64 and q_dtype == "fp8" else 16,
            verified=table.verified,
        )
    if refusals:
        why = refusals[0]
    elif without_row:
        sizes = " or ".join(map(str, without_row))
        lse_part = " with LSE" if lse else ""
        why = f"no {_mode(masked, cprr, q_len)} row{lse_part} for {sizes} heads x {q_len} tokens"
    else:
        why = f"no kernel above {PADDED_HEADS[-1]} heads"
    return _folded(*point, f"AITER {table.version}, {q_dtype}/{kv_dtype}, {arch}: {why}")


def _refusal(
    table: AiterTable, heads: int, padded: int, q_len: int, q_dtype: str, kv_dtype: str
) -> str | None:
    """Why a shape that has a row is not given to AITER, or None where it is."""
    for fault in table.faults:
        if fault.hits(q_dtype, padded, q_len):
            return f"is known to fail: {fault.symptom} ({fault.source})"
    reads = table.kv_reads(q_dtype, kv_dtype, padded, q_len)
    ours = folded_kv_reads(heads, q_len, q_dtype, kv_dtype, table.arch)
    # Both over one tile: AITER keeps the shape while padding costs it at most a third more reads,
    # which is what 96 heads padded to 128 cost. Measuring the folded kernel replaces this.
    if reads > 1 and (ours == 1 or 3 * reads > 4 * ours):
        return f"reads the KV {_times(reads)}, the folded kernel {_times(ours)}"
    scratch = table.scratch_bytes(reads, padded, q_len)
    if scratch >= MAX_SCRATCH_BYTES:
        return f"may need {scratch >> 20} MiB of partial outputs (sglang#24762)"
    return None


def folded_kv_reads(
    heads: int, q_len: int, q_dtype: str = "fp8", kv_dtype: str = "fp8", arch: str = "gfx950"
) -> int:
    """Row tiles of the folded kernel, each of which reads one request's KV."""
    rows = heads * q_len
    config = decode_launch(
        rows,
        q_dtype="fp8" if q_dtype == "fp8" else "bf16",
        kv_dtype="fp8" if kv_dtype == "fp8" else "bf16",
        arch=arch,
    )
    return config.row_tiles(rows)


def _folded(heads: int, q_len: int, q_dtype: str, kv_dtype: str, arch: str, why: str) -> Route:
    if (q_dtype, kv_dtype) == ("fp8", "bf16"):
        why += "; the folded kernel asks for a bf16 query over a bf16 cache"
    reads = folded_kv_reads(heads, q_len, q_dtype, kv_dtype, arch)
    return Route(FOLDED, heads, why, kv_reads=reads)


def _mode(masked: bool, cprr: bool, q_len: int) -> str:
    if cprr:
        return "causal across DCP ranks"
    if masked:
        return "causal"
    return "single-token" if q_len == 1 else "non-causal"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One line of the route table: a shape that a deployment decodes, and its route."""

    shape: str
    arch: str
    kv_dtype: str
    heads: int
    q_len: int
    causal: bool
    route: Route


def route_table(
    *,
    tp: int,
    spec_tokens: int,
    dcp: int = 1,
    target_heads: int = 96,
    draft_heads: int = 64,
    arch: str | None = None,
    aiter_version: str | None = None,
) -> list[RouteRow]:
    """The routes of one K3 deployment: single-token decode, verify and draft, per dtype and GPU.

    Args:
        tp: tensor parallel ranks; must divide both head counts.
        spec_tokens: draft tokens a step; 0: no draft.
        dcp: context parallel ranks, a divisor of ``tp``; queries are gathered over them.
        target_heads, draft_heads: attention heads of the whole model.
        arch: one GPU; None: both.
        aiter_version: as for `choose_route`.

    Raises:
        InputError: sizes that do not divide.
    """
    _check_counts(tp=tp, dcp=dcp, target_heads=target_heads, draft_heads=draft_heads)
    if isinstance(spec_tokens, bool) or not isinstance(spec_tokens, int) or spec_tokens < 0:
        raise InputError(f"spec_tokens={spec_tokens!r} is not an integer >= 0; 0 means no draft")
    for name, heads in (("target_heads", target_heads), ("draft_heads", draft_heads)):
        if heads % tp:
            raise InputError(f"tp={tp} does not divide {name}={heads}; pass a divisor")
    if tp % dcp:
        raise InputError(f"dcp={dcp} does not divide tp={tp}; pass a divisor of tp")
    shapes = [("target, one token", target_heads, 1, True)]
    if spec_tokens:
        shapes.append(
            (f"target verify, {spec_tokens} drafted", target_heads, 1 + spec_tokens, True)
        )
        shapes.append(("DSpark draft block", draft_heads, spec_tokens, False))
    return [
        RouteRow(
            shape=shape,
            arch=one_arch,
            kv_dtype=dtype,
            heads=heads // tp * dcp,
            q_len=q_len,
            causal=causal,
            route=choose_route(
                heads=heads // tp * dcp,
                q_len=q_len,
                q_dtype=dtype,
                kv_dtype=dtype,
                causal=causal,
                dcp=dcp,
                arch=one_arch,
                need_lse=dcp > 1,
                aiter_version=aiter_version,
            ),
        )
        for one_arch in ([arch] if arch else ARCHS)
        for dtype in DTYPES
        for shape, heads, q_len, causal in shapes
    ]
