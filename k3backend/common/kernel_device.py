"""Which devices the Triton kernels can run on in this process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from k3backend.common.decode_checks import device_name_problems, device_problems
from k3backend.common.errors import UnsupportedDecodeError


def kernel_device_problems(device: torch.device | str) -> list[str]:
    """Why kernels cannot run on a device; empty if they can."""
    reasons = device_name_problems(device)
    if reasons:
        return reasons
    found = torch.device(device)
    if found.type == "cpu":
        return device_problems(found)
    if found.type != "cuda":
        return [f"device is {found}, expected a GPU, or the CPU under Triton's interpreter"]
    if not torch.cuda.is_available():
        return [f"device is {found}, but torch {torch.__version__} finds none; install a driver"]
    count = torch.cuda.device_count()
    if found.index is not None and found.index >= count:
        return [f"device is {found}, but torch finds {count} GPUs; give cuda:0 to cuda:{count - 1}"]
    return []


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which kernels are launched on the tensor's GPU.

    Triton launches on the current GPU, wherever the tensors are.
    """
    index = tensor.device.index
    if tensor.device.type != "cuda" or index is None or index == torch.cuda.current_device():
        return nullcontext()
    guard: AbstractContextManager[object] = torch.cuda.device(index)
    return guard


def missing_gpu_problems(device: torch.device | str) -> list[str]:
    """Why a device other than the CPU is not here; empty if it is."""
    return [] if torch.device(device).type == "cpu" else kernel_device_problems(device)


def require_gpu(device: torch.device | str) -> None:
    """Refuse a device other than the CPU that is not here.

    Raises:
        UnsupportedDecodeError: naming the device.
    """
    reasons = missing_gpu_problems(device)
    if reasons:
        raise UnsupportedDecodeError("balanced MLA decode cannot be built", reasons)
