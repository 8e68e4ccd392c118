"""Storage (L3) for an engine with its own tree and host memory.

    EngineGate       the store of one namespace, opened now or later; whether it may be used; skipped calls and metrics
    EngineStorage    the stores of all pools of an engine's pages, with one deadline, back-off and page of metrics
    PoolStorage      the verbs over the pages of one pool, for an engine that calls them from its threads

Each pool has its own namespace and page size, so it has a store of its own, with its own connections: a driver may be
bound to one namespace and page size, as that of a daemon is. All stores are of one configuration, so a failure of one
pauses all.

Each failure of storage is a miss or a page that is not stored.

Locking design: an EngineGate is made for one thread. `_state` of EngineStorage guards its gates and the table of them;
it is held for a few instructions, not while a store works. Verbs run on their callers' threads, several at once.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.registry import Collector

from ..backends.base import Direction, GetOutcome, SetOutcome
from ..backends.compose import CopyStatistics, copies_of
from ..backends.errors import ErrorKind
from ..backends.missed import answer_of, note_reads, note_writes
from ..backends.opening import StorageOpener
from ..backends.slot import OpenBackend
from ..backends.storage import Storage, StoreStatistics, named_stores
from ..clock import SYSTEM_CLOCK, Clock
from ..config import HiCacheConfig
from ..config.storage import max_age_of
from ..controller.gate import StorageGate
from ..errors import BackendUnavailable, ConfigError, InvalidInput
from ..frame import PageBuffer
from ..ghosts import KINDS, Kind, PageAccounts
from ..keys import Namespace
from ..metrics.server import serve_collector
from ..metrics.spec import MetricSpec, SnapshotCollector, Table
from ..metrics.stores import copy_metrics, store_table
from ..supervised import SupervisedPool

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class EngineStorageStatistics:
    """Totals since the start. `skipped` counts calls that were not made because storage is not open, has just failed or
    its breaker is open. `missed` are pages that were not found. `stores` are those of `Slot.leaves`."""

    skipped: Mapping[Direction, int]
    open_failures: int
    missed: Mapping[Kind, int]
    stores: tuple[StoreStatistics, ...]
    copies: Mapping[str, CopyStatistics]


_COPIES: tuple[MetricSpec[EngineStorageStatistics], ...] = copy_metrics(lambda s: s.copies)

# With the same names as in a cache, so that dashboards and alerts work for both.
STORAGE_METRICS: tuple[MetricSpec[EngineStorageStatistics], ...] = (
    MetricSpec("skipped_total", "Skipped calls of storage, by reason.", ("reason",),
               lambda s: {"prefetch_paused": s.skipped[Direction.READ], "store_paused": s.skipped[Direction.WRITE]},
               "Rises while storage is not open, or has just failed."),
    MetricSpec("storage_open_failures_total", "Failed attempts to open storage.", (),
               lambda s: s.open_failures, "Rises while the server is down. The log has the error."),
    MetricSpec("missed_pages_total", "Pages that were looked up or read in storage and not found, by reason.",
               ("reason", "detail"), lambda s: {**dict.fromkeys(KINDS, 0), **s.missed},
               "docs/daemon.md has the reasons, and what to do."),
    *_COPIES,
)


def storage_collector(statistics: Callable[[], EngineStorageStatistics]) -> Collector:
    return SnapshotCollector(statistics, Table(STORAGE_METRICS, lambda s: [((), s)]), store_table(lambda s: s.stores))


class EngineGate(StorageGate):
    """The gate of a store without a cache. The constructor opens the store, which blocks; if it is unavailable, a
    thread opens it during a later `advance` of the slot. `user` is for a log line.

    Registers no memory: stores do not transfer pages in parts through registered memory. Serves metrics as the section
    `metrics` configures them, on the first free port of `processes`, because an engine has several processes with one
    configuration; with 0 processes, its owner serves them. Raises ConfigError, and BackendError of the store.
    """

    def __init__(
        self, config: HiCacheConfig, open_backend: OpenBackend, user: str, *, processes: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(None, SupervisedPool, clock)
        self._skipped = dict.fromkeys(Direction, 0)
        self.accounts = PageAccounts(config.explain.pages, max_age_of(config.storage), clock)
        try:
            self.start(open_backend())
        except BackendUnavailable as error:
            logger.warning("storage is not open yet; the %s starts without it and tries again: %s", user, error)
            self.replace(open_backend)
        self.metrics = None
        try:
            if processes:
                self.metrics = serve_collector(config, storage_collector(self.statistics), ports=processes)
        except ConfigError:
            self.slot.end(0.0)
            self.slot.close()
            raise

    def admits(self, direction: Direction) -> bool:
        """Return `may`, and count a call that is skipped."""
        may = self.may(direction)
        self._skipped[direction] += not may
        return may

    def statistics(self, pool: str = "") -> EngineStorageStatistics:
        """Return the totals so far. Any thread may call it; does not block.

        The names of the stores of a further `pool` of an engine end with it. Their usage is left out: it is the usage
        of the whole store, which the first pool reports.
        """
        copies = {_named(name, pool): one for backend in self.slot.open_backends()
                  for name, one in copies_of(backend).items()}
        store = self.slot.store
        if not pool or store is None:
            stores = self.slot.leaves()
        else:
            stores = tuple(
                StoreStatistics(_named(name, pool), one.statistics(), None, one.guard_statistics(), one.health())
                for name, one in named_stores(store.backend)
            )
        missed = self.accounts.counts()
        return EngineStorageStatistics(dict(self._skipped), self.slot.open_failures, missed, stores, copies)

    def close(self, timeout_s: float, *, calls_ended: bool) -> bool:
        """End the metrics and the slot, and close the store unless a call hangs. Blocks. Return False if a thread or
        the store remained."""
        if self.metrics is not None:
            self.metrics.close()
        ended = self.slot.end(timeout_s)
        return calls_ended and self.slot.close() and ended


class EngineStorage:
    """See the module's docstring. Thread-safe. The stores are those of `config`. The deadline of a call is
    `transfer.storage_deadline`, at most `deadline_s_max`. Serves metrics as EngineGate does.

    Raises ConfigError, also for a configuration without storage.
    """

    def __init__(
        self, config: HiCacheConfig, *, processes: int = 1, deadline_s_max: float = math.inf,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config = config
        self._opener = StorageOpener(config, clock=clock)
        if self._opener.spec is None:
            raise ConfigError("storage: is not configured; add the section `storage` with the type of the store")
        self._clock = clock
        self._deadline_s = min(config.transfer.storage_deadline, deadline_s_max)
        self._close_s = config.transfer.shutdown_deadline
        self._state = threading.Lock()
        self._closed = False
        self._gates: dict[str, EngineGate] = {}  # by pool; the first one has the plain names in metrics
        self._metrics = serve_collector(config, storage_collector(self.statistics), ports=processes)

    def open(self, namespace: Namespace, pool: str = "") -> PoolStorage:
        """Open a store for the pages of `namespace`, the only one of `pool`. Blocks and raises as EngineGate. Raises
        InvalidInput for a pool that has a store, and after `close`. One thread at a time."""
        if pool in self._gates or self._closed:
            raise InvalidInput(f"engine storage: pool {pool!r} has a store already, or storage is closed; open it once")
        namespace = namespace.labelled(self._config.model_label)
        open_store = functools.partial(self._opener.open_namespace, namespace)
        gate = EngineGate(self._config, open_store, "engine", processes=0, clock=self._clock)
        with self._state:
            self._gates[pool] = gate
        return PoolStorage(self, gate)

    def deadline(self) -> float:
        """Return the deadline of a call that begins now."""
        return self._clock() + self._deadline_s

    def statistics(self) -> EngineStorageStatistics:
        """Return the totals of all pools so far. Does not block."""
        with self._state:
            gates = list(self._gates.items())
        found = [gate.statistics(pool if number else "") for number, (pool, gate) in enumerate(gates)]
        skipped: Counter[Direction] = Counter(dict.fromkeys(Direction, 0))
        missed = Counter[Kind]()
        for one in found:
            skipped.update(one.skipped)
            missed.update(one.missed)
        return EngineStorageStatistics(
            skipped=dict(skipped), open_failures=sum(one.open_failures for one in found), missed=missed,
            stores=tuple(store for one in found for store in one.stores),
            copies={name: copies for one in found for name, copies in one.copies.items()},
        )

    def close(self) -> bool:
        """Stop using storage and close it. Idempotent. Blocks for `transfer.shutdown_deadline`, and for the stores' own
        close; a store with a call that hangs stays open. Return False if a thread or a store remained."""
        ends_s = self._clock() + self._close_s
        with self._state:
            gates = list(self._gates.values())
            for gate in gates:
                for direction in Direction:
                    gate.stop(direction)
            if self._closed:
                return True
            self._closed = True
        idle = [gate.slot.wait_idle(max(0.0, ends_s - self._clock())) for gate in gates]
        if self._metrics is not None:
            self._metrics.close()
        return all([
            gate.close(max(0.0, ends_s - self._clock()), calls_ended=ended)
            for gate, ended in zip(gates, idle, strict=True)
        ])

    def call(
        self, gate: EngineGate, direction: Direction, deadline: float | None, refused: Answer,
        verb: Callable[[Storage, float, list[str]], Answer], is_good: Callable[[Answer], bool] = lambda answer: True,
    ) -> tuple[Answer, list[str]]:
        """Return the result of `verb`, or `refused` while storage is not used, and its errors. A late or failed result
        starts a back-off of all pools. For PoolStorage."""
        deadline, errors = self.deadline() if deadline is None else deadline, list[str]()
        with self._state:
            gate.slot.advance()
            gate.settle()
            if not gate.admits(direction):
                return refused, ["guard_open"]
            store = gate.enter()
        try:
            answer = verb(store.backend, deadline, errors)
            is_late = self._clock() >= deadline
            errors += [ErrorKind.DEADLINE] * (is_late and bool(errors))
            with self._state:
                if is_late or not is_good(answer):
                    for one in self._gates.values():
                        one.failed(direction)
                else:
                    gate.succeeded(direction)
            return answer, errors
        finally:
            gate.slot.leave(store)


class PoolStorage:
    """The verbs over the pages of one pool of an EngineStorage, which owns it. Thread-safe. Each blocks up to its
    deadline, by default that of a call that begins now; several calls of one call of the engine share one deadline."""

    def __init__(self, owner: EngineStorage, gate: EngineGate) -> None:
        self._owner = owner
        self._gate = gate

    def lookup(self, keys: Sequence[bytes], deadline: float | None = None) -> int:
        """Return the length of the longest prefix of `keys` that is stored; see `batch_exists`."""
        found, errors = self._owner.call(
            self._gate, Direction.READ, deadline, 0,
            lambda store, until, errors: store.batch_exists(keys, deadline=until, errors=errors),
        )
        self._gate.accounts.missing(keys[found:], answer_of(errors, "lookup"), ())
        return found

    def has(self, keys: Sequence[bytes], deadline: float | None = None) -> list[bool]:
        """Return for each of `keys` whether it is stored; see `batch_has`."""
        found, errors = self._owner.call(
            self._gate, Direction.READ, deadline, [False] * len(keys),
            lambda store, until, errors: store.batch_has(keys, deadline=until, errors=errors),
        )
        lost = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
        self._gate.accounts.missing(lost, answer_of(errors, "lookup"))
        return found

    def read(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float | None = None
    ) -> list[GetOutcome]:
        """Read pages, one outcome per key; see `batch_get`. While storage is not used, each is an ERROR."""
        outcomes, errors = self._owner.call(
            self._gate, Direction.READ, deadline, [GetOutcome.ERROR] * len(keys),
            lambda store, until, errors: store.batch_get(keys, pages, deadline=until, errors=errors),
            lambda outcomes: GetOutcome.ERROR not in outcomes,
        )
        note_reads(self._gate.accounts, keys, outcomes, errors)
        return outcomes

    def write(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float | None = None,
    ) -> list[SetOutcome]:
        """Store pages, one outcome per key; see `batch_set`. While storage is not used, each is an ERROR."""
        outcomes, errors = self._owner.call(
            self._gate, Direction.WRITE, deadline, [SetOutcome.ERROR] * len(keys),
            lambda store, until, errors: store.batch_set(keys, pages, parent=parent, deadline=until, errors=errors),
            lambda outcomes: all(outcome.is_stored for outcome in outcomes),
        )
        note_writes(self._gate.accounts, keys, outcomes, errors)
        return outcomes

    def clear(self, deadline: float | None = None) -> int:
        """Remove all pages of the namespace, for all engines that use it; return their number."""
        self._gate.accounts.cleared()
        return self._owner.call(
            self._gate, Direction.WRITE, deadline, 0,
            lambda store, until, errors: store.clear(deadline=until, errors=errors),
        )[0]


def _named(name: str, pool: str) -> str:
    return f"{name}-{pool}" if pool else name
