"""Mailbox: requests of other threads that the scheduler thread serves, a few in each `poll`.

An operator asks on a thread of the admin surface and waits there, with a deadline. The scheduler thread runs what was
asked when it polls next, and never waits. Work that visits much is a generator: it is continued from poll to poll, for
a small slice of time each.

Locking design: `_items` is a deque, whose operations are atomic: askers append, the scheduler thread takes. `_places`
bounds them. A Future hands back the answer; one that its asker gave up is cancelled, and is not begun then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from ..errors import AdminError

# Requests that wait at once. An operator has one or two.
ITEMS_MAX = 16
# What one poll serves: so many requests, and of those that go on so much time.
ITEMS_PER_POLL = 4
SLICE_S = 0.0001

T = TypeVar("T")
# Yields whenever it may be interrupted, and returns the answer.
Steps = Generator[None, None, T]


class _Item(Generic[T]):
    def __init__(self, work: Callable[[], T] | Steps[T]) -> None:
        self.work = work
        self.answer: Future[T] = Future()
        self.is_abandoned = False  # written by the asker


class Mailbox:
    """See the module's docstring. One scheduler thread serves it."""

    def __init__(self) -> None:
        self._items: deque[_Item[Any]] = deque()
        self._places = threading.BoundedSemaphore(ITEMS_MAX)
        self._closed = False

    def ask(self, work: Callable[[], T] | Steps[T], timeout_s: float) -> T:
        """Have the scheduler thread call `work`, or go through its steps, and return what it returns or raise what it
        raises. Blocks.

        Raises AdminError if too many requests wait, if the scheduler thread does not come to it in time, and once the
        cache is closed. Work that was not begun by then is never done; work that goes on is ended. REQUIRES: not called
        on the scheduler thread.
        """
        if not self._places.acquire(blocking=False):
            raise AdminError("busy", f"{ITEMS_MAX} requests wait for the scheduler already; ask again later")
        try:
            item = _Item(work)
            self._items.append(item)
            if self._closed:
                self._refuse_all()
            try:
                return item.answer.result(timeout_s)
            except TimeoutError:
                item.is_abandoned = True
                if item.answer.cancel() or isinstance(work, Generator):
                    raise _late(timeout_s) from None
                return item.answer.result()  # it is being served in this moment
        finally:
            self._places.release()

    @property
    def pending(self) -> bool:
        """True if there is something to serve. For each step of a scheduler."""
        return bool(self._items)

    def serve(self) -> None:
        """Serve what waits, as much as one step may take. On the scheduler thread; does not block or raise."""
        until_s = time.perf_counter() + SLICE_S
        for _ in range(min(ITEMS_PER_POLL, len(self._items))):
            item = self._items.popleft()
            if not _advance(item, until_s):
                self._items.append(item)

    def close(self) -> None:
        """Refuse what waits and what comes later. On the scheduler thread."""
        self._closed = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        while self._items:
            try:
                item = self._items.popleft()
            except IndexError:  # the other thread that does this was faster
                return
            if item.answer.running() or item.answer.set_running_or_notify_cancel():
                item.answer.set_exception(AdminError("closed", "the cache is closed; its engine is ending"))


def _advance(item: _Item[Any], until_s: float) -> bool:
    """Begin an item or go on with it; return whether it has ended."""
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
    except Exception as error:  # the asker's thread raises it; no request of an operator ends an engine
        answer.set_exception(error)
    return True


def _late(timeout_s: float) -> AdminError:
    return AdminError(
        "scheduler_stopped",
        f"the engine's scheduler did not serve this within {timeout_s:g} s; it may be stuck, or wait for requests "
        "without polling: look at the engine, then ask again",
    )
