"""Which vendor to use, as a pure function of facts that no device had to be started for."""

from __future__ import annotations

from dataclasses import dataclass

from k3backend.common.backend import VENDOR_NAMES, VendorName
from k3backend.common.errors import PlatformError


@dataclass(frozen=True, slots=True)
class PlatformFacts:
    """What was looked at.

    Attributes:
        forced: the value of K3BACKEND_PLATFORM, None where unset.
        torch_version: version of the installed torch, None where there is none.
        torch_hip, torch_cuda: the HIP or CUDA version that torch was built for, None where not.
        nvidia_devices: visible NVIDIA device nodes after CUDA_VISIBLE_DEVICES.
    """

    forced: str | None
    torch_version: str | None
    torch_hip: str | None
    torch_cuda: str | None
    nvidia_devices: int

    @property
    def torch_build(self) -> str:
        """The torch build in words."""
        if self.torch_version is None:
            return "no torch installed"
        if self.torch_hip:
            return f"torch {self.torch_version} built for HIP {self.torch_hip}"
        if self.torch_cuda:
            return f"torch {self.torch_version} built for CUDA {self.torch_cuda}"
        return f"torch {self.torch_version} built for CPU"


@dataclass(frozen=True, slots=True)
class PlatformChoice:
    """The vendor and, in one sentence, why."""

    name: VendorName
    reason: str


def choose_platform(facts: PlatformFacts) -> PlatformChoice:
    """Choose the vendor. A forced one wins and never falls back.

    Raises:
        PlatformError: the forced name is unknown, or torch is built for the other vendor.
    """
    if facts.forced is not None:
        return _forced(facts)
    if facts.torch_hip:
        return PlatformChoice("rocm", facts.torch_build)
    if facts.torch_cuda and facts.nvidia_devices:
        return PlatformChoice(
            "nvidia", f"{facts.torch_build}, {facts.nvidia_devices} visible device(s)"
        )
    if facts.torch_cuda:
        return PlatformChoice("reference", f"{facts.torch_build}, but no visible NVIDIA device")
    return PlatformChoice("reference", facts.torch_build)


def _forced(facts: PlatformFacts) -> PlatformChoice:
    name = next((vendor for vendor in VENDOR_NAMES if vendor == facts.forced), None)
    if name is None:
        raise PlatformError(
            f"K3BACKEND_PLATFORM={facts.forced!r} is not one of {', '.join(VENDOR_NAMES)}; "
            "set one of these or unset it"
        )
    wrong = (name == "nvidia" and facts.torch_hip) or (name == "rocm" and facts.torch_cuda)
    if wrong:
        raise PlatformError(
            f"K3BACKEND_PLATFORM={name} cannot run here: {facts.torch_build}; install torch for "
            f"{name} or unset K3BACKEND_PLATFORM"
        )
    return PlatformChoice(name, f"K3BACKEND_PLATFORM={name}; {facts.torch_build}")
