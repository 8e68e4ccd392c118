"""Mailbox: requests of other threads that the scheduler thread serves, a few in each `poll`.

A thread of the admin surface submits work and waits for it with a deadline. The scheduler thread runs the work in its
next poll and never waits. Long work is a generator, which runs for a small slice of time in each poll.

Locking design: `_items` is a deque, whose operations are atomic: requesters append, the scheduler thread pops.
`_places` limits their number. A Future returns the answer; a requester that times out cancels the start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from ..clock import Clock
from ..errors import AdminError

# The most waiting requests. An operator has one or two.
ITEMS_MAX = 16
# The limits of one poll: the number of new requests, and the time for those that continue.
ITEMS_PER_POLL = 4
SLICE_S = 0.0001

T = TypeVar("T")
# Yields where it may be interrupted, and returns the answer.
Steps = Generator[None, None, T]


class _Item(Generic[T]):
    def __init__(self, work: Callable[[], T] | Steps[T]) -> None:
        self.work = work
        self.answer: Future[T] = Future()
        self.answered = threading.Event()
        self.answer.add_done_callback(lambda answer: self.answered.set())
        self.is_abandoned = False  # written by the requester


class Mailbox:
    """See the module's docstring. One scheduler thread serves it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: deque[_Item[Any]] = deque()
        self._places = threading.BoundedSemaphore(ITEMS_MAX)
        self._closed = False

    def ask(self, work: Callable[[], T] | Steps[T], timeout_s: float) -> T:
        """Run `work`, or its steps, on the scheduler thread; return its result or raise its error. Blocks.

        Raises AdminError if too many requests wait, if the scheduler thread does not serve it in time, and after the
        cache is closed. Work that has not started by then never starts; started work is stopped. REQUIRES: not called
        on the scheduler thread.
        """
        if not self._places.acquire(blocking=False):
            raise AdminError("busy", f"{ITEMS_MAX} requests already wait for the scheduler; try again later")
        try:
            item = _Item(work)
            self._items.append(item)
            if self._closed:
                self._refuse_all()
            if not self._clock.wait_set(item.answered, timeout_s):
                item.is_abandoned = True
                if item.answer.cancel() or isinstance(work, Generator):
                    raise _late(timeout_s)
            return item.answer.result()  # it is there, or just being served
        finally:
            self._places.release()

    @property
    def pending(self) -> bool:
        """Return True if requests wait. Cheap enough for each step of a scheduler."""
        return bool(self._items)

    def serve(self) -> None:
        """Serve waiting requests within the limits of one poll. Scheduler thread; does not block or raise."""
        until_s = time.perf_counter() + SLICE_S
        for _ in range(min(ITEMS_PER_POLL, len(self._items))):
            item = self._items.popleft()
            if not _advance(item, until_s):
                self._items.append(item)

    def close(self) -> None:
        """Reject waiting and later requests. Scheduler thread."""
        self._closed = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        while self._items:
            try:
                item = self._items.popleft()
            except IndexError:  # another thread was faster
                return
            if item.answer.running() or item.answer.set_running_or_notify_cancel():
                item.answer.set_exception(AdminError("closed", "the cache is closed; its engine is ending"))


def _advance(item: _Item[Any], until_s: float) -> bool:
    """Start or continue an item. Return True if it has ended."""
    answer, work = item.answer, item.work
    if not answer.running() and not answer.set_running_or_notify_cancel():
        return True
    try:
        if not isinstance(work, Generator):
            answer.set_result(work())
            return True
        while not item.is_abandoned:
            next(work)
            if time.perf_counter() >= until_s:
                return False
        raise _late(0.0)
    except StopIteration as end:
        answer.set_result(end.value)
    except Exception as error:  # raised on the requester's thread; a request of an operator must not end an engine
        answer.set_exception(error)
    return True


def _late(timeout_s: float) -> AdminError:
    return AdminError(
        "scheduler_stopped",
        f"the engine's scheduler did not serve this within {timeout_s:g} s; it may be stuck, or wait for requests "
        "without polling: check the engine, then try again",
    )
