"""A double of AITER's MLA entry points that checks every argument and computes with the reference.

It stands in for the hardware library alone: it refuses what AITER refuses (a call without a kernel
row ends the process there, here it raises), leaves unwritten what AITER leaves unwritten, and
returns what AITER returns: a natural LSE, +inf where a row sees no key. What it is given is taken
from the arguments, never from the caller's block table, so wrong indices give wrong numbers.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import math
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from k3backend.common.attention_reference import attend, local_length
from k3backend.rocm import aiter_ops
from tests.helpers.aiter_launcher import launcher_runs

SIGNATURES = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "aiter_signatures.json").read_text()
)
REDUCE_HEADS = {
    "0.1.7.post2.dev18": {16, 128},
    "0.1.20": {8, 16, 24, 32, 48, 64, 80, 96, 112, 128},
}
FP8 = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
CLUSTERS = 4


class ContractError(AssertionError):
    """An argument breaks AITER's documented contract."""


class ProcessAbort(RuntimeError):
    """AITER would end the process here: it has no kernel for the call."""


def expect(condition: bool, message: str) -> None:
    """Raise ContractError with the message unless the condition holds."""
    if not condition:
        raise ContractError(message)


class AiterContractDouble:
    """The three functions that this package calls, for one recorded version and one GPU.

    Attributes:
        plans, decodes: how often each was called.
        last_lse: natural LSE of the last decode, padded heads included.
    """

    def __init__(self, version: str = "0.1.20", arch: str = "gfx950") -> None:
        self.version = version
        self.arch = arch
        self.names: dict[str, list[str]] = SIGNATURES[version]["signatures"]
        self.old = version.startswith("0.1.7")
        self.plans = 0
        self.decodes = 0
        self.last_lse: torch.Tensor | None = None
        self._plan: dict[str, Any] | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make ``import aiter`` find this double, for one test."""
        root = types.ModuleType("aiter")
        mla = types.ModuleType("aiter.mla")
        root.mla = mla  # type: ignore[attr-defined]
        for name, method in (
            ("mla_decode_fwd", self.mla_decode_fwd),
            ("get_mla_metadata_info_v1", self.get_mla_metadata_info_v1),
            ("get_mla_metadata_v1", self.get_mla_metadata_v1),
        ):
            setattr(mla if name == "mla_decode_fwd" else root, name, self._signed(name, method))
        monkeypatch.setitem(sys.modules, "aiter", root)
        monkeypatch.setitem(sys.modules, "aiter.mla", mla)
        real = importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata,
            "version",
            lambda name: self.version if name == "amd-aiter" else real(name),
        )
        aiter_ops.load_aiter.cache_clear()

    def _signed(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            unknown = set(kwargs) - set(self.names[name])
            if unknown and not (self.old and name == "get_mla_metadata_v1"):
                raise TypeError(f"{name}() got unexpected keyword arguments {sorted(unknown)}")
            return method(*args, **kwargs)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(parameter, kind) for parameter in self.names[name]]
        )
        return call

    def dtype_name(self, dtype: torch.dtype) -> str:
        """ "fp8" or "bf16"; refuses the other GPU's fp8."""
        if dtype == torch.bfloat16:
            return "bf16"
        expect(dtype == FP8[self.arch], f"{dtype} is not a dtype of {self.arch}")
        return "fp8"

    def get_mla_metadata_info_v1(self, *args: Any, **info: Any) -> tuple[Any, ...]:
        """Shapes and dtypes of the planner's buffers."""
        expect(not args, "get_mla_metadata_info_v1 takes keywords only here")
        for name in ("batch_size", "max_seqlen_qo", "num_head_qo"):
            expect(type(info[name]) is int and info[name] >= 1, f"{name}={info[name]!r}")
        expect(info["num_head_qo"] % (16 if self.old else 8) == 0, "num_head_qo asserts in AITER")
        expect(info["is_sparse"] is False, "is_sparse")
        expect(info["fast_mode"] is True, "fast_mode")
        self.dtype_name(info["q_dtype"])
        self.dtype_name(info["kv_dtype"])
        batch, q_len, heads = (info[n] for n in ("batch_size", "max_seqlen_qo", "num_head_qo"))
        tiles = -(-q_len * heads // 16)
        return (
            (2, torch.uint64),
            (CLUSTERS + 1, torch.int32),
            (((batch + CLUSTERS - 1) * tiles, 8), torch.int32),
            (batch * tiles + 1, torch.int32),
            ((batch * tiles, 2), torch.int32),
            (min(batch + CLUSTERS - 1, (CLUSTERS - 1) * 2) * tiles, torch.int32),
        )

    def get_mla_metadata_v1(self, *args: Any, **kwargs: Any) -> None:
        """The planner: checks its arguments and marks the buffers as planned for them."""
        if self.old:
            binding = (
                "seqlens_qo_indptr",
                "seqlens_kv_indptr",
                "num_heads_per_head_k",
                "num_heads_k",
                "is_causal",
                "work_metadata_ptrs",
                "work_info_set",
                "work_indptr",
                "reduce_indptr",
                "reduce_final_map",
                "reduce_partial_map",
            )
            expect(len(args) == len(binding), "0.1.7 takes the first 11 by position")
            given = dict(zip(binding, args, strict=True))
            allowed = set(self.names["get_mla_metadata_v1"]) - set(binding) - {"work_info"}
            expect(set(kwargs) <= allowed, f"0.1.7 takes no {set(kwargs) - allowed}")
            given.update(kwargs)
        else:
            expect(not args, "get_mla_metadata_v1 takes keywords only here")
            given = kwargs
        qo, kv = given["seqlens_qo_indptr"], given["seqlens_kv_indptr"]
        requests = kv.shape[0] - 1
        for name, tensor in (("seqlens_qo_indptr", qo), ("seqlens_kv_indptr", kv)):
            check_int32(name, tensor, (requests + 1,))
        heads = given["num_heads_per_head_k"]
        expect(heads % 8 == 0 and given["num_heads_k"] == 1, "head counts")
        q_len = given["max_seqlen_qo"]
        expect(given["uni_seqlen_qo"] == q_len, "uni_seqlen_qo differs from max_seqlen_qo")
        expect(qo.tolist() == [q_len * i for i in range(requests + 1)], "query is not uniform")
        expect(int(kv[0]) == 0 and bool((kv.diff() >= 1).all()), "a request without keys")
        granularity = given["kv_granularity"]
        expect(granularity & (granularity - 1) == 0, "kv_granularity is no power of two")
        expect(given["fast_mode"] is True, "fast_mode")
        dtypes = (None, None)
        if not self.old:
            check_int32("kv_last_page_lens", given["kv_last_page_lens"], (requests,))
            expect(given["page_size"] == 1, "page_size")
            dtypes = (given["dtype_q"], given["dtype_kv"])
            both_fp8 = all(self.dtype_name(dtype) == "fp8" for dtype in dtypes)
            expect(
                granularity == (32 if heads == 64 and both_fp8 else 16),
                f"kv_granularity={granularity} for {heads} heads",
            )
        expect(given["work_indptr"].shape == (CLUSTERS + 1,), "work_indptr")
        expect(given["work_info_set"].dim() == 2, "work_info_set and work_indptr are swapped")
        expect(given["work_metadata_ptrs"].dtype == torch.uint64, "work_metadata_ptrs")
        given["work_info_set"].fill_(0)
        self.plans += 1
        self._plan = {
            "buffers": {
                name: given[name].data_ptr()
                for name in (
                    "work_info_set",
                    "work_indptr",
                    "reduce_indptr",
                    "reduce_final_map",
                    "reduce_partial_map",
                )
            },
            "kv_indptr": kv.tolist(),
            "heads": heads,
            "q_len": q_len,
            "is_causal": given["is_causal"],
            "cprr": given.get("is_cp_round_robin", False),
            "dtypes": dtypes,
        }

    def mla_decode_fwd(self, *args: Any, **call: Any) -> tuple[None, torch.Tensor | None]:
        """The decode: checks every argument, then computes what AITER would."""
        expect(not args, "mla_decode_fwd takes keywords only here")
        q, kv, o = call["q"], call["kv_buffer"], call["o"]
        requests = call["qo_indptr"].shape[0] - 1
        q_len = call["max_seqlen_q"]
        expect(type(q_len) is int and q_len >= 1, "max_seqlen_q")
        tokens, heads = requests * q_len, q.shape[1]
        expect(q.shape == (tokens, heads, 576) and q.is_contiguous(), f"q {tuple(q.shape)}")
        expect(
            o.shape == (tokens, heads, 512) and o.dtype == torch.bfloat16 and o.is_contiguous(),
            f"o {o.dtype} {tuple(o.shape)}",
        )
        expect(kv.dim() == 4 and kv.shape[1:] == (1, 1, 576), f"kv_buffer {tuple(kv.shape)}")
        expect(kv.stride() == (576, 576, 576, 1), f"kv_buffer strides {kv.stride()}")
        for name, size in (("qo_indptr", requests + 1), ("kv_indptr", requests + 1)):
            check_int32(name, call[name], (size,))
        check_int32("kv_last_page_lens", call["kv_last_page_lens"], (requests,))
        expect(bool((call["kv_last_page_lens"] == 1).all()), "kv_last_page_lens")
        indices = call["kv_indices"]
        check_int32("kv_indices", indices, tuple(indices.shape))
        expect(indices.dim() == 1, "kv_indices")
        indptr = call["kv_indptr"].tolist()
        expect(indptr[-1] <= indices.shape[0], "kv_indices is too short")
        for tensor in (q, kv, o, indices):
            expect(tensor.device == q.device, "devices differ")
        if not self.old:
            expect(call["page_size"] == 1 and call["nhead_kv"] == 1, "page_size, nhead_kv")
        scale = call["sm_scale"]
        expect(type(scale) is float, "sm_scale is no float")
        expect(not math.isclose(scale, 576**-0.5), "sm_scale is AITER's default")
        q_scale, kv_scale = self._scales(call)
        causal = call.get("causal", True)
        lse_asked = call.get("return_lse", False)
        cprr = "g_kv_indptr" in call
        self._check_plan(call, indptr, heads, q_len, causal, cprr)
        expect(call["num_kv_splits"] == CLUSTERS, "num_kv_splits: the plan would be dropped")
        if heads not in REDUCE_HEADS[self.version] or not launcher_runs(
            self.version,
            self.arch,
            self.dtype_name(q.dtype),
            self.dtype_name(kv.dtype),
            heads,
            q_len,
            causal,
            lse_asked,
            cprr,
        ):
            raise ProcessAbort(
                f"cannot get heuristic kernel! q_type:{q.dtype} kv_type:{kv.dtype} gqa:{heads} "
                f"ps:1 causal:{causal} qseqlen:{q_len} lse:{lse_asked} cprr:{cprr}"
            )
        self.decodes += 1
        lse = torch.full((tokens, heads), math.nan)
        o.fill_(math.nan)
        for request in range(requests):
            used = indices[indptr[request] : indptr[request + 1]].long()
            expect(bool(((used >= 0) & (used < kv.shape[0])).all()), "an index outside the cache")
            flat = kv.view(torch.uint8) if kv.element_size() == 1 else kv
            keys = flat[used].view(kv.dtype).reshape(-1, 576).float()
            seen = torch.tensor(self._seen(call, request, len(used), q_len, causal, cprr))
            rows = q[request * q_len : (request + 1) * q_len].float().reshape(-1, 576)
            out, lse2 = attend(
                rows, keys, seen.repeat_interleave(heads), scale * q_scale * kv_scale
            )
            natural = lse2 * math.log(2)
            natural[lse2 == -math.inf] = math.inf
            part = slice(request * q_len, (request + 1) * q_len)
            written = (lse2 != -math.inf).reshape(q_len, heads, 1)
            value = (out * kv_scale).reshape(q_len, heads, 512).to(torch.bfloat16)
            o[part] = torch.where(written, value, o[part])
            lse[part] = natural.reshape(q_len, heads)
        self.last_lse = lse
        if self.old:
            return None, torch.full((tokens, heads), math.nan)
        return None, lse if lse_asked else None

    def _scales(self, call: dict[str, Any]) -> tuple[float, float]:
        values = []
        for name, tensor in (("q_scale", call["q"]), ("kv_scale", call["kv_buffer"])):
            scale = call.get(name)
            if self.dtype_name(tensor.dtype) == "bf16":
                expect(scale is None, f"{name} for bf16")
                values.append(1.0)
                continue
            expect(isinstance(scale, torch.Tensor), f"{name} is no tensor")
            expect(scale.dtype == torch.float32 and scale.shape == (1,), f"{name} {scale}")
            expect(scale.device == tensor.device, f"{name} is elsewhere")
            values.append(float(scale))
        return values[0], values[1]

    def _check_plan(
        self,
        call: dict[str, Any],
        indptr: list[int],
        heads: int,
        q_len: int,
        causal: bool,
        cprr: bool,
    ) -> None:
        plan = self._plan
        if plan is None:
            raise ContractError("decode before any plan")
        for name, pointer in plan["buffers"].items():
            expect(call[name].data_ptr() == pointer, f"{name} is not the planned buffer")
        expect(call["work_meta_data"].dtype == torch.uint64, "work_meta_data is None: it allocates")
        expect(plan["kv_indptr"] == indptr, "the plan is of other lengths")
        expect((plan["heads"], plan["q_len"]) == (heads, q_len), "the plan is of another shape")
        expect(plan["cprr"] == cprr, "the plan is of the other context-parallel mode")
        expect(plan["is_causal"] == (causal and not cprr), "the plan is of the other mask")
        if not self.old:
            expect(plan["dtypes"] == (call["q"].dtype, call["kv_buffer"].dtype), "planned dtypes")

    def _seen(
        self,
        call: dict[str, Any],
        request: int,
        length: int,
        q_len: int,
        causal: bool,
        cprr: bool,
    ) -> Iterable[int]:
        if not cprr:
            return [length - q_len + i + 1 if causal else length for i in range(q_len)]
        check_int32("g_kv_indptr", call["g_kv_indptr"], tuple(call["kv_indptr"].shape))
        world, rank = call["cp_world_size"], call["cp_rank"]
        expect(type(world) is int and type(rank) is int and 0 <= rank < world, "cp rank")
        start, end = call["g_kv_indptr"][request : request + 2].tolist()
        mine = int(local_length(torch.tensor(end - start), world, rank))
        expect(length == max(mine, 1), f"{length} local keys of {end - start}, expected {mine}")
        ends = [end - start - q_len + i for i in range(q_len)]
        return [sum(j * world + rank <= last for j in range(length)) for last in ends]


def check_int32(name: str, tensor: torch.Tensor, size: tuple[int, ...]) -> None:
    """int32, contiguous, of this shape."""
    expect(
        tensor.dtype == torch.int32 and tuple(tensor.shape) == size and tensor.is_contiguous(),
        f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected int32 {size}",
    )
