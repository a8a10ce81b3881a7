"""What the plugin needs of vLLM 0.32, and the contract of the GPU backends against it."""

from __future__ import annotations

import pytest
from packaging.version import Version

from k3backend.vllm_plugin import registration, vllm_interfaces
from k3backend.vllm_plugin.vllm_names import vllm_version
from tests.vllm import test_gpu_backends_033
from tests.vllm.test_gpu_backends_033 import *  # noqa: F403

pytestmark = [pytest.mark.vllm, pytest.mark.engine]


def test_every_interface_is_there_in_this_version():
    version = Version(vllm_version())
    assert version.release[:2] == (0, 32)
    assert vllm_interfaces.differences(version) == []


def test_grouping_stays_vllms_and_that_is_said():
    assert registration._own_grouping() == "vLLM's own (before 0.33 a model cannot own them)"


def test_the_contract_is_the_same_tests():
    theirs = {name for name in vars(test_gpu_backends_033) if name.startswith("test_")}
    assert theirs <= set(globals())
    assert len(theirs) >= 20
