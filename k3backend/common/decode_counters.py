"""How often this process decoded, and with how many split pieces: kept to show that it did.

Vendors on the host add plain numbers. Kernels add to a small counter on the device, so that replays
of a captured graph, which run no Python, are counted too.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from multiprocessing import util as multiprocessing_util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LOGGER = logging.getLogger("k3backend")


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """Totals of this process.

    Attributes:
        calls: decode calls, one per layer and step; replayed ones included.
        splits: pieces of row tiles that were split, over all calls.
        platforms: the vendors that decoded, in order of first use.
    """

    calls: int
    splits: int
    platforms: tuple[str, ...]

    def __str__(self) -> str:
        where = "+".join(self.platforms) or "no platform"
        return f"k3backend: {self.calls} decode calls, {self.splits} split pieces, {where}"


@dataclass(slots=True)
class _Counters:
    pid: int = -1
    host: dict[str, list[int]] = field(default_factory=dict)
    device: dict[tuple[str, str], Any] = field(default_factory=dict)
    logged: DecodeStats | None = None


_COUNTERS = _Counters()


def _counters() -> _Counters:
    """This process's counters; a fork starts at zero and logs at its own exit."""
    if _COUNTERS.pid != os.getpid():
        _COUNTERS.pid = os.getpid()
        _COUNTERS.host.clear()
        _COUNTERS.device.clear()
        _COUNTERS.logged = None
        # Unlike atexit this also runs at the end of a multiprocessing child.
        multiprocessing_util.Finalize(None, log_stats_once, exitpriority=100)
    return _COUNTERS


def count_decode(platform: str, splits: int) -> None:
    """Add one call with ``splits`` split pieces that ran on the host."""
    totals = _counters().host.setdefault(platform, [0, 0])
    totals[0] += 1
    totals[1] += splits


def device_counter(platform: str, device: torch.device) -> torch.Tensor:
    """The int64 [2] tensor (calls, splits) on ``device`` that kernels of a vendor add to."""
    import torch

    counters = _counters()
    key = (platform, str(device))
    if key not in counters.device:
        counters.device[key] = torch.zeros(2, dtype=torch.int64, device=device)
    found: torch.Tensor = counters.device[key]
    return found


def read_stats() -> DecodeStats:
    """Totals of this process so far. Waits for devices that decoded."""
    counters = _counters()
    calls = splits = 0
    platforms: dict[str, None] = {}
    for platform, (host_calls, host_splits) in counters.host.items():
        calls += host_calls
        splits += host_splits
        platforms[platform] = None
    for (platform, _), counter in counters.device.items():
        device_calls, device_splits = counter.tolist()
        calls += device_calls
        splits += device_splits
        if device_calls:
            platforms[platform] = None
    return DecodeStats(calls, splits, tuple(platforms))


def log_stats() -> DecodeStats:
    """Log one line at INFO on the logger ``k3backend`` and return the totals."""
    totals = read_stats()
    _COUNTERS.logged = totals
    LOGGER.info("%s", totals)
    return totals


def log_stats_once() -> None:
    """What a process does at its end: log the totals if it decoded and has not said so yet."""
    try:
        totals = read_stats()
    except RuntimeError as error:  # the device is gone already
        LOGGER.info("k3backend: decoded, but its counters cannot be read at exit: %s", error)
        return
    if totals.calls and totals != _COUNTERS.logged:
        _COUNTERS.logged = totals
        LOGGER.info("%s", totals)
