"""Which backend is in use: opening another one and closing the old one, off the scheduler thread.

Opening a store may create directories, sweep an index or connect to a server, and closing one may wait; both happen on
a supervised worker of their own, which is started when first needed. Until the new store is open there is none, which
costs hits and nothing else. An attempt that fails is repeated with growing pauses.

Locking design: every method is called by the scheduler thread, which owns all fields. The worker writes the order that
it was given and hands it back through one `SimpleQueue`.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass

from ..backends.base import StorageBackend
from ..backends.guard import Direction, Override, guards_of, may_pass
from ..errors import BackendError
from .storage import StorageJobs
from .worker import WorkerFactory, WorkerGroup

logger = logging.getLogger(__name__)
OpenBackend = Callable[[], StorageBackend]

# An attempt to open a store is repeated after 0.1, 0.2, 0.4 ... 30 s.
REOPEN_S_MIN = 0.1
REOPEN_S_MAX = 30.0
# A large store is swept when it is opened. What takes longer hangs, and must not keep the next store from being opened.
ORDER_DEADLINE_S = 60.0


@dataclass(slots=True, eq=False)
class _Order:
    """Open a store, which is then `backend` (None: it could not be opened); or close `backend`."""

    open_backend: OpenBackend | None
    backend: StorageBackend | None = None


class BackendLifecycle:
    """Invariant: a backend is closed once, after its last operation was acknowledged, or never if one does not end.

    `adopt` makes the jobs of a backend, `workers` the group that opens and closes. `clock` is monotonic, in seconds.
    """

    def __init__(
        self, adopt: Callable[[StorageBackend], StorageJobs], workers: WorkerFactory, clock: Callable[[], float]
    ) -> None:
        self.jobs: StorageJobs | None = None
        self._overrides: dict[Direction, Override] = {}  # what is not left to the breakers
        self.open_failures = 0
        self.wanted = self.opened = 0  # the number of the backend that is wanted, and of the one that is open
        self._adopt = adopt
        self._workers = workers
        self._clock = clock
        self._retired: list[StorageJobs] = []
        self._opening: OpenBackend | None = None  # what is wanted instead of `jobs`
        self._attempt: OpenBackend | None = None  # under way for what is wanted
        self._retry_at = 0.0
        self._retry_s = REOPEN_S_MIN
        self._carried_out: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._worker: WorkerGroup[_Order] | None = None
        self._closed = False

    def start(self, backend: StorageBackend) -> None:
        """Use a backend that is open. REQUIRES: there was none."""
        self._use(backend)
        self.wanted = self.opened = 1

    def replace(self, open_backend: OpenBackend) -> None:
        """Retire the backend in use and have another one opened. Does not block."""
        self._retire()
        self._opening = open_backend
        self.advance()

    def detach(self) -> None:
        """Retire the backend in use, or the wish for one. Does not block."""
        self._retire()
        self.advance()

    def may_pass(self, direction: Direction) -> bool:
        """Whether there is a backend and its guard, if it has one, would let a call through now. Does not block."""
        return self.jobs is not None and may_pass(self.jobs.backend, direction)

    def override(self, direction: Direction, mode: Override) -> None:
        """Switch a direction of this backend and of all later ones on or off, or leave it to their breakers."""
        self._overrides[direction] = mode
        if self.jobs is not None:
            self._apply_overrides(self.jobs.backend)
        if mode is Override.AUTO:
            del self._overrides[direction]

    def advance(self) -> None:
        """Take over what was opened, try again what was not, close what is idle. Cheap if there is nothing to do, and
        does nothing once closed."""
        if self._closed:
            return
        if self._worker is not None:
            self._worker.supervise()
            self._take_opened()
        if self._opening is not None and self._attempt is None and self._clock() >= self._retry_at:
            self._attempt = self._opening
            self._submit(_Order(self._opening))
        if self.jobs is not None:
            self._apply_overrides(self.jobs.backend)  # a composition may have opened another part meanwhile
        for jobs in [jobs for jobs in self._retired if jobs.in_flight == 0]:
            self._retired.remove(jobs)
            self._submit(_Order(None, jobs.backend))

    def close(self, timeout_s: float, *, workers_ended: bool) -> bool:
        """End the worker, and close all backends unless a worker is still in a call of one; blocks.

        False if something is left behind, or a backend could not be closed.
        """
        self._closed = True
        ended = self._worker is None or self._worker.close(timeout_s)
        for order in self._drain():
            if order.open_backend is not None and order.backend is not None:
                ended &= _close(order.backend)
        if workers_ended:
            for jobs in [*self._retired, *([self.jobs] if self.jobs is not None else [])]:
                ended &= _close(jobs.backend)
        return ended and workers_ended

    def _retire(self) -> None:
        if self.jobs is not None:
            self.jobs.retire()
            self._retired.append(self.jobs)
            self.jobs = None
        self.wanted += 1
        self._opening = self._attempt = None
        self._retry_at, self._retry_s = 0.0, REOPEN_S_MIN

    def _use(self, backend: StorageBackend) -> None:
        self._apply_overrides(backend)
        self.jobs = self._adopt(backend)

    def _apply_overrides(self, backend: StorageBackend) -> None:
        for guard in guards_of(backend) if self._overrides else ():
            breakers = guard.guard_statistics().breakers
            for direction, mode in self._overrides.items():
                if breakers[direction].override is not mode:
                    guard.override(direction, mode)

    def _take_opened(self) -> None:
        for order in self._drain():
            if order.open_backend is None:
                continue
            self.open_failures += order.backend is None
            if order.open_backend is not self._opening:  # another one is wanted by now
                if order.backend is not None:
                    self._submit(_Order(None, order.backend))
                continue
            self._attempt = None
            if order.backend is None:
                self._retry_at = self._clock() + self._retry_s
                self._retry_s = min(2 * self._retry_s, REOPEN_S_MAX)
            else:
                self._use(order.backend)
                self.opened = self.wanted
                self._opening = None

    def _drain(self) -> list[_Order]:
        return [self._carried_out.get_nowait() for _ in range(self._carried_out.qsize())]

    def _submit(self, order: _Order) -> None:
        if self._worker is None:
            self._worker = self._workers(
                "open", 1, handle=_carry_out, fail=_fail, acknowledge=self._carried_out.put,
                deadline_s=ORDER_DEADLINE_S,
            )  # fmt: skip
        self._worker.submit(order)


def _close(backend: StorageBackend) -> bool:
    """Whether it was closed without trouble; one that was not keeps no other from being closed."""
    try:
        backend.close()
    except BackendError as error:
        logger.warning("storage failed to close: %s", error)
        return False
    return True


def _carry_out(order: _Order, beat: Callable[[], None]) -> None:
    if order.open_backend is not None:
        order.backend = order.open_backend()
    elif order.backend is not None:
        order.backend.close()


def _fail(order: _Order) -> None:
    """Nothing to mark: an order to open that has failed has no backend."""
