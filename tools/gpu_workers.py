"""Entries of gpu_check.py in processes of their own: a hang or a broken device loses one entry.

A process that faults on a GPU cannot use it again, and a kernel that never ends blocks whoever
waits for it. So the parent never touches the device: workers run the entries, one at a time each,
and the parent replaces a worker that dies, says that its device is lost, or takes too long.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

START_S = 180
"""A worker imports torch and opens the device in this time."""
DEVICE_LOST = "device_lost"
"""True in a result after which the worker's device answers no more."""
MAX_REFUSALS = 2
"""Starts in a row that fail before no further one is tried."""
BUDGET = "the budget ended while it ran"


class Bench(Protocol):
    """What runs entries, inside a worker."""

    facts: dict[str, Any]

    def run(self, name: str) -> dict[str, Any]:
        """Run one entry; JSON values. Whatever it raises is the entry's result."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an entry ended.

    Attributes:
        name: the entry. result: what the worker said, or None.
        why_not: why there is no result: the worker died or was stopped.
        cut_off: the budget stopped it.
    """

    name: str
    result: dict[str, Any] | None
    why_not: str = ""
    cut_off: bool = False


def failure(error: BaseException) -> str:
    """One line of an exception: its kind and its first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


def serve(connection: Connection, open_bench: Callable[[], Bench]) -> None:
    """A worker's whole life: open, then answer names until None comes."""
    try:
        bench = open_bench()
    except Exception as error:
        connection.send(("refused", failure(error)))
        return
    # The parent's end closes when it dies.
    with contextlib.suppress(EOFError, BrokenPipeError):
        connection.send(("ready", bench.facts))
        for name in iter(connection.recv, None):
            try:
                result = bench.run(name)
            # One entry must not hide the others.
            except Exception as error:
                result = {"why_not": failure(error)}
            connection.send(("result", result))
            if result.get(DEVICE_LOST):
                return


class _Worker:
    """The parent's end of one worker."""

    def __init__(self, open_bench: Callable[[], Bench]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, open_bench), daemon=True)
        self.process.start()
        theirs.close()
        self.entry: str | None = None
        self.ready = False
        self.deadline = time.monotonic() + START_S

    def give(self, entry: str, seconds: float) -> None:
        self.entry, self.deadline = entry, time.monotonic() + seconds
        # One that has died since is heard of as the end of its connection.
        with contextlib.suppress(OSError):
            self.connection.send(entry)

    def stop(self) -> None:
        """End this process, which may hang in the driver, and nothing else."""
        self.process.kill()
        self.process.join(10)
        self.connection.close()

    def dismiss(self) -> None:
        """Ask an idle worker to leave by itself; `stop` then waits for it no longer."""
        with contextlib.suppress(OSError):
            self.connection.send(None)


class Workers:
    """Workers on one device, opened as they are needed and kept between calls of `run`.

    Use as a context manager. ``facts`` is what the first one said about the device.
    """

    def __init__(self, open_bench: Callable[[], Bench]) -> None:
        self._open_bench = open_bench
        self._workers: list[_Worker] = []
        self.facts: dict[str, Any] | None = None
        self.refusal = ""
        self._refusals = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._keep(0)

    def open(self, count: int) -> bool:
        """Have ``count`` workers and wait until one is ready; False where none can start."""
        self._fill(count)
        while self._workers and not any(worker.ready for worker in self._workers):
            for worker in self._answering(1.0):
                self._greet(worker)
            for worker in [w for w in self._workers if w.deadline < time.monotonic()]:
                self._drop(worker, f"did not start in {START_S} s")
        return bool(self._workers)

    def run(
        self,
        names: Sequence[str],
        *,
        count: int,
        entry_s: float,
        starts_until: float,
        ends_by: float,
    ) -> Iterator[Ended]:
        """Run every entry that can start in time, ``count`` at once, in the order of their ends.

        Args:
            entry_s: seconds of one entry, after which its worker is stopped.
            starts_until: no entry starts after this time (of ``time.monotonic``).
            ends_by: what still runs then is stopped.
        Entries that did not start are not told.
        """
        left = deque(names)
        self._keep(count)
        while (left and time.monotonic() < starts_until) or self._busy():
            if left and time.monotonic() < starts_until:
                self._fill(min(count, len(left) + len(self._busy())))
                for worker in self._workers:
                    if left and worker.ready and worker.entry is None:
                        worker.give(left.popleft(), entry_s)
            if not self._workers:
                yield from (Ended(name, None, f"no worker starts: {self.refusal}") for name in left)
                return
            now = time.monotonic()
            nearest = min(w.deadline if w.entry or not w.ready else ends_by for w in self._workers)
            for worker in self._answering(min(max(min(nearest, ends_by) - now, 0.0), 1.0)):
                yield from self._hear(worker)
            now = time.monotonic()
            for worker in list(self._workers):
                waiting = worker.entry is not None or not worker.ready
                if now >= ends_by and worker.entry is not None:
                    yield Ended(worker.entry, None, BUDGET, cut_off=True)
                    self._drop(worker, BUDGET)
                elif waiting and now >= worker.deadline:
                    if worker.entry is not None:
                        said = f"no answer in {entry_s:.0f} s; its process was stopped"
                        yield Ended(worker.entry, None, said)
                    self._drop(worker, f"did not start in {START_S} s")
                elif now >= ends_by and not worker.ready:
                    self._drop(worker, BUDGET)

    def _keep(self, count: int) -> None:
        """End all but ``count`` workers, the ready ones last; what runs now is lost."""
        ranked = sorted(self._workers, key=lambda worker: not worker.ready)
        self._workers, leaving = ranked[:count], ranked[count:]
        idle = [worker for worker in leaving if worker.ready and worker.entry is None]
        for worker in idle:
            worker.dismiss()
        for worker in idle:
            worker.process.join(10)
        for worker in leaving:
            worker.stop()

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.entry is not None]

    def _fill(self, count: int) -> None:
        # After a refusal (no memory, a device for one process only) nothing starts while others
        # work, and then one at a time.
        if self._refusals:
            count = 0 if self._workers or self._refusals >= MAX_REFUSALS else 1
        while len(self._workers) < count:
            self._workers.append(_Worker(self._open_bench))

    def _answering(self, seconds: float) -> list[_Worker]:
        answering = wait([worker.connection for worker in self._workers], seconds)
        return [worker for worker in self._workers if worker.connection in answering]

    def _hear(self, worker: _Worker) -> Iterator[Ended]:
        if not worker.ready:
            self._greet(worker)
            return
        entry = worker.entry or ""
        try:
            _, result = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(10)
            self._drop(worker, "")
            if entry:
                code = worker.process.exitcode
                yield Ended(entry, None, f"its process ended with exit code {code}")
            return
        worker.entry = None
        if result.get(DEVICE_LOST):
            self._drop(worker, "")
        yield Ended(entry, result)

    def _greet(self, worker: _Worker) -> None:
        try:
            kind, what = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(10)
            kind, what = "refused", f"exit code {worker.process.exitcode}"
        if kind == "ready":
            worker.ready = True
            self._refusals = 0
            self.facts = self.facts or what
        else:
            self._drop(worker, what)

    def _drop(self, worker: _Worker, refusal: str) -> None:
        if not worker.ready:
            self.refusal = refusal
            self._refusals += 1
        self._workers.remove(worker)
        worker.stop()
