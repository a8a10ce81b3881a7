"""AMD ROCm. Exports ``BACKEND``; every vendor has the same module names."""

from k3backend.common.backend import Backend

BACKEND = Backend(
    name="rocm",
    package="k3backend.rocm",
    summary="AITER routes that never abort, and the folded kernel for what AITER lacks",
)

__all__ = ["BACKEND"]
