"""Detects mistakes of the calling engine that would otherwise pass in silence.

    mistake                                     result
    a call from a second thread                 WrongThread; nothing was changed
    `poll` is not called                        one warning, after calls for `UNPOLLED_S` and with operations in flight
    requests never end, so waiting ones stay      a warning, after `STARVED_S`, with the ids of those that hold the room

The owner is the first thread that calls the cache for a request or polls it. So another thread may build the cache.
When the owner has ended, the next caller becomes the owner; before that, a thread must take the cache over.

Locking design: no lock. A second thread only reads `owner` and its id; these are written by the owner, or in
`take_over`, when no other thread is in a call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from threading import get_ident

from ..controller import HiCacheController
from ..errors import WrongThread
from ..logs import LimitedLog
from .requests import RequestKV

logger = logging.getLogger(__name__)

# Longer than any step of an engine, in which it polls once.
UNPOLLED_S = 10.0
# The clock is read at every eighth call: a step may check hundreds of waiting requests.
CALLS_PER_LOOK = 8
# Under a full load a request rarely waits this long for running ones to end.
STARVED_S = 30.0
# At most one line per this time about requests that do not end.
STARVED_LOG_S = 600.0
# Requests whose refusals are remembered: more than an engine tries in a step. The oldest is forgotten first.
REFUSED_MAX = 1024
# The requests that a line names.
NAMED_MAX = 5
_NAME_CHARS_MAX = 40


class OwnerThread:
    """The thread that may call a cache; None before the first call. `owner_id` is its `get_ident()`."""

    __slots__ = ("owner", "owner_id")

    def __init__(self) -> None:
        self.owner: threading.Thread | None = None
        self.owner_id = 0

    def require(self) -> None:
        """Raises WrongThread if another thread owns the cache and has not ended."""
        if get_ident() == self.owner_id:
            return
        owner = self.owner
        if owner is not None and owner.is_alive():
            raise WrongThread(
                f"a call from thread {threading.current_thread().name!r}, but thread {owner.name!r} owns the cache: "
                "make all calls from one thread; to change it, call take_over() on the new thread after the last call "
                "of the old one"
            )
        self.take_over()

    def take_over(self) -> None:
        """Make the calling thread the owner. REQUIRES: no other thread is in a call of the cache."""
        if get_ident() != self.owner_id:
            self.owner, self.owner_id = threading.current_thread(), get_ident()


class CallerWatch(OwnerThread):
    """See the module's docstring. Reads time and operations in flight from `controller`.

    `poll` itself compares `owner_id` and sets `calls`, the calls for requests since then, to 0: a method would double
    the time of a check.
    """

    __slots__ = ("_clock", "_controller", "_first_call_s", "_is_warned", "_log", "_refused_s", "calls")

    def __init__(self, controller: HiCacheController) -> None:
        super().__init__()
        self._controller = controller
        self._clock = controller.clock
        self.calls = 0
        self._first_call_s = 0.0
        self._is_warned = False
        self._refused_s: dict[str, float] = {}  # when a waiting request was refused first
        self._log = LimitedLog(logger, STARVED_LOG_S, self._clock)

    def called(self) -> None:
        """Note a call for a request. Raises as `require`."""
        self.require()
        self.calls = calls = self.calls + 1
        if calls == 1:
            self._first_call_s = self._clock()
        elif calls % CALLS_PER_LOOK == 0 and not self._is_warned:
            waited_s = self._clock() - self._first_call_s
            if waited_s >= UNPOLLED_S and not self._controller.idle:
                self._is_warned = True
                logger.warning("poll() was not called for %.0f s, in which %d calls for requests were made, and "
                               "operations wait for it: call it once per step, also when idle", waited_s, calls)

    def refused(self, rid: str, running: Iterable[RequestKV], pages: int) -> None:
        """Note that a request found no room on L1, which has `pages` pages."""
        now_s = self._clock()
        waited_s = now_s - self._refused_s.setdefault(rid, now_s)
        if len(self._refused_s) > REFUSED_MAX:
            del self._refused_s[next(iter(self._refused_s))]
        if waited_s < STARVED_S:
            return
        holding = sorted(running, key=lambda request: -len(request.pages))
        named = ", ".join(f"{one.rid[:_NAME_CHARS_MAX]!r} ({len(one.pages)})" for one in holding[:NAMED_MAX])
        self._log.warn("starved", "request %r has found no room on L1 for %.0f s; it has %d pages, and %d running "
                       "requests use most: %s. End each request with cache_finished_req", rid[:_NAME_CHARS_MAX],
                       waited_s, pages, len(holding), named)

    def forget_refusals(self, rid: str) -> None:
        """Forget the refusals of a request that has begun, or will not."""
        if self._refused_s:
            self._refused_s.pop(rid, None)
