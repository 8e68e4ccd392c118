"""Recurring background work on its own supervised thread.

Locking design: one condition guards all fields and is not held while the work runs. It is taken before the lock of the
pool, never after it: the pool calls back without holding its lock.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable

from .backoff import Backoff
from .clock import SYSTEM_CLOCK, Clock
from .supervised import LINGER_S, Beat, SupervisedPool, WorkerFactory

# The delays after an exception of the work, unless the user gives a back-off.
RETRY_S = 5.0


class BackgroundTask:
    """Runs `work` on its own thread when woken, and again at the time that `work` returns (infinity: when woken).

    The thread starts at the first use. A thread that died, or that has worked for longer than `patience_s`, is
    replaced, and the work runs again. An exception is counted and logged once per kind; the work runs again after the
    next delay of `backoff`, which the work itself resets after a success. Times are those of `clock`. `linger_s` and
    `on_error` are passed to the pool, which `workers` makes.
    """

    def __init__(
        self, name: str, work: Callable[[], float], patience_s: float = math.inf, *, backoff: Backoff | None = None,
        linger_s: float = LINGER_S, on_error: Callable[[], None] = lambda: None, clock: Clock = SYSTEM_CLOCK,
        workers: WorkerFactory = SupervisedPool,
    ) -> None:
        self._work = work
        self._clock = clock
        self._backoff = backoff or Backoff(RETRY_S, RETRY_S)
        self._state = threading.Condition()
        self._next_at = math.inf
        self._number = 0  # of the newest job; results of older jobs are ignored
        self._is_submitted = False  # the newest job is submitted and has not ended
        self._closed = False
        self._pool: SupervisedPool[int] = workers(
            name, 1, handle=self._handle, fail=self._retry, acknowledge=self._acknowledge, on_error=on_error,
            patience_s=patience_s, linger_s=linger_s, clock=clock,
        )

    @property
    def errors(self) -> Counter[str]:
        """Return the number of exceptions of `work` by kind, with ThreadDied and NoThread."""
        return self._pool.errors

    def wake(self, at_s: float = -math.inf) -> None:
        """Run the work at `at_s` at the latest; by default now. Replaces the thread as `tend` does. Does not block."""
        with self._state:
            if at_s < self._next_at:
                self._next_at = at_s
                self._state.notify_all()
            self._tend()

    def tend(self) -> None:
        """Replace a dead or hung thread. Call it while work is pending. Does not block."""
        with self._state:
            self._tend()

    def close(self, timeout_s: float) -> bool:
        """End the thread after its current work. Blocks. Return False if it hangs and is abandoned. Idempotent."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        return self._pool.close(timeout_s)

    def _tend(self) -> None:
        stuck = self._pool.stuck_threads
        self._pool.supervise()
        if self._pool.stuck_threads > stuck:
            self._next_at = -math.inf  # the work of the stuck thread has not been done
            self._is_submitted = False
        if self._next_at < math.inf and not self._is_submitted and not self._closed:
            self._number += 1
            self._is_submitted = True
            self._pool.submit(self._number)

    def _handle(self, number: int, beat: Beat) -> None:
        with self._state:
            while not self._is_over(number) and (wait_s := self._next_at - self._clock()) > 0:
                beat(wait_s)
                self._clock.wait(self._state, wait_s)
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
                self._next_at = min(self._next_at, self._clock() + self._backoff.next_s())

    def _acknowledge(self, number: int) -> None:
        with self._state:
            if not self._is_over(number):
                self._is_submitted = False
                self._tend()
