"""Slot: the place of one store. Only a slot opens, replaces, retires and overrides a store that is in use.

    none       no store is wanted
    awaited    a store is wanted; a thread opens it, and tries again after 0.1, 0.2 ... 30 s if that fails
    open       the store is in use
    retired    another store, or none, is wanted; it is closed after its last call

A thread of the slot opens and closes stores, which may take long. An attempt that hangs does not block the next one:
after a minute the thread gets a substitute, and the store that the attempt opens later is closed.

Invariant: a call ends with the store that it began with. A store is closed once, after its last call; never if a call
does not end.

Locking design: any threads may call all methods. `_changed`, a condition, guards the fields of the slot and of its
entries; it is held for a few instructions or for the start of a thread, never while a store is opened, called or
closed. `store` is one reference, which is also read without it. The locks of `Overrides` and of the pool are taken
after it.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from ..backoff import Backoff
from ..clock import SYSTEM_CLOCK, Clock
from ..config.guard import Override
from ..errors import BackendError, ConfigError, InvariantError
from ..logs import LimitedLog, shortened
from ..supervised import LINGER_S, SupervisedPool, WorkerFactory
from .base import Direction
from .guard import CONFIRM_S
from .storage import Storage, StoreStatistics, named_stores, store_statistics, unopened

logger = logging.getLogger(__name__)
OpenBackend: TypeAlias = Callable[[], Storage]

REOPEN_S_MIN = 0.1
REOPEN_S_MAX = 30.0
# Opening sweeps a large store. An attempt that takes longer hangs, and must not block opening the next store.
OPEN_DEADLINE_S = 60.0
# The log has at most one line per this time about a store that cannot be opened.
OPEN_LOG_S = 60.0
# The longest shown reason: a message of any backend fits, and a page with many namespaces stays small.
_REASON_CHARS_MAX = 300


@dataclass(slots=True, eq=False)
class Entry:
    """A store in a slot. `in_flight`: calls of it that have not ended. A retired store gets no further call."""

    backend: Storage
    in_flight: int = field(default=0, kw_only=True)
    is_retired: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A store that is wanted since `since_s` (wall clock, seconds) and not open. `attempts` to open it have failed;
    `error` is the reason of the last one, on one line, without secrets."""

    attempts: int
    since_s: float
    error: str


E = TypeVar("E", bound=Entry)


class Overrides:
    """The operator's overrides of breakers by direction and store, for stores that are open and for those that are
    opened later; store None means all stores. The latest override of a store wins. Thread-safe."""

    def __init__(self) -> None:
        self.modes: Mapping[tuple[Direction, str | None], Override] = {}  # replaced, never changed
        self._lock = threading.RLock()

    def force(self, direction: Direction, mode: Override, store: str | None, backends: Iterable[Storage]) -> None:
        """Switch a direction of a store on or off, or return it to its breaker. `backends` are all open backends, read
        after the change. Does not block."""
        with self._lock:
            modes = {key: other for key, other in self.modes.items() if store is not None or key[0] is not direction}
            modes[direction, store] = mode
            self.modes = modes
            for backend in backends:
                self.apply(backend)
            if mode is Override.AUTO and (store is None or (direction, None) not in modes):
                self.modes = {key: other for key, other in modes.items() if key != (direction, store)}

    def apply(self, backend: Storage) -> None:
        """Apply the overrides to the stores of `backend`. Does not block."""
        with self._lock:
            for name, one in named_stores(backend) if self.modes else ():
                for direction in Direction:
                    mode = self.modes.get((direction, name), self.modes.get((direction, None)))
                    if mode is not None:
                        one.override(direction, mode)


