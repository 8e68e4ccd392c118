"""StorageGate: alone decides whether storage may be used now.

A direction is closed while one of these reasons holds on this rank or on another one:

    reason                              the direction closes    and opens again
    the wanted store is not open        at once, by `replace`   in the step after it is open
    the service ends                    at once, by `stop`      never
    the guard passes no calls           at the next step        when the guard passes calls
    a back-off runs after a failure     at the next step        after 0.1 s to 1 s, or after a success

The slot opens, replaces and closes the store. The guard owns the breaker and its probes; the gate checks it once per
step. Workers read one value, `OpenStore.until`, which the gate writes.

Locking design: the scheduler thread makes every call and owns all fields, so no lock is needed. The slot has its own
lock, held for moments, and its thread sets the store; a guard takes its own lock for a few instructions. In an
`OpenStore`, the scheduler writes all but `broken_chains`, whose entries the workers set and remove one by one. `until`
is one reference to an immutable value, whose times only move earlier.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from ..backends.base import Direction, EvictionListener
from ..backends.slot import Entry, OpenBackend, Slot
from ..backends.storage import Storage
from ..backoff import Backoff
from ..clock import Clock
from ..errors import InvariantError
from ..supervised import WorkerFactory

logger = logging.getLogger(__name__)

# A full or hanging store should delay one request, not every request. After a failure the direction is closed for this
# long, twice as long after each further failure. A success ends the back-off. It is short because the guard's breaker,
# which probes, handles outages: a longer back-off would keep a recovered store closed.
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 1.0

# Monotonic seconds: workers start no batch of a direction at or after its time.
Until: TypeAlias = Mapping[Direction, float]
IN_SERVICE: Final[Until] = dict.fromkeys(Direction, math.inf)
RETIRED: Final[Until] = dict.fromkeys(Direction, -math.inf)


@dataclass(slots=True, eq=False)
class OpenStore(Entry):
    """An open backend, in use or being retired. `in_flight` are operations that are not acknowledged yet."""

    until: Until
    # Last keys of operations that did not store all pages, the oldest first. With several backup workers a
    # continuation may overtake the failure. Then its pages are of no use until its head is stored.
    broken_chains: dict[bytes, None] = field(default_factory=dict)
    closed_until: dict[Direction, float] = field(default_factory=lambda: dict.fromkeys(Direction, -math.inf))
    backoffs: dict[Direction, Backoff] = field(
        default_factory=lambda: {direction: Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX) for direction in Direction}
    )


class Readiness(NamedTuple):
    """Whether storage may be used, on this rank or on all ranks."""

    opened: int = 0  # number of the open store, see Slot
    read: bool = True
    write: bool = True


class StorageGate:
    """Whether the store in `slot` may be read and written now. `memory`, which holds the frames, is registered with
    each store; None registers nothing. `workers` makes the pool of the slot.
    `on_evicted` is notified of evictions in the store in use, if the store reports them.

    Invariant: `may(direction)` is True if and only if no reason of the table above held on any rank when the ranks last
    agreed, and this rank has since called neither `replace` nor `stop(direction)`. The workers of operations in flight
    read the `until` of this gate, or that of a retired store.

    REQUIRES: with ranks, all call `replace` in the same step. Then `may` is equal on all ranks until they close.
    """

    def __init__(
        self, memory: memoryview | None, workers: WorkerFactory, clock: Clock,
        on_evicted: EvictionListener | None = None,
    ) -> None:
        self.slot = Slot(self._attach, name="storage", user="the cache", workers=workers, clock=clock)
        self._memory = memory
        self._on_evicted = on_evicted
        self._clock = clock
        self._agreed: Readiness | None = Readiness()
        self._until = IN_SERVICE

    @property
    def storage(self) -> OpenStore | None:
        """The store in use, None while none is open."""
        return self.slot.store

    @property
    def attached(self) -> bool:
        """True if a store is open or being opened."""
        return self.slot.store is not None or self.slot.is_awaited

    def may(self, direction: Direction) -> bool:
        """Return True if a new operation of `direction` may be submitted. Within a step it changes only to False."""
        agreed = self._agreed
        if agreed is None:
            agreed = self._agreed = self.offer()
        opened, read, write = agreed
        ready = read if direction is Direction.READ else write
        return ready and opened == self.slot.wanted and self._until[direction] == math.inf

    def enter(self) -> OpenStore:
        """Count one more operation in flight and return its store; `slot.leave` ends it. Raises InvariantError if no
        store is open."""
        store = self.slot.enter()
        if store is None:
            raise InvariantError("storage gate: an operation was submitted, but no storage is open")
        store.until = self._until
        return store

    # Each step

    def offer(self) -> Readiness:
        """Return the readiness of this rank alone. Checks the guards; does not block."""
        return Readiness(self.slot.opened, self._is_ready(Direction.READ), self._is_ready(Direction.WRITE))

    def settle(self, agreed: Readiness | None = None) -> None:
        """Use `agreed`, the minimum of the offers of all ranks, until the next call. With None, for a single rank, the
        next `may` makes its own offer.
        """
        self._agreed = agreed

    def _is_ready(self, direction: Direction) -> bool:
        store = self.slot.store
        return (
            store is not None
            and self._until[direction] == math.inf
            and self._clock() >= store.closed_until[direction]
            and store.backend.may_pass(direction)
        )

    # Reasons

    def failed(self, direction: Direction) -> None:
        """Start a back-off. Does nothing during a back-off, because the failed operation began before it."""
        time_s, store = self._clock(), self.slot.store
        if store is not None and time_s >= store.closed_until[direction]:
            store.closed_until[direction] = time_s + store.backoffs[direction].next_s()

    def succeeded(self, direction: Direction) -> None:
        """End the back-off. The next one has the shortest length again."""
        store = self.slot.store
        if store is not None:
            store.closed_until[direction] = -math.inf
            store.backoffs[direction].reset()

    def stop(self, direction: Direction, at: float = -math.inf) -> None:
        """Close `direction` permanently, for shutdown. Workers start no batch of it at or after the time `at`."""
        self._until = {**self._until, direction: at}
        if self.slot.store is not None:
            self.slot.store.until = self._until

    # Stores

    def start(self, backend: Storage) -> None:
        """Use an open backend. REQUIRES: no backend was in use. Raises as `register_memory`.

        It may be used at once: until the first agreement, all ranks decide by this call.
        """
        self.slot.start(backend)
        self.settle(Readiness(self.slot.opened))

    def replace(self, open_backend: OpenBackend | None) -> None:
        """Retire the backend in use, or cancel its opening, and open another one (None: none). Does not block."""
        if self.slot.store is not None:
            self.slot.store.until = RETIRED
        self.slot.replace(None if open_backend is None else functools.partial(_open, open_backend))

    def _attach(self, backend: Storage) -> OpenStore:
        if self._memory is not None:
            backend.register_memory(self._memory)
        if self._on_evicted is not None:
            backend.watch_evictions(self._on_evicted)
        return OpenStore(backend, IN_SERVICE)

    def check(self) -> None:
        """Raise InvariantError if the invariant does not hold."""
        self.slot.check()
        store = self.slot.store
        if store is not None and store.in_flight and store.until is not self._until:
            raise InvariantError("storage gate: the workers of the open store read a stale `until`")


def _open(open_backend: OpenBackend) -> Storage:
    backend = open_backend()
    logger.info("storage is open")
    return backend
