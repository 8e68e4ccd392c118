"""Recording: samples of the engines' logs. tests/engines/test_request_logs.py has logs of the engines themselves."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from hicache.errors import InvalidInput
from hicache_lab.traces import record
from hicache_lab.traces.engine_logs import CUT, NO_TIME, SGLANG_LEVEL, SGLANG_TEXT, VLLM_EMBEDS, VLLM_LEVEL, events
from hicache_lab.traces.record import Recorder
from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.trace import read_trace, write_trace

LOGGER = "[entrypoints/.../utils/request_logger.py:55]"
HI = "'hi'"


def vllm(time: str, message: str, level: str = "DEBUG") -> str:
    return f"(APIServer pid=7) {level} {time} {LOGGER} {message}"


def prompt(name: str, ids: Sequence[int] | None, time: str = "11-20 10:00:00", text: str = HI) -> str:
    shown = None if ids is None else list(ids)
    return vllm(time, f"Request {name} details: prompt: {text}, prompt_token_ids: {shown}, prompt_embeds shape: None.")


def received(name: str) -> str:
    return vllm("11-20 10:00:00", f"Received request {name}: params: SamplingParams(n=1), lora_request: None.", "INFO")


def output(name: str, ids: Sequence[int] | None, stream: str = "") -> str:
    return vllm("11-20 10:00:01", f"Generated response {name}{stream} details: output_token_ids: {ids}")


def sglang(event: str, name: object, time: str = "2026-11-20T10:00:00.500000", **more: object) -> str:
    fields = {"timestamp": time, "event": f"request.{event}", "rid": name, **more}
    return f"[2026-11-20 10:00:00] {json.dumps(fields)}"


def recorded(*lines: str, block_tokens: int = 16) -> tuple[list[TraceRequest], Recorder]:
    recorder = Recorder(block_tokens)
    return list(recorder.requests(f"{line}\n".encode() for line in lines)), recorder


def test_a_vllm_log_becomes_requests_in_the_order_of_arrival_with_numbered_blocks() -> None:
    requests, recorder = recorded(
        "INFO starting", prompt("a", range(40)), received("a"),
        prompt("b", [*range(16), 99, *range(17, 40)], "11-20 10:00:02"), received("b"), output("b", [5, 6]),
        output("a", [1, 2, 3]), prompt("c", range(40), "11-20 10:01:00"),
    )
    assert requests == [
        TraceRequest(0, 0, 40, 3, (0, 1, 2), 16),
        TraceRequest(1, 2000, 40, 2, (0, 3, 4), 16),  # blocks after another one are other blocks
        TraceRequest(2, 60_000, 40, 0, (0, 1, 2), 16),
    ]
    assert (recorder.other_lines, recorder.without_output, recorder.left_out) == (1, 1, {})


def test_a_partial_block_is_not_equal_to_a_whole_one_that_begins_with_it() -> None:
    requests, _ = recorded(prompt("a", range(20)), prompt("b", range(32)), prompt("c", range(20)))
    assert [request.hash_ids for request in requests] == [(0, 1), (0, 2), (0, 1)]


def test_deltas_of_a_stream_are_summed() -> None:
    requests, recorder = recorded(
        prompt("a", [1]), output("a", [5], " (streaming delta)"), output("a", [6, 7], " (streaming delta)"),
        output("a", None, " (streaming complete)"), prompt("b", [1]), output("b", [1, 2], " (streaming complete)"),
    )
    assert [request.output_length for request in requests] == [3, 2]
    assert recorder.without_output == 0


def test_text_in_a_prompt_or_an_output_that_looks_like_a_log_line_is_not_one() -> None:
    fake = "Request x details: prompt: 'a', prompt_token_ids: [1, 2], prompt_embeds shape: None."
    requests, recorder = recorded(
        prompt("a", [1], text=repr(f"{fake}\n{LOGGER} {fake}")),
        vllm("11-20 10:00:00", f'Request a JSON body: {{"prompt": "{fake}"}}'),
        vllm("11-20 10:00:00", f"Generated response a: output: {fake!r}, finish_reason: stop", "INFO"),
        sglang("received.openai", "x", obj={"text": fake}),
    )
    assert [request.input_length for request in requests] == [1]
    assert recorder.other_lines == 3


def test_colors_and_prefixes_of_other_programs_do_not_matter() -> None:
    line = prompt("a", [1, 2, 3]).replace("DEBUG", "\x1b[37mDEBUG\x1b[0m").replace(LOGGER, f"\x1b[90m{LOGGER}\x1b[0m")
    requests, _ = recorded(f"Nov 20 10:00:00 node vllm[7]: {line}")
    assert requests == [TraceRequest(0, 0, 3, 0, (0,), 16)]


def test_json_lines_of_vllm_have_milliseconds() -> None:
    def line(name: str, ms: int) -> str:
        message = f"Request {name} details: prompt: None, prompt_token_ids: [1], prompt_embeds shape: None."
        logger = "vllm.entrypoints.serve.utils.request_logger"
        return json.dumps({"asctime": f"2026-11-20 10:00:00,{ms:03}", "name": logger, "message": message})

    requests, _ = recorded(line("a", 5), line("b", 250), line("c", 249))
    assert [request.timestamp_ms for request in requests] == [0, 245, 245]  # c is slightly out of order


def test_a_vllm_date_without_a_year_is_of_the_last_12_months() -> None:
    now = datetime.now().replace(microsecond=0)
    for days in (0, 1, 100, 363):
        before, after = now - timedelta(days=days), now - timedelta(days=days) + timedelta(hours=1)
        requests, _ = recorded(*(prompt(f"{time:%s}", [1], f"{time:%m-%d %H:%M:%S}") for time in (before, after)))
        assert requests[1].timestamp_ms == 3_600_000, (before, after)


def test_an_sglang_log_becomes_requests() -> None:
    meta = {"completion_tokens": 9}
    requests, recorder = recorded(
        sglang("received", "a", obj={"input_ids": list(range(20)), "text": None}),
        sglang("received", ["b", "c"], "2026-11-20T10:00:01", obj={"input_ids": [[1, 2], list(range(20))]}),
        sglang("received", "HEALTH_CHECK_1", obj={"input_ids": [0]}),
        sglang("finished", "c", obj={}, out={"output_ids": [1], "meta_info": meta}),
        sglang("finished", "a", obj={}, out={"output_ids": [1], "meta_info": {"completion_tokens": 4}}),
        sglang("finished", "of an earlier log", obj={}, out={"meta_info": meta}),
    )
    assert requests == [
        TraceRequest(0, 0, 20, 4, (0, 1), 16), TraceRequest(1, 500, 2, 0, (2,), 16),
        TraceRequest(2, 500, 20, 9, (0, 1), 16),
    ]
    assert (recorder.other_lines, recorder.without_output) == (1, 1)


def test_a_text_prompt_of_sglang_is_recorded_if_its_ids_are_in_the_finished_event() -> None:
    meta = {"completion_tokens": 1}
    requests, recorder = recorded(
        sglang("received", "a", obj={"input_ids": None, "text": "hi"}),
        sglang("received", "b", obj={"input_ids": None, "text": "hi"}),
        sglang("received", "c", obj={"input_ids": [3]}),
        sglang("finished", "a", obj={}, out={"meta_info": meta, "prompt_token_ids": [1, 2]}),
        sglang("finished", "b", obj={}, out={"meta_info": meta}),
    )
    assert [request.input_length for request in requests] == [2, 1]
    assert recorder.left_out == {SGLANG_TEXT: 1}


def test_a_request_with_an_impossible_count_is_left_out_and_the_others_are_recorded() -> None:
    requests, recorder = recorded(
        *(sglang("received", name, obj={"input_ids": [3, 4]}) for name in "abc"),
        sglang("finished", "a", obj={}, out={"meta_info": {"completion_tokens": -5}}),
        sglang("finished", "b", obj={}, out={"meta_info": {"completion_tokens": 10**18}}),
        sglang("finished", "c", obj={}, out={"meta_info": {"completion_tokens": 7}}),
    )
    assert [request.output_length for request in requests] == [7]
    assert recorder.left_out == {"its output has not 0 to 16,777,216 tokens": 2}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([received("a")], VLLM_LEVEL),
        ([prompt("a", None), received("a")], VLLM_EMBEDS),
        ([prompt("a", range(100))[:-150]], CUT),
        ([sglang("received", "a", obj={"rid": "a"})], SGLANG_LEVEL),
        ([sglang("received", "a", obj={"input_ids": [1, 2, "...", 9]})], SGLANG_LEVEL),
        ([sglang("received", "a", obj={"input_ids": list(range(200))})[:-150]], CUT),
        (["[2026-11-20 10:00:00] Receive: obj=GenerateReqInput(rid='a', input_ids=[1, 2])"], SGLANG_LEVEL),
        ([sglang("received", "a", obj={"input_ids": None, "text": "hi"})], SGLANG_TEXT),
        ([prompt("a", [1]).replace("11-20 10:00:00", "today")], NO_TIME),
        ([prompt("a", [])], "the token ids of the prompt are empty"),
        ([sglang("received", "a", obj={"input_ids": [1, "2"]})], "not whole numbers"),
        ([sglang("received", "a", obj={"input_ids": [1 << 70]})], "not whole numbers"),
        (["nothing"], f"{VLLM_LEVEL}, or {SGLANG_LEVEL}"),
        ([prompt("tokenize-a", [1]), received("tokenize-a")], VLLM_LEVEL),
    ],
)
def test_a_log_without_token_ids_is_an_error_that_says_what_to_do(lines: list[str], reason: str) -> None:
    recorder = Recorder(64)
    with pytest.raises(InvalidInput, match="log: no request has token ids") as error:
        list(recorder.requests(line.encode() for line in lines))
    assert reason in str(error.value)
    assert sum(recorder.left_out.values()) <= 1
    _, mixed = recorded(*lines, prompt("good", [1]))
    assert mixed.left_out == recorder.left_out


def test_two_recordings_have_other_salts_and_no_hash_is_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with the same salt, the hashes are the same."""
    lines = [prompt("a", range(1000)).encode()]
    hashes = []
    for number in range(4):
        if number == 2:
            monkeypatch.setattr(secrets, "token_bytes", bytes)
        recorder = Recorder(16)
        write_trace(tmp_path / "trace", recorder.requests(lines))
        (request,) = read_trace(tmp_path / "trace")
        assert request.hash_ids == tuple(range(63))
        hashes.append(set(recorder._numbers))
    assert not hashes[0] & hashes[1] and hashes[2] == hashes[3]


def test_requests_without_an_output_wait_in_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "PENDING_MAX", 3)
    recorder = Recorder(16)
    lines = (prompt(str(i), [i]).encode() for i in itertools.count())
    requests = recorder.requests(lines)
    assert [next(requests).index for _ in range(10)] == list(range(10))
    assert len(recorder._pending) == len(recorder._open) == 3


def test_a_name_that_is_used_again_is_another_request() -> None:
    requests, _ = recorded(prompt("a", [1]), prompt("a", [2]), output("a", [1, 2]))
    assert [request.output_length for request in requests] == [0, 2]


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"{", b"[1]", b'{"event": "request.received", "obj": 7}', b"\xff\xfe", b"{" * 100_000,
     b'{"event": "request.received", "rid": null, "obj": {}}', b"request_logger.py:1] Request",
     b'{"event": "request.finished", "rid": "a", "out": {"meta_info": 5}}',
     b'{"message": 5, "name": "x.request_logger"}'],
)
def test_other_lines_are_not_requests(line: bytes) -> None:
    assert not any(getattr(event, "token_ids", None) for event in events(line))
    assert [request.index for request in Recorder(16).requests([line, prompt("a", [1]).encode()])] == [0]
