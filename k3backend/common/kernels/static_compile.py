"""Kernels as they are launched in production, compiled for a target that need not be here.

`decode_request` and `combine_request` turn a production shape and a vendor's launch choice
into what Triton's ahead-of-time compiler wants: types, constants, alignment and options equal
to those that ``launch.py`` gives at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from k3backend.common.kernels.combine import combine_kernel
from k3backend.common.kernels.folded_decode import folded_decode_kernel
from k3backend.common.kernels.launch import COMBINE_SCAN
from k3backend.common.launch_config import LaunchConfig, ProductionShape

TARGETS = {
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
}
_FP8 = {"gfx950": "fp8e4nv", "gfx942": "fp8e4b8", "sm_90": "fp8e4nv", "sm_100": "fp8e4nv"}
_P_EXP = {"fp8e4nv": 8, "fp8e4b8": 7, "bf16": 0}
_POINTERS = {
    "table_ptr": "*i32",
    "lens_ptr": "*i32",
    "causal_lens_ptr": "*i32",
    "indptr_ptr": "*i32",
    "work_ptr": "*i32",
    "counts_ptr": "*i32",
    "counter_ptr": "*i64",
    "out_ptr": "*bf16",
    "lse_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "partial_lse_ptr": "*fp32",
}
_SCALARS = {
    "score_scale": "fp32",
    "out_scale": "fp32",
    "block_stride": "i64",
    "table_stride": "i32",
    "cp_world": "i32",
    "cp_rank": "i32",
    "cp_interleave": "i32",
}


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """One compilation.

    Attributes:
        name: kernel and shape, unique per target.
        target: key of ``TARGETS``.
        kernel: the Triton function.
        signature: Triton type of every argument, "constexpr" for constants.
        constants: value of every constant. aligned: arguments divisible by 16.
        options: num_warps, num_stages and the vendor's options.
        expected: a substring of the matrix instructions that must be there, or None.
    """

    name: str
    target: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, int]
    expected: str | None

    def compile(self) -> Any:
        """Triton's CompiledKernel; its ``asm`` holds the assembly, ``metadata`` the sizes."""
        names = self.kernel.arg_names
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned}
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        source = triton.compiler.ASTSource(self.kernel, self.signature, constants, attributes)
        return triton.compile(source, target=TARGETS[self.target], options=self.options)


def decode_request(shape: ProductionShape, config: LaunchConfig, target: str) -> KernelRequest:
    """The folded decode of one production shape."""
    types = {"fp8": _FP8[target], "bf16": "bf16"}
    q_type, kv_type = types[shape.q_dtype], types[shape.kv_dtype]
    constants = {
        "HEADS": shape.heads,
        "Q_LEN": shape.q_len,
        "ROWS_A": config.row_groups[0],
        "ROWS_B": config.row_groups[1],
        "TILE": config.tile_tokens,
        "CHUNK": config.value_chunk,
        "BLOCK_SIZE": shape.block_size,
        "TOKEN_STRIDE": 576,
        "CAUSAL": shape.causal and (shape.q_len > 1 or shape.cp),
        "CP": shape.cp,
        "PREFETCH": config.prefetch,
        "STAGES": config.num_stages,
        "HOIST": config.hoist,
        "P_EXP": _P_EXP[q_type],
        "EXACT_SUMS": config.exact_sums,
        "NUM_XCDS": config.num_xcds,
        "STORE_LSE": True,
        "UPCAST": False,
    }
    pointers = _POINTERS | {"q_ptr": f"*{q_type}", "kv_ptr": f"*{kv_type}"}
    return KernelRequest(
        name=f"decode {shape.name}",
        target=target,
        kernel=folded_decode_kernel,
        signature=_signature(folded_decode_kernel, pointers, constants),
        constants=constants,
        aligned=_aligned(folded_decode_kernel, ("block_stride",)),
        options={"num_warps": config.num_warps, **dict(config.backend_options)},
        expected=_expected(shape, target),
    )


def combine_request(shape: ProductionShape, config: LaunchConfig, target: str) -> KernelRequest:
    """The combine of one production shape."""
    constants = {
        "ROWS_PER_REQUEST": shape.heads * shape.q_len,
        "TILE_ROWS": config.tile_rows,
        "SPLITS": config.combine_splits,
        "COLUMNS": config.combine_columns,
        "MIN_SPLITS": 2,
        "SCAN": COMBINE_SCAN,
        "STORE_LSE": True,
        "UPCAST": False,
    }
    return KernelRequest(
        name=f"combine {shape.name}",
        target=target,
        kernel=combine_kernel,
        signature=_signature(combine_kernel, _POINTERS, constants),
        constants=constants,
        aligned=_aligned(combine_kernel, ()),
        options={"num_warps": config.combine_warps},
        expected=None,
    )


def _signature(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    types = pointers | _SCALARS | dict.fromkeys(constants, "constexpr")
    return {name: types[name] for name in kernel.arg_names}


def _aligned(kernel: Any, scalars: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(n for n in kernel.arg_names if n.endswith("_ptr") or n in scalars)


def _expected(shape: ProductionShape, target: str) -> str:
    """Part of the name of the matrix instruction that the shape has to use."""
    fp8 = shape.q_dtype == "fp8"
    return {
        "gfx950": "f8f6f4" if fp8 else "bf16",
        "gfx942": "fp8_fp8" if fp8 else "bf16",
        "sm_90": "e4m3.e4m3" if fp8 else "bf16.bf16",
        "sm_100": "kind::f8f6f4" if fp8 else "kind::f16",
    }[target]
