"""Request traces: when requests came, how long they were, how much they generated."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from k3backend.common.errors import InputError

COLUMNS = ("timestamp_ms", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp_ms: arrival, in milliseconds after the trace's start.
        input_tokens, output_tokens: lengths of the prompt and of the answer, at least 1 each.
    """

    timestamp_ms: int
    input_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens that the request holds when it ends."""
        return self.input_tokens + self.output_tokens


def read_trace(path: str | Path, max_requests: int | None = None) -> list[TraceRequest]:
    """Read a CSV file with the columns ``timestamp_ms,input_tokens,output_tokens``.

    Args:
        path: the file; its first line names the columns, in any order, others are ignored.
        max_requests: read this many requests at most.
    Returns:
        The requests in the file's order, at least one.
    Raises:
        InputError: the file cannot be read, a column is missing, or a value is no integer in range.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise InputError(
                    f"trace {path}: no column {', '.join(missing)} in the first line; expected "
                    f"{','.join(COLUMNS)}"
                )
            requests = [
                _request(path, line, row) for line, row in enumerate(islice(rows, max_requests), 2)
            ]
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"trace {path}: {reason}; give a readable CSV file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"trace {path}: not a CSV text file ({error}); give one") from error
    if not requests:
        raise InputError(f"trace {path}: holds no request; give at least one line of lengths")
    return requests


def _request(path: str | Path, line: int, row: dict[str, str | None]) -> TraceRequest:
    values = []
    for name, minimum in zip(COLUMNS, (0, 1, 1), strict=True):
        text = (row[name] or "").strip()
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1
        if value < minimum:
            raise InputError(
                f"trace {path}, line {line}: {name} is {text[:40]!r}, expected an integer >= "
                f"{minimum}; correct the line"
            )
        values.append(value)
    return TraceRequest(*values)
