"""The dispatcher: one choice, at import, with a reason, without a device and without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from k3backend.common.backend import VENDOR_NAMES
from k3backend.common.errors import PlatformError
from k3backend.common.platform_choice import PlatformFacts, choose_platform
from k3backend.dispatch import load_backend


def facts(forced=None, hip=None, cuda=None, devices=0, version="2.13.0"):
    return PlatformFacts(forced, version, hip, cuda, devices)


@pytest.mark.parametrize(
    ("given", "name", "reason"),
    [
        (facts(), "reference", "CPU"),
        (facts(version=None), "reference", "no torch"),
        (facts(hip="7.0"), "rocm", "HIP 7.0"),
        (facts(cuda="13.0", devices=8), "nvidia", "8 visible"),
        (facts(cuda="13.0", devices=0), "reference", "no visible NVIDIA device"),
        (facts(forced="rocm"), "rocm", "K3BACKEND_PLATFORM=rocm"),
        (facts(forced="nvidia"), "nvidia", "K3BACKEND_PLATFORM=nvidia"),
        (facts(forced="reference", hip="7.0"), "reference", "K3BACKEND_PLATFORM=reference"),
    ],
)
def test_choice_and_reason(given, name, reason):
    choice = choose_platform(given)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (facts(forced="amd"), "nvidia, rocm, reference"),
        (facts(forced="NVIDIA"), "nvidia, rocm, reference"),
        (facts(forced="nvidia", hip="7.0"), "built for HIP 7.0"),
        (facts(forced="rocm", cuda="13.0", devices=1), "built for CUDA 13.0"),
    ],
)
def test_a_forced_choice_never_falls_back(given, said):
    with pytest.raises(PlatformError, match=said):
        choose_platform(given)


def test_every_vendor_loads_and_names_itself():
    for name in VENDOR_NAMES:
        backend = load_backend(name)
        assert backend.name == name
        assert backend.package == f"k3backend.{name}"


def run(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", VENDOR_NAMES)
def test_fixed_at_first_import(name):
    code = (
        "import os, k3backend.dispatch as d\n"
        "os.environ['K3BACKEND_PLATFORM'] = 'reference'\n"
        "import k3backend.dispatch as e\n"
        "print(d.BACKEND.name, e.BACKEND is d.BACKEND)"
    )
    assert run(code, K3BACKEND_PLATFORM=name).stdout.split() == [name, "True"]


def test_an_empty_value_means_unset():
    code = "from k3backend.dispatch import CHOICE, FACTS; print(FACTS.forced, CHOICE.name)"
    assert run(code, K3BACKEND_PLATFORM="").stdout.split()[0] == "None"


def test_an_unknown_platform_is_one_clear_error():
    done = run("import k3backend.dispatch", K3BACKEND_PLATFORM="tpu")
    assert done.returncode != 0
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("k3backend.common.errors.PlatformError: K3BACKEND_PLATFORM='tpu' is not one of")
    )


def test_choosing_imports_no_torch():
    code = "import sys, k3backend.dispatch; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run(code).stdout.split() == ["False", "False"]


def test_visible_devices_are_counted_from_device_nodes(tmp_path, monkeypatch):
    from k3backend.dispatch import _visible_nvidia_devices

    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _visible_nvidia_devices(tmp_path) == 2
    for value, count in {"": 0, "-1": 0, "0": 1, "0,1": 2, "1,-1,0": 1, "0,1,2": 2}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert _visible_nvidia_devices(tmp_path) == count, value
