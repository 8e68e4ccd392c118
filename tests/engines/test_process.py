"""The test harness for engines: failures of an engine fail its calls and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .process import EngineFailed, EngineProcess

MODULE = "tests.engines.fragile"


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EngineProcess]:
    with EngineProcess(MODULE, {}, folder=tmp_path) as process:
        yield process


def test_a_step_that_raises_fails_its_call_with_the_log_and_later_calls_work(process: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match=r"(?s)ZeroDivisionError.*some text on stdout"):
        process.call("raise")
    assert process.call("echo", value=[1, "a"]) == [1, "a"]


def test_an_engine_that_dies_fails_its_call(process: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match="the engine has ended"):
        process.call("die")


def test_an_engine_that_hangs_fails_its_call_and_is_killed(process: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match=r"no answer within 0\.1 s"):
        process.call("hang", timeout_s=0.1)
    assert not process.pids()
    with pytest.raises(EngineFailed, match="the engine has ended"):
        process.call("echo", value=1)


def test_an_engine_that_does_not_start_reports_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"(?s)did not start.*ValueError: no such model"):
        EngineProcess(MODULE, {"error": "no such model"}, folder=tmp_path)


def test_a_killed_engine_leaves_no_process_and_no_shared_memory(process: EngineProcess) -> None:
    name, child = process.call("left")
    assert child in process.pids() and Path("/dev/shm", name).exists()
    process.kill()
    assert not process.pids() and not Path("/dev/shm", name).exists()
