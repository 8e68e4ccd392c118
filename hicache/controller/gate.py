"""StorageGate: which store is in use, and the one owner of the answer to "may storage be used now?".

A direction is closed while one of these reasons holds, on this rank or on another one:

    reason                              the direction closes    and opens again
    the wanted store is not open        at once, by `retire`    in the step after `use`
    the service ends                    at once, by `stop`      never
    the guard lets no calls through     at the next step        when the guard lets calls through
    a back-off runs after a failure     at the next step        after 0.1 s to 1 s, or after a success

The guard owns the breaker and its probes; the gate asks it once per step. Workers read one value, `OpenStore.until`,
which the gate writes.

Opening a store may create directories, sweep an index or connect to a server, and closing one may wait; both happen on
a supervised worker of their own, which is started when first needed. Until the new store is open there is none, which
costs hits and nothing else. An attempt that fails is repeated with growing delays.

Locking design: the scheduler thread makes every call but `_open` and owns all fields, so there is no lock. The opening
worker hands back what it has opened through one `SimpleQueue`. A guard that is asked takes a lock of its own and holds
it for a few instructions. Of an `OpenStore`, the scheduler writes `until`, one reference to a value that never changes,
whose times only ever get earlier, and `in_flight`; workers set and remove the entries of `broken_chains` one by one.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from ..backends.base import EvictionListener, StorageBackend, register_memory, watch_evictions
from ..backends.guard import Direction, Override, Overrides, may_pass
from ..backoff import Backoff
from ..errors import BackendError, InvariantError
from ..logs import LimitedLog
from ..supervised import SupervisedPool, WorkerFactory

logger = logging.getLogger(__name__)
OpenBackend: TypeAlias = Callable[[], StorageBackend]

# A store that is full or hanging should cost one request its time, and not every request: after a failure the direction
# is closed for this long, twice as long after each further failure. A success ends the back-off. It is short because
# outages belong to the guard's breaker, which probes: a longer one would keep a store closed that works again.
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 1.0
# An attempt to open a store is repeated after 0.1, 0.2, 0.4 ... 30 s.
REOPEN_S_MIN = 0.1
REOPEN_S_MAX = 30.0
# A large store is swept when it is opened. What takes longer hangs, and must not keep the next store from being opened.
OPEN_DEADLINE_S = 60.0
# Of storage that cannot be opened, one line in so long.
_OPEN_LOG_S = 60.0

# Monotonic seconds: workers start no batch of a direction at or after its time.
Until: TypeAlias = Mapping[Direction, float]
IN_SERVICE: Final[Until] = dict.fromkeys(Direction, math.inf)
RETIRED: Final[Until] = dict.fromkeys(Direction, -math.inf)


@dataclass(slots=True, eq=False)
class OpenStore:
    """A backend that is open, in use or being retired."""

    backend: StorageBackend
    until: Until
    in_flight: int = 0  # operations that are not acknowledged yet
    # Last keys of operations that did not store everything, the oldest first. With several backup workers a
    # continuation may overtake the failure; it is then stored in vain and found once its head is there.
    broken_chains: dict[bytes, None] = field(default_factory=dict)


class Readiness(NamedTuple):
    """Whether storage may be used, on this rank or on all of them."""

    opened: int = 0  # the number of the last store that was opened
    read: bool = True
    write: bool = True


class StorageGate:
    """Which store is in use, and whether it may be read and written now. `memory`, where frames will come from, is
    registered with each store. `workers` makes the pool that opens and closes them; `clock` is monotonic, in seconds.
    `on_evicted` is told what a store in use evicts, as far as the store tells.

    Invariant: `may(direction)` is True exactly if no reason of the table above held on any rank when the ranks last
    agreed, and this rank has called neither `retire` nor `stop(direction)` since. `storage` is the open store if
    `opened == wanted`, else None; its workers read the `until` of this gate. A store is closed once, after its last
    operation was acknowledged, or never if one does not end.

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
        self._log = LimitedLog(logger, _OPEN_LOG_S)
        self.storage: OpenStore | None = None
        self.attached = False  # True if a store is open or being opened
        self.wanted, self.opened = 1, 0  # numbers: of the store that is wanted, and of the last one that was opened
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
        self._opening: OpenBackend | None = None  # opens the wanted store, as long as it is not open
        self._attempt: OpenBackend | None = None  # in flight for the wanted store
        self._retry_at = 0.0
        self._reopen_backoff = Backoff(REOPEN_S_MIN, REOPEN_S_MAX)
        # How each attempt has ended: the backend, None if it could not be opened.
        self._opened: queue.SimpleQueue[tuple[OpenBackend, StorageBackend | None]] = queue.SimpleQueue()
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
        """Return the answers of this rank alone. Asks the guards; does not block."""
        return Readiness(self.opened, self._is_ready(Direction.READ), self._is_ready(Direction.WRITE))

    def settle(self, agreed: Readiness | None = None) -> None:
        """Use `agreed` until the next call, the minimum of the offers of all ranks. None, for a rank alone: its own
        offer, which is made when it is asked for.
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
        """Start a back-off. Does nothing during one: that operation began before it and says nothing new."""
        time_s = self._clock()
        if time_s >= self._closed_until[direction]:
            self._closed_until[direction] = time_s + self._backoffs[direction].next_s()

    def succeeded(self, direction: Direction) -> None:
        """End the back-off; the next one is the shortest again."""
        self._closed_until[direction] = -math.inf
        self._backoffs[direction].reset()

    def override(self, direction: Direction, mode: Override, store: str | None = None) -> None:
        """Switch a direction of this and all later stores on or off, or return it to their breakers. Does not block.

        `store` names one of a composition, None all of them; the last word about a store holds. With ranks, one rank
        that switches a direction of all off closes it on all.
        """
        self.overrides.force(direction, mode, store, () if self.storage is None else (self.storage.backend,))

    # Stores

    def start(self, backend: StorageBackend) -> None:
        """Use a backend that is open. REQUIRES: there was none. Raises as `register_memory`.

        It may be used at once: until the ranks have agreed for the first time, all decide by this.
        """
        register_memory(backend, self._memory)
        self.use(backend)
        self.settle(Readiness(self.opened))

    def replace(self, open_backend: OpenBackend | None) -> None:
        """Retire the backend in use, or the wish for one, and have another one opened (None: none). Does not block."""
        retired = self.retire(for_another=open_backend is not None)
        if retired is not None:
            self._retired.append(retired)
        self._opening, self._attempt = open_backend, None
        self._retry_at = 0.0
        self._reopen_backoff.reset()
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
            for store in filter(None, [*self._retired, self.storage]):
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
                self._retry_at = self._clock() + self._reopen_backoff.next_s()
            else:
                self.use(backend)
                self._opening = None

    def _drain(self) -> list[tuple[OpenBackend, StorageBackend | None]]:
        return [self._opened.get_nowait() for _ in range(self._opened.qsize())]

    def _submit(self, call: Callable[[], None]) -> None:
        if self._worker is None:
            self._worker = self._workers("open", 1, handle=lambda call, beat: call(), patience_s=OPEN_DEADLINE_S)
        self._worker.submit(call)

    def _open(self, open_backend: OpenBackend) -> None:
        """Opening worker: a backend that knows the memory its frames will come from."""
        opened = None
        try:
            try:
                backend = open_backend()
            except BackendError as error:
                self._log.warn("open", "storage cannot be opened, so the cache works without it and tries again: %s",
                               error)  # fmt: skip
                return
            logger.info("storage is open")
            try:
                register_memory(backend, self._memory)
                opened = backend
            finally:
                if opened is None:
                    backend.close()
        finally:
            self._opened.put((open_backend, opened))

    def use(self, backend: StorageBackend) -> None:
        """Use `backend` as the store that is wanted. REQUIRES: no store is open."""
        self.storage, self.attached, self.opened = OpenStore(backend, self._until), True, self.wanted
        self.overrides.apply(backend)
        if self._on_evicted is not None:
            watch_evictions(backend, self._on_evicted)

    def retire(self, *, for_another: bool) -> OpenStore | None:
        """Stop using the open store, cancel its work and return it. `for_another`: another one is being opened."""
        retired, self.storage = self.storage, None
        if retired is not None:
            retired.until = RETIRED
        self.wanted += 1
        self.attached = for_another
        return retired

    def stop(self, direction: Direction, at: float = -math.inf) -> None:
        """Close `direction` for good. Workers start no batch of it at or after the time `at`. For shutdown."""
        self._until = {**self._until, direction: at}
        if self.storage is not None:
            self.storage.until = self._until

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold."""
        is_open = self.storage is not None
        if is_open is not (self.opened == self.wanted) or (is_open and not self.attached):
            raise InvariantError(f"storage gate: store {self.opened} of {self.wanted} was opened; in use: {is_open}")
        if self.storage is not None and self.storage.until is not self._until:
            raise InvariantError("storage gate: the workers of the open store read a stale `until`")


def _close(backend: StorageBackend) -> bool:
    """Whether it was closed without trouble; one that was not keeps no other from being closed."""
    try:
        backend.close()
    except BackendError as error:
        logger.warning("storage failed to close: %s", error)
        return False
    return True
