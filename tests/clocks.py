"""Clocks for tests."""

from __future__ import annotations

import threading

from hicache.clock import Clock
from hicache_lab.clocks import ManualClock


class PassingClock(ManualClock):
    """A clock that a pause moves, so that a thread that pauses goes on at once."""

    def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))

    def wait_set(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self.sleep(timeout_s)
        return event.is_set()


class At(Clock):
    """A clock whose wall time stands still, for pages that were stored at a known time."""

    def __init__(self, wall_s: float) -> None:
        self._wall_s = wall_s

    def wall_s(self) -> float:
        return self._wall_s
