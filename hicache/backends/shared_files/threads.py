"""Calls of the operating system that their caller may leave at a deadline, because a mount may hang.

A call runs on a thread of the pool, with a buffer of that thread. At the deadline the caller leaves: the thread stays
in the call until the system returns. It uses the caller's pages only through `Lent`, so not after that. When all
threads are held so for a moment, each further call fails at once.

Locking design: `Lent._state` guards its fields. Each thread has its own buffer in `_buffers`. `_left_at_s` is one
reference, written by any caller.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ...clock import Clock
from ...errors import BackendUnavailable
from ...supervised import NoThread, SupervisedPool
from ..errors import ErrorKind, StoreError

T = TypeVar("T")
R = TypeVar("R")

# A call that takes longer after its caller has left hangs. A busy machine makes calls of some 10 ms.
_SLOW_S = 0.25


class Lent(Generic[T]):
    """A value that threads may use until its owner takes it back."""

    def __init__(self, value: T) -> None:
        self._state = threading.Condition()
        self._value: T | None = value
        self._users = 0

    def use(self, function: Callable[[T], R]) -> R | None:
        """Return `function(value)`, or None after `take_back`. REQUIRES: the function does not block."""
        with self._state:
            if self._value is None:
                return None
            value = self._value
            self._users += 1
        try:
            return function(value)
        finally:
            with self._state:
                self._users -= 1
                self._state.notify_all()

    def take_back(self) -> None:
        """Wait for the calls in progress, and lend the value to no others."""
        with self._state:
            self._value = None
            while self._users:
                self._state.wait()


class AbandonableCalls:
    """See the module's docstring. Has `threads` threads. Deadlines are times of `clock`."""

    def __init__(self, threads: int, clock: Clock) -> None:
        self._threads = threads
        self._clock = clock
        self._left_at_s = -math.inf  # when a caller last left its calls
        self._buffers = threading.local()
        # No `on_error`: the call of the store counts a page that a bug leaves without an outcome.
        self._pool = SupervisedPool[Any]("shared-files", threads, clock=clock)

    def one(self, call: Callable[[], T], deadline: float, late: Callable[[T | None], None]) -> T | None:
        """Make a call; return its result, or None at the deadline: then `late` gets it. Raises as the call does, and
        BackendUnavailable if the system cannot start a thread."""
        try:
            return self._pool.call(call, deadline, late=late)
        except NoThread as error:
            raise BackendUnavailable(
                "shared files: this machine cannot start a thread; raise the limit on threads of the user or the "
                "container"
            ) from error

    def later(self, work: Callable[[], object]) -> None:
        """Call `work` when a thread is free, also after the threads have hung. Does not wait."""
        todo = [work]

        def run(late: object = None) -> None:
            with contextlib.suppress(IndexError):  # the work was already begun
                todo.pop()()

        with contextlib.suppress(BackendUnavailable):
            self.one(run, -math.inf, run)

    def each(self, count: int, work: Callable[[int], None], deadline: float) -> bool:
        """Call `work` for each position below `count`, several at a time. Return False if one has not ended by the
        deadline. Raises StoreError if all threads hang, or if the system cannot start one."""
        try:
            if self._pool.abandoned >= self._threads:
                # The calls may be slow, or a deadline of milliseconds may have left them.
                until = min(deadline, self._left_at_s + _SLOW_S)
                if self._clock() >= until or self._pool.call(lambda: True, until) is None:
                    raise StoreError(ErrorKind.HANGS)
            has_ended = self._pool.run_until(count, work, deadline)
        except NoThread:
            raise StoreError(ErrorKind.NO_THREAD) from None
        if not has_ended:
            self._left_at_s = self._clock()
        return has_ended

    def buffer(self, size: int) -> memoryview:
        """Return `size` bytes of this thread's buffer."""
        buffer: bytearray | None = getattr(self._buffers, "frame", None)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers.frame = bytearray(size)
        return memoryview(buffer)[:size]

    def close(self, timeout_s: float) -> bool:
        """End the threads. Return False if one still hangs after `timeout_s`."""
        return self._pool.close(timeout_s)
