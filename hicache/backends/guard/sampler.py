"""Usage of a store as it was a moment ago, for those who must not wait for it: a server counts by listing.

Locking design: `_sample` and `_next_at` are written by whoever renews and read by others; each is one reference.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from ...background import BackgroundTask
from ..base import Usage

# Counting takes a small part of the time, however slow it is: a file store is asked ten times a second at most, a
# bucket whose listing takes ten seconds every eight minutes.
_PERIOD_S_MIN = 0.1
_DUTY = 50
# Most stores answer within this; the caller waits as long, so that it sees what holds now.
_WAIT_S = 0.05
# A count that takes longer hangs.
PATIENCE_S = 300.0


class UsageSampler:
    """The last known usage. `measure` may block; None from it means that it could not be had now. One that takes longer
    than `patience_s` hangs, and is tried again by another thread."""

    def __init__(
        self, name: str, measure: Callable[[], Usage | None], patience_s: float = PATIENCE_S
    ) -> None:
        self._measure = measure
        self._sample: Usage | None = None
        self._next_at = 0.0  # infinity while somebody counts
        self._took_s = 0.0
        self._renewed = threading.Event()
        self._task = BackgroundTask(f"usage-{name}", self._renew, patience_s)

    def sample(self) -> Usage | None:
        """What was found last, None before the first time; has it found anew if it is old.

        Waits 50 ms at most, and only for a store that was quick the last time.
        """
        if time.monotonic() >= self._next_at:
            self._next_at = math.inf
            self._renewed.clear()
            self._task.wake()
            if self._took_s < _WAIT_S:
                self._renewed.wait(_WAIT_S)
        elif self._next_at == math.inf:
            self._task.tend()
        return self._sample

    def close(self, timeout_s: float) -> bool:
        """End the thread. False if it hangs in the store."""
        return self._task.close(timeout_s)

    def _renew(self) -> float:
        began_s = time.monotonic()
        try:
            self._sample = self._measure() or self._sample
        finally:
            ended_s = time.monotonic()
            self._took_s = ended_s - began_s
            self._next_at = ended_s + max(_PERIOD_S_MIN, _DUTY * self._took_s)
            self._renewed.set()
        return math.inf
