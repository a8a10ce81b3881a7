"""What this package uses of vLLM, as a list that a version outside the tested ones is held to."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from k3backend.vllm_plugin.vllm_names import SUPPORTED, vllm_version

LOGGER = logging.getLogger("k3backend.vllm_plugin")


@dataclass(frozen=True, slots=True)
class Interface:
    """One name that is used, and the parameters or fields of it that are.

    Attributes:
        module, name: where; the name may be dotted.
        parts: parameters of a function, fields of a dataclass.
        since: the first version that has it.
    """

    module: str
    name: str
    parts: tuple[str, ...] = ()
    since: str = "0.32"


_ATTENTION = "vllm.model_executor.layers.attention.mla_attention"
INTERFACES = (
    Interface("vllm.v1.attention.backends.registry", "register_backend", ("backend", "class_path")),
    Interface("vllm.v1.attention.backends.registry", "AttentionBackendEnum"),
    Interface("vllm.model_executor.models.registry", "ModelRegistry.register_model"),
    Interface("vllm.model_executor.models.config", "MODELS_CONFIG_MAP"),
    Interface("vllm.platforms", "current_platform.is_rocm"),
    Interface("vllm.platforms", "current_platform.is_cuda"),
    Interface("vllm.config", "AttentionConfig", ("backend", "backend_per_kind")),
    Interface("vllm.config", "SpeculativeConfig", ("attention_backend", "num_speculative_tokens")),
    Interface("vllm.v1.engine.core", "get_kv_cache_configs"),
    Interface("vllm.v1.worker.worker_base", "WorkerWrapperBase.shutdown"),
    Interface("vllm.v1.worker.workspace", "WorkspaceManager.get_persistent_resource"),
    Interface("vllm.v1.worker.workspace", "WorkspaceManager.get_simultaneous"),
    Interface("vllm.v1.worker.ubatching", "_THREAD_ID_TO_CONTEXT"),
    Interface("vllm.v1.attention.backend", "max_decode_query_len"),
    Interface("vllm.v1.attention.backend", "MultipleOf", ("base",)),
    Interface("vllm.v1.attention.backend", "AttentionCGSupport.UNIFORM_BATCH"),
    Interface("vllm.forward_context", "is_forward_context_available"),
    Interface(
        _ATTENTION,
        "MLACommonMetadataBuilder.__init__",
        ("kv_cache_spec", "layer_names", "vllm_config", "device", "supports_dcp_with_varlen"),
    ),
    Interface(
        _ATTENTION,
        "MLACommonMetadataBuilder._build_decode",
        (
            "block_table_tensor",
            "seq_lens_device",
            "query_start_loc_cpu",
            "dcp_tot_seq_lens_device",
        ),
    ),
    Interface(
        _ATTENTION,
        "MLACommonImpl.forward_mqa",
        ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
    ),
    Interface(_ATTENTION, "MLACommonDecodeMetadata", ("block_table", "seq_lens")),
    Interface(_ATTENTION, "MLACommonMetadata", ("num_decodes", "num_decode_tokens", "causal")),
    Interface(_ATTENTION, "QueryLenSupport.UNIFORM"),
    Interface("vllm.v1.core.kv_cache_planning", "get_kv_cache_groups", since="0.33"),
    Interface("vllm.model_executor.models.interfaces", "SupportsKVCacheGrouping", since="0.33"),
)


def differences(version: Version | None = None) -> list[str]:
    """How the installed vLLM differs from what this package uses; a sentence each.

    Args:
        version: take what this version should have; None takes everything.
    """
    found = []
    for interface in INTERFACES:
        if version is not None and version.release[:2] < Version(interface.since).release:
            continue
        found += _difference(interface)
    return found + _spec_differences()


def check_version() -> None:
    """Warn about a vLLM that is not a tested one, with what differs, and about two of them."""
    text = vllm_version()
    try:
        version = Version(text)
    except InvalidVersion:
        version = None
    tested = [Version(name).release for name in SUPPORTED]
    if version is None or version.release[:2] not in tested:
        differs = differences() or ["no interface that k3backend uses"]
        LOGGER.warning(
            "k3backend is tested with vLLM %s and this is %s; it goes on. What differs: %s",
            " and ".join(SUPPORTED),
            text,
            "; ".join(differs),
        )
    folders = vllm_folders(sys.path)
    if len(folders) > 1:
        LOGGER.warning(
            "k3backend: this process runs vLLM %s from %s, and there is another vLLM in %s; remove "
            "one of them if that is not meant",
            text,
            folders[0],
            " and ".join(str(folder) for folder in folders[1:]),
        )


def vllm_folders(search_path: Sequence[str]) -> list[Path]:
    """Every different vLLM on a module search path; the first one is imported."""
    found = dict.fromkeys(
        (Path(entry) / "vllm").resolve()
        for entry in search_path
        if (Path(entry) / "vllm" / "version.py").is_file()
    )
    return list(found)


def _difference(interface: Interface) -> list[str]:
    where = f"{interface.module}.{interface.name}"
    try:
        value: Any = importlib.import_module(interface.module)
        for part in interface.name.split("."):
            value = getattr(value, part)
    except Exception as error:  # a module of an unknown version may end its import in any way
        return [f"{where} is missing ({_short(error)})"]
    if not interface.parts:
        return []
    if is_dataclass(value):
        known = {f.name for f in fields(value)}
    else:
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError) as error:
            return [f"{where} has no parameters to compare ({_short(error)})"]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return []
        known = {parameter.name for parameter in parameters}
    missing = [part for part in interface.parts if part not in known]
    return [f"{where} has no {', '.join(missing)}"] if missing else []


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _spec_differences() -> list[str]:
    """Cache formats and fields of them that this package does not know."""
    from k3backend.common import kv_spec

    try:
        kv_cache_interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        base: type[Any] = kv_cache_interface.KVCacheSpec
    except Exception as error:
        return [f"vllm.v1.kv_cache_interface.KVCacheSpec is missing ({_short(error)})"]
    found = []
    for name, cls in vars(kv_cache_interface).items():
        own = isinstance(cls, type) and cls.__module__ == kv_cache_interface.__name__
        if not own or not issubclass(cls, base):
            continue
        ours: Any = getattr(kv_spec, name, None)
        if ours is None:
            found.append(f"cache format {name} is not known here")
            continue
        if not is_dataclass(cls):
            found.append(f"cache format {name} is no dataclass")
            continue
        known = {f.name for f in fields(ours)}
        added = [f.name for f in fields(cls) if f.init and f.name not in known]
        if added:
            found.append(f"{name} has fields that are not known here: {', '.join(added)}")
    return found
