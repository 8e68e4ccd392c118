"""Reading and writing traces: valid traces, and the errors for invalid ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import InvalidInput
from hicache_lab.traces.request import TIMESTAMP_MS_MAX, TraceRequest
from hicache_lab.traces.trace import LINE_BYTES_MAX, as_line, read_trace, write_trace

LINE = '{"timestamp": 27482, "input_length": 1955, "output_length": 52, "hash_ids": [46, 47, 48, 2353]}'
GOOD: dict[str, Any] = json.loads(LINE)


def wrong(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidInput) as refused:
        list(read_trace(path))
    return str(refused.value)


def test_a_line_of_the_public_format_is_a_request_and_is_written_in_the_same_form(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + "\n")
    (request,) = read_trace(path)
    assert request == TraceRequest(0, 27482, 1955, 52, (46, 47, 48, 2353))
    assert request.whole_blocks == 3 and as_line(request) == LINE


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [TraceRequest(0, 0, 512, 0, (7,)), TraceRequest(1, 1.5, 513, 9, (7, 8))]
    assert write_trace(path, requests) == 2
    assert list(read_trace(path)) == requests


def test_blank_lines_and_other_fields_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + json.dumps({**GOOD, "type": "text", "turn": 2}) + "\n\n" + LINE + "\n")
    assert [request.index for request in read_trace(path)] == [0, 1]


def test_a_trace_is_read_lazily_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE}\nno request\n")
    assert len(list(read_trace(path, 1))) == 1
    requests = read_trace(path)
    assert next(requests).index == 0
    with pytest.raises(InvalidInput, match="line 2"):
        next(requests)


@pytest.mark.parametrize("name", list(GOOD))
def test_a_missing_field_is_named_with_file_and_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "some.jsonl"
    text = wrong(path, LINE + "\n" + json.dumps({key: value for key, value in GOOD.items() if key != name}))
    assert f"{path}, line 2: {name} is missing" in text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("timestamp", -1, "timestamp must be milliseconds"), ("timestamp", "0", "timestamp"),
        ("timestamp", True, "timestamp"), ("timestamp", 1e400, "timestamp"), ("timestamp", None, "timestamp"),
        ("input_length", 0, "input_length must be a whole number from 1"), ("input_length", 1.5, "input_length"),
        ("input_length", 1 << 40, "input_length"), ("input_length", True, "input_length"),
        ("output_length", -1, "output_length must be a whole number from 0"), ("output_length", "5", "output_length"),
        ("hash_ids", "46", "hash_ids must be a list"), ("hash_ids", {"0": 1}, "hash_ids must be a list"),
        ("hash_ids", [46, 47], "hash_ids has 2 blocks, but input_length 1955 makes 4"),
        ("hash_ids", [46, -1, 48, 9], "hash_ids[1] must be a whole number"),
        ("hash_ids", [46, 47, 48, 1 << 64], "hash_ids[3]"), ("hash_ids", [46, 47, 48, None], "hash_ids[3]"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(tmp_path: Path, name: str, value: object, said: str) -> None:
    text = wrong(tmp_path / "some.jsonl", json.dumps({**GOOD, name: value}))
    assert "line 1: " + name in text
    assert said in text


NO_TRACES: list[tuple[str | bytes, str]] = [
    *((f"{LINE}\n{line}\n", "line 2: expected")
      for line in ("{", "[1, 2]", "7", "null", '"text"', "\0", "[" * 100_000)),
    (b"\xff\xfe\xfd\n", "line 1: expected one JSON object"),
    (b" " * (LINE_BYTES_MAX + 10), "line 1: is longer"),
    (LINE[:-1] + ', "timestamp": 1}', "appears twice"),
    ("\n\n", "is empty; use a file"),
]


def test_a_file_that_is_not_a_trace_is_rejected_with_the_line(tmp_path: Path) -> None:
    for content, said in NO_TRACES:
        assert said in wrong(tmp_path / "some.jsonl", content)


def test_a_file_that_cannot_be_read_or_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"missing\.jsonl: cannot be read"):
        list(read_trace(tmp_path / "missing.jsonl"))
    with pytest.raises(InvalidInput, match="cannot be written"):
        write_trace(tmp_path / "no" / "folder.jsonl", [TraceRequest(0, 0, 1, 1, (0,))])


def test_an_interrupted_write_leaves_the_old_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + "\n")

    def breaking() -> Iterator[TraceRequest]:
        yield TraceRequest(0, 0, 1, 1, (0,))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(path, breaking())
    assert path.read_text() == LINE + "\n"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_a_trace_keeps_links_and_paths_that_are_not_files(tmp_path: Path) -> None:
    link, path = tmp_path / "link", tmp_path / "trace.jsonl"
    link.symlink_to(path)
    assert write_trace(link, [TraceRequest(0, 0, 1, 1, (0,))]) == 1
    assert link.is_symlink() and len(list(read_trace(path))) == 1
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidInput, match="not a regular file"):
        write_trace(pipe, [])
    assert pipe.is_fifo()


_hostile = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([10**400, -(10**400), 1e308, 5e-324, 1 << 63, (1 << 63) - 1, 1 << 24, [[[]]], [None], [1.0]]),
)


@given(fields=st.dictionaries(st.sampled_from(list(GOOD)) | st.text(max_size=4), _hostile, max_size=5))
def test_any_values_are_a_request_or_rejected_with_their_line(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | fields) + "\n")
    read_or_refused(path, line=2)


@given(line=st.binary(max_size=60) | st.text(alphabet='{}[]:,"\\\0 019.eE+-tfnulNaIity', max_size=40).map(str.encode))
def test_any_bytes_are_a_request_or_rejected_with_their_line(
    tmp_path_factory: pytest.TempPathFactory, line: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line.replace(b"\n", b" ") + b"\n")
    read_or_refused(path, line=2)


@pytest.mark.parametrize(
    "value",
    ["9" * 5000, "1e400", "-1e400", "NaN", "Infinity", "[" * 500 + "]" * 500, "[" * 200_000,
     '{"a":' * 500 + "1" + "}" * 500, '"\\ud800"', "-0", "-5", "1" + "0" * 400],
    ids=lambda value: value[:12],
)
def test_a_hostile_value_is_rejected_with_its_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "some.jsonl"
    for name in GOOD:
        others = {other: field for other, field in GOOD.items() if other != name}
        path.write_text(f'{json.dumps(GOOD)}\n{json.dumps(others)[:-1]}, "{name}": {value}}}\n')
        read_or_refused(path, line=2)


def read_or_refused(path: Path, *, line: int) -> None:
    try:
        for request in read_trace(path):
            assert float(request.timestamp_ms) >= 0 and request.timestamp_ms <= TIMESTAMP_MS_MAX
    except InvalidInput as error:
        assert f", line {line}: " in str(error) and len(str(error)) < 2000
