"""StorageGate: knows the store in use, and alone decides whether storage may be used now.

A direction is closed while one of these reasons holds on this rank or on another one:

    reason                              the direction closes    and opens again
    the wanted store is not open        at once, by `retire`    in the step after `use`
    the service ends                    at once, by `stop`      never
    the guard passes no calls           at the next step        when the guard passes calls
    a back-off runs after a failure     at the next step        after 0.1 s to 1 s, or after a success

The guard owns the breaker and its probes; the gate checks it once per step. Workers read one value, `OpenStore.until`,
which the gate writes.

Opening a store may create directories, sweep an index or connect to a server; closing one may wait. A separate
supervised worker, started when first needed, does both. Until the new store is open there is no storage, which only
costs hits. A failed attempt is repeated with growing delays.

Locking design: the scheduler thread makes every call except for `_open` and owns all fields, so no lock is needed. The
opening worker returns opened stores through one `SimpleQueue`. A guard takes its own lock for a few instructions. In an
`OpenStore`, the scheduler writes `until` and `in_flight`. `until` is one reference to an immutable value, whose times
only move earlier. Workers set and remove the entries of `broken_chains` one by one.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from ..backends.base import EvictionListener, StorageBackend, register_memory, watch_evictions
from ..backends.guard import (
    CONFIRM_S,
    Direction,
    LeafStatistics,
    Override,
    Overrides,
    leaf_statistics,
    may_pass,
    unopened,
)
from ..backoff import Backoff
from ..errors import BackendError, InvariantError
from ..logs import LimitedLog, shortened
from ..supervised import SupervisedPool, WorkerFactory

logger = logging.getLogger(__name__)
OpenBackend: TypeAlias = Callable[[], StorageBackend]

# A full or hanging store should delay one request, not every request. After a failure the direction is closed for this
# long, twice as long after each further failure. A success ends the back-off. It is short because the guard's breaker,
# which probes, handles outages: a longer back-off would keep a recovered store closed.
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 1.0
# An attempt to open a store is repeated after 0.1, 0.2, 0.4 ... 30 s.
REOPEN_S_MIN = 0.1
REOPEN_S_MAX = 30.0
# Opening sweeps a large store. An attempt that takes longer hangs, and must not block opening the next store.
OPEN_DEADLINE_S = 60.0
# The log has at most one line per this time about storage that cannot be opened.
_OPEN_LOG_S = 60.0

# Monotonic seconds: workers start no batch of a direction at or after its time.
Until: TypeAlias = Mapping[Direction, float]
IN_SERVICE: Final[Until] = dict.fromkeys(Direction, math.inf)
RETIRED: Final[Until] = dict.fromkeys(Direction, -math.inf)


@dataclass(slots=True, eq=False)
class OpenStore:
    """An open backend, in use or being retired."""

    backend: StorageBackend
    until: Until
    in_flight: int = 0  # operations that are not acknowledged yet
    # Last keys of operations that did not store all pages, the oldest first. With several backup workers a
    # continuation may overtake the failure. Then its pages are of no use until its head is stored.
    broken_chains: dict[bytes, None] = field(default_factory=dict)


class Readiness(NamedTuple):
    """Whether storage may be used, on this rank or on all ranks."""

    opened: int = 0  # number of the last opened store
    read: bool = True
    write: bool = True


class StorageGate:
    """The store in use, and whether it may be read and written now. `memory`, which holds the frames, is registered
    with each store. `workers` makes the pool that opens and closes stores; `clock` is monotonic, in seconds.
    `on_evicted` is notified of evictions in the store in use, if the store reports them.

    Invariant: `may(direction)` is True if and only if no reason of the table above held on any rank when the ranks last
    agreed, and this rank has since called neither `retire` nor `stop(direction)`. `storage` is the open store if
    `opened == wanted`, else None; its workers read the `until` of this gate. A store is closed once, after the ack of
    its last operation; never if an operation does not end.

    REQUIRES: with ranks, all call `replace` in the same step. Then `may` is equal on all ranks until they close.
    """

    def __init__(
        self,
        memory: memoryview,
        workers: WorkerFactory,
        clock: Callable[[], float],
        on_evicted: EvictionListener | None = None,
    ) -> None:
        self.open_failures = 0
        self._unopened: tuple[float, str] | None = None  # since when (wall clock) the wanted store is not open, and why
        self._log = LimitedLog(logger, _OPEN_LOG_S)
        self.storage: OpenStore | None = None
        self.attached = False  # True if a store is open or being opened
        self.wanted, self.opened = 1, 0  # numbers of the wanted and of the last opened store
        self._memory = memory
        self._on_evicted = on_evicted
        self._workers = workers
        self._clock = clock
        self._agreed: Readiness | None = Readiness()
        self._until = IN_SERVICE
        self._closed_until = dict.fromkeys(Direction, -math.inf)
        self._backoffs = {direction: Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX) for direction in Direction}
        self.overrides = Overrides()
        self._retired: list[OpenStore] = []
        self._opening: OpenBackend | None = None  # opens the wanted store; None once it is open
        self._attempt: OpenBackend | None = None  # in flight for the wanted store
        self._retry_at = 0.0
        self._reopen_backoff = Backoff(REOPEN_S_MIN, REOPEN_S_MAX)
        # Result of each attempt: the backend, or the reason why it could not be opened.
        self._opened: queue.SimpleQueue[tuple[OpenBackend, StorageBackend | str]] = queue.SimpleQueue()
        self._worker: SupervisedPool[Callable[[], None]] | None = None
        self._closed = False

    def may(self, direction: Direction) -> bool:
        """Return True if a new operation of `direction` may be submitted. Within a step it changes only to False."""
        agreed = self._agreed
        if agreed is None:
            agreed = self._agreed = self.offer()
        opened, read, write = agreed
        ready = read if direction is Direction.READ else write
        return ready and opened == self.wanted and self._until[direction] == math.inf

    def enter(self) -> OpenStore:
        """Count one more operation in flight and return its store. Raises InvariantError if no store is open."""
        if self.storage is None:
            raise InvariantError("storage gate: an operation was submitted, but no storage is open")
        self.storage.in_flight += 1
        return self.storage

    # Each step

    def offer(self) -> Readiness:
        """Return the readiness of this rank alone. Checks the guards; does not block."""
        return Readiness(self.opened, self._is_ready(Direction.READ), self._is_ready(Direction.WRITE))

    def settle(self, agreed: Readiness | None = None) -> None:
        """Use `agreed`, the minimum of the offers of all ranks, until the next call. With None, for a single rank, the
        next `may` makes its own offer.
        """
        self._agreed = agreed

    def _is_ready(self, direction: Direction) -> bool:
        return (
            self.storage is not None
            and self._until[direction] == math.inf
            and self._clock() >= self._closed_until[direction]
            and may_pass(self.storage.backend, direction)
        )

    # Reasons

    def failed(self, direction: Direction) -> None:
        """Start a back-off. Does nothing during a back-off, because the failed operation began before it."""
        time_s = self._clock()
        if time_s >= self._closed_until[direction]:
            self._closed_until[direction] = time_s + self._backoffs[direction].next_s()

    def succeeded(self, direction: Direction) -> None:
        """End the back-off. The next one has the shortest length again."""
        self._closed_until[direction] = -math.inf
        self._backoffs[direction].reset()

    def override(self, direction: Direction, mode: Override, store: str | None = None) -> None:
        """Switch a direction of this and all later stores on or off, or return it to their breakers. Does not block.

        `store` names one store of a composition, None means all stores; the latest call for a store holds. With ranks,
        a rank that switches a direction off for all its stores closes it on all ranks.
        """
        self.overrides.force(direction, mode, store, () if self.storage is None else (self.storage.backend,))

    # Stores

    def leaves(self) -> tuple[LeafStatistics, ...]:
        """Return the statistics of each open store; while the wanted storage is not open, one entry with the reason.
        Any thread. Blocks as `leaf_statistics`."""
        storage, waiting = self.storage, self._unopened
        if storage is not None:
            return leaf_statistics(storage.backend)
        if waiting is None:
            return ()
        since_s, reason = waiting
        if not reason and time.time() - since_s < CONFIRM_S:
            return ()
        return (unopened("storage", since_s, reason or "it does not answer while it is opened"),)

    def start(self, backend: StorageBackend) -> None:
        """Use an open backend. REQUIRES: no backend was in use. Raises as `register_memory`.

        It may be used at once: until the first agreement, all ranks decide by this call.
        """
        register_memory(backend, self._memory)
        self.use(backend)
        self.settle(Readiness(self.opened))

    def replace(self, open_backend: OpenBackend | None) -> None:
        """Retire the backend in use, or cancel its opening, and open another one (None: none). Does not block."""
        retired = self.retire(for_another=open_backend is not None)
        if retired is not None:
            self._retired.append(retired)
        self._opening, self._attempt = open_backend, None
        self._unopened = None if open_backend is None else (time.time(), "")
        self._retry_at = 0.0
        self._reopen_backoff.reset()
        self.advance()

    def advance(self) -> None:
        """Take over an opened backend, retry a failed attempt, close idle retired backends. Cheap if nothing is to be
        done. Does nothing after `close`."""
        if self._closed:
            return
        if self._worker is not None:
            self._worker.supervise()
            self._take_opened()
        if self._opening is not None and self._attempt is None and self._clock() >= self._retry_at:
            self._attempt = self._opening
            self._submit(functools.partial(self._open, self._opening))
        for store in [store for store in self._retired if store.in_flight == 0]:
            self._retired.remove(store)
            self._submit(store.backend.close)

    def close(self, timeout_s: float, *, workers_ended: bool) -> bool:
        """End the worker. Close all backends, unless a worker is still in a call of one. Blocks.

        Return False if a thread or a backend remains, or if a backend failed to close.
        """
        self._closed = True
        ended = self._worker is None or self._worker.close(timeout_s)
        for _, backend in self._drain():
            ended &= isinstance(backend, str) or _close(backend)
        if workers_ended:
            for store in filter(None, [*self._retired, self.storage]):
                ended &= _close(store.backend)
        return ended and workers_ended

    def _take_opened(self) -> None:
        for open_backend, backend in self._drain():
            self.open_failures += isinstance(backend, str)
            if open_backend is not self._opening:  # another backend is wanted since
                if not isinstance(backend, str):
                    self._submit(backend.close)
                continue
            self._attempt = None
            if isinstance(backend, str):
                self._retry_at = self._clock() + self._reopen_backoff.next_s()
                if self._unopened is not None:
                    self._unopened = self._unopened[0], backend
            else:
                self.use(backend)
                self._opening = None

    def _drain(self) -> list[tuple[OpenBackend, StorageBackend | str]]:
        return [self._opened.get_nowait() for _ in range(self._opened.qsize())]

    def _submit(self, call: Callable[[], None]) -> None:
        if self._worker is None:
            self._worker = self._workers("open", 1, handle=lambda call, beat: call(), patience_s=OPEN_DEADLINE_S)
        self._worker.submit(call)

    def _open(self, open_backend: OpenBackend) -> None:
        """Open a backend and register the memory of the frames. On the opening worker."""
        opened: StorageBackend | str = "an unexpected error, which is in the log"
        try:
            try:
                backend = open_backend()
            except BackendError as error:
                opened = shortened(str(error))
                self._log.warn("open", "storage cannot be opened, so the cache works without it and tries again: %s",
                               error)  # fmt: skip
                return
            logger.info("storage is open")
            try:
                register_memory(backend, self._memory)
                opened = backend
            finally:
                if opened is not backend:
                    backend.close()
        finally:
            self._opened.put((open_backend, opened))

    def use(self, backend: StorageBackend) -> None:
        """Use `backend` as the wanted store. REQUIRES: no store is open."""
        self.storage, self.attached, self.opened = OpenStore(backend, self._until), True, self.wanted
        self._unopened = None
        for direction in Direction:
            self.succeeded(direction)  # a back-off is of the store before
        self.overrides.apply(backend)
        if self._on_evicted is not None:
            watch_evictions(backend, self._on_evicted)

    def retire(self, *, for_another: bool) -> OpenStore | None:
        """Stop using the open store, cancel its work and return it. `for_another`: another store is being opened."""
        retired, self.storage = self.storage, None
        if retired is not None:
            retired.until = RETIRED
        self.wanted += 1
        self.attached = for_another
        return retired

    def stop(self, direction: Direction, at: float = -math.inf) -> None:
        """Close `direction` permanently, for shutdown. Workers start no batch of it at or after the time `at`."""
        self._until = {**self._until, direction: at}
        if self.storage is not None:
            self.storage.until = self._until

    def check(self) -> None:
        """Raise InvariantError if the invariant does not hold."""
        is_open = self.storage is not None
        if is_open is not (self.opened == self.wanted) or (is_open and not self.attached):
            raise InvariantError(f"storage gate: store {self.opened} of {self.wanted} was opened; in use: {is_open}")
        if self.storage is not None and self.storage.until is not self._until:
            raise InvariantError("storage gate: the workers of the open store read a stale `until`")


def _close(backend: StorageBackend) -> bool:
    """Close `backend`. Return False, and log, if it fails, so that the caller can close the other backends."""
    try:
        backend.close()
    except BackendError as error:
        logger.warning("storage failed to close: %s", error)
        return False
    return True
