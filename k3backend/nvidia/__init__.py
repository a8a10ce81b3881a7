"""NVIDIA. Exports ``BACKEND``; every vendor has the same module names."""

from k3backend.common.backend import Backend

BACKEND = Backend(
    name="nvidia",
    package="k3backend.nvidia",
    summary="KV-balanced split MLA decode in Triton",
)

__all__ = ["BACKEND"]
