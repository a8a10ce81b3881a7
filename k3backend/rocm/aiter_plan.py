"""AITER's MLA decode behind this package's decode contract: plan, padding, masks and LSE.

AITER's contract differs from ours in ways that are all settled here, once:

- it takes token ids, not block tables: `AiterPlan.update` expands them once a forward;
- it takes the head counts of its kernels: queries are padded with zero rows, and those rows are
  dropped from the output and from the LSE (a zero query has LSE ln(length), not -inf);
- its LSE is natural, and +inf where no key is visible: it becomes base 2 and -inf;
- it may leave rows without a visible key unwritten: they become output 0, LSE -inf;
- its default scale is 1/sqrt(576): ``sm_scale`` is always passed;
- without planner buffers it allocates and copies on every call: they are always passed;
- its signatures grew in the middle: everything is passed by keyword.

The plan and its scratch are sized by shapes alone, and nothing here reads the device, so a forward
can be captured in a graph and replayed at other lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from k3backend.common.attention_reference import visible_keys
from k3backend.common.errors import InputError, PlatformError, ShapeError
from k3backend.rocm.aiter_ops import Aiter
from k3backend.rocm.aiter_signature import DECODE, METADATA
from k3backend.rocm.token_view import HEAD_DIM, check_tensor, token_view

VALUE_DIM = 512
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AiterShape:
    """What one plan is for. All layers of a forward with this shape share the plan.

    Attributes:
        heads: real query heads. padded_heads: heads that AITER is given.
        q_len: query tokens of each request.
        causal: mask within the block.
        cp_round_robin: mask on global positions across DCP ranks.
        q_dtype, kv_dtype: torch dtypes of the query and the cache.
        max_requests: most requests of one forward.
        max_kv_tokens: most keys of one request on this rank.
        kv_granularity: tokens in a block of AITER's planner.
    """

    heads: int
    padded_heads: int
    q_len: int
    causal: bool
    cp_round_robin: bool
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    max_requests: int
    max_kv_tokens: int
    kv_granularity: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= self.padded_heads:
            raise InputError(
                f"heads={self.heads} with padded_heads={self.padded_heads}: expected "
                "1 <= heads <= padded_heads; take both from choose_route"
            )
        for name in ("q_len", "max_requests", "max_kv_tokens", "kv_granularity"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is not an integer >= 1")
        if self.max_requests * self.max_kv_tokens > 2**31 - 1:
            raise InputError(
                f"max_requests={self.max_requests} x max_kv_tokens={self.max_kv_tokens} exceeds "
                "int32, AITER's offsets; lower one of them"
            )

    @property
    def masked(self) -> bool:
        """Whether AITER's masked kernels run: always at one token, where the mask does nothing."""
        return self.causal or self.q_len == 1


