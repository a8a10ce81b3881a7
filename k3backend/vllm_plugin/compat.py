"""What this package corrects in vLLM: one function per difference.

Each docstring names the symptom without it, and the event after which it can go. For each there is
a test that shows the symptom on the installed vLLM, and so fails once the function is not needed.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from k3backend.common.decode_counters import log_stats_once
from k3backend.common.errors import WorkspaceError
from k3backend.vllm_plugin.vllm_names import vllm_name, vllm_version

LOGGER = logging.getLogger("k3backend.vllm_plugin")
BACKEND_REGISTRY = "vllm.v1.attention.backends.registry"
K3_ARCHITECTURE = "KimiK3ForConditionalGeneration"
MODEL_CLASS_PREFIX = "kimi_k3_on_vllm_"


def log_with_vllm() -> None:
    """Let the logger ``k3backend`` write where and at the level that vLLM's own does.

    Symptom: vLLM gives a handler to the logger ``vllm`` alone, so this package's INFO lines vanish.
    Remove when: vLLM configures loggers of its plugins, or names a logger for them.
    """
    logger = logging.getLogger("k3backend")
    if not logger.handlers:
        logger.parent = logging.getLogger("vllm")
        logger.setLevel(logging.NOTSET)  # also forgets levels asked for under the old parent


def make_backend_member_picklable(member: Any) -> None:
    """Make an added attention backend pickle by name, through a function that registers it.

    Symptom: the member pickles by value, and a spawned process that reads the configuration before
    it loads plugins ends with "is not a valid AttentionBackendEnum".
    Remove when: vLLM pickles added backends by name, or loads plugins before it unpickles.
    """
    name = member.name
    member.__reduce_ex__ = lambda protocol: (backend_member, (name,))


def backend_member(name: str) -> Any:
    """The attention backend of that name, registered first where this process has not yet."""
    from k3backend.vllm_plugin import register

    register()
    return vllm_name(BACKEND_REGISTRY, "AttentionBackendEnum")[name]


def let_cpu_platform_take_named_backends(names: Sequence[str]) -> None:
    """Let ``--attention-backend`` select one of ``names`` on vLLM's CPU platform.

    Symptom: the CPU platform logs "Cannot use … backend on CPU" and runs its own decode.
    Remove when: ``CpuPlatform.get_attn_backend_cls`` takes backends that plugins registered.
    """
    platform: Any = type(vllm_name("vllm.platforms", "current_platform"))
    original = platform.get_attn_backend_cls
    if getattr(original, "takes_named_backends", False):
        return

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        config = kwargs.get("attn_selector_config", args[0] if args else None)
        named = selected_backend is not None and selected_backend.name in names
        if not named or not getattr(config, "use_mla", False):
            own: str | None = original(selected_backend, *args, **kwargs)
            return own
        original(None, *args, **kwargs)  # raises what the CPU cannot do
        return str(selected_backend.get_path())

    get_attn_backend_cls.takes_named_backends = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def model_class_name() -> str:
    """The attribute of ``kimi_k3_model`` to register as Kimi-K3: another one per vLLM version.

    Symptom: vLLM keeps what it learnt about a model class on disk, under a hash of the module that
    is registered. That module is this package's and does not change with vLLM, so after an upgrade
    vLLM would believe what the old class could do.
    Remove when: vLLM's cache of model facts depends on vLLM's version.
    """
    return MODEL_CLASS_PREFIX + re.sub(r"\W", "_", vllm_version())


def give_draft_the_targets_backend(names: Sequence[str]) -> None:
    """Give the MLA layers of a Kimi-K3 draft the target's backend where that is one of ``names``.

    Symptom: ``--attention-backend`` does not reach a DSpark draft. Its layers get the backend that
    vLLM prefers, whose fixed kernel blocks set ``block_stride_alignment``: 20 groups instead of 4.
    Remove when: vLLM gives a Kimi-K3 draft the target's backend, as it does for DeepSeek-V4.
    """
    hooks = vllm_name("vllm.model_executor.models.config", "MODELS_CONFIG_MAP")
    original: Any = hooks.get(K3_ARCHITECTURE)
    if getattr(original, "gives_draft_the_backend", False):
        return

    class K3Config:
        """vLLM's own adjustments for Kimi-K3, then the draft's backend."""

        gives_draft_the_backend = True

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            if original is not None:
                original.verify_and_update_config(vllm_config)
            _set_mla_backend(vllm_config, names)

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            update = getattr(original, "verify_and_update_model_config", None)
            if update is not None:
                update(model_config)

    hooks[K3_ARCHITECTURE] = K3Config


def _set_mla_backend(vllm_config: Any, names: Sequence[str]) -> None:
    attention, draft = vllm_config.attention_config, vllm_config.speculative_config
    if draft is None:
        return
    per_kind = attention.backend_per_kind.get("mla_attention")
    own, backend = draft.attention_backend, attention.backend
    if own is not None and per_kind is not None:
        # vLLM lets a backend by kind win, in the draft as in the target.
        if own != per_kind and _has_mla(draft):
            LOGGER.warning(
                "k3backend: backend_per_kind gives the draft's MLA layers %s; attention_backend %s "
                "of --speculative-config does not reach them",
                per_kind.name,
                own.name,
            )
        return
    if backend is None or backend.name not in names or per_kind is not None:
        return
    if own is None:
        # By kind and not as the draft's backend: layers that are not MLA keep vLLM's choice.
        attention.backend_per_kind["mla_attention"] = backend
        LOGGER.info("k3backend: MLA layers of the draft use %s, as the target's", backend.name)
    elif own != backend and _has_mla(draft):
        LOGGER.warning(
            "k3backend: the draft's attention backend is %s and the target's %s; their layers "
            "may not share KV cache groups (k3backend explain shows it)",
            own.name,
            backend.name,
        )


def _has_mla(draft: Any) -> bool:
    """Whether a speculative configuration's draft has MLA layers; True where it does not say."""
    return bool(getattr(getattr(draft, "draft_model_config", None), "use_mla", True))


