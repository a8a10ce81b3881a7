"""A fake of torch.cuda's streams, events and graphs over the CPU and Triton's interpreter.

It stands in for hardware that is not here and measures nothing: its clock counts launches. Calls
are held to what torch documents: an event is recorded before it is timed, both are done before
times are read, a kernel is captured after a warm-up, and during a capture nothing runs, is copied
to the host or waits. A captured graph replays its launches and copies with the memory of then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from k3backend.common import balanced_mla

LAUNCH_US = 10.0
"""What the clock adds per kernel."""
VIEWS = (
    "view", "_unsafe_view", "reshape", "slice", "select", "as_strided", "detach", "alias", "expand",
    "unsqueeze", "squeeze", "transpose", "permute", "split", "t",
)  # fmt: skip
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty")


class CaptureError(RuntimeError):
    """torch's and CUDA's refusals are RuntimeErrors too."""


class _Captured(TorchDispatchMode):
    """torch's operations during a capture."""

    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in VIEWS or name in ALLOCATIONS:
            return func(*args, **(kwargs or {}))
        if name == "copy_":
            self.graph.steps.append(lambda: func(*args, **(kwargs or {})))
            return args[0]
        raise CaptureError(f"operation not permitted when stream is capturing: {name}")


class FakeGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.captured = False

    def replay(self) -> None:
        if not self.captured:
            raise CaptureError("replay of a graph that was not captured")
        if CUDA.capturing is not None:
            raise CaptureError("replay during a capture")
        for run in self.steps:
            run()
            CUDA.clock_us += LAUNCH_US


class FakeStream:
    """torch.cuda.Stream."""

    def wait_stream(self, other: FakeStream) -> None:
        if not isinstance(other, FakeStream):
            raise TypeError(f"wait_stream takes a stream, got {type(other).__name__}")


class FakeEvent:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.at_us: float | None = None
        self.done = False

    def record(self) -> None:
        if CUDA.capturing is not None:
            raise CaptureError("a timing event in a capture")
        self.at_us, self.done = CUDA.clock_us, False
        CUDA.pending.append(self)

    def synchronize(self) -> None:
        CUDA.synchronize()

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.timing and end.timing):
            raise ValueError("both events must be made with enable_timing=True")
        if self.at_us is None or end.at_us is None:
            raise RuntimeError("both events must be recorded before their times are compared")
        if not (self.done and end.done):
            raise RuntimeError("both events must be done: synchronize first")
        return (end.at_us - self.at_us) / 1000


class FakeCuda:
    """The state of the fake device."""

    def __init__(self) -> None:
        self.clock_us = 0.0
        self.launches: list[str] = []
        self.pending: list[FakeEvent] = []
        self.default = FakeStream()
        self.current = self.default
        self.capturing: FakeGraph | None = None

    def synchronize(self) -> None:
        if self.capturing is not None:
            raise CaptureError("synchronize during a capture")
        for event in self.pending:
            event.done = True
        self.pending.clear()

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        """As torch's: it captures on a stream of its own."""
        if self.capturing is not None or graph.captured:
            raise CaptureError("a capture inside of a capture, or a graph captured twice")
        self.capturing = graph
        try:
            with self.stream(FakeStream()), _Captured(graph):
                yield
        finally:
            self.capturing = None
        graph.captured = True

    def launch(self, run: Callable[[], object], name: str) -> None:
        """One kernel: now, or with every replay."""
        if self.capturing is not None:
            if name not in self.launches:
                raise CaptureError(f"{name} would be compiled during a capture: warm it up")
            self.capturing.steps.append(run)
            return
        self.launches.append(name)
        self.clock_us += LAUNCH_US
        run()


CUDA = FakeCuda()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """torch.cuda is the fake, and every interpreted launch passes it."""
    CUDA.__init__()  # type: ignore[misc]
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        CUDA.launch(lambda: launch(self, *args, **kwargs), self.fn.__name__)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    # Of tensors on a GPU nothing is read, so nothing of these here.
    monkeypatch.setattr(balanced_mla, "content_problems", lambda *_, **__: [], raising=False)
    for name, value in (
        ("Stream", FakeStream),
        ("Event", FakeEvent),
        ("CUDAGraph", FakeGraph),
        ("stream", CUDA.stream),
        ("graph", CUDA.graph),
        ("current_stream", lambda: CUDA.current),
        ("synchronize", CUDA.synchronize),
        ("is_current_stream_capturing", lambda: CUDA.capturing is not None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return CUDA
