"""Which parameters of AITER's entry points are needed, and what a version without one cannot do.

Works on parameter names alone, so that an installed AITER (``inspect``) and a wheel's source (AST,
``tools/check_aiter_signature.py``) are checked by the same rule. The signatures grew in the middle
(``page_size`` and ``nhead_kv`` of the decode, ``kv_last_page_lens`` of the planner), so positions
mean nothing across versions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One function of AITER that this package calls.

    Attributes:
        name: function name. module: where AITER defines it.
        needed: parameters without which it cannot be called.
        optional: parameter -> what cannot be asked of a version without it.
    """

    name: str
    module: str
    needed: tuple[str, ...]
    optional: Mapping[str, str]


_PAGE_OF_ONE = "pages are one token, which is all this package uses"
_NO_GLOBAL_MASK = "no mask on global positions: one token only under context parallelism"
_PLAN_WITHOUT_DTYPES = "the plan does not know the dtypes: 16 and 128 heads only"

DECODE = EntryPoint(
    name="mla_decode_fwd",
    module="aiter.mla",
    needed=(
        "q",
        "kv_buffer",
        "o",
        "qo_indptr",
        "kv_indptr",
        "kv_indices",
        "kv_last_page_lens",
        "max_seqlen_q",
        "sm_scale",
        "num_kv_splits",
        "work_meta_data",
        "work_indptr",
        "work_info_set",
        "reduce_indptr",
        "reduce_final_map",
        "reduce_partial_map",
        "q_scale",
        "kv_scale",
    ),
    optional={
        "page_size": _PAGE_OF_ONE,
        "nhead_kv": "KV heads are one, which is all this package uses",
        "return_lse": "no LSE: nothing that needs one, so no context parallelism",
        "causal": "no mask-free kernel: a block of several tokens is causal",
        "g_kv_indptr": _NO_GLOBAL_MASK,
        "cp_world_size": _NO_GLOBAL_MASK,
        "cp_rank": _NO_GLOBAL_MASK,
    },
)
METADATA_INFO = EntryPoint(
    name="get_mla_metadata_info_v1",
    module="aiter",
    needed=(
        "batch_size",
        "max_seqlen_qo",
        "num_head_qo",
        "q_dtype",
        "kv_dtype",
        "is_sparse",
        "fast_mode",
    ),
    optional={},
)
METADATA = EntryPoint(
    name="get_mla_metadata_v1",
    module="aiter",
    needed=(
        "seqlens_qo_indptr",
        "seqlens_kv_indptr",
        "num_heads_per_head_k",
        "num_heads_k",
        "is_causal",
        "work_metadata_ptrs",
        "work_indptr",
        "reduce_indptr",
        "reduce_final_map",
        "reduce_partial_map",
        "kv_granularity",
        "max_seqlen_qo",
        "uni_seqlen_qo",
        "fast_mode",
    ),
    optional={
        "kv_last_page_lens": _PAGE_OF_ONE,
        "page_size": _PAGE_OF_ONE,
        "dtype_q": _PLAN_WITHOUT_DTYPES,
        "dtype_kv": _PLAN_WITHOUT_DTYPES,
        "is_cp_round_robin": _NO_GLOBAL_MASK,
    },
)
ENTRY_POINTS: tuple[EntryPoint, ...] = (DECODE, METADATA_INFO, METADATA)


@dataclass(frozen=True, slots=True)
class SignatureReport:
    """What a check found.

    Attributes:
        missing: ``function(parameter)`` or ``function`` that this package cannot do without.
        lacks: (function, parameter, consequence) of the rest.
        names: function -> its parameters.
    """

    missing: tuple[str, ...]
    lacks: tuple[tuple[str, str, str], ...]
    names: Mapping[str, frozenset[str]]

    def has(self, entry: EntryPoint, parameter: str) -> bool:
        """Whether a function takes a parameter."""
        return parameter in self.names.get(entry.name, frozenset())


def check_signatures(signatures: Mapping[str, Collection[str]]) -> SignatureReport:
    """Compare parameter names with what this package calls.

    Args:
        signatures: function name -> its parameter names; absent functions are left out.
    """
    missing: list[str] = []
    lacks: list[tuple[str, str, str]] = []
    for entry in ENTRY_POINTS:
        names = signatures.get(entry.name)
        if names is None:
            missing.append(f"{entry.module}.{entry.name}")
            continue
        missing += [f"{entry.name}({name})" for name in entry.needed if name not in names]
        # 0.1.7's stub calls the work list work_info; its binding and later stubs work_info_set.
        if entry is METADATA and not {"work_info_set", "work_info"} & set(names):
            missing.append(f"{entry.name}(work_info_set)")
        lacks += [
            (entry.name, name, consequence)
            for name, consequence in entry.optional.items()
            if name not in names
        ]
    return SignatureReport(
        tuple(missing), tuple(lacks), {name: frozenset(p) for name, p in signatures.items()}
    )
