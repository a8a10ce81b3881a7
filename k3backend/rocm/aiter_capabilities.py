"""What can be said of one AITER version's MLA decode: the types of the tables in `aiter_tables`.

AITER ends the process, not the call, where no kernel row matches ("cannot get heuristic kernel"),
so nothing may reach it that is not in these tables. A table holds, for one version and one
architecture:

- ``rows``: the decode rows of ``hsa/<arch>/mla/mla_asm.csv`` (for 0.1.7, which has no such file,
  the branches of ``csrc/py_itfs_cu/asm_mla.cu``). Rows of the non-persistent mode are listed
  because known faults name them; no route uses them.
- ``lookups``: the row that the launcher looks up for (heads, query tokens) *after* its own remaps.
  A head count without a lookup is one that AITER folds into 16-head batches, reading the KV once
  per batch, or refuses.
- ``faults``: wrong results and failures that were reported for rows which exist.

Imports neither aiter nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ARCHS: tuple[str, ...] = ("gfx950", "gfx942")
DTYPES: tuple[str, ...] = ("fp8", "bf16")
ABSENT = "absent"
"""The version string that says: AITER is not installed."""
ANY = 0
"""``q_len`` of a row that serves every query length."""
MAX_TABLE_Q_LEN = 8
"""Query lengths above this were not read out of the launcher and never reach AITER."""
PADDED_HEADS: tuple[int, ...] = (8, 16, 32, 64, 128)
"""Head counts to which queries are padded, in the order tried. 24, 48, 80, 96 and 112 are absent:
AITER folds them into 16-head batches that each re-read the KV (vllm#54899: 6x for 96 heads)."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One decode kernel: the key that AITER's launcher looks up.

    Attributes:
        q_dtype, kv_dtype: "fp8" or "bf16".
        heads, q_len: of the row, not of the caller; q_len 0 serves any.
        persistent: planned by ``get_mla_metadata_v1``; False is the split mode.
        causal: False is a mask-free ("msk0") kernel.
        lse: writes the LSE of pieces that are not split.
        cprr: round-robin context parallel: masks on global positions.
        source: file the row stands in.
    """

    q_dtype: str
    kv_dtype: str
    heads: int
    q_len: int
    persistent: bool
    causal: bool
    lse: bool
    cprr: bool
    source: str

    @property
    def key(self) -> tuple[str, str, int, int, bool, bool, bool, bool]:
        """Everything but the source."""
        return (
            self.q_dtype,
            self.kv_dtype,
            self.heads,
            self.q_len,
            self.persistent,
            self.causal,
            self.lse,
            self.cprr,
        )


@dataclass(frozen=True, slots=True)
class KnownFault:
    """A reported wrong result or failure of something that has a row, or of a fold.

    Attributes:
        source: where it was reported.
        symptom: what happens.
        persistent: the mode it was seen in; None for both.
        fold: it is about a head count that AITER folds.
        q_dtype: None for both.
        heads: (least, most) heads, after padding.
        q_len: (least, most) query tokens.
    """

    source: str
    symptom: str
    persistent: bool | None = True
    fold: bool = False
    q_dtype: str | None = None
    heads: tuple[int, int] = (1, 1 << 30)
    q_len: tuple[int, int] = (1, 1 << 30)

    def hits(self, q_dtype: str, heads: int, q_len: int) -> bool:
        """Whether a persistent call without a fold would meet it."""
        return (
            self.persistent is not False
            and not self.fold
            and self.q_dtype in (None, q_dtype)
            and self.heads[0] <= heads <= self.heads[1]
            and self.q_len[0] <= q_len <= self.q_len[1]
        )


LookupKey = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class AiterTable:
    """What one AITER version has on one architecture.

    Attributes:
        version, arch: "0.1.20", "gfx950".
        verified: the rows were read in that version's own files.
        rows: decode kernels.
        lookups: (q dtype, kv dtype, heads, query tokens) -> (row heads, row query tokens).
        reduce_heads: head counts that ``mla_reduce_v1`` has at width 512.
        max_kv_bytes: largest KV cache of one layer that its kernels address; None: no known limit.
        clusters: workgroups of the persistent planner (compute units of the part).
        narrow_groups: some gfx950 shapes run 64 instead of 128 rows in a workgroup.
        faults: what is known to be wrong.
    """

    version: str
    arch: str
    verified: bool
    rows: tuple[KernelRow, ...]
    lookups: Mapping[LookupKey, tuple[int, int]]
    reduce_heads: frozenset[int]
    max_kv_bytes: int | None
    clusters: int
    narrow_groups: bool
    faults: tuple[KnownFault, ...]

    def row_for(
        self,
        *,
        q_dtype: str,
        kv_dtype: str,
        heads: int,
        q_len: int,
        causal: bool,
        lse: bool,
        cprr: bool,
    ) -> KernelRow | None:
        """The persistent row that the launcher would use, or None where it would abort.

        One query token always looks up the masked kernel: the mask does nothing there.
        """
        target = self.lookups.get((q_dtype, kv_dtype, heads, q_len))
        if target is None or heads not in self.reduce_heads:
            return None
        masked = causal or q_len == 1
        wanted = (q_dtype, kv_dtype, *target, True, masked, lse, cprr)
        return next((row for row in self.rows if row.key == wanted), None)

    def kv_reads(self, q_dtype: str, kv_dtype: str, heads: int, q_len: int) -> int:
        """Query tiles of one request, each of which reads the KV.

        ``v1_2_device.cuh``: 128 rows in a workgroup (64 for some shapes of gfx950); one tile if all
        rows fit, one per token if two tokens do not fit together, else as many as rows need.
        """
        rows = heads * q_len
        per_group = 128
        if self.narrow_groups:
            both_bf16 = q_dtype == kv_dtype == "bf16"
            if both_bf16 and 64 <= rows < 128 and heads <= 64:
                per_group = 64
            if q_dtype == kv_dtype == "fp8" and (heads, q_len) == (32, 3):
                per_group = 64
        if rows <= per_group:
            return 1
        if 2 * heads > per_group:
            return q_len
        return -(-rows // per_group)

    def scratch_bytes(self, kv_reads: int, heads: int, q_len: int) -> int:
        """Most fp32 partial output one call allocates, from 2 x clusters requests on.

        ``get_mla_metadata_info_v1``: at most 2 (clusters - 1) split tiles per query tile, for each
        of which the call allocates ``q_len`` tokens of heads x 512 floats.
        """
        return 2 * (self.clusters - 1) * kv_reads * q_len * heads * 512 * 4
