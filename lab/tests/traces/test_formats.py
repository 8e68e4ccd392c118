"""The formats of traces: Qwen-Bailian's, and HiCache's own fields in the format of Mooncake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import InvalidInput
from hicache_lab.traces.formats import TraceFormat
from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.trace import as_line, read_trace, trace_format, write_trace

MOONCAKE: dict[str, Any] = {"timestamp": 5, "input_length": 100, "output_length": 3, "hash_ids": [7, 8]}
BAILIAN: dict[str, Any] = {
    "chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 132,
    "type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091],
}


def read(folder: Path, *lines: dict[str, Any]) -> list[TraceRequest]:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(read_trace(path))


def refused(folder: Path, *lines: dict[str, Any]) -> str:
    with pytest.raises(InvalidInput) as error:
        read(folder, *lines)
    return str(error.value)


def test_our_fields_are_read_and_written_only_if_they_are_not_the_defaults(tmp_path: Path) -> None:
    (request,) = read(tmp_path, {**MOONCAKE, "block_tokens": 64, "session": 3, "other": "x"})
    assert request == TraceRequest(0, 5, 100, 3, (7, 8), block_tokens=64, session=3)
    assert json.loads(as_line(request)) == {**MOONCAKE, "block_tokens": 64, "session": 3}
    assert json.loads(as_line(TraceRequest(0, 5, 513, 3, (7, 8)))) == {**MOONCAKE, "input_length": 513}
    path = tmp_path / "written.jsonl"
    write_trace(path, [request])
    assert list(read_trace(path)) == [request]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_tokens": 15}, "block_tokens must be a whole number from 16 to 4096, got 15"),
        ({"block_tokens": 4097}, "block_tokens"), ({"block_tokens": 64.0}, "block_tokens"),
        ({"block_tokens": None}, "block_tokens"), ({"block_tokens": True}, "block_tokens"),
        ({"session": -1}, "session must be a whole number from 0"), ({"session": "a"}, "session"),
        ({"block_tokens": 128}, "block_tokens is 128, but 64 in the lines before"),
        ({"hash_ids": [7]}, "hash_ids has 1 blocks, but input_length 100 makes 2 of 64 tokens"),
        ({"parent_chat_id": 4, "chat_id": 5}, "one format per file"),
    ],
)
def test_an_invalid_value_of_our_fields_is_named_with_line_and_field(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    good = {**MOONCAKE, "block_tokens": 64}
    text = refused(tmp_path, good, {**good, **change})
    assert "trace.jsonl, line 2: " in text and said in text


def test_a_line_without_the_block_size_of_the_others_is_rejected(tmp_path: Path) -> None:
    one = {**MOONCAKE, "block_tokens": 64}
    assert "block_tokens is 512, but 64" in refused(tmp_path, one, {**MOONCAKE, "hash_ids": [7]})


def test_a_line_of_the_qwen_bailian_format_is_a_request_of_16_token_blocks(tmp_path: Path) -> None:
    (request,) = read(tmp_path, BAILIAN)
    assert (request.timestamp_ms, request.input_length, request.output_length) == (61114, 40, 132)
    assert (request.block_tokens, request.session, len(request.hash_ids)) == (16, 159, 3)
    assert trace_format(tmp_path / "trace.jsonl") is TraceFormat.BAILIAN
    read(tmp_path, {**MOONCAKE, "hash_ids": [7], "chat_id": 3})
    assert trace_format(tmp_path / "trace.jsonl") is TraceFormat.MOONCAKE


def test_equal_hashes_are_equal_blocks_only_after_equal_prefixes(tmp_path: Path) -> None:
    first, same, other, again = read(
        tmp_path, BAILIAN, {**BAILIAN, "hash_ids": [1089, 1090, 5]}, {**BAILIAN, "hash_ids": [4, 1090, 1091]},
        {**BAILIAN, "hash_ids": [4, 4, 4]},
    )
    assert first.hash_ids[:2] == same.hash_ids[:2] and first.hash_ids[2] != same.hash_ids[2]
    assert not set(first.hash_ids) & set(other.hash_ids)
    assert len(set(again.hash_ids)) == 3 and again.hash_ids[0] == other.hash_ids[0]


def test_a_partial_block_without_a_hash_is_not_equal_to_any_other(tmp_path: Path) -> None:
    short = {**BAILIAN, "hash_ids": [1089, 1090]}
    one, two = read(tmp_path, short, short)
    assert len(one.hash_ids) == len(two.hash_ids) == 3
    assert one.hash_ids[:2] == two.hash_ids[:2] and one.hash_ids[2] != two.hash_ids[2]
    whole, tiny = read(tmp_path, {**short, "input_length": 32}, {**BAILIAN, "input_length": 9, "hash_ids": []})
    assert whole.hash_ids == one.hash_ids[:2] and len(tiny.hash_ids) == 1


def test_the_session_is_the_first_chat_of_a_conversation(tmp_path: Path) -> None:
    chats = [(1, -1), (2, 1), (3, -1), (4, 2), (5, 99), (6, 99), (7, 5)]
    lines = [{**BAILIAN, "chat_id": chat, "parent_chat_id": parent} for chat, parent in chats]
    assert [request.session for request in read(tmp_path, *lines)] == [1, 1, 3, 1, 99, 99, 99]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chat_id": -1}, "chat_id must be"), ({"chat_id": "1"}, "chat_id"), ({"parent_chat_id": -2}, "parent_chat_id"),
        ({"timestamp": 2e12}, "timestamp must be seconds from 0 to 1000000000000"), ({"timestamp": -1.0}, "timestamp"),
        ({"hash_ids": [1]}, "hash_ids has 1 blocks, but input_length 40 makes 2 whole blocks of 16 tokens"),
        ({"hash_ids": [1, 2, 3, 4]}, "hash_ids has 4 blocks"), ({"hash_ids": [1, True, 3]}, "hash_ids[1] must be"),
        ({"hash_ids": [1, 2, -5]}, "hash_ids[2] must be"), ({"hash_ids": 7}, "hash_ids must be a list"),
        ({"input_length": 0}, "input_length"), ({"output_length": None}, "output_length"),
    ],
)
def test_an_invalid_value_of_a_qwen_bailian_line_is_named_with_line_and_field(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    text = refused(tmp_path, BAILIAN, {**BAILIAN, **change})
    assert "trace.jsonl, line 2: " in text and said in text


def test_a_mooncake_line_in_a_qwen_bailian_trace_is_rejected(tmp_path: Path) -> None:
    assert "line 2: chat_id is missing" in refused(tmp_path, BAILIAN, MOONCAKE)


def test_ids_are_the_same_in_each_process(tmp_path: Path) -> None:
    (request,) = read(tmp_path, BAILIAN)
    code = (
        "import sys; from pathlib import Path; from hicache_lab.traces.trace import read_trace; "
        "print(*next(iter(read_trace(Path(sys.argv[1])))).hash_ids)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "trace.jsonl")], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": "5"},
    )
    assert done.stdout.split() == [str(block) for block in request.hash_ids]


# Mooncake with sessions

FIRST: dict[str, Any] = {
    "session_id": "a", "timestamp": 1000, "input_length": 512, "output_length": 50, "hash_ids": [1],
}
SECOND: dict[str, Any] = {
    "session_id": "a", "delay": 30000, "input_length": 600, "output_length": 8, "hash_ids": [1, 2],
}


def test_a_turn_begins_its_delay_after_the_end_of_the_turn_before(tmp_path: Path) -> None:
    other = {**FIRST, "session_id": "b", "timestamp": 5000, "hash_ids": [9]}
    single = {**MOONCAKE, "timestamp": 40000, "input_length": 600}
    requests = read(tmp_path, FIRST, SECOND, {**SECOND, "delay": None}, other, single)
    # 50 tokens take a second, 8 tokens 160 ms.
    assert [(one.timestamp_ms, one.session) for one in requests] == [
        (1000, 0), (5000, 1), (32000, 0), (32160, 0), (40000, None),
    ]
    assert [one.index for one in requests] == [0, 1, 2, 3, 4]
    assert requests[2].hash_ids == (1, 2)
    assert trace_format(tmp_path / "trace.jsonl") is TraceFormat.SESSIONS
    assert list(read_trace(tmp_path / "trace.jsonl", 2)) == requests[:2]


def test_a_recorded_time_has_precedence_over_a_delay(tmp_path: Path) -> None:
    assert read(tmp_path, FIRST, {**SECOND, "timestamp": 2500})[1].timestamp_ms == 2500


def test_other_names_of_the_fields_of_sessions_are_read(tmp_path: Path) -> None:
    names = {"timestamp": "created_time", "delay": "delay_ms", "input_length": "input_tokens",
             "output_length": "output_tokens"}
    lines = [{names.get(name, name): value for name, value in line.items()} for line in (FIRST, SECOND)]
    assert read(tmp_path, *lines) == read(tmp_path, FIRST, SECOND)


def test_a_trace_of_sessions_is_written_with_times_and_numbers_of_sessions(tmp_path: Path) -> None:
    requests = read(tmp_path, FIRST, SECOND)
    write_trace(tmp_path / "written.jsonl", requests)
    assert list(read_trace(tmp_path / "written.jsonl")) == requests
    assert trace_format(tmp_path / "written.jsonl") is TraceFormat.MOONCAKE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"session_id": "b"}, "timestamp is missing"), ({"session_id": ["a"]}, "session_id must be text"),
        ({"delay": -1}, "delay must be milliseconds from 0"), ({"delay": "1"}, "delay"),
        ({"context_mode": "deltas_without_responses"}, "only whole prompts can be read"),
        ({"hash_ids": [1]}, "hash_ids has 1 blocks, but input_length 600 makes 2 of 512 tokens"),
    ],
)
def test_an_invalid_value_of_a_session_is_named_with_line_and_field(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    text = refused(tmp_path, FIRST, {**SECOND, **change})
    assert "trace.jsonl, line 2: " in text and said in text
