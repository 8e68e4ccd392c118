"""Clocks for tests."""

from __future__ import annotations

import threading

from hicache.clock import ManualClock


class PassingClock(ManualClock):
    """A clock that a pause moves, so that a thread that pauses goes on at once."""

    def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))

    def wait_set(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self.sleep(timeout_s)
        return event.is_set()
