"""`hicache trace record` and `show` as a user runs them: files, pipes, signals, messages, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hicache.cli.main import main
from hicache_lab.cli import trace as trace_command
from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.trace import read_trace
from tests.cli.processes import TIMEOUT_S


def line(name: str, ids: list[int]) -> str:
    details = f"Request {name} details: prompt: None, prompt_token_ids: {ids}, prompt_embeds shape: None."
    return f"(APIServer pid=7) DEBUG 11-20 10:00:00 [entrypoints/.../utils/request_logger.py:55] {details}\n"


LOG = f"starting\n{line('a', [1, 2, 3])}{line('b', list(range(100)))}"
OUTPUT = line("a", []).partition("Request")[0] + "Generated response a details: output_token_ids: [9]\n"
REQUESTS = [TraceRequest(0, 0, 3, 0, (0,), 64), TraceRequest(1, 0, 100, 0, (1, 2), 64)]


def invoke(*arguments: str, given: str = "") -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["trace", *arguments], input=given)


def test_a_log_is_converted_and_the_notes_are_on_standard_error(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "trace.jsonl"
    log.write_text(LOG + line("c", []))
    result = invoke("record", str(log), "-o", str(path))
    assert (result.exit_code, result.stdout) == (0, f"2 requests written to {path}\n")
    assert result.stderr.splitlines() == [
        "2 requests without a logged output, and so with output_length 0; vLLM logs outputs with --enable-log-outputs",
        "1 request left out: the token ids of the prompt are empty or not whole numbers",
        "1 other line skipped",
    ]
    assert list(read_trace(path)) == REQUESTS


def test_a_log_is_read_from_standard_input_and_a_trace_written_to_standard_output(tmp_path: Path) -> None:
    result = invoke("record", "-o", "-", "--block-tokens", "512", given=LOG)
    assert result.exit_code == 0
    assert [json.loads(one) for one in result.stdout.splitlines()] == [
        {"timestamp": 0, "input_length": 3, "output_length": 0, "hash_ids": [0]},
        {"timestamp": 0, "input_length": 100, "output_length": 0, "hash_ids": [1]},
    ]


def test_the_log_itself_is_not_replaced_by_its_trace(tmp_path: Path) -> None:
    log, other = tmp_path / "log", tmp_path / "link"
    log.write_text(LOG)
    other.symlink_to(log)
    result = invoke("record", str(log), "-o", str(other), "--force")
    assert result.exit_code == 2 and "is the log itself" in result.stderr
    assert log.read_text() == LOG


def test_a_log_without_requests_is_an_error_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    result = invoke("record", "-o", str(path), given="starting\n")
    assert result.exit_code == 2 and "no request has token ids; start vLLM with --enable-log-requests" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_not_replaced_without_force(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("precious")
    result = invoke("record", "-o", str(path), given=LOG)
    assert result.exit_code == 2 and "--force" in result.stderr and path.read_text() == "precious"
    assert invoke("record", "-o", str(path), "--force", given=LOG).exit_code == 0
    assert list(read_trace(path)) == REQUESTS


@pytest.mark.parametrize("arguments", [["--block-tokens", "15"], ["--block-tokens", "4097"], ["missing"], ["."]])
def test_invalid_arguments_are_exit_code_2(tmp_path: Path, arguments: list[str]) -> None:
    result = invoke("record", *arguments, "-o", str(tmp_path / "x"), given=LOG)
    assert result.exit_code == 2 and result.stderr, result.output
    assert invoke("record", given=LOG).exit_code == 2


def test_a_line_that_is_too_long_is_skipped_and_the_next_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_command, "LOG_LINE_BYTES_MAX", 1000)
    result = invoke("record", "-o", "-", given=line("a", list(range(1000))) + LOG + line("b", [5] * 1000)[:-1])
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 2
    assert "3 other lines skipped" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_recording_of_a_stream_with_all_requests_so_far(
    repository: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "hicache", "trace", "record", "-", "-o", "-"]
    environ = {**os.environ, "PYTHONPATH": str(repository)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(LOG + OUTPUT)
        process.stdin.flush()
        # The first request appears with its output. The second one has none, and waits for the end.
        assert json.loads(process.stdout.readline())["input_length"] == 3
        process.send_signal(number)
        assert json.loads(process.stdout.read())["input_length"] == 100
        assert process.wait(TIMEOUT_S) == 0


def test_show_names_the_format_its_blocks_and_its_sessions(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    chats = [(1, -1, [1, 2]), (2, 1, [1, 2, 3]), (3, -1, [1, 5])]
    path.write_text("".join(
        json.dumps({"chat_id": chat, "parent_chat_id": parent, "timestamp": chat, "input_length": 16 * len(ids),
                    "output_length": 1, "hash_ids": ids}) + "\n" for chat, parent, ids in chats
    ))
    result = invoke("show", str(path))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "format              Qwen-Bailian",
        "requests            3 within 3 s",
        "prompt tokens       112, median 32, longest 48",
        "output tokens       3, median 1, longest 1",
        "blocks of 16        4 different ones",
        "sessions            2",
        # Two blocks and the output of the first turn, and one block of the other conversation.
        "seen before         49 prompt tokens, 43.8 %",
    ]
    facts = json.loads(invoke("show", str(path), "--json").stdout)
    assert (facts["format"], facts["block_tokens"], facts["sessions"]) == ("Qwen-Bailian", 16, 2)
    invoke("generate", str(path), "--requests", "5", "--force")
    lines = invoke("show", str(path)).stdout.splitlines()
    assert lines[0] == "format              Mooncake"
    assert any(one.startswith("blocks of 512 ") for one in lines) and not any("sessions" in one for one in lines)
