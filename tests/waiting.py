"""Waiting for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable

# Far longer than any expected wait in tests.
WAIT_S = 30.0
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
