"""Reading traces of request lengths: the real file, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3backend.common.errors import InputError
from k3backend.common.request_trace import TraceRequest, read_trace

TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_lengths.csv"


def test_the_real_trace_is_read_whole_and_in_order() -> None:
    requests = read_trace(TRACE)
    assert len(requests) == 4000
    assert requests[0] == TraceRequest(0, 6758, 500)
    assert requests[0].total_tokens == 7258
    assert read_trace(TRACE, 3) == requests[:3]


def test_columns_may_come_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("output_tokens,other,timestamp_ms,input_tokens\n3,x,5,7\n")
    assert read_trace(path) == [TraceRequest(5, 7, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column timestamp_ms"),
        ("timestamp_ms,input_tokens\n1,2\n", "no column output_tokens"),
        ("timestamp_ms,input_tokens,output_tokens\n", "holds no request"),
        ("timestamp_ms,input_tokens,output_tokens\n0,0,1\n", "line 2: input_tokens is '0'"),
        ("timestamp_ms,input_tokens,output_tokens\n0,5,1\n0,-3,1\n", "line 3: input_tokens"),
        ("timestamp_ms,input_tokens,output_tokens\n0,5\n", "output_tokens is ''"),
        ("timestamp_ms,input_tokens,output_tokens\n0,1e3,4\n", "input_tokens is '1e3'"),
    ],
)
def test_bad_traces_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(path)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    path = tmp_path / "trace.csv"
    path.write_bytes(b"timestamp_ms,input_tokens,output_tokens\n\xff\xfe,1,1\n")
    with pytest.raises(InputError, match="not a CSV text file"):
        read_trace(path)
