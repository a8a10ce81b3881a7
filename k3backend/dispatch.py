"""The one place that chooses the vendor: ``BACKEND``, fixed when this module is first imported.

Choosing starts no device and does not import torch: torch's build is read from its version file,
NVIDIA devices are counted from their device nodes, so that a process may still fork afterwards.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from k3backend.common import envs
from k3backend.common.backend import Backend
from k3backend.common.errors import PlatformError
from k3backend.common.platform_choice import PlatformChoice, PlatformFacts, choose_platform


def load_backend(name: str) -> Backend:
    """The Backend record of one vendor by name, whatever the dispatcher chose.

    Raises:
        PlatformError: the name is unknown or its package does not import.
    """
    facts = PlatformFacts(name, None, None, None, 0)
    choice = choose_platform(facts)
    try:
        backend: Backend = importlib.import_module(f"k3backend.{choice.name}").BACKEND
    except ImportError as error:
        raise PlatformError(
            f"platform {choice.name} cannot run here: importing k3backend.{choice.name} failed "
            f"({error}); install what is missing or set K3BACKEND_PLATFORM to another platform"
        ) from error
    return backend


def read_facts() -> PlatformFacts:
    """Look at the environment, torch's version file and the device nodes."""
    version = _torch_version_file()
    return PlatformFacts(
        forced=os.environ.get(envs.PLATFORM.name, "").strip() or None,
        torch_version=version.get("__version__"),
        torch_hip=version.get("hip"),
        torch_cuda=version.get("cuda"),
        nvidia_devices=_visible_nvidia_devices(),
    )


def _torch_version_file() -> dict[str, Any]:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).with_name("version.py")
    version_spec = importlib.util.spec_from_file_location("_k3backend_torch_version", path)
    if version_spec is None or version_spec.loader is None or not path.is_file():
        return {}
    module = importlib.util.module_from_spec(version_spec)
    version_spec.loader.exec_module(module)
    return {name: getattr(module, name, None) for name in ("__version__", "hip", "cuda")}


def _visible_nvidia_devices(dev: Path = Path("/dev")) -> int:
    nodes = [p for p in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    count = len(nodes) or int((dev / "dxg").exists())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    wanted = [item.strip() for item in visible.split(",") if item.strip()]
    if "-1" in wanted:
        wanted = wanted[: wanted.index("-1")]
    return min(count, len(wanted))


FACTS: PlatformFacts = read_facts()
CHOICE: PlatformChoice = choose_platform(FACTS)
BACKEND: Backend = load_backend(CHOICE.name)
