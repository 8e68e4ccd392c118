"""One namespace that engines have opened: its store behind the eight verbs, its wire codec, and its threads.

A call runs on a thread of its namespace, so that a store that hangs blocks only the threads of its own namespace. Calls
wait for a thread in order of arrival; their deadline starts with the arrival. Threads start when there is work for
them, and end when they are idle.

Locking design: `_lock` guards `in_flight`, `_is_closed` and `last_use_s`; the lock of the node guards `_engines` and
`is_retired`. The verbs run on the namespace's own threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ..backends.errors import ErrorKind
from ..clock import SYSTEM_CLOCK, Clock
from ..frame import FrameCodec
from ..supervised import SupervisedPool
from .pool import PoolSpace
from .protocol import Refused
from .sharing import SharedStore

T = TypeVar("T")

# An idle thread ends after this time. Many namespaces may be idle, and a thread starts in some 0.1 ms.
_LINGER_S = 2.0
# Engines that are remembered as users of one namespace. If there are more, it is used until it is closed.
_ENGINES_MAX = 4096


class ServedNamespace:
    """See the module's docstring. `digest` is the namespace in hexadecimal digits; `wire` seals and verifies the pages
    that clients send and get; `space` is its part of the pool."""

    def __init__(
        self, wire: FrameCodec, store: SharedStore, space: PoolSpace, *, weights_epoch: int, label: str, threads: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.digest = wire.namespace.hex()
        self.wire = wire
        self.store = store
        self.space = space
        self.weights_epoch = weights_epoch
        self.label = label
        self._clock = clock
        self.last_use_s = clock()
        self._lock = threading.Lock()
        self.in_flight = 0  # calls that run or wait for a thread
        self.is_retired = False  # its store is closed until an engine uses it again
        self._is_closed = False
        self._engines: set[str] = set()
        self._threads = SupervisedPool[Callable[[], None]](
            self.digest[:8], threads, handle=lambda call, beat: call(), linger_s=_LINGER_S, clock=clock
        )

    @property
    def has_engines(self) -> bool:
        return bool(self._engines)

    def use(self, engine: str) -> bool:
        """Register an engine, which uses this namespace until it releases it. Return True if the store was closed."""
        self._engines.add(engine if len(self._engines) < _ENGINES_MAX else "")
        was_retired, self.is_retired = self.is_retired, False
        return was_retired

    def release(self, engine: str) -> None:
        """End the use by an engine; one without a name does not end."""
        if engine:
            self._engines.discard(engine)

    def submit(self, call: Callable[[], T], in_flight_max: int) -> asyncio.Future[T]:
        """Run `call` on a thread of this namespace. Does not wait. Raises Refused: 503 if too many calls wait, 404 if
        it was closed, so that the client opens it again. REQUIRES: a running event loop."""
        future: Future[T] = Future()
        job = functools.partial(_run, future, contextvars.copy_context(), call)
        with self._lock:
            if self._is_closed:
                raise not_open()
            if self.in_flight >= in_flight_max:
                raise Refused(503, ErrorKind.BUSY, "namespace: too many requests wait for its store; try again", 1)
            self._threads.submit(job)
            if not self._threads.alive and self._threads.withdraw(job):
                raise Refused(503, ErrorKind.NO_THREAD, "namespace: no thread can be started; try again", 1)
            self.in_flight += 1
            self.last_use_s = self._clock()
        future.add_done_callback(self._done)
        return asyncio.wrap_future(future)

    def close(self) -> None:
        """Reject further calls, wait for those in flight, then close the store. Blocks."""
        with self._lock:
            self._is_closed = True
        self.store.close()
        self._threads.close(0.0)

    def _done(self, _: Future[T]) -> None:
        with self._lock:
            self.in_flight -= 1


def _run(future: Future[T], context: contextvars.Context, call: Callable[[], T]) -> None:
    """Make a call with the request ID of its caller, unless the caller has cancelled it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        answer = context.run(call)
    except BaseException as error:  # the caller raises it
        future.set_exception(error)
    else:
        future.set_result(answer)


def not_open() -> Refused:
    """Return the rejection of a call for a namespace that is not open: the client opens it and repeats the call."""
    return Refused(404, ErrorKind.CLOSED, "namespace: is not open; PUT /v1/namespaces/NS and try again")
