"""The balanced decode of one shape, free of any framework: plan once, decode per layer.

A vendor subclasses `BalancedMla` with its launch choices. Buffers belong to the caller: ``counts``
and ``work`` hold the plan, ``workspace`` the partials. Their sizes depend on the shape alone, so
that a captured graph plans and decodes any lengths.

``plan_layout`` says where plans lie in them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from k3backend.common.decode_checks import (
    buffer_problems,
    cache_problems,
    interpreting,
    parallel_problems,
    scale_problems,
    table_problems,
    tensor_problems,
)
from k3backend.common.decode_contents import content_problems
from k3backend.common.decode_counters import device_counter
from k3backend.common.errors import InputError, UnsupportedDecodeError
from k3backend.common.kernel_device import (
    kernel_device_problems,
    launching_on,
    require_gpu,
)
from k3backend.common.launch_config import VALUE_DIM, DtypeName, LaunchConfig
from k3backend.common.plan_layout import PlanPart, indptr_len, plan_layout, require_shape
from k3backend.common.split_packing import CANDIDATES
from k3backend.common.split_plan import (
    WORK_FIELDS,
    SplitCost,
    max_items,
    max_slots,
    plan_splits,
)

PLAN_TILE_TOKENS = 64
PLAN_SCRATCH = 2 * CANDIDATES + 1
"""int32 entries that the device planner needs, zero before its first launch."""

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def dtype_name(dtype: torch.dtype) -> DtypeName | None:
    """ "fp8", "bf16" or None for a dtype that the kernels do not take."""
    if dtype in _FP8:
        return "fp8"
    return "bf16" if dtype == torch.bfloat16 else None


def require_dtypes(q_dtype: object, fp8_dtype: object) -> None:
    """Refuse a query dtype or fp8 format that no core can be built for.

    Raises:
        UnsupportedDecodeError: naming the argument.
    """
    reasons = []
    if q_dtype not in (None, "fp8", "bf16"):
        reasons.append(f'q_dtype is {q_dtype!r}, expected "fp8", "bf16" or None for both')
    if fp8_dtype not in _FP8:
        reasons.append(f"fp8_dtype is {fp8_dtype}, expected one of {', '.join(map(str, _FP8))}")
    if reasons:
        raise UnsupportedDecodeError("balanced MLA decode cannot be built", reasons)


class BalancedMla:
    """Plan and decode of one (heads, query tokens, maximum of requests) on one device.

    One object serves one stream at a time: plans share a few integers of its own.

    Attributes:
        platform: the vendor's name, for the counters.
        heads, q_len, max_requests, causal, device, workers: as constructed.
        rows: heads * q_len.
        layout: its plans, and the sizes of its buffers.
        row_groups, row_tiles, slot_rows: of the first plan, which serves ``q_dtype``, or fp8
            where none was given. ``row_tiles`` is how often the KV of a request is read.
    """

    platform = "none"
    interpret_planner = False
    """Interpret the device planner too: it makes the host planner's plan, but takes seconds."""

    def __init__(
        self,
        heads: int,
        q_len: int,
        max_requests: int,
        causal: bool,
        device: torch.device | str,
        *,
        workers: int,
        q_dtype: DtypeName | None = None,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        """Check the shape.

        Args:
            heads: query heads per rank (gathered ones under DCP), 1 to 128.
            q_len: query tokens per request, 1 to 64.
            max_requests: most requests of one decode, 1 to 1,024.
            causal: token i of q_len sees the keys up to its own position; otherwise all.
            workers: persistent workgroups.
            q_dtype: of the queries that will come; None: both, at the price of a second plan
                where their row tiles differ.
            fp8_dtype: the fp8 format of the device.
        Raises:
            UnsupportedDecodeError: with every limit that is broken, or a GPU that is not here.
        """
        require_shape(heads, q_len, max_requests, workers, device)
        require_gpu(device)
        require_dtypes(q_dtype, fp8_dtype)
        self.heads = heads
        self.q_len = q_len
        self.max_requests = max_requests
        self.causal = causal
        self.device = torch.device(device)
        self.workers = workers
        self.q_dtype = q_dtype
        self.fp8_dtype = fp8_dtype
        self.rows = heads * q_len
        self._configs: dict[tuple[torch.dtype, torch.dtype], LaunchConfig] = {}
        names: tuple[DtypeName, ...] = ("fp8", "bf16") if q_dtype is None else (q_dtype,)
        self.layout = plan_layout(
            heads, q_len, max_requests, workers, (self.launch_config(q, "fp8") for q in names)
        )
        first = self.layout.parts[0]
        self.row_groups, self.row_tiles = first.row_groups, first.row_tiles
        self.slot_rows = first.slot_rows
        # Allocated now, because neither may happen inside graph capture.
        self._plan_scratch = torch.zeros(PLAN_SCRATCH, dtype=torch.int32, device=self.device)
        self._counter = device_counter(self.platform, self.device)

    def launch_config(self, q_dtype: DtypeName, kv_dtype: DtypeName) -> LaunchConfig:
        """The vendor's launch choice for a dtype pair."""
        raise NotImplementedError

    @property
    def cost(self) -> SplitCost:
        """What a piece of the first plan is charged. Setting it sets it for every plan."""
        return self.layout.parts[0].cost

    @cost.setter
    def cost(self, cost: SplitCost) -> None:
        parts = tuple(replace(part, cost=cost) for part in self.layout.parts)
        self.layout = replace(self.layout, parts=parts)

    @property
    def counts_len(self) -> int:
        """int32 entries of ``counts``."""
        return self.layout.counts_len

    @property
    def work_len(self) -> int:
        """int32 entries of ``work``."""
        return self.layout.work_len

    @property
    def workspace_bytes(self) -> int:
        """Bytes of ``workspace``."""
        return self.layout.workspace_bytes

    def new_buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fresh (counts, work, workspace) for callers without a workspace manager."""
        return (
            torch.empty(self.counts_len, dtype=torch.int32, device=self.device),
            torch.empty(self.work_len, dtype=torch.int32, device=self.device),
            torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device),
        )

    def plan(self, seq_lens: torch.Tensor, counts: torch.Tensor, work: torch.Tensor) -> None:
        """Plan one forward from lengths on the device.

        Args:
            seq_lens: [requests] int32, local lengths, 0 allowed; requests <= max_requests.
            counts: int32, at least counts_len. work: int32, at least work_len.
        Mutates counts and work. Does not sync; graph-safe: replaying it plans the lengths of then.
        Raises:
            UnsupportedDecodeError: with every reason.
        """
        reasons = self._length_problems(seq_lens) + self._plan_buffer_problems(counts, work)
        if reasons:
            raise UnsupportedDecodeError("balanced MLA decode cannot plan", reasons)
        from k3backend.common.kernels.split_plan_device import plan_splits_device

        requests = seq_lens.shape[0]
        if requests == 0:
            return
        for part in self.layout.parts:
            indptr, items = self._plan_views(requests, work, part)
            part_counts = counts[part.counts_start :]
            if interpreting() and not self.interpret_planner:
                self._plan_on_host(seq_lens, part_counts, indptr, items, part)
                continue
            with launching_on(seq_lens):
                plan_splits_device(
                    seq_lens,
                    items,
                    indptr,
                    part_counts,
                    self._plan_scratch,
                    row_tiles=part.row_tiles,
                    num_workers=self.workers,
                    tile_tokens=PLAN_TILE_TOKENS,
                    cost=part.cost,
                )

    def decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        k_scale: float,
        counts: torch.Tensor,
        work: torch.Tensor,
        workspace: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        causal_lens: torch.Tensor | None = None,
        cp: tuple[int, int, int] = (1, 0, 1),
        check: bool = True,
    ) -> torch.Tensor:
        """Decode one layer with a plan of the same ``seq_lens``.

        Args:
            q: [requests * q_len, heads, 576], fp8 or bfloat16, contiguous.
            kv_cache: [blocks, block_size, 576], q's dtype, or fp8 under a bfloat16 q; the last
                dimension contiguous, rows and blocks at any stride.
            block_table: [requests, columns] int32; entries past a length are not read.
            seq_lens: [requests] int32, as planned.
            scale: scale * q_scale * k_scale, above 0. k_scale: factor of the output.
            counts, work: of ``plan``. workspace: uint8, at least workspace_bytes; any content.
            out: [tokens, heads, 512] bfloat16 to write, or None for a fresh one.
            lse: [tokens, heads] float32 to write base-2 log-sum-exp to, or None.
            causal_lens: [requests] int32 global lengths under DCP.
            cp: (world, rank, interleave) of DCP.
            check: False skips every check, for a caller that has just made them itself.
        Returns:
            out. Rows that see no key hold 0, and -inf in ``lse``.
        Mutates out, lse, workspace. Does not sync; graph-safe; deterministic per plan.
        Raises:
            UnsupportedDecodeError: with every reason why this cannot run.
        """
        if check:
            reasons = self.decode_problems(
                q, kv_cache, block_table, seq_lens, scale, k_scale, lse, causal_lens, cp
            )
            reasons += self._plan_buffer_problems(counts, work)
            reasons += self._workspace_problems(workspace)
            if out is not None and isinstance(q, torch.Tensor):
                reasons += tensor_problems(
                    "out", out, self.device, (torch.bfloat16,), (*q.shape[:-1], VALUE_DIM)
                )
            if reasons:
                raise UnsupportedDecodeError("balanced MLA decode cannot run", reasons)
        from k3backend.common.kernels.launch import launch_combine, launch_decode

        config = self._config_of(q.dtype, kv_cache.dtype)
        requests = seq_lens.shape[0]
        if out is None:
            out = torch.empty((*q.shape[:-1], VALUE_DIM), dtype=torch.bfloat16, device=q.device)
        if requests == 0:
            return out
        part = self._part_of(config)
        slots = max_slots(requests, part.row_tiles, self.workers) or 1
        values = slots * part.slot_rows * VALUE_DIM
        floats = workspace[: (values + slots * part.slot_rows) * 4].view(torch.float32)
        indptr, items = self._plan_views(requests, work, part)
        counts = counts[part.counts_start : part.counts_start + requests * part.row_tiles]
        with launching_on(q):
            launch_decode(
                config,
                q=q,
                kv_cache=kv_cache,
                block_table=block_table,
                seq_lens=seq_lens,
                causal_lens=causal_lens,
                worker_indptr=indptr,
                work=items,
                out=out,
                lse2=lse,
                partial=floats[:values],
                partial_lse=floats[values:],
                score_scale=scale,
                out_scale=k_scale,
                q_len=self.q_len,
                causal=self.causal,
                cp=cp,
            )
            launch_combine(
                config,
                counts=counts,
                partial=floats[:values],
                partial_lse=floats[values:],
                out=out,
                lse2=lse,
                counter=self._counter,
                out_scale=k_scale,
                rows=self.rows,
            )
        return out

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        k_scale: float,
        causal_lens: torch.Tensor | None = None,
        cp: tuple[int, int, int] = (1, 0, 1),
        return_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Plan and decode once with fresh buffers; arguments as in ``decode``."""
        lse = None
        if return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        reasons = self.decode_problems(
            q, kv_cache, block_table, seq_lens, scale, k_scale, lse, causal_lens, cp
        )
        if reasons:
            raise UnsupportedDecodeError("balanced MLA decode cannot run", reasons)
        counts, work, workspace = self.new_buffers()
        self.plan(seq_lens, counts, work)
        out = self.decode(
            q,
            kv_cache,
            block_table,
            seq_lens,
            scale,
            k_scale,
            counts,
            work,
            workspace,
            lse=lse,
            causal_lens=causal_lens,
            cp=cp,
            check=False,
        )
        return out, lse

    def decode_problems(
        self,
        q: object,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        k_scale: float,
        lse: torch.Tensor | None = None,
        causal_lens: torch.Tensor | None = None,
        cp: tuple[int, int, int] = (1, 0, 1),
    ) -> list[str]:
        """Every reason why a decode of these arguments cannot run; empty if it can."""
        reasons = self._length_problems(seq_lens)
        requests = seq_lens.shape[0] if isinstance(seq_lens, torch.Tensor) and seq_lens.ndim else 0
        tokens = requests * self.q_len
        if isinstance(q, torch.Tensor):
            reasons += tensor_problems(
                "q", q, self.device, (self.fp8_dtype, torch.bfloat16), (tokens, self.heads, 576)
            )
            if isinstance(kv_cache, torch.Tensor):
                reasons += self._dtype_pair_problems(q.dtype, kv_cache.dtype)
        else:
            reasons.append(
                f"q is a {type(q).__name__}, expected one tensor [{tokens}, {self.heads}, 576]; "
                "concatenate latent and rope parts"
            )
        reasons += cache_problems(kv_cache, self.device)
        reasons += table_problems(block_table, requests, self.device)
        if lse is not None:
            reasons += tensor_problems(
                "lse", lse, self.device, (torch.float32,), (tokens, self.heads)
            )
        if causal_lens is not None:
            reasons += tensor_problems(
                "causal_lens", causal_lens, self.device, (torch.int32,), (requests,)
            )
        reasons += parallel_problems(causal_lens, cp, self.causal)
        reasons += scale_problems(scale, k_scale)
        reasons += self.device_problems()
        return reasons or content_problems(kv_cache, block_table, seq_lens, causal_lens, cp)

    def device_problems(self) -> list[str]:
        """Why kernels cannot run on the core's device."""
        # A GPU was looked for when the core was built.
        return kernel_device_problems(self.device) if self.device.type == "cpu" else []

    def _plan_on_host(
        self,
        seq_lens: torch.Tensor,
        counts: torch.Tensor,
        indptr: torch.Tensor,
        items: torch.Tensor,
        part: PlanPart | None = None,
    ) -> None:
        part = part or self.layout.parts[0]
        plan = plan_splits(
            seq_lens,
            row_tiles=part.row_tiles,
            num_workers=self.workers,
            tile_tokens=PLAN_TILE_TOKENS,
            cost=part.cost,
        )
        counts[: plan.counts.shape[0]] = torch.from_numpy(plan.counts)
        indptr.copy_(torch.from_numpy(plan.worker_indptr))
        items[: plan.work.shape[0]] = torch.from_numpy(plan.work)

    def _config_of(self, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> LaunchConfig:
        config = self._configs.get((q_dtype, kv_dtype))
        if config is None:
            q_name, kv_name = dtype_name(q_dtype), dtype_name(kv_dtype)
            if q_name is None or kv_name is None:
                raise InputError(f"no launch choice for q {q_dtype} over kv_cache {kv_dtype}")
            config = self._configs[q_dtype, kv_dtype] = self.launch_config(q_name, kv_name)
        return config

    def _part_of(self, config: LaunchConfig) -> PlanPart:
        """The plan that cuts rows as the launch choice does."""
        for part in self.layout.parts:
            if part.row_groups == config.row_groups:
                return part
        raise InputError(
            f"no plan has row groups {config.row_groups}: it was made for {self.q_dtype} queries; "
            "construct without q_dtype"
        )

    def _plan_views(
        self, requests: int, work: torch.Tensor, part: PlanPart | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """worker_indptr [workers + 1] and items [n, 6] of a plan, the first one by default."""
        part = part or self.layout.parts[0]
        work = work[part.work_start :]
        start = indptr_len(self.workers)
        items = max_items(requests, part.row_tiles, self.workers)
        return work[: self.workers + 1], work[start : start + items * WORK_FIELDS].view(
            items, WORK_FIELDS
        )

    def _length_problems(self, seq_lens: torch.Tensor) -> list[str]:
        reasons = tensor_problems("seq_lens", seq_lens, self.device, (torch.int32,), None)
        if not isinstance(seq_lens, torch.Tensor):
            return reasons
        if seq_lens.ndim != 1:
            return [*reasons, f"seq_lens has shape {list(seq_lens.shape)}, expected [requests]"]
        if seq_lens.shape[0] > self.max_requests:
            reasons.append(
                f"{seq_lens.shape[0]} requests, built for at most {self.max_requests}; raise "
                "max_requests or decode in parts"
            )
        return reasons

    def _plan_buffer_problems(self, counts: torch.Tensor, work: torch.Tensor) -> list[str]:
        return [
            *buffer_problems("counts", counts, self.counts_len, torch.int32, self.device),
            *buffer_problems("work", work, self.work_len, torch.int32, self.device),
        ]

    def _workspace_problems(self, workspace: torch.Tensor) -> list[str]:
        size = self.workspace_bytes
        reasons = buffer_problems("workspace", workspace, size, torch.uint8, self.device)
        if not reasons and workspace.data_ptr() % 16:
            reasons.append("workspace is not aligned to 16 bytes; allocate it on its own")
        return reasons

    def _dtype_pair_problems(self, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> list[str]:
        pairs = (
            (self.fp8_dtype, self.fp8_dtype),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, self.fp8_dtype),
        )
        if (q_dtype, kv_dtype) not in pairs:
            known = ", ".join(f"{q} over {kv}" for q, kv in pairs)
            return [f"q {q_dtype} over kv_cache {kv_dtype} is not one of {known}"]
        config = self._config_of(q_dtype, kv_dtype)
        if all(part.row_groups != config.row_groups for part in self.layout.parts):
            return [
                f"q is {q_dtype}, but row tiles were planned for {self.q_dtype} queries; construct "
                f"with q_dtype={dtype_name(q_dtype)!r}, or without for both"
            ]
        return []
