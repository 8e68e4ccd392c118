"""Traces from the lines that the engines' own request loggers write."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hicache.errors import InvalidInput
from hicache_lab.traces.engine_logs import SGLANG_LEVEL, SGLANG_TEXT, VLLM_LEVEL
from hicache_lab.traces.record import Recorder

from .process import START_TIMEOUT_S, engine_environ
from .request_logs import END, OUTPUT, PROMPTS
from .sglang_engine import sglang_environ
from .vllm_engine import vllm_environ

# In blocks of 64 tokens; the first 64 tokens of all prompts are equal.
BLOCKS = [(0, 1), (0,), (0, 2)]


def logs_of(engine: str, *names: str) -> dict[str, list[bytes]]:
    """Return the lines that the request logger of an engine writes to standard output, by form and level."""
    environ = engine_environ(vllm_environ() if engine == "vllm" else sglang_environ())
    lines = subprocess.run(
        [sys.executable, "-m", "tests.engines.request_logs", engine, *names], env=environ, check=True,
        stdout=subprocess.PIPE, timeout=START_TIMEOUT_S,
    ).stdout.splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines) if line == END]
    begins = [0, *(end + 1 for end in ends)]
    return {name: lines[begin:end] for name, begin, end in zip(names, begins, ends, strict=False)}


@pytest.fixture(scope="module")
def vllm_logs() -> dict[str, list[bytes]]:
    return logs_of("vllm", "text:DEBUG", "json:DEBUG", "text:INFO")


@pytest.fixture(scope="module")
def sglang_logs() -> dict[str, list[bytes]]:
    return logs_of("sglang", "json:3", "json:1", "text:3")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_debug_log_of_vllm_becomes_a_trace(vllm_logs: dict[str, list[bytes]], form: str) -> None:
    recorder = Recorder(64)
    requests = list(recorder.requests(vllm_logs[f"{form}:DEBUG"]))
    assert [request.input_length for request in requests] == [len(prompt) for prompt in PROMPTS]
    assert [request.hash_ids for request in requests] == BLOCKS
    assert [request.output_length for request in requests] == [len(OUTPUT), len(OUTPUT), 0]
    assert (recorder.without_output, recorder.left_out) == (1, {})


def test_an_info_log_of_vllm_is_rejected_with_the_level(vllm_logs: dict[str, list[bytes]]) -> None:
    with pytest.raises(InvalidInput, match=VLLM_LEVEL):
        list(Recorder(64).requests(vllm_logs["text:INFO"]))


def test_a_json_log_of_sglang_at_level_3_becomes_a_trace(sglang_logs: dict[str, list[bytes]]) -> None:
    recorder = Recorder(64)
    requests = list(recorder.requests(sglang_logs["json:3"]))
    # The last one is the prompt of text whose ids were returned.
    assert [request.input_length for request in requests] == [len(prompt) for prompt in (*PROMPTS, PROMPTS[0])]
    assert [request.hash_ids for request in requests] == [*BLOCKS, BLOCKS[0]]
    assert [request.output_length for request in requests] == [3, 0, 3, 3]
    assert recorder.left_out == {SGLANG_TEXT: 1}


@pytest.mark.parametrize("log", ["json:1", "text:3"])
def test_another_log_of_sglang_is_rejected_with_the_flags(sglang_logs: dict[str, list[bytes]], log: str) -> None:
    with pytest.raises(InvalidInput, match=SGLANG_LEVEL):
        list(Recorder(64).requests(sglang_logs[log]))
