"""The clock of a cache, a store or a daemon.

Every deadline, back-off, expiry and pause of an object comes from the clock that it was created with. So a test moves
time instead of waiting for it, and a simulation runs in virtual time. The time that a call of the operating system may
take (a socket, a lock of a file) is real time: `tests/test_house.py` lists the modules with such calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

# `Condition.wait` raises OverflowError above this.
_WAIT_S_MAX = threading.TIMEOUT_MAX


class Clock:
    """The clocks of the system, and waits in their time. Thread-safe."""

    def __call__(self) -> float:
        """Return monotonic seconds, which may be negative. Deadlines are times of this clock."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return seconds since 1970 (Unix time)."""
        return time.time()

    def wait(self, condition: threading.Condition, timeout_s: float) -> bool:
        """Wait for a notification for at most `timeout_s`. Return False if none came. It may also return True without
        one. REQUIRES: the caller holds `condition`, as for `Condition.wait`.
        """
        return condition.wait(max(0.0, min(timeout_s, _WAIT_S_MAX)))

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool], deadline: float) -> bool:
        """Wait until `predicate` is true, at most until `deadline`. Return its last value. REQUIRES: as `wait`."""
        while not (result := predicate()) and (left_s := deadline - self()) > 0:
            self.wait(condition, left_s)
        return result

    def wait_set(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until `event` is set, at most for `timeout_s`. Return True if it is."""
        return event.wait(max(0.0, min(timeout_s, _WAIT_S_MAX)))

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`; does nothing if they are not positive."""
        time.sleep(max(0.0, seconds))


SYSTEM_CLOCK: Final = Clock()
