"""Leaving a storage direction alone for a while after it has failed. Owned by the scheduler thread; no lock."""

from __future__ import annotations

import time
from collections.abc import Callable

# A store that is full or hanging should cost one request its time, and not every request: nothing is asked of it for
# this long, twice as long after each further failure up to the maximum. The first success ends that. An outage is the
# business of the guard's breaker, which probes: a longer pause here would keep a store closed that has healed.
PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 1.0


class Pause:
    """`active` from a failure until its time is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = PAUSE_S_MIN
        self._until = 0.0

    @property
    def active(self) -> bool:
        """Whether to leave the store alone now."""
        return self._until != 0.0 and self._clock() < self._until

    def failed(self) -> None:
        """Begin a pause, longer than the last one. What fails during a pause began before it and tells nothing new."""
        if self.active:
            return
        self._until = self._clock() + self._next_s
        self._next_s = min(2 * self._next_s, PAUSE_S_MAX)

    def succeeded(self) -> None:
        """The store works: no pause, and the next one is short."""
        self._until = 0.0
        self._next_s = PAUSE_S_MIN
