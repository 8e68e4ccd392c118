"""Engines in separate processes that share one storage."""

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
# The vocabulary of the bundled model.
_VOCABULARY = 2048
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one prompt."""

    tokens: list[int]
    storage_hit_tokens: int


def configuration() -> dict[str, Any]:
    """Return the configuration of an engine with little memory, which always waits for storage and uses its pages."""
    return {
        "page_size": PAGE_TOKENS,
        "device": {"tokens": 4096},
        "host": {"tokens": 8192, "pin": "auto"},
        "load_back_threshold_tokens": PAGE_TOKENS,
        "prefetch": {"policy": "wait_complete", "threshold_tokens": 2 * PAGE_TOKENS},
        "break_even": {"mode": "always"},
    }


def make_prompts(seed: int, count: int) -> list[list[int]]:
    """Return prompts without common prefixes."""
    numbers = rng(seed)
    return [[numbers.randrange(3, _VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class EngineProcess:
    """An engine process with asynchronous calls, so that several engines can be busy at once."""

    def __init__(self, repository: Path, config_file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.engine._shared_child", str(config_file)],
            cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        assert self._line() == "ready\n", "the engine did not start; see its error above"

    def ask(self, prompts: Sequence[Sequence[int]]) -> None:
        """Send `prompts`, to be served together. Call `answers` before the next call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()

    def answers(self) -> list[Answer]:
        """Wait until the last prompts are served and stored. Return their answers."""
        return [Answer(tokens, hits) for tokens, hits in json.loads(self._line())]

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def end(self) -> int:
        """Wait until the engine ends. Return its exit code."""
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
    """Start `count` engines. Check that each ends without an error."""
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