def workspace_manager() -> Any:
    """vLLM's workspace manager, whose scratch and persistent buffers this package's layers share.

    Symptom: asked too early, vLLM ends with an assertion that does not say what to do.
    Remove when: vLLM raises an error of its own there.

    Raises:
        WorkspaceError: vLLM has not made it yet.
    """
    module = "vllm.v1.worker.workspace"
    if not vllm_name(module, "is_workspace_manager_initialized")():
        raise WorkspaceError(
            "vLLM's workspace manager does not exist yet, so decode scratch cannot be reserved; "
            "call vllm.v1.worker.workspace.init_workspace_manager(device) before the model is built"
        )
    return vllm_name(module, "current_workspace_manager")()


def each_micro_batch(manager: Any) -> Iterator[int]:
    """Run the loop's body once for each micro-batch of vLLM's workspace manager, as that one.

    Symptom: buffers exist per micro-batch, and a layer is built in the first one only. The others'
    would be claimed in their first forward, after the KV cache was sized.
    Remove when: the manager can claim for a micro-batch by number.
    """
    contexts = vllm_name("vllm.v1.worker.ubatching", "_THREAD_ID_TO_CONTEXT")
    count = int(getattr(manager, "_num_ubatches", 1))
    thread = threading.get_ident()
    if count == 1 or contexts:
        yield 0
        return
    try:
        for micro_batch in range(count):
            contexts[thread] = micro_batch
            yield micro_batch
    finally:
        contexts.pop(thread, None)


def log_decodes_when_worker_stops() -> None:
    """Log how often a worker decoded at the start of its shutdown, not at the end of its process.

    Symptom: vLLM kills a worker that takes more than 5 seconds to stop, and on a GPU the device is
    released before the process ends; the line of `decode_counters` is lost.
    Remove when: vLLM offers a hook at which workers stop.
    """
    wrapper = vllm_name("vllm.v1.worker.worker_base", "WorkerWrapperBase")
    original = wrapper.shutdown
    if getattr(original, "logs_decodes", False):
        return

    def shutdown(self: Any) -> None:
        log_stats_once()
        original(self)

    shutdown.logs_decodes = True  # type: ignore[attr-defined]
    wrapper.shutdown = shutdown


def watch_collected_specs(seen: Callable[[Any, Any, Any], None]) -> None:
    """Call ``seen`` when a start has collected the specs of its workers.

    vLLM 0.33 groups layers before it knows the available bytes, and ends there where it cannot. So
    ``seen`` is called without bytes before the grouping, and again once they are known.

    Args:
        seen: takes vLLM's configuration, the specs per worker and the available bytes per worker.

    Symptom: no hook of vLLM sees the specs of every model's layers.
    Remove when: vLLM passes collected specs to plugins, or dumps them itself.
    """
    core = "vllm.v1.engine.core"
    original = vllm_name(core, "get_kv_cache_configs")
    if getattr(original, "shows_specs", False):
        return

    def get_kv_cache_configs(
        vllm_config: Any, kv_cache_specs: Any, available_memory: Any, *more: Any, **named: Any
    ) -> Any:
        seen(vllm_config, kv_cache_specs, available_memory)
        return original(vllm_config, kv_cache_specs, available_memory, *more, **named)

    get_kv_cache_configs.shows_specs = True  # type: ignore[attr-defined]
    module: Any = importlib.import_module(core)
    module.get_kv_cache_configs = get_kv_cache_configs
    group = getattr(module, "get_global_kv_cache_groups", None)  # since 0.33
    if group is None:
        return

    def get_global_kv_cache_groups(
        vllm_config: Any, kv_cache_specs: Any, *more: Any, **named: Any
    ) -> Any:
        seen(vllm_config, kv_cache_specs, [])
        return group(vllm_config, kv_cache_specs, *more, **named)

    module.get_global_kv_cache_groups = get_global_kv_cache_groups
