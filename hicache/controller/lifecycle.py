"""Which backend is in use: opening another one and closing the old one, off the scheduler thread.

Opening a store may create directories, sweep an index or connect to a server, and closing one may wait; both happen on
a thread of their own. Until the new store is open there is none, which costs hits and nothing else. An attempt that
fails is repeated with growing pauses.

Locking design: everything but `_run` is called by the scheduler thread, which owns all fields. The thread gets its
orders and gives its results through one `SimpleQueue` each.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ..backends.base import StorageBackend
from .storage import StorageJobs

logger = logging.getLogger(__name__)

OpenBackend = Callable[[], StorageBackend]

# An attempt to open a store is repeated after 0.1, 0.2, 0.4 ... 30 s.
REOPEN_S_MIN = 0.1
REOPEN_S_MAX = 30.0


class BackendLifecycle:
    """Invariant: a backend is closed once, after its last operation was acknowledged, or never if one does not end.

    `adopt` makes the jobs of a backend. `clock` is monotonic, in seconds.
    """

    def __init__(self, adopt: Callable[[StorageBackend], StorageJobs], clock: Callable[[], float]) -> None:
        self.jobs: StorageJobs | None = None
        self.open_failures = 0
        self.wanted = self.opened = 0  # the number of the backend that is wanted, and of the one that is open
        self._adopt = adopt
        self._clock = clock
        self._retired: list[StorageJobs] = []
        self._opening: OpenBackend | None = None  # what is wanted instead of `jobs`
        self._attempt_under_way = False
        self._retry_at = 0.0
        self._retry_s = REOPEN_S_MIN
        self._orders: queue.SimpleQueue[OpenBackend | StorageBackend | None] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[tuple[OpenBackend, StorageBackend | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def opening(self) -> bool:
        """Whether a backend is wanted that is not open yet."""
        return self._opening is not None

    def start(self, backend: StorageBackend) -> None:
        """Use a backend that is open. REQUIRES: there was none."""
        self.jobs = self._adopt(backend)
        self.wanted = self.opened = 1

    def replace(self, open_backend: OpenBackend) -> None:
        """Retire the backend in use and have another one opened. Does not block."""
        if self.jobs is not None:
            self.jobs.retire()
            self._retired.append(self.jobs)
            self.jobs = None
        self.wanted += 1
        self._opening, self._retry_at, self._retry_s = open_backend, 0.0, REOPEN_S_MIN
        self.advance()

    def advance(self) -> None:
        """Take over what was opened, try again what was not, close what is idle. Cheap if there is nothing to do."""
        if self._opening is not None:
            self._take_opened()
        if self._opening is not None and not self._attempt_under_way and self._clock() >= self._retry_at:
            self._attempt_under_way = True
            self._order(self._opening)
        if self._retired:
            for jobs in [jobs for jobs in self._retired if jobs.in_flight == 0]:
                self._retired.remove(jobs)
                self._order(jobs.backend)

    def close(self, timeout_s: float, *, workers_ended: bool) -> bool:
        """End the thread, and close all backends unless a worker is still in a call of one; blocks.

        False if something is left behind.
        """
        self._opening = None
        thread_ended = True
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(timeout_s)
            thread_ended = not self._thread.is_alive()
        while not self._opened.empty():
            _, backend = self._opened.get_nowait()
            if backend is not None:
                backend.close()
        if workers_ended:
            for jobs in [*self._retired, *([self.jobs] if self.jobs is not None else [])]:
                jobs.backend.close()
        return thread_ended and workers_ended

    def _take_opened(self) -> None:
        for _ in range(self._opened.qsize()):
            wanted, backend = self._opened.get_nowait()
            self._attempt_under_way = False
            if backend is None:
                self.open_failures += 1
                self._retry_at = self._clock() + self._retry_s
                self._retry_s = min(2 * self._retry_s, REOPEN_S_MAX)
            elif wanted is self._opening:
                self.jobs = self._adopt(backend)
                self.opened = self.wanted
                self._opening = None
            else:
                self._order(backend)  # another one is wanted by now

    def _order(self, order: OpenBackend | StorageBackend) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hicache-open", daemon=True)
            self._thread.start()
        self._orders.put(order)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            backend: StorageBackend | None = None
            try:
                if isinstance(order, StorageBackend):
                    order.close()
                    continue
                backend = order()
            except Exception:
                # The thread must outlive a store that cannot be opened now; it is asked to try again.
                logger.exception("a storage backend could not be opened or closed")
            if not isinstance(order, StorageBackend):
                self._opened.put((order, backend))
