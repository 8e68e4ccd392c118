"""Work that comes up now and then, on a supervised thread of its own.

Locking design: one condition guards all fields and is not held while the work runs. It is taken before the lock of the
pool, never after: the pool calls back without its lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable

from .backoff import Backoff
from .supervised import LINGER_S, Beat, SupervisedPool

# After work that raised, unless its user says otherwise.
RETRY_S = 5.0


class BackgroundTask:
    """Runs `work` on a thread of its own when woken, and again at the time that it returned (infinity: when woken).

    The thread starts when first needed. One that died is replaced, and so is one that has worked for longer than
    `patience_s`: then the work is done again. An exception is counted, logged once per kind, and the work is done again
    after the next delay of `backoff`, which the work resets when it has succeeded. Times are those of `time.monotonic`.
    `linger_s` and `on_error` are those of SupervisedPool.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], float],
        patience_s: float = math.inf,
        *,
        backoff: Backoff | None = None,
        linger_s: float = LINGER_S,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._work = work
        self._backoff = backoff or Backoff(RETRY_S, RETRY_S)
        self._state = threading.Condition()
        self._next_at = math.inf
        self._number = 0  # of the newest job; what an older one returns does not count
        self._is_submitted = False  # the newest job, and it has not ended
        self._closed = False
        self._pool = SupervisedPool[int](
            name, 1, handle=self._handle, fail=self._retry, acknowledge=self._acknowledge, on_error=on_error,
            patience_s=patience_s, linger_s=linger_s,
        )  # fmt: skip

    @property
    def errors(self) -> Counter[str]:
        """Exceptions of `work` by kind, ThreadDied and NoThread."""
        return self._pool.errors

    def wake(self, at_s: float = 0.0) -> None:
        """Have the work done at `at_s` or before; now, without it. Does not block. Otherwise as `tend`."""
        with self._state:
            if at_s < self._next_at:
                self._next_at = at_s
                self._state.notify_all()
            self._tend()

    def tend(self) -> None:
        """Replace a thread that has died or hangs. Call it while work is pending. Does not block."""
        with self._state:
            self._tend()

    def close(self, timeout_s: float) -> bool:
        """End the thread after what it is doing; blocks. False if it hangs: it is left behind. May be called twice."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        return self._pool.close(timeout_s)

    def _tend(self) -> None:
        stuck = self._pool.stuck_threads
        self._pool.supervise()
        if self._pool.stuck_threads > stuck:
            self._next_at = 0.0  # what the stuck thread was doing is not done
            self._is_submitted = False
        if self._next_at < math.inf and not self._is_submitted and not self._closed:
            self._number += 1
            self._is_submitted = True
            self._pool.submit(self._number)

    def _handle(self, number: int, beat: Beat) -> None:
        with self._state:
            while not self._is_over(number) and (wait_s := self._next_at - time.monotonic()) > 0:
                beat(wait_s)
                self._state.wait(min(wait_s, threading.TIMEOUT_MAX))
            if self._is_over(number):
                return
            self._next_at = math.inf
        beat()
        next_at = self._work()
        with self._state:
            if not self._is_over(number):
                self._next_at = min(self._next_at, next_at)

    def _is_over(self, number: int) -> bool:
        return self._closed or number != self._number

    def _retry(self, number: int) -> None:
        with self._state:
            if not self._is_over(number):
                self._next_at = min(self._next_at, time.monotonic() + self._backoff.next_s())

    def _acknowledge(self, number: int) -> None:
        with self._state:
            if not self._is_over(number):
                self._is_submitted = False
                self._tend()
