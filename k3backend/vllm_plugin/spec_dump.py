"""``K3BACKEND_DUMP_SPECS``: the layers of a live engine as a spec file.

``k3backend groups --specs FILE`` and ``k3backend explain --specs FILE`` then answer for that model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from k3backend.common import envs
from k3backend.common.spec_file import dump_spec_document
from k3backend.vllm_plugin.grouping import plan_context
from k3backend.vllm_plugin.translate import from_vllm_spec, unknown_fields

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec as VllmSpec

LOGGER = logging.getLogger("k3backend.vllm_plugin")


def write_spec_file(
    path: str | Path,
    vllm_config: VllmConfig,
    worker_specs: Sequence[Mapping[str, VllmSpec]],
    available_bytes: Sequence[int],
) -> None:
    """Write the specs that an engine collected.

    Args:
        path: replaced as a whole.
        worker_specs: spec per layer, for each worker.
        available_bytes: bytes for the cache, of each worker.
    Raises:
        PluginError: a spec cannot be translated.
        OSError: the file cannot be written.
    """
    specs = {}
    stages: dict[str, int] = {}
    seen: list[frozenset[str]] = []
    for worker in worker_specs:
        layers = frozenset(worker)
        if layers and layers not in seen:
            seen.append(layers)
        for name, spec in worker.items():
            if name in specs:
                continue
            specs[name] = from_vllm_spec(spec)
            stages[name] = seen.index(layers)
            if left := unknown_fields(spec):
                LOGGER.warning("k3backend: %s: %s is not in the spec file", name, left)
    context = plan_context(vllm_config, specs)
    least = min(available_bytes) if available_bytes else None
    document = dump_spec_document(specs, context, stages, least if least and least > 0 else None)
    target = Path(path)
    draft = target.with_name(target.name + ".part")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(target)
    LOGGER.info("k3backend: wrote the specs of %d layers to %s", len(specs), target)


def dump_collected_specs(
    vllm_config: VllmConfig,
    worker_specs: Sequence[Mapping[str, VllmSpec]],
    available_bytes: Sequence[int],
) -> None:
    """Write to ``K3BACKEND_DUMP_SPECS`` where it is set; a failure is logged, not raised."""
    path = envs.DUMP_SPECS.get()
    if path is None or not any(worker_specs):
        return
    try:
        write_spec_file(path, vllm_config, worker_specs, available_bytes)
    except Exception:  # the engine can serve without the file
        LOGGER.exception("k3backend: %s=%s was not written", envs.DUMP_SPECS.name, path)
