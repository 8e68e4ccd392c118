"""The test harness for engines: failures of an engine fail its calls and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .process import EngineFailed, EngineProcess

MODULE = "tests.engines.fragile"


@pytest.mark.parametrize(
    ("step", "options", "reason"),
    [("raise", {}, "(?s)ZeroDivisionError.*some text on stdout"), ("die", {}, "the engine has ended"),
     ("hang", {"timeout_s": 0.1}, r"no answer within 0\.1 s")],
)
def test_a_step_that_fails_fails_its_call_with_the_reason_and_leaves_nothing(
    tmp_path: Path, step: str, options: dict[str, Any], reason: str
) -> None:
    with EngineProcess(MODULE, {}, folder=tmp_path) as process:
        name, child = process.call("left")
        assert child in process.pids() and Path("/dev/shm", name).exists()
        with pytest.raises(EngineFailed, match=reason):
            process.call(step, **options)
        if step == "raise":
            assert process.call("left") == [name, child], "later calls work"
    assert not process.pids() and not Path("/dev/shm", name).exists()


def test_an_engine_that_does_not_start_reports_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"(?s)did not start.*ValueError: no such model"):
        EngineProcess(MODULE, {"error": "no such model"}, folder=tmp_path)


def test_the_file_of_a_scheduler_that_does_not_start_is_removed_and_that_of_another_engine_is_not(
    tmp_path: Path,
) -> None:
    dead, alive = (Path(f"/dev/shm/sglang_loads_test-{os.getpid()}-{name}.shm") for name in ("dead", "alive"))
    try:
        with alive.open("wb"):
            with pytest.raises(EngineFailed):
                EngineProcess(MODULE, {"error": "no such model", "leaves": [str(dead)]}, folder=tmp_path)
            assert (dead.exists(), alive.exists()) == (False, True)
    finally:
        for path in (dead, alive):
            path.unlink(missing_ok=True)