class AiterScratch:
    """The large buffers, which plans of one lane share: index list, padded queries and outputs.

    Attributes:
        kv_indices: int32 [max_requests * max_kv_tokens] token ids.
    """

    def __init__(
        self,
        heads: int,
        q_dtype: torch.dtype,
        max_tokens: int,
        max_kv_indices: int,
        device: torch.device,
    ) -> None:
        """Allocate the index list; padded buffers follow per head count, on first use.

        Args:
            heads: real heads. q_dtype: of queries. max_tokens: most query tokens of a forward.
            max_kv_indices: most keys of all requests together.
        """
        self.heads, self.q_dtype, self.max_tokens = heads, q_dtype, max_tokens
        self.device = device
        self.kv_indices = torch.zeros(max_kv_indices, dtype=torch.int32, device=device)
        self._padded: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def padded(self, heads: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Queries [tokens, heads, 576] with zero rows (None: no padding) and outputs."""
        if heads not in self._padded:
            size = (self.max_tokens, heads)
            q = None
            if heads != self.heads:
                q = torch.zeros(*size, HEAD_DIM, dtype=self.q_dtype, device=self.device)
            out = torch.empty(*size, VALUE_DIM, dtype=torch.bfloat16, device=self.device)
            self._padded[heads] = q, out
        return self._padded[heads]


@dataclass(slots=True)
class AiterPlan:
    """AITER's plan and index list for one shape.

    Buffers are made here, while the model is being built; `update` fills them once a forward.

    Attributes:
        aiter: the checked AITER. shape: what it is for. device: where the buffers are.
        scratch: shared with plans of other shapes, of which one is current; None: an own one.
    """

    aiter: Aiter
    shape: AiterShape
    device: torch.device
    scratch: AiterScratch | None = None
    qo_indptr: torch.Tensor = field(init=False)
    kv_indptr: torch.Tensor = field(init=False)
    global_indptr: torch.Tensor = field(init=False)
    kv_indices: torch.Tensor = field(init=False)
    last_page_lens: torch.Tensor = field(init=False)
    hidden: torch.Tensor = field(init=False)
    padded_q: torch.Tensor | None = field(init=False)
    padded_out: torch.Tensor = field(init=False)
    work: dict[str, torch.Tensor] = field(init=False)
    scales: dict[float, torch.Tensor] = field(init=False, default_factory=dict)
    requests: int = field(init=False, default=0)
    cp: tuple[int, int, int] = field(init=False, default=(1, 0, 1))

    def __post_init__(self) -> None:
        shape, device = self.shape, self.device
        signatures = self.aiter.signatures
        needs = {
            "causal": not shape.masked,
            "g_kv_indptr": shape.cp_round_robin,
            "is_cp_round_robin": shape.cp_round_robin,
        }
        for parameter, needed in needs.items():
            entry = METADATA if parameter in METADATA.optional else DECODE
            if needed and not signatures.has(entry, parameter):
                raise PlatformError(
                    f"AITER {self.aiter.version} has no {parameter} in {entry.name}: "
                    f"{entry.optional[parameter]}; take the folded kernel"
                )
        tokens = shape.max_requests * shape.q_len

        def int32(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.qo_indptr = torch.arange(0, tokens + 1, shape.q_len, dtype=torch.int32, device=device)
        self.kv_indptr = int32(shape.max_requests + 1)
        self.global_indptr = int32(shape.max_requests + 1)
        scratch = self.scratch
        if scratch is None:
            capacity = shape.max_requests * shape.max_kv_tokens
            scratch = AiterScratch(shape.heads, shape.q_dtype, tokens, capacity, device)
        self.kv_indices = scratch.kv_indices
        self.last_page_lens = torch.ones(shape.max_requests, dtype=torch.int32, device=device)
        self.hidden = torch.ones(tokens, dtype=torch.bool, device=device)
        self.padded_q, self.padded_out = scratch.padded(shape.padded_heads)
        names = (
            "work_meta_data",
            "work_indptr",
            "work_info_set",
            "reduce_indptr",
            "reduce_final_map",
            "reduce_partial_map",
        )
        info = self.aiter.metadata_info(
            batch_size=shape.max_requests,
            max_seqlen_qo=shape.q_len,
            num_head_qo=shape.padded_heads,
            q_dtype=shape.q_dtype,
            kv_dtype=shape.kv_dtype,
            is_sparse=False,
            fast_mode=True,
        )
        self.work = {
            name: torch.empty(size, dtype=dtype, device=device)
            for name, (size, dtype) in zip(names, info, strict=True)
        }

    def update(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        block_size: int,
        block_stride_tokens: int | None = None,
        causal_lens: torch.Tensor | None = None,
        cp: tuple[int, int, int] = (1, 0, 1),
    ) -> None:
        """Expand the block table and plan. Once a forward, for all its layers.

        Args:
            block_table: [requests, columns] int32, unit stride in the last dimension.
            seq_lens: [requests] int32, keys on this rank, 0 allowed, at most ``max_kv_tokens``.
            block_size: tokens in a block.
            block_stride_tokens: distance of two blocks in the cache in tokens; None: block_size.
            causal_lens: [requests] int32, keys of all ranks; needed where the mask is global.
            cp: (world, rank, interleave) of decode context parallelism.
        Mutates the plan's buffers. No host sync; graph-safe; deterministic.

        Raises:
            ShapeError, InputError: naming the argument.
        """
        from k3backend.rocm.token_indices import expand_block_table

        shape = self.shape
        requests = self._check_update(block_table, seq_lens, causal_lens, cp)
        self.requests, self.cp = requests, cp
        if requests == 0:
            return
        kv_indptr = self.kv_indptr[: requests + 1]
        # A longer length would write outside the index list. The layer refuses steps that have one.
        lens = seq_lens.clamp(0, shape.max_kv_tokens)
        torch.cumsum(lens.clamp(min=1), 0, dtype=torch.int32, out=kv_indptr[1:])
        expand_block_table(
            block_table,
            lens,
            kv_indptr,
            self.kv_indices,
            block_size=block_size,
            block_stride_tokens=block_stride_tokens or block_size,
        )
        if causal_lens is not None:
            torch.cumsum(
                causal_lens, 0, dtype=torch.int32, out=self.global_indptr[1 : requests + 1]
            )
        masked = shape.causal and shape.q_len > 1
        seen = visible_keys(lens, shape.q_len, causal=masked, causal_lens=causal_lens, cp=cp)
        self.hidden[: requests * shape.q_len] = (seen <= 0).reshape(-1)
        self._plan(requests)

    def _plan(self, requests: int) -> None:
        shape, signatures = self.shape, self.aiter.signatures
        options: dict[str, Any] = {
            "kv_granularity": shape.kv_granularity,
            "max_seqlen_qo": shape.q_len,
            "uni_seqlen_qo": shape.q_len,
            "fast_mode": True,
        }
        # Across ranks every tile takes all local keys; the kernel masks on global positions.
        is_causal = shape.masked and not shape.cp_round_robin
        if not signatures.has(METADATA, "kv_last_page_lens"):
            # 0.1.7: stub and binding disagree on the name and the order of the work list, so its
            # buffers go by position, in the binding's order, as its own tests pass them.
            self.aiter.metadata(
                self.qo_indptr[: requests + 1],
                self.kv_indptr[: requests + 1],
                shape.padded_heads,
                1,
                is_causal,
                self.work["work_meta_data"],
                self.work["work_info_set"],
                self.work["work_indptr"],
                self.work["reduce_indptr"],
                self.work["reduce_final_map"],
                self.work["reduce_partial_map"],
                **options,
            )
            return
        known = {"page_size": 1, "dtype_q": shape.q_dtype, "dtype_kv": shape.kv_dtype}
        options.update({k: v for k, v in known.items() if signatures.has(METADATA, k)})
        if shape.cp_round_robin:
            options["is_cp_round_robin"] = True
        self.aiter.metadata(
            seqlens_qo_indptr=self.qo_indptr[: requests + 1],
            seqlens_kv_indptr=self.kv_indptr[: requests + 1],
            kv_last_page_lens=self.last_page_lens[:requests],
            num_heads_per_head_k=shape.padded_heads,
            num_heads_k=1,
            is_causal=is_causal,
            work_metadata_ptrs=self.work["work_meta_data"],
            work_info_set=self.work["work_info_set"],
            work_indptr=self.work["work_indptr"],
            reduce_indptr=self.work["reduce_indptr"],
            reduce_final_map=self.work["reduce_final_map"],
            reduce_partial_map=self.work["reduce_partial_map"],
            **options,
        )

    def decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        scale: float,
        q_scale: float = 1.0,
        k_scale: float = 1.0,
        need_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode one layer with the current plan.

        Args:
            q: [requests * q_len, heads, 576], the plan's dtype, contiguous.
            kv_cache: [blocks, block_size, 576], the plan's dtype; see `token_view`.
            scale: softmax scale, without q_scale and k_scale; 192**-0.5 for K3.
            q_scale, k_scale: what the query and the cache were divided by.
            need_lse: return the LSE.
        Returns:
            out: [tokens, heads, 512] bfloat16. lse2: [tokens, heads] float32, base 2, or None. Rows
            without a visible key are 0 and -inf.
        Mutates the plan's padded buffers. No host sync; graph-safe; as deterministic as AITER.

        Raises:
            ShapeError, InputError, PlatformError: naming the argument.
        """
        shape, signatures = self.shape, self.aiter.signatures
        tokens = self.requests * shape.q_len
        check_tensor("q", q, (tokens, shape.heads, HEAD_DIM), shape.q_dtype, self.device)
        if not q.is_contiguous():
            raise ShapeError(f"q has strides {q.stride()}, expected contiguous; copy it first")
        if need_lse and not signatures.has(DECODE, "return_lse"):
            raise PlatformError(
                f"AITER {self.aiter.version} has no return_lse: {DECODE.optional['return_lse']}; "
                "take the folded kernel"
            )
        tokens_view = token_view(kv_cache, shape.kv_dtype, self.device)
        if tokens == 0:
            empty = q.new_empty(0, shape.heads, dtype=torch.float32)
            out = q.new_empty(0, shape.heads, VALUE_DIM, dtype=torch.bfloat16)
            return out, empty if need_lse else None
        padded_q = q
        if self.padded_q is not None:
            padded_q = self.padded_q[:tokens]
            padded_q[:, : shape.heads].copy_(q)
        out = self.padded_out[:tokens]
        options: dict[str, Any] = {}
        if signatures.has(DECODE, "page_size"):
            options["page_size"] = 1
        if signatures.has(DECODE, "nhead_kv"):
            options["nhead_kv"] = 1
        if signatures.has(DECODE, "causal"):
            options["causal"] = shape.masked
        if need_lse:
            options["return_lse"] = True
        if shape.cp_round_robin:
            options["g_kv_indptr"] = self.global_indptr[: self.requests + 1]
            options["cp_world_size"], options["cp_rank"] = self.cp[:2]
        sm_scale, out_scale = float(scale), 1.0
        for name, value, dtype in (
            ("q_scale", q_scale, shape.q_dtype),
            ("kv_scale", k_scale, shape.kv_dtype),
        ):
            if dtype in FP8_DTYPES:
                options[name] = self._scale_tensor(name, value)
            else:
                # Kernels of bf16 operands take no scale: it joins the softmax scale, and k_scale
                # the output.
                sm_scale *= value
                out_scale = value if name == "kv_scale" else out_scale
        _, lse = self.aiter.decode_fwd(
            q=padded_q,
            kv_buffer=tokens_view,
            o=out,
            qo_indptr=self.qo_indptr[: self.requests + 1],
            kv_indptr=self.kv_indptr[: self.requests + 1],
            kv_indices=self.kv_indices,
            kv_last_page_lens=self.last_page_lens[: self.requests],
            max_seqlen_q=shape.q_len,
            sm_scale=sm_scale,
            # Without it AITER may drop the plan for its split mode (aiter#4144), whose empty rows
            # are NaN. The planner's worker count is also what the reduction sizes itself by.
            num_kv_splits=self.work["work_indptr"].shape[0] - 1,
            **self.work,
            **options,
        )
        hidden = self.hidden[:tokens, None]
        real = out[:, : shape.heads]
        if out_scale != 1.0:
            real = real * out_scale
        real = torch.where(hidden[..., None], torch.zeros_like(real[:1, :1, :1]), real)
        if not need_lse:
            return real, None
        return real, _base2_lse(lse[:, : shape.heads], hidden)

    def _scale_tensor(self, name: str, value: float) -> torch.Tensor:
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise InputError(f"{name}={value!r} is not a number > 0; pass the per-tensor scale")
        tensor = self.scales.get(float(value))
        if tensor is None:
            tensor = torch.full((1,), float(value), dtype=torch.float32, device=self.device)
            self.scales[float(value)] = tensor
        return tensor

    def _check_update(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        causal_lens: torch.Tensor | None,
        cp: tuple[int, int, int],
    ) -> int:
        requests = seq_lens.shape[0] if seq_lens.dim() == 1 else -1
        if not 0 <= requests <= self.shape.max_requests:
            raise ShapeError(
                f"seq_lens has shape {tuple(seq_lens.shape)}, expected [requests] with at most "
                f"{self.shape.max_requests} requests; raise max_requests"
            )
        check_tensor("seq_lens", seq_lens, (requests,), torch.int32, self.device)
        columns = block_table.shape[-1] if block_table.dim() == 2 else -1
        check_tensor("block_table", block_table, (requests, columns), torch.int32, self.device)
        if block_table.stride(1) != 1 and columns > 1:
            raise ShapeError("block_table has no unit stride in its last dimension; copy it first")
        if self.shape.cp_round_robin:
            if causal_lens is None:
                raise InputError("causal_lens=None: this shape masks on global lengths; pass them")
            if cp[2] != 1:
                raise InputError(f"cp={cp}: AITER masks across ranks at interleave 1 only")
        elif cp[0] > 1 and self.shape.causal and self.shape.q_len > 1:
            raise InputError(f"cp={cp}: this shape masks on local positions; plan another shape")
        if causal_lens is not None:
            check_tensor("causal_lens", causal_lens, (requests,), torch.int32, self.device)
        return requests


def _base2_lse(lse: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """AITER's natural LSE as base 2, -inf where no key is visible (there it is +inf or unset)."""
    return torch.where(
        hidden | (lse == math.inf), torch.full_like(lse[:1, :1], -math.inf), lse * _LOG2_E
    )
