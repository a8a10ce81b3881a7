"""A file that may be anything gives an object of finite numbers, or one InputError."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3backend.common import json_file
from k3backend.common.errors import InputError
from k3backend.common.json_file import read_json_object


def test_reads_an_object_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1, 2.5, null]}')
    assert read_json_object(path, "--specs") == {"a": [1, 2.5, None]}


BAD_CONTENT = {
    "empty": (b"", "is empty"),
    "spaces": (b" \n\t", "is empty"),
    "truncated": (b'{"a": [1, 2', "is not JSON"),
    "text": (b"hello", "is not JSON"),
    "two documents": (b"{} {}", "is not JSON"),
    "binary": (b"\x7fELF\xff\xfe\x00", "is not UTF-8"),
    "nul": (b"{\x00}", "is not JSON"),
    "array": (b"[1]", "JSON array"),
    "number": (b"7", "JSON number"),
    "boolean": (b"true", "JSON boolean"),
    "string": (b'"a"', "JSON string"),
    "null": (b"null", "JSON null"),
    "NaN": (b'{"a": NaN}', "holds NaN"),
    "Infinity": (b'{"a": -Infinity}', "holds -Infinity"),
    "overflow": (b'{"a": 1e999}', "not a finite number"),
    "huge integer": (b'{"a": ' + b"9" * 5000 + b"}", "integer of 5000 digits"),
    "repeated key": (b'{"a": 1, "a": 2}', "repeats the key 'a'"),
    "deep": (b'{"a":' * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("kind", BAD_CONTENT)
def test_refuses_bad_content_in_one_line_that_names_the_file(kind: str, tmp_path: Path) -> None:
    content, expected = BAD_CONTENT[kind]
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_json_object(path, "--specs")
    message = str(caught.value)
    assert expected in message
    assert message.startswith("--specs ")
    assert "bad.json" in message
    assert "\n" not in message


def test_refuses_what_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory"):
        read_json_object(tmp_path, "--specs")
    with pytest.raises(InputError, match="does not exist"):
        read_json_object(tmp_path / "none.json", "--specs")
    with pytest.raises(InputError, match="cannot be read"):
        read_json_object(str(tmp_path / "a\0b"), "--specs")


def test_reads_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_FILE_BYTES", 1000)
    with pytest.raises(InputError, match="larger than 1,000 bytes"):
        read_json_object("/dev/zero", "--specs")
