"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

# Far above what anything takes that tests wait for.
WAIT_S = 30.0
# Short, but long enough for others to get the processor.
PAUSE_S = 0.001


def wait_for(
    condition: Callable[[], bool],
    meanwhile: Callable[[], object] = lambda: None,
    *,
    timeout_s: float = WAIT_S,
    pause_s: float = PAUSE_S,
) -> None:
    """Until `condition` holds; `meanwhile` is called again and again, with a pause in between, and takes a moment."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        meanwhile()
        time.sleep(pause_s)
