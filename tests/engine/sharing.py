"""Engines in processes of their own that share one storage."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.seeds import rng

NEW_TOKENS = 8
PAGE_TOKENS = 16
PROMPT_TOKENS = 20 * PAGE_TOKENS + 5
# What the small model of the package knows.
_VOCABULARY = 2048
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt came to."""

    tokens: list[int]
    storage_hit_tokens: int


def configuration() -> dict[str, Any]:
    """Of an engine with little memory, which waits for storage and always takes what that has."""
    return {
        "page_size": PAGE_TOKENS,
        "device": {"tokens": 4096},
        "host": {"tokens": 8192, "pin": "auto"},
        "load_back_threshold_tokens": PAGE_TOKENS,
        "prefetch": {"policy": "wait_complete", "threshold_tokens": 2 * PAGE_TOKENS},
        "break_even": {"mode": "always"},
    }


def make_prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts that share nothing."""
    numbers = rng(seed)
    return [[numbers.randrange(3, _VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class EngineProcess:
    """An engine that is asked and answers later, so that several can be busy at once."""

    def __init__(self, repository: Path, config_file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine._shared_child", str(config_file)],
            cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        assert self._line() == "ready\n", "the engine did not start; its error is above"

    def ask(self, prompts: Sequence[Sequence[int]]) -> None:
        """Have it serve `prompts` together; `answers` are to be fetched before the next time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()

    def answers(self) -> list[Answer]:
        """What it says to what it was asked last, once all of that is stored."""
        return [Answer(tokens, hits) for tokens, hits in json.loads(self._line())]

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def end(self) -> int:
        """Let it end; its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            return self._process.wait(_WAIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@contextmanager
def engines(repository: Path, config_file: Path, count: int) -> Iterator[list[EngineProcess]]:
    """`count` engines that are ready at once. Each has to end without an error."""
    processes: list[EngineProcess] = []
    try:
        for _ in range(count):
            processes.append(EngineProcess(repository, config_file))
        for process in processes:
            process.wait_until_ready()
        yield processes
    except BaseException:
        for process in processes:
            process.end()
        raise
    assert [process.end() for process in processes] == [0] * count
