"""Loading AITER: which signatures, switches and versions the boundary accepts."""

from __future__ import annotations

from typing import Any

import pytest

from k3backend.common.errors import PlatformError
from k3backend.rocm import aiter_ops
from tests.helpers.aiter_contract_double import SIGNATURES, AiterContractDouble

OLD = "0.1.7.post2.dev18"
pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    """No AITER from another test."""
    aiter_ops.load_aiter.cache_clear()
    yield
    aiter_ops.load_aiter.cache_clear()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> AiterContractDouble:
    made = AiterContractDouble()
    made.install(monkeypatch)
    return made


def test_a_missing_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = AiterContractDouble()
    made.names = {name: list(names) for name, names in made.names.items()}
    made.names["mla_decode_fwd"].remove("work_info_set")
    made.install(monkeypatch)
    with pytest.raises(PlatformError, match=r"mla_decode_fwd\(work_info_set\)"):
        aiter_ops.load_aiter()


@pytest.mark.parametrize("name", aiter_ops.OTHER_KERNELS)
def test_switches_to_other_kernels_are_refused(
    monkeypatch: pytest.MonkeyPatch, double: AiterContractDouble, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(PlatformError, match=name):
        aiter_ops.load_aiter()
    monkeypatch.setenv(name, "0")
    assert aiter_ops.load_aiter().version == "0.1.20"


def test_without_aiter_loading_says_so() -> None:
    assert aiter_ops.installed_version() == "absent"
    with pytest.raises(PlatformError, match="not installed"):
        aiter_ops.load_aiter()


def test_recorded_signatures_are_callable() -> None:
    assert set(SIGNATURES) == {OLD, "0.1.20"}
