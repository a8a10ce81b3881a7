"""the CPU default. Exports ``BACKEND``; every vendor has the same module names."""

from k3backend.common.backend import Backend

BACKEND = Backend(
    name="reference",
    package="k3backend.reference",
    summary="planned and split decode in torch, on the CPU",
)

__all__ = ["BACKEND"]
