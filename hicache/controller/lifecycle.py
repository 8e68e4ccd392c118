"""Opening the backend that is wanted and closing the old one, off the scheduler thread. The gate has the one in use.

Opening a store may create directories, sweep an index or connect to a server, and closing one may wait; both happen on
a supervised worker of their own, which is started when first needed. Until the new store is open there is none, which
costs hits and nothing else. An attempt that fails is repeated with growing pauses.

Locking design: every method but `_open` is called by the scheduler thread, which owns all fields. The worker hands what
it has opened back through one `SimpleQueue`.
"""

from __future__ import annotations

import functools
import logging
import queue
from collections.abc import Callable

from ..backends.base import StorageBackend, register_memory
from ..backoff import Backoff
from ..errors import BackendError
from ..supervised import SupervisedPool, WorkerFactory
from .gate import OpenStore, Readiness, StorageGate

logger = logging.getLogger(__name__)
OpenBackend = Callable[[], StorageBackend]

# An attempt to open a store is repeated after 0.1, 0.2, 0.4 ... 30 s.
REOPEN_S_MIN = 0.1
REOPEN_S_MAX = 30.0
# A large store is swept when it is opened. What takes longer hangs, and must not keep the next store from being opened.
ORDER_DEADLINE_S = 60.0


class BackendLifecycle:
    """Invariant: a backend is closed once, after its last operation was acknowledged, or never if one does not end.

    `gate` is told which one to use; `memory`, where frames will come from, is registered with each. `workers` makes the
    pool that opens and closes. `clock` is monotonic, in seconds.
    """

    def __init__(
        self, gate: StorageGate, memory: memoryview, workers: WorkerFactory, clock: Callable[[], float]
    ) -> None:
        self.open_failures = 0
        self._gate = gate
        self._memory = memory
        self._workers = workers
        self._clock = clock
        self._retired: list[OpenStore] = []
        self._opening: OpenBackend | None = None  # opens what is wanted, as long as it is not open
        self._attempt: OpenBackend | None = None  # in flight for what is wanted
        self._retry_at = 0.0
        self._backoff = Backoff(REOPEN_S_MIN, REOPEN_S_MAX)
        # How each attempt has ended: the backend, None if it could not be opened.
        self._opened: queue.SimpleQueue[tuple[OpenBackend, StorageBackend | None]] = queue.SimpleQueue()
        self._worker: SupervisedPool[Callable[[], None]] | None = None
        self._closed = False

    def start(self, backend: StorageBackend) -> None:
        """Use a backend that is open. REQUIRES: there was none. Raises as `register_memory`.

        It may be used at once: until the ranks have agreed for the first time, all decide by this.
        """
        register_memory(backend, self._memory)
        self._gate.use(backend)
        self._gate.settle(Readiness(self._gate.opened))

    def replace(self, open_backend: OpenBackend | None) -> None:
        """Retire the backend in use, or the wish for one, and have another one opened (None: none). Does not block."""
        retired = self._gate.retire(for_another=open_backend is not None)
        if retired is not None:
            self._retired.append(retired)
        self._opening, self._attempt = open_backend, None
        self._retry_at = 0.0
        self._backoff.reset()
        self.advance()

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
            self._submit(functools.partial(self._open, self._opening))
        self._gate.apply_overrides()
        for store in [store for store in self._retired if store.in_flight == 0]:
            self._retired.remove(store)
            self._submit(store.backend.close)

    def close(self, timeout_s: float, *, workers_ended: bool) -> bool:
        """End the worker, and close all backends unless a worker is still in a call of one; blocks.

        False if something is left behind, or a backend could not be closed.
        """
        self._closed = True
        ended = self._worker is None or self._worker.close(timeout_s)
        for _, backend in self._drain():
            ended &= backend is None or _close(backend)
        if workers_ended:
            for store in filter(None, [*self._retired, self._gate.storage]):
                ended &= _close(store.backend)
        return ended and workers_ended

    def _take_opened(self) -> None:
        for open_backend, backend in self._drain():
            self.open_failures += backend is None
            if open_backend is not self._opening:  # another one is wanted by now
                if backend is not None:
                    self._submit(backend.close)
                continue
            self._attempt = None
            if backend is None:
                self._retry_at = self._clock() + self._backoff.next_s()
            else:
                self._gate.use(backend)
                self._opening = None

    def _drain(self) -> list[tuple[OpenBackend, StorageBackend | None]]:
        return [self._opened.get_nowait() for _ in range(self._opened.qsize())]

    def _submit(self, call: Callable[[], None]) -> None:
        if self._worker is None:
            self._worker = self._workers("open", 1, handle=lambda call, beat: call(), patience_s=ORDER_DEADLINE_S)
        self._worker.submit(call)

    def _open(self, open_backend: OpenBackend) -> None:
        """Opening worker: a backend that knows the memory its frames will come from."""
        backend = None
        try:
            backend = open_backend()
            register_memory(backend, self._memory)
        except BaseException:
            if backend is not None:
                backend.close()
            backend = None
            raise
        finally:
            self._opened.put((open_backend, backend))


def _close(backend: StorageBackend) -> bool:
    """Whether it was closed without trouble; one that was not keeps no other from being closed."""
    try:
        backend.close()
    except BackendError as error:
        logger.warning("storage failed to close: %s", error)
        return False
    return True
