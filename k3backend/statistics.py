"""``k3backend.stats()``: what shows that this package's decode ran."""

from __future__ import annotations

from k3backend.common.decode_counters import DecodeStats, log_stats

__all__ = ["DecodeStats", "stats"]


def stats() -> DecodeStats:
    """Log ``k3backend: <calls> decode calls, <splits> split pieces, <platform>`` and return it.

    The line goes to the logger ``k3backend`` at INFO. A process that decoded logs it once more at
    its exit. Waits for the device, so keep it out of captured code.
    """
    return log_stats()
