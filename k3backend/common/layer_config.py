"""What a decode layer reads of its host's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from k3backend.common.errors import InputError
from k3backend.common.launch_config import DtypeName
from k3backend.common.workspace import OwnWorkspace, Workspace

CACHE_DTYPES: dict[str, DtypeName] = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
}
"""vLLM's cache dtypes that the kernels read, and the queries that come with them."""


def _no_forward() -> object:
    return None


def _interleave_of_one() -> int:
    return 1


def _capturing() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Sizes and services that a decode layer needs.

    Attributes:
        max_requests: most requests of one step. max_q_len: most query tokens of a request.
        device: where tensors live.
        dcp_size: ranks of decode context parallelism.
        q_dtype: of the queries, "fp8" or "bf16". fp8_dtype: the device's fp8 format.
        max_kv_tokens: most keys of one request on this rank; 0: not known.
        max_interleave: the largest interleave for which that holds; 0: every one.
        workspace: where plan buffers and scratch are claimed; an own one if not given.
        forward_context: identifies the forward that is running, in which lengths stay as they are;
            None: its metadata object does, and a plan over inference tensors is not reused.
        interleave: keys that a DCP rank holds in a row, read on every call.
        capturing: whether a graph is being captured right now.
    """

    max_requests: int
    max_q_len: int = 1
    device: torch.device | str = "cuda"
    dcp_size: int = 1
    q_dtype: DtypeName = "fp8"
    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    max_kv_tokens: int = 0
    max_interleave: int = 0
    workspace: Workspace = field(default=None)  # type: ignore[assignment]
    forward_context: Callable[[], object] = _no_forward
    interleave: Callable[[], int] = _interleave_of_one
    capturing: Callable[[], bool] = _capturing

    def __post_init__(self) -> None:
        for name in ("forward_context", "interleave", "capturing"):
            value = getattr(self, name)
            if not callable(value):
                raise InputError(f"{name} is {value!r}, expected a function without arguments")
        if self.workspace is None:
            object.__setattr__(self, "workspace", OwnWorkspace(self.device))


def read_config(config: Any) -> DecodeConfig:
    """A `DecodeConfig`, or what an object with vLLM's config attributes says.

    Of the latter are read: ``scheduler_config.max_num_seqs``,
    ``speculative_config.num_speculative_tokens`` (None: one query token),
    ``parallel_config.decode_context_parallel_size`` and, on every call,
    ``.cp_kv_cache_interleave_size``, ``cache_config.cache_dtype``, ``device_config.device`` and,
    where there is one, ``model_config.max_model_len``.

    Raises:
        InputError: naming the attribute that is missing, or a cache dtype that no kernel reads.
    """
    if isinstance(config, DecodeConfig):
        return config
    speculative = getattr(config, "speculative_config", None)
    drafts = _attribute(speculative, "num_speculative_tokens") if speculative is not None else 0
    parallel = _attribute(config, "parallel_config")
    cache_dtype = getattr(getattr(config, "cache_config", None), "cache_dtype", "fp8")
    if not isinstance(cache_dtype, str) or cache_dtype not in CACHE_DTYPES:
        raise InputError(
            f"cache_config.cache_dtype is {cache_dtype!r}, expected {', '.join(CACHE_DTYPES)}; the "
            "kernels read no other format"
        )
    return DecodeConfig(
        max_requests=int(_attribute(_attribute(config, "scheduler_config"), "max_num_seqs")),
        max_q_len=1 + int(drafts or 0),
        device=getattr(getattr(config, "device_config", None), "device", None) or "cuda",
        dcp_size=int(_attribute(parallel, "decode_context_parallel_size")),
        q_dtype=CACHE_DTYPES[cache_dtype],
        max_kv_tokens=int(getattr(getattr(config, "model_config", None), "max_model_len", 0) or 0),
        interleave=lambda: int(_attribute(parallel, "cp_kv_cache_interleave_size")),
    )


def _attribute(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise InputError(
            f"config: {type(owner).__name__} has no attribute {name!r}; pass a DecodeConfig or an "
            "object with vLLM's config attributes"
        )
    return getattr(owner, name)
