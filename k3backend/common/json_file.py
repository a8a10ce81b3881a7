"""Reading one JSON object from a file that may be anything: every failure is one InputError.

The callers are the spec file, a model's ``config.json`` and saved plans. They get a dict of finite
numbers without repeated keys, or a message that names the file and what to do.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from k3backend.common.errors import InputError

MAX_FILE_BYTES = 64 * 2**20
"""A config or spec file is some kilobytes, a plan with every layer name some hundred."""


def read_json_object(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Read the one JSON object that ``path`` holds.

    Args:
        path: the file; a pipe works too, a directory does not.
        what: the argument that named the file, for the message ("--specs").
    Raises:
        InputError: the file is missing, unreadable, larger than MAX_FILE_BYTES, not UTF-8, not
            JSON, not an object, or holds a repeated key, NaN or an infinite number.
    """
    text = _read_text(path, what)
    where = f"{what} {os.fspath(path)!r}"
    if not text.strip():
        raise InputError(f"{where} is empty; give a file with one JSON object")
    try:
        document = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not JSON: {error.msg} at line {error.lineno} column {error.colno}; "
            "correct it or give the whole file"
        ) from error
    except RecursionError as error:
        raise InputError(f"{where} is nested too deeply; give a file of this schema") from error
    except InputError as error:
        raise InputError(f"{where} {error}; correct the file") from error
    if not isinstance(document, dict):
        raise InputError(
            f"{where} holds a JSON {_json_type(document)}, not an object; "
            "give a file whose outermost value is {...}"
        )
    return document


def _read_text(path: str | os.PathLike[str], what: str) -> str:
    where = f"{what} {os.fspath(path)!r}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise InputError(f"{where} does not exist; give the path of a JSON file") from error
    except IsADirectoryError as error:
        raise InputError(f"{where} is a directory; give the path of a JSON file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{where} cannot be read ({reason}); give a readable file") from error
    if len(content) > MAX_FILE_BYTES:
        raise InputError(
            f"{where} is larger than {MAX_FILE_BYTES:,} bytes; give a JSON file of this schema"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (byte {error.start}); give a JSON file"
        ) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in document if keys.count(key) > 1)
        raise InputError(f"repeats the key {repeated[:40]!r}")
    return document


def _refuse_constant(name: str) -> float:
    raise InputError(f"holds {name}, which is not a number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InputError(f"holds {text[:40]}, which is not a finite number")
    return value


def _bounded_int(text: str) -> int:
    if len(text) > 30:
        raise InputError(f"holds an integer of {len(text)} digits")
    return int(text)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array"
