"""What :func:`k3backend.vllm_plugin.register` does, step by step, and says in one log line."""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass

from k3backend._version import __version__
from k3backend.common import envs
from k3backend.common.backend import VendorName
from k3backend.common.errors import PlatformError
from k3backend.vllm_plugin import compat
from k3backend.vllm_plugin.vllm_interfaces import check_version
from k3backend.vllm_plugin.vllm_names import vllm_name, vllm_version

LOGGER = logging.getLogger("k3backend.vllm_plugin")

BACKEND_NAME = "KIMI_K3_MLA"
NVIDIA_NAME = "KIMI_K3_KV_BALANCED_MLA"
CPU_SLOTS = ("CPU_MLA", "AMX_MLA")
"""Where the CPU has AMX, vLLM prefers AMX_MLA to CPU_MLA, so both are served."""

_PLUGIN = "k3backend.vllm_plugin"
BACKEND_PATHS: dict[VendorName, dict[str, str]] = {
    "nvidia": {
        BACKEND_NAME: f"{_PLUGIN}.nvidia_backend.K3NvidiaMLABackend",
        NVIDIA_NAME: f"{_PLUGIN}.nvidia_backend.K3KvBalancedMLABackend",
    },
    "rocm": {BACKEND_NAME: f"{_PLUGIN}.rocm_backend.K3RocmMLABackend"},
    "reference": {BACKEND_NAME: f"{_PLUGIN}.cpu_backend.K3CpuMLABackend"},
}
CPU_SLOT_PATH = f"{_PLUGIN}.cpu_backend.K3CpuMLASlotBackend"
MODEL_MODULE = f"{_PLUGIN}.kimi_k3_model"


@dataclass(frozen=True, slots=True)
class Registered:
    """What this process registered.

    Attributes:
        platform: the vendor that vLLM's platform asks for; None where nothing was registered.
        why_not: why nothing was registered; empty where something was.
        backends: attention backend names that were added; one that vLLM has is left alone.
        slots: vLLM's own backend names that are served by this package.
        grouping: who groups Kimi-K3's layers, in words.
    """

    platform: VendorName | None
    backends: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    grouping: str = "vLLM's own"
    why_not: str = ""


_registered: Registered | None = None
_announced = False


def register_all() -> Registered:
    """Register everything, once per process; later calls return what the first one did."""
    global _registered
    if _registered is None:
        compat.log_with_vllm()
        _registered = _register()
    announce()
    return _registered


def announce() -> None:
    """Log what was registered, once per process, as soon as vLLM has set its logging up.

    A process may register before that: where it unpickles its configuration, or in the front end.
    """
    global _announced
    found = _registered
    if _announced or found is None or not LOGGER.isEnabledFor(logging.INFO):
        return
    _announced = True
    if found.platform is None:
        LOGGER.info("k3backend %s: off, %s", __version__, found.why_not)
        return
    LOGGER.info(
        "k3backend %s in vLLM %s, pid %d: platform %s, attention backends %s%s; Kimi-K3's KV cache "
        "groups: %s",
        __version__,
        vllm_version(),
        os.getpid(),
        found.platform,
        ", ".join(found.backends) or "none added",
        f", serving {' and '.join(found.slots)}" if found.slots else "",
        found.grouping,
    )


def _register() -> Registered:
    if envs.DISABLE.flag():
        return Registered(None, why_not=f"{envs.DISABLE.name} is set")
    check_version()
    platform = vllm_vendor()
    if platform is None:
        name = vllm_name("vllm.platforms", "current_platform").device_type
        return Registered(None, why_not=f"vLLM runs on {name}, which is not served")
    backends = tuple(
        name for name, path in BACKEND_PATHS[platform].items() if _add_backend(name, path)
    )
    slots: tuple[str, ...] = ()
    if platform == "reference":
        compat.let_cpu_platform_take_named_backends((BACKEND_NAME,))
        if envs.CPU.flag():
            slots = _serve_cpu_slots()
    compat.give_draft_the_targets_backend((BACKEND_NAME, NVIDIA_NAME))
    grouping = _own_grouping()
    if envs.DUMP_SPECS.get() is not None:
        _dump_specs()
    return Registered(platform, backends, slots, grouping)


def vllm_vendor() -> VendorName | None:
    """The vendor of vLLM's own platform; None for one that this package does not serve.

    Raises:
        PlatformError: K3BACKEND_PLATFORM names another one.
    """
    current = vllm_name("vllm.platforms", "current_platform")
    vendor: VendorName | None = None
    if current.is_rocm():
        vendor = "rocm"
    elif current.is_cuda():
        vendor = "nvidia"
    elif current.is_cpu() or not current.device_type:  # no device: vLLM plans, and runs nothing
        vendor = "reference"
    forced = envs.PLATFORM.get()
    if forced is not None and forced != vendor:
        raise PlatformError(
            f"{envs.PLATFORM.name}={forced}, but vLLM's platform is {current.device_type!r}, which "
            f"is {vendor or 'not served'} here; unset {envs.PLATFORM.name} or install vLLM for "
            f"{forced}"
        )
    return vendor


def _add_backend(name: str, path: str) -> bool:
    """Register a backend under a new name. False where vLLM already has the name.

    A registration that failed half-way may have added it: then it is this package's, and stays.
    """
    registry = "vllm.v1.attention.backends.registry"
    members = vllm_name(registry, "AttentionBackendEnum").__members__
    if name in members and members[name].value != path:
        LOGGER.info(
            "k3backend: vLLM already has an attention backend %s (%s); it is left alone",
            name,
            members[name].value,
        )
        return False
    if name not in members:
        vllm_name(registry, "register_backend")(name, path)
    compat.make_backend_member_picklable(members[name])
    return True


def _serve_cpu_slots() -> tuple[str, ...]:
    registry = "vllm.v1.attention.backends.registry"
    members = vllm_name(registry, "AttentionBackendEnum").__members__
    served = tuple(name for name in CPU_SLOTS if name in members)
    for name in served:
        vllm_name(registry, "register_backend")(members[name], CPU_SLOT_PATH)
    return served


def _own_grouping() -> str:
    """Put this package's Kimi-K3 in place of vLLM's. Who groups its layers from now on."""
    if importlib.util.find_spec("vllm.v1.core.kv_cache_config_builder") is None:
        return "vLLM's own (before 0.33 a model cannot own them)"
    models = vllm_name("vllm.model_executor.models.registry", "ModelRegistry")
    if compat.K3_ARCHITECTURE not in models.models:
        return "vLLM's own (it has no Kimi-K3)"
    models.register_model(compat.K3_ARCHITECTURE, f"{MODEL_MODULE}:{compat.model_class_name()}")
    policy = envs.GROUPING.get()
    if policy in {"k3", "isolate"}:
        return f"policy {policy}"
    return f"policy {policy or 'k3'}, unless the model owns them"


def _dump_specs() -> None:
    from k3backend.vllm_plugin.spec_dump import dump_collected_specs

    compat.watch_collected_specs(dump_collected_specs)
