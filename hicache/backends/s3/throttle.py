"""How many requests may be in flight: as many as are allowed, fewer after the server has asked to slow down.

Additive increase, multiplicative decrease (Chiu and Jain, 1989): a reply that says "slow down" halves the limit, each
round of answered requests adds one to it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from ..errors import ErrorKind, StoreError

# Replies of requests that were in flight when the limit was cut say nothing new about it.
_CUT_INTERVAL_S = 0.5


class Throttle:
    """A limit on requests in flight. Invariant: 1 <= limit <= `requests_max`, and `running` <= `requests_max`.

    Locking design: one condition guards all fields, held for a few instructions.
    """

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._state = threading.Condition()
        self._limit = float(requests_max)
        self._running = 0
        self._cut_s = -_CUT_INTERVAL_S
        self._closed_until_s = 0.0

    @property
    def limit(self) -> int:
        """How many requests may be in flight now."""
        with self._state:
            return int(self._limit)

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Wait for the turn of a request, whose StoreError says how it ended. Raises StoreError if there is no turn
        until `deadline`, or if the server wants no request yet."""
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
                now = time.monotonic()
                left = min(deadline - now, threading.TIMEOUT_MAX)
                if left <= 0:
                    raise StoreError(ErrorKind.DEADLINE)
                if now < self._closed_until_s:
                    raise StoreError(ErrorKind.THROTTLED, "the server asked for a pause")
                if self._running < int(self._limit):
                    self._running += 1
                    return
                self._state.wait(left)

    def _leave(self, failure: StoreError | None) -> None:
        with self._state:
            self._running -= 1
            now = time.monotonic()
            if failure is None:
                self._limit = min(self._limit + 1 / self._limit, float(self._requests_max))
            elif failure.kind in (ErrorKind.THROTTLED, ErrorKind.UNAVAILABLE):
                self._closed_until_s = max(self._closed_until_s, now + failure.retry_after_s)
                if now - self._cut_s >= _CUT_INTERVAL_S:
                    self._limit = max(1.0, self._limit / 2)
                    self._cut_s = now
            self._state.notify_all()
