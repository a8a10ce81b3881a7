"""Query tokens per request of a step, read without waiting for the device.

The total alone hides what is not uniform (8 + 6 tokens look like 2 x 7), so query start positions
on the host or the largest query length are required.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class QueryLength:
    """Uniform query length of the requests that decode.

    Attributes:
        tokens: query tokens per request.
        requests: requests with query tokens; padding requests at the end have none.
        problems: why this is not a uniform batch; empty if it is.
    """

    tokens: int
    requests: int
    problems: tuple[str, ...] = ()


def read_query_length(metadata: Any) -> QueryLength:
    """Read one step's metadata.

    Looked at, in this order: ``query_start_loc_cpu`` of ``metadata.decode`` and of ``metadata``,
    ``metadata.query_start_loc`` where it is on the host, ``metadata.decode.max_query_len``, and
    ``metadata.max_query_len`` of a step without prefill.
    """
    requests = int(metadata.num_decodes)
    tokens = int(metadata.num_decode_tokens)
    starts = _host_starts(metadata)
    if starts is not None:
        return _from_starts(starts[: requests + 1], requests, tokens)
    longest = getattr(getattr(metadata, "decode", None), "max_query_len", None)
    if longest is None and not getattr(metadata, "num_prefills", 0):
        longest = getattr(metadata, "max_query_len", None)
    if longest is None:
        return QueryLength(
            1,
            requests,
            (
                "metadata has neither query start positions on the host nor the largest query "
                "length; add query_start_loc_cpu or max_query_len to it",
            ),
        )
    longest = int(longest)
    if longest * requests != tokens:
        return QueryLength(longest, requests, (_not_uniform(requests, tokens, longest),))
    return QueryLength(longest, requests)


def _host_starts(metadata: Any) -> list[int] | None:
    candidates: Iterable[Any] = (
        getattr(getattr(metadata, "decode", None), "query_start_loc_cpu", None),
        getattr(metadata, "query_start_loc_cpu", None),
        getattr(metadata, "query_start_loc", None),
    )
    for starts in candidates:
        if isinstance(starts, torch.Tensor):
            if starts.device.type == "cpu":
                return [int(start) for start in starts.tolist()]
        elif starts is not None:
            return [int(start) for start in starts]
    return None


def _from_starts(starts: list[int], requests: int, tokens: int) -> QueryLength:
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    real = len(lengths)
    while real and lengths[real - 1] == 0:
        real -= 1
    longest = max(lengths, default=0)
    if len(lengths) != requests:
        problem = f"query start positions cover {len(lengths)} requests, expected {requests}"
        return QueryLength(longest, real, (problem,))
    if starts and starts[0] != 0:
        problem = (
            f"query start positions begin at {starts[0]}, expected 0; the requests that decode "
            "come first in a step"
        )
        return QueryLength(longest, real, (problem,))
    if any(length != longest for length in lengths[:real]) or sum(lengths) != tokens:
        return QueryLength(longest, real, (_not_uniform(requests, tokens, longest),))
    return QueryLength(longest, real)


def _not_uniform(requests: int, tokens: int, longest: int) -> str:
    return (
        f"query tokens are not uniform: {tokens} tokens of {requests} requests, the longest has "
        f"{longest}; decode requests of one query length together"
    )
