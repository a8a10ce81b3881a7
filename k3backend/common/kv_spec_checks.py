"""Field checks that every KV cache spec class gets from its dataclass fields.

A field annotated ``int`` or ``int | None`` is an integer of at least 1 unless its class lists
another minimum; ``bool`` and ``str | None`` fields are checked by type. Anything else is checked
where the class is defined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from k3backend.common.errors import SpecError

_MEANING = {
    "block_size": "the tokens of a block",
    "num_kv_heads": "the KV heads of this rank",
    "head_size": "the elements of a head",
    "head_size_v": "the elements of a value head, 0 where there is none",
    "page_size_padded": "the bytes of the padded page",
    "num_head_slots": "the head slots of a page",
    "state_content_bytes": "the bytes of one head's state",
    "max_tp_shards": "the distinct tensor-parallel shards",
    "sliding_window": "the tokens of the window",
    "attention_chunk_size": "the tokens of a chunk",
    "rswa_window": "the generated tokens that stay",
    "extra_retained_tokens": "the tokens kept below the window",
    "sink_len": "the sink tokens",
    "alignment": "the bytes that the page is a multiple of",
    "storage_block_size": "the tokens of a storage block",
    "topk_buffer_width": "the width of the top-k index buffer",
    "num_speculative_blocks": "the blocks for speculative tokens",
    "num_prefill_checkpoint_blocks": "the blocks for prefill checkpoints",
    "prefill_checkpoint_alignment": "the tokens between prefill checkpoints",
    "num_heads": "the heads of the state",
    "page_size": "the bytes of a page",
    "blocks_per_request": "the blocks of a request",
}

_Check = tuple[str, Callable[[object], bool], str]


def field_error(cls: type, name: str, value: object, expected: str, remedy: str = "") -> SpecError:
    """The one shape of a spec field's error; callers that know a path find the field in it."""
    remedy = remedy or f"give {_MEANING.get(name, 'such a value')}"
    return SpecError(f"{cls.__name__}.{name} is {value!r}, expected {expected}; {remedy}", name)


def check_fields(spec: Any) -> None:
    """Check every plain field of ``spec``. Raises SpecError naming the first wrong one."""
    cls = spec.__class__
    checks = _CHECKS.get(cls)
    if checks is None:
        checks = _CHECKS[cls] = _compile(cls)
    for name, accepts, expected in checks:
        value = getattr(spec, name)
        if not accepts(value):
            raise field_error(cls, name, value, expected)


_CHECKS: dict[type, tuple[_Check, ...]] = {}


def _compile(cls: Any) -> tuple[_Check, ...]:
    checks: list[_Check] = []
    for item in fields(cls):
        annotation = item.type if isinstance(item.type, str) else getattr(item.type, "__name__", "")
        kind = annotation.removesuffix(" | None")
        optional = kind != annotation
        if kind == "int":
            minimum = cls.FIELD_MINIMUM.get(item.name, 1)
            accepts, expected = _int_check(minimum, optional), f"an integer >= {minimum}"
        elif kind in ("bool", "str"):
            accepts, expected = _type_check(kind, optional), _TYPE_NAMES[kind]
        else:
            continue
        checks.append((item.name, accepts, expected + (" or None" if optional else "")))
    return tuple(checks)


_TYPE_NAMES = {"bool": "True or False", "str": "a non-empty string"}


def _int_check(minimum: int, optional: bool) -> Callable[[object], bool]:
    def accepts(value: object) -> bool:
        if value is None:
            return optional
        return type(value) is int and value >= minimum

    return accepts


def _type_check(kind: str, optional: bool) -> Callable[[object], bool]:
    def accepts(value: object) -> bool:
        if value is None:
            return optional
        return type(value) is bool if kind == "bool" else isinstance(value, str) and value != ""

    return accepts
