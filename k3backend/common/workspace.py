"""Scratch and persistent device buffers that decode layers share.

`Workspace` is what a decode layer asks of its host; vLLM's workspace manager has these methods, and
`OwnWorkspace` serves programs without vLLM.

Everything is claimed while layers are built: a server sizes its KV cache by the memory that is left
afterwards and then locks the workspace. Buffers exist once per lane, because two lanes (a target
and its draft, or two micro-batches) may run at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from k3backend.common.errors import WorkspaceError

T = TypeVar("T")
ALIGNMENT_BYTES = 256


class Workspace(Protocol):
    """What a decode layer asks of its host."""

    def get_persistent_resource(self, key: Hashable, factory: Callable[[], T]) -> T:
        """The lane's object of that key, made by ``factory`` on first use."""

    def get_simultaneous(
        self, *shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]
    ) -> list[torch.Tensor]:
        """Scratch tensors that do not overlap; the next call may hand out the same bytes."""


class OwnWorkspace:
    """A workspace for use without a server.

    Args:
        device: where buffers live.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._lane: Hashable = 0
        self._resources: dict[tuple[Hashable, Hashable], Any] = {}
        self._scratch: dict[Hashable, torch.Tensor] = {}
        self._locked = False

    @property
    def scratch_bytes(self) -> int:
        """Scratch held, over all lanes."""
        return sum(scratch.numel() for scratch in self._scratch.values())

    def lock(self) -> None:
        """From now on nothing grows."""
        self._locked = True

    @contextmanager
    def lane(self, lane: Hashable) -> Iterator[None]:
        """Hand out the buffers of ``lane`` inside the block. Lane 0 is the default."""
        outer, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = outer

    def get_persistent_resource(self, key: Hashable, factory: Callable[[], T]) -> T:
        """See `Workspace`. Raises WorkspaceError for a new key once locked."""
        place = (self._lane, key)
        if place not in self._resources:
            self._refuse_if_locked(f"resource {key!r}")
            self._resources[place] = factory()
        found: T = self._resources[place]
        return found

    def get_simultaneous(
        self, *shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]
    ) -> list[torch.Tensor]:
        """See `Workspace`. Raises WorkspaceError where the lane's scratch must grow once locked."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes_and_dtypes]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        scratch = self._scratch.get(self._lane)
        if scratch is None or scratch.numel() < starts[-1]:
            self._refuse_if_locked(f"{starts[-1]} bytes of scratch")
            scratch = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
            self._scratch[self._lane] = scratch
        return [
            scratch[start : start + size].view(dtype).reshape(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, shapes_and_dtypes, strict=False)
        ]

    def _refuse_if_locked(self, what: str) -> None:
        if self._locked:
            raise WorkspaceError(
                f"workspace is locked, but lane {self._lane!r} asks for {what} that it does not "
                "hold; build every decode layer (in its lane) before locking"
            )