class Slot(Generic[E]):
    """See the module's docstring. `attach` makes the entry of an opened store before its first call, and may block; if
    it raises, the store is closed. `name` and `user` are for log lines. Several slots may share `overrides` and `log`.

    Its owner calls `advance` from time to time; `changed` is called when that is due earlier. `workers` makes the pool
    of the thread. Deadlines are times of `clock`.
    """

    def __init__(
        self, attach: Callable[[Storage], E], *, name: str, user: str, overrides: Overrides | None = None,
        log: LimitedLog | None = None, changed: Callable[[], object] = lambda: None,
        workers: WorkerFactory = SupervisedPool, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.store: E | None = None
        self.wanted = 1  # number of the last change
        self.open_failures = 0
        self.overrides = overrides or Overrides()
        self._attach = attach
        self._name, self._user = name, user
        self._log = log or LimitedLog(logger, OPEN_LOG_S, clock)
        self._notify = changed
        self._clock = clock
        self._changed = threading.Condition()
        self._opener: OpenBackend | None = None  # of the wanted store, until it is open
        self._is_opening = False  # an attempt of `_opener` is in flight
        self.waiting = Waiting(0, 0.0, "")  # of the wanted store, while it is awaited
        self._retry_at = -math.inf
        self._backoff = Backoff(REOPEN_S_MIN, REOPEN_S_MAX)
        self._leaving: list[E] = []  # retired, with calls in flight
        self._jobs = 0  # queued or running on the thread
        self._has_ended = False
        self._pool: SupervisedPool[Callable[[], object]] = workers(
            "open", 1, handle=lambda job, beat: job(), acknowledge=self._job_ended, patience_s=OPEN_DEADLINE_S,
            linger_s=LINGER_S, clock=clock,
        )

    # The store in use

    @property
    def opened(self) -> int:
        """The number of the change that opened the store in use; 0 while none is open."""
        return 0 if self.store is None else self.wanted

    @property
    def is_awaited(self) -> bool:
        """True if a store is wanted and not open."""
        return self._opener is not None

    def enter(self) -> E | None:
        """Count one more call in flight and return its store; None if none is open. `leave` ends the call."""
        with self._changed:
            store = self.store
            if store is not None:
                store.in_flight += 1
            return store

    def leave(self, store: E) -> None:
        """Count the end of a call. After the last call of a retired store it is closed, on the thread."""
        with self._changed:
            store.in_flight -= 1
            if store.in_flight:
                return
            self._changed.notify_all()
            if store.is_retired and not self._has_ended:
                self._leaving.remove(store)
                self._submit(functools.partial(_close, store, "a detached store"))

    def open_backends(self) -> Iterator[Storage]:
        """Yield the open store, if there is one."""
        store = self.store
        if store is not None:
            yield store.backend

    def override(self, direction: Direction, mode: Override, store: str | None = None) -> None:
        """Switch a direction of this and all later stores on or off, or return it to their breakers. Does not block.

        `store` names one store of a composition, None means all stores; the latest call for a store holds.
        """
        self.overrides.force(direction, mode, store, self.open_backends())

    def leaves(self) -> tuple[StoreStatistics, ...]:
        """Return the statistics of each open store; while a wanted store is not open, one entry with the reason. Blocks
        as `store_statistics`."""
        with self._changed:
            store, is_awaited, waiting = self.store, self.is_awaited, self.waiting
        if store is not None:
            return store_statistics(store.backend)
        if not is_awaited or (not waiting.error and self._clock.wall_s() - waiting.since_s < CONFIRM_S):
            return ()
        return (unopened("storage", waiting.since_s, waiting.error or "it does not answer while it is opened"),)

    # Changes

    def start(self, backend: Storage) -> None:
        """Use an open backend. REQUIRES: no store was wanted. Raises as `attach`, and then does not close it."""
        store = self._attach(backend)
        with self._changed:
            self._use(store)

    def replace(self, open_backend: OpenBackend | None) -> None:
        """Retire the store in use, or cancel its opening, and open another one (None: none). Does not block, and does
        nothing after `end`."""
        with self._changed:
            if self._has_ended:
                return
            retired, self.store = self.store, None
            self.wanted += 1
            self._opener, self._is_opening = open_backend, False
            self.waiting, self._retry_at = Waiting(0, self._clock.wall_s(), ""), -math.inf
            self._backoff.reset()
            self._open_if_due()
            if retired is not None:
                retired.is_retired = True
                if retired.in_flight:
                    self._leaving.append(retired)
                else:
                    self._submit(functools.partial(_close, retired, "a detached store"))
            self._changed.notify_all()
        self._notify()

    def advance(self) -> float:
        """Replace a hung thread, and retry a failed attempt if it is due. Cheap, and does not block. Return when to
        call it again at the latest."""
        if self._jobs:
            self._pool.supervise()
        with self._changed:
            self._open_if_due()
            if self._jobs:
                return self._clock() + OPEN_DEADLINE_S
            return self._retry_at if self.is_awaited and not self._has_ended else math.inf

    def wait(self, deadline: float) -> None:
        """Wait until the wanted store is open or an attempt to open it has failed, at most until `deadline`."""
        with self._changed:
            self._clock.wait_for(
                self._changed, lambda: not self.is_awaited or self.waiting.attempts > 0 or self._has_ended, deadline
            )

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is in flight. Return False if one still is after `timeout_s`."""
        with self._changed:
            return self._clock.wait_for(
                self._changed, lambda: not any(one.in_flight for one in self._entries()), self._clock() + timeout_s
            )

    def end(self, timeout_s: float) -> bool:
        """Open no further store, and end the thread after its work. Blocks. Return False if the thread hangs; a store
        that it opens later is closed at once. Idempotent."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        return self._pool.close(timeout_s)

    def close(self) -> bool:
        """Close the stores. Blocks. Return False if one failed to close. REQUIRES: `end` was called; no call runs."""
        with self._changed:
            entries, self._leaving = self._entries(), []
        return all([_close(store, self._name) for store in entries])

    def check(self) -> None:
        """Raise InvariantError if the invariant does not hold."""
        with self._changed:
            wrong = [one for one in self._entries() if one.is_retired is (one is self.store)]
            if wrong or (self.store is not None and (self.is_awaited or self._is_opening)):
                raise InvariantError(f"slot: {len(wrong)} wrong entries; awaited: {self.is_awaited}")

    # With `_changed` held

    def _entries(self) -> list[E]:
        return [*self._leaving, *([] if self.store is None else [self.store])]

    def _use(self, store: E) -> None:
        self.store, self._opener = store, None
        self.overrides.apply(store.backend)

    def _open_if_due(self) -> None:
        is_due = self._clock() >= self._retry_at and not (self._is_opening or self._has_ended)
        if self._opener is not None and is_due:
            self._is_opening = True
            self._submit(functools.partial(self._attempt, self.wanted, self._opener))

    def _submit(self, job: Callable[[], object]) -> None:
        self._jobs += 1
        self._pool.submit(job)

    # On the thread

    def _attempt(self, number: int, open_backend: OpenBackend) -> None:
        store, reason = None, "an unexpected error, which is in the log"
        try:
            backend = open_backend()
            try:
                store = self._attach(backend)
            finally:
                if store is None:
                    backend.close()
        except (BackendError, ConfigError) as error:
            reason = shortened(" ".join(str(error).split()))[:_REASON_CHARS_MAX]
            self._log.warn(self._name, "%s cannot be opened, so %s works without it and tries again: %s",
                           self._name, self._user, error)
        finally:
            self._attempted(number, store, reason)

    def _attempted(self, number: int, store: E | None, reason: str) -> None:
        with self._changed:
            self.open_failures += store is None
            is_wanted = number == self.wanted and not self._has_ended
            if is_wanted:
                self._is_opening = False
                if store is not None:
                    self._use(store)
                else:
                    self.waiting = Waiting(self.waiting.attempts + 1, self.waiting.since_s, reason)
                    self._retry_at = self._clock() + self._backoff.next_s()
            self._changed.notify_all()
        if store is not None and not is_wanted:
            _close(store, "a detached store")

    def _job_ended(self, job: object) -> None:
        with self._changed:
            self._jobs -= 1
        self._notify()


def _close(store: Entry, name: str) -> bool:
    """Close the backend of `store`. Return False, and log, if it fails, so that the caller can close the others."""
    try:
        store.backend.close()
    except BackendError as error:
        logger.warning("%s failed to close: %s", name, error)
        return False
    return True
