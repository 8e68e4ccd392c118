"""A clock that a test or a simulation moves."""

from __future__ import annotations

import threading
import time

from hicache.clock import Clock

# How often a wait for an event looks at a moved clock.
_LOOK_S = 0.002
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
