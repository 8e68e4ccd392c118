"""Traces from the lines that the engines' own request loggers write."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hicache.errors import InvalidInput
from hicache.lab.traces.engine_logs import SGLANG_LEVEL, SGLANG_TEXT, VLLM_LEVEL
from hicache.lab.traces.record import Recorder

from .process import START_TIMEOUT_S, engine_environ
from .request_logs import OUTPUT, PROMPTS
from .sglang_engine import sglang_environ
from .vllm_engine import vllm_environ

# In blocks of 64 tokens; the first 64 tokens of all prompts are equal.
BLOCKS = [(0, 1), (0,), (0, 2)]


def log_lines(engine: str, *arguments: str) -> list[bytes]:
    """Return the lines that the request logger of an engine writes to standard output."""
    environ = engine_environ(vllm_environ() if engine == "vllm" else sglang_environ())
    return subprocess.run(
        [sys.executable, "-m", "tests.engines.request_logs", engine, *arguments], env=environ, check=True,
        stdout=subprocess.PIPE, timeout=START_TIMEOUT_S,
    ).stdout.splitlines(keepends=True)  # fmt: skip


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_debug_log_of_vllm_becomes_a_trace(form: str) -> None:
    recorder = Recorder(64)
    requests = list(recorder.requests(log_lines("vllm", form, "DEBUG")))
    assert [request.input_length for request in requests] == [len(prompt) for prompt in PROMPTS]
    assert [request.hash_ids for request in requests] == BLOCKS
    assert [request.output_length for request in requests] == [len(OUTPUT), len(OUTPUT), 0]
    assert (recorder.without_output, recorder.left_out) == (1, {})


def test_an_info_log_of_vllm_is_rejected_with_the_level() -> None:
    with pytest.raises(InvalidInput, match=VLLM_LEVEL):
        list(Recorder(64).requests(log_lines("vllm", "text", "INFO")))


def test_a_json_log_of_sglang_at_level_3_becomes_a_trace() -> None:
    recorder = Recorder(64)
    requests = list(recorder.requests(log_lines("sglang", "json", "3")))
    # The last one is the prompt of text whose ids were returned.
    assert [request.input_length for request in requests] == [len(prompt) for prompt in (*PROMPTS, PROMPTS[0])]
    assert [request.hash_ids for request in requests] == [*BLOCKS, BLOCKS[0]]
    assert [request.output_length for request in requests] == [3, 0, 3, 3]
    assert recorder.left_out == {SGLANG_TEXT: 1}


@pytest.mark.parametrize(("form", "level"), [("json", "1"), ("text", "3")])
def test_another_log_of_sglang_is_rejected_with_the_flags(form: str, level: str) -> None:
    with pytest.raises(InvalidInput, match=SGLANG_LEVEL):
        list(Recorder(64).requests(log_lines("sglang", form, level)))
