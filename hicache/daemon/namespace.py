"""One namespace that engines have opened: its store behind the nine verbs, its wire codec, and its threads.

A call runs on a thread of its namespace, so that a store that hangs blocks only the threads of its own namespace. Calls
wait for a thread in order of arrival; their deadline starts with the arrival.

Locking design: `_lock` guards `_in_flight` and `last_use_s`. The verbs run on the namespace's own threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ..backends.errors import ErrorKind
from ..frame import FrameCodec
from .pool import PoolSpace
from .refusal import Refused
from .sharing import SharedStore

T = TypeVar("T")


class Namespace:
    """See the module's docstring. `digest` is the namespace in hexadecimal digits; `wire` seals and verifies the pages
    that clients send and get; `space` is its part of the pool."""

    def __init__(
        self, wire: FrameCodec, store: SharedStore, space: PoolSpace, *, weights_epoch: int, label: str, threads: int
    ) -> None:
        self.digest = wire.namespace.hex()
        self.wire = wire
        self.store = store
        self.space = space
        self.weights_epoch = weights_epoch
        self.label = label
        self.last_use_s = time.monotonic()
        self._lock = threading.Lock()
        self._in_flight = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"hicache-{self.digest[:8]}")

    @property
    def in_flight(self) -> int:
        """Calls that run or wait for a thread."""
        return self._in_flight

    def submit(self, call: Callable[[], T], in_flight_max: int) -> asyncio.Future[T]:
        """Run `call` on a thread of this namespace. Does not wait. Raises Refused (503) if too many calls wait, and for
        a namespace that is closed. REQUIRES: a running event loop."""
        with self._lock:
            if self._in_flight >= in_flight_max:
                raise Refused(503, ErrorKind.BUSY, "namespace: too many requests wait for its store; try again", 1)
            self._in_flight += 1
            self.last_use_s = time.monotonic()
        try:
            future = self._threads.submit(contextvars.copy_context().run, call)
        except RuntimeError as error:  # shut down, or out of threads
            self._done(None)
            raise Refused(503, ErrorKind.NO_THREAD, "namespace: is closing, or no thread can be started", 1) from error
        future.add_done_callback(self._done)
        return asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for the calls in flight, then close the store. Blocks. Raises BackendError."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    def _done(self, _: Future[T] | None) -> None:
        with self._lock:
            self._in_flight -= 1
