"""A limit on requests in flight, which is lower after a "slow down" reply of the server.

Additive increase, multiplicative decrease (Chiu and Jain, 1989): a "slow down" reply halves the limit; each round of
answered requests adds one to it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

from ...clock import SYSTEM_CLOCK, Clock
from ..errors import ErrorKind, StoreError

# After a cut, replies to requests already in flight must not cut the limit again.
_CUT_INTERVAL_S = 0.5


class Throttle:
    """A limit on requests in flight. Invariant: 1 <= limit <= `requests_max`, and `running` <= `requests_max`.

    Locking design: one condition guards all fields, held for a few instructions.
    """

    def __init__(self, requests_max: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._requests_max = requests_max
        self._state = threading.Condition()
        self._limit = float(requests_max)
        self._running = 0
        self._cut_s = -math.inf
        self._closed_until_s = -math.inf

    @property
    def limit(self) -> int:
        """The number of requests that may be in flight now."""
        with self._state:
            return int(self._limit)

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """A context for one request: waits until it may be sent, and learns from the StoreError that leaves the
        context. Raises StoreError at `deadline`, or if the server has requested a pause."""
        self._enter(deadline)
        failure = None
        try:
            yield
        except StoreError as error:
            failure = error
            raise
        finally:
            self._leave(failure)

    def _enter(self, deadline: float) -> None:
        with self._state:
            while True:
                now = self._clock()
                if now >= deadline:
                    raise StoreError(ErrorKind.DEADLINE)
                if now < self._closed_until_s:
                    raise StoreError(ErrorKind.THROTTLED, "the server requested a pause")
                if self._running < int(self._limit):
                    self._running += 1
                    return
                self._clock.wait(self._state, deadline - now)

    def _leave(self, failure: StoreError | None) -> None:
        with self._state:
            self._running -= 1
            now = self._clock()
            if failure is None:
                self._limit = min(self._limit + 1 / self._limit, float(self._requests_max))
            elif failure.kind in (ErrorKind.THROTTLED, ErrorKind.UNAVAILABLE):
                self._closed_until_s = max(self._closed_until_s, now + failure.retry_after_s)
                if now - self._cut_s >= _CUT_INTERVAL_S:
                    self._limit = max(1.0, self._limit / 2)
                    self._cut_s = now
            self._state.notify_all()
