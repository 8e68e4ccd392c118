"""The clock of a cache, a store or a daemon, and one that a test moves.

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
# How often a wait for an event looks at a moved clock.
_LOOK_S = 0.002


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


# A deadline and the time that reaches it are sums of different parts, so one of them can be a rounding error larger.
_ROUNDING_S = 1e-8


class ManualClock(Clock):
    """A clock that moves only in `advance`, which ends the waits whose time has come. For tests and simulations.

    It starts at the system's time: until it is moved, a test can also use deadlines of the system's clock.

    Locking design: `_lock` guards all mutable state, and is held for a few instructions. A waiter takes it with its own
    condition held, and `advance` notifies with `_lock` released, so the order is condition, `_lock`. A waiter holds its
    condition from its registration until it waits, so no notification is lost.
    """

    def __init__(self) -> None:
        self._started_s, self._started_wall_s = time.monotonic(), time.time()
        self._passed_s = 0.0
        self._lock = threading.Lock()
        self._waiting: list[threading.Condition] = []
        self._wake_times: list[float] = []

    def __call__(self) -> float:
        return self._started_s + self._passed_s

    def wall_s(self) -> float:
        return self._started_wall_s + self._passed_s

    def advance(self, seconds: float) -> None:
        """Move the time forward, by 10 ns more than `seconds`. REQUIRES: the caller holds no condition with
        which another thread waits here."""
        with self._lock:
            self._passed_s += seconds + _ROUNDING_S
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, timeout_s: float) -> bool:
        with self._lock:
            deadline = self() + timeout_s
            if timeout_s <= 0:
                return False
            self._waiting.append(condition)
        try:
            condition.wait()
        finally:
            with self._lock:
                self._waiting.remove(condition)
        return self() < deadline

    def wait_set(self, event: threading.Event, timeout_s: float) -> bool:
        deadline = self() + timeout_s
        while not event.wait(_LOOK_S) and self() < deadline:
            pass
        return event.is_set()

    def sleep(self, seconds: float) -> None:
        woken, wake_time = threading.Condition(), self() + seconds
        with self._lock:
            self._wake_times.append(wake_time)
        try:
            with woken:
                self.wait_for(woken, lambda: False, wake_time)
        finally:
            with self._lock:
                self._wake_times.remove(wake_time)

    @property
    def sleepers(self) -> int:
        """The number of threads in `sleep` whose time has not come."""
        with self._lock:
            return sum(wake_time > self() for wake_time in self._wake_times)
