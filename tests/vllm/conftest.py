"""Engine runs that several tests compare: made once per session, one process per side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engine_runs import EngineRun, run_engines
from tests.helpers.tiny_mla_model import write_model, write_tokenizer

try:
    from vllm.version import __version__ as VLLM_VERSION
except ImportError:
    VLLM_VERSION = ""

# A tier's process has one vLLM or none; files of the other tier would fail while they are imported.
collect_ignore_glob = [
    pattern
    for pattern, version in (("*_033.py", "0.33"), ("*_engine.py", "0.32"))
    if not VLLM_VERSION.startswith(version)
]
FAULTS = ("zeroed", "split-dropped", "lse-base")


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scratch of the engine runs; vLLM's cache in it is shared by them."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def tiny_models(engine_folder: Path) -> dict[str, Path]:
    """12 and 16 heads, with and without a rotary part."""
    models = {
        f"{heads}{'-rotary' if rotary else ''}": (heads, rotary)
        for heads in (12, 16)
        for rotary in (False, True)
    }
    written = {
        name: write_model(engine_folder / f"model-{name}", heads=heads, rotary=rotary)
        for name, (heads, rotary) in models.items()
    }
    write_tokenizer(written["12"])
    return written


@pytest.fixture(scope="session")
def stock_runs(engine_folder: Path, tiny_models: dict[str, Path]) -> dict[str, EngineRun]:
    """vLLM's own CPU decode, with this package's plugin turned off."""
    runs = [EngineRun(name, str(model)) for name, model in tiny_models.items()]
    runs.append(EngineRun("12-speculative", str(tiny_models["12"]), speculative=True))
    done, log = run_engines(runs, engine_folder / "stock", plugin=False)
    assert "decode calls" not in log
    return {run.name: run for run in done}


@pytest.fixture(scope="session")
def our_runs(engine_folder: Path, tiny_models: dict[str, Path]) -> dict[str, EngineRun]:
    """This package's decode in the CPU MLA slots, whole and broken on purpose."""
    runs = [EngineRun(name, str(model)) for name, model in tiny_models.items()]
    runs += [
        EngineRun(f"{heads}-speculative", str(tiny_models[heads]), speculative=True)
        for heads in ("12", "16")
    ]
    runs += [EngineRun(fault, str(tiny_models["12"]), fault=fault) for fault in FAULTS]
    runs.append(
        EngineRun(
            "12-prefixes",
            str(tiny_models["12"]),
            backend=None,
            block_size=None,
            prefix_caching=True,
        )
    )
    done, _ = run_engines(runs, engine_folder / "ours", plugin=True)
    return {run.name: run for run in done}
