"""Ranks as processes over gloo decide identically, and end with an error when a rank is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.cache._rank_child import Outcome, Task

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 100.0
DEADLINE_S = 3.0


class Processes:
    """The ranks of one run. `stop` ends all processes, also those stopped by a signal."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, task: Task) -> None:
        for rank in range(task.size):
            argument = json.dumps(asdict(replace(task, rank=rank)))
            command = [sys.executable, "-m", "tests.cache._rank_child", argument]
            self.children.append(subprocess.Popen(command, cwd=ROOT))

    def wait(self, *ranks: int) -> list[int]:
        """Wait for some ranks; return their exit codes."""
        deadline = time.monotonic() + WAIT_S
        return [self.children[rank].wait(max(0.0, deadline - time.monotonic())) for rank in ranks]

    def stop(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.stop()


def outcome(folder: Path, rank: int) -> Outcome:
    return Outcome(**json.loads((folder / f"rank-{rank}.json").read_text()))


@pytest.mark.parametrize(("size", "seeds"), [(2, [1, 2]), (4, [5])])
def test_processes_with_different_hits_speeds_pools_and_faults_decide_identically(
    tmp_path: Path, processes: Processes, size: int, seeds: list[int]
) -> None:
    processes.start(Task(str(tmp_path), 0, size, seeds, deadline_s=60.0))
    assert processes.wait(*range(size)) == [0] * size
    outcomes = [outcome(tmp_path, rank) for rank in range(size)]
    for other in outcomes:
        assert other.error is None and other.closed
        assert other.wrong_pages == 0
        assert other.digests == outcomes[0].digests
        assert other.storage_hit_tokens == outcomes[0].storage_hit_tokens
    assert outcomes[0].storage_hit_tokens > 0


@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP])
def test_when_a_rank_dies_or_stops_the_others_end_with_an_error(
    tmp_path: Path, processes: Processes, lost: signal.Signals
) -> None:
    processes.start(Task(str(tmp_path), 0, 3, [1], deadline_s=DEADLINE_S, signal=lost))
    assert processes.wait(0, 1) == [0, 0]
    for rank in range(2):
        end = outcome(tmp_path, rank)
        assert end.error is not None and "another rank is gone or did not answer" in end.error
        assert end.closed, "the operations of this rank have ended"
        assert end.wrong_pages == 0
