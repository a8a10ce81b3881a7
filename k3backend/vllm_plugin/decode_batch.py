"""What vLLM's layer hands to a decode, brought to the form that every decode here takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from k3backend._version import __version__
from k3backend.common.decode_counters import log_stats, read_stats
from k3backend.common.errors import UnsupportedDecodeError
from k3backend.vllm_plugin import compat, registration

if TYPE_CHECKING:
    import torch

LOGGER = logging.getLogger("k3backend.vllm_plugin")
_announced: set[str] = set()
_report_at = 10


def announce_decode(platform: str) -> None:
    """Say once per process, when the first MLA layer is built, whose decode it has."""
    if platform not in _announced:
        _announced.add(platform)
        registration.announce()
        LOGGER.info("k3backend %s: MLA layers decode with this package, %s", __version__, platform)
        compat.log_decodes_when_worker_stops()


def report_progress() -> None:
    """Log the totals after 10, 100, 1,000 … decodes that ran on the host.

    ``vllm serve`` kills its engine at once unless it has a ``--shutdown-timeout``, so the line that
    a process logs at its end may never come.
    """
    global _report_at
    totals = read_stats()
    if totals.calls >= _report_at:
        _report_at = 10 * totals.calls
        log_stats()


def one_query(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The query as one contiguous tensor.

    Args:
        q: [tokens, heads, 576], or its parts ([tokens, heads, 512], [tokens, heads, 64]).
    """
    if isinstance(q, tuple):
        import torch

        q = torch.cat(q, dim=-1)
    return q.contiguous()


def decode_query_len(starts: Sequence[int], what: str) -> int:
    """Query tokens per request, from where each request's tokens start (host integers).

    Raises:
        UnsupportedDecodeError: not the same number for all.
    """
    query_lens = {end - start for start, end in pairwise(starts)}
    if len(query_lens) != 1:
        raise UnsupportedDecodeError(
            what,
            [
                f"query tokens per request are {sorted(query_lens)}, expected one number for all; "
                "a metadata builder with query_len_support UNIFORM gives that"
            ],
        )
    return query_lens.pop()
