"""Waiting for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")

# Far longer than any expected wait in tests.
WAIT_S = 60.0
# Short, but long enough for other threads to run.
PAUSE_S = 0.001


def wait_for(
    condition: Callable[[], bool],
    meanwhile: Callable[[], object] = lambda: None,
    *,
    timeout_s: float = WAIT_S,
    pause_s: float = PAUSE_S,
) -> None:
    """Wait until `condition` is true. Call `meanwhile`, which must be short, and pause between the checks."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition is still false after {timeout_s:g} s"
        meanwhile()
        time.sleep(pause_s)


def wait_until_made(make: Callable[[], Made], refusal: type[Exception]) -> Made:
    """Return `make()`. Call it again while it raises `refusal`: a busy machine may exceed the short timeouts of a
    test."""
    made: list[Made] = []

    def attempt() -> None:
        with suppress(refusal):
            made.append(make())

    wait_for(lambda: bool(made), attempt)
    return made[0]


def is_running(pid: int) -> bool:
    """Return False for a process that has ended, also if its parent has not waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between opening and reading
        return False
