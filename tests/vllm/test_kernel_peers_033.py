"""vLLM 0.33's Triton decode compiles from the installed package, for the comparison with ours."""

from __future__ import annotations

import sys

import pytest

from k3backend.common.errors import PlatformError
from k3backend.report.kernel_report import read_facts
from tools import kernel_peers


def test_vllm_is_compiled_as_installed():
    loaded = set(sys.modules)
    found = [p for p in kernel_peers.peers("gfx950") if p.project.startswith("vLLM")]
    assert [peer.request.name for peer in found] == ["bf16 / fp8", "bf16 / bf16"]
    assert not {name for name in set(sys.modules) - loaded if name.split(".")[0] == "vllm"}
    peer = found[1]
    facts = read_facts(peer.request)
    assert facts.loop.matrix > 0
    assert all("bf16" in name for name, _ in facts.matrix_instructions)
    # Its tile of keys is read whole: 16 keys of 576 bfloat16.
    assert facts.loop_load_bytes(8) >= peer.tile_tokens * 576 * peer.kv_element_bytes


def test_without_peers_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(kernel_peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlatformError, match="install one"):
        list(kernel_peers.peers("gfx950"))
