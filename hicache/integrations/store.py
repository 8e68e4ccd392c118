"""EngineStorage: storage (L3) for an engine with its own tree and host memory, which calls it from its threads.

It adds the features of a HiCacheController to a StorageBackend: a deadline for each call, a store that is opened later
if its server is down, a pause after failures, metrics, and a limited time for shutdown. Each failure of storage is a
miss or a page that is not stored.

Locking design: `_state` guards the gate, which is made for one thread, and the counts. It is held for a few
instructions, not while the store works. Verbs run on their callers' threads, several at the same time.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ..backends.base import GetOutcome, SetOutcome, StorageBackend
from ..backends.compose import copies_of
from ..backends.guard import Direction
from ..cache.factory import storage_opener
from ..config import HiCacheConfig
from ..controller.gate import OpenStore, StorageGate
from ..errors import BackendUnavailable, ConfigError
from ..frame import PageBuffer
from ..keys import Namespace
from ..metrics.server import MetricsServer, serve_collector
from ..supervised import SupervisedPool
from .figures import EngineStorageStatistics, storage_collector

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

# The memory that the gate registers with stores that transfer registered memory faster: none of the engine's, because
# stores do not transfer pages in parts through registered memory.
_NOT_REGISTERED = memoryview(bytearray(4096))


class EngineStorage:
    """See the module's docstring. Thread-safe. The store is that of `config`, with the pages of `namespace`.

    The constructor opens it, which blocks; if it is unavailable, a thread opens it during a later call. Serves metrics
    as the section `metrics` configures them, on the first free port of `processes`, because an engine has several
    processes with one configuration. The deadline of a call is `transfer.storage_deadline`, at most `deadline_s_max`.

    Raises ConfigError for a configuration without storage or with errors, and BackendError if the store fails to open.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        namespace: Namespace,
        *,
        processes: int = 1,
        deadline_s_max: float = math.inf,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        opener = storage_opener(config, namespace, environ)
        if opener is None:
            raise ConfigError("storage: is not configured; add the section `storage` with the type of the store")
        self.namespace = namespace
        self._deadline_s = min(config.transfer.storage_deadline, deadline_s_max)
        self._close_s = config.transfer.shutdown_deadline
        self._state = threading.Condition()
        self._gate = StorageGate(_NOT_REGISTERED, SupervisedPool, time.monotonic)
        self._skipped = dict.fromkeys(Direction, 0)
        self._calls = 0  # in flight
        self._closed = False
        self._metrics: MetricsServer | None = None
        open_store = functools.partial(opener, namespace.weights_epoch)
        try:
            self._gate.start(open_store())
        except BackendUnavailable as error:
            logger.warning("storage is not open yet; the engine starts without it and tries again: %s", error)
            self._gate.replace(open_store)
        try:
            self._metrics = serve_collector(config, storage_collector(self.statistics), ports=processes)
        except ConfigError:
            self.close()
            raise

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Return the length of the longest prefix of `keys` that is stored; see `batch_exists`. Blocks up to
        `transfer.storage_deadline`, as the verbs below do."""
        return self._call(Direction.READ, 0, lambda store, deadline: store.batch_exists(keys, deadline=deadline))

    def read(self, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        """Read pages, one outcome per key; see `batch_get`. While storage is not used, each is an ERROR."""
        return self._call(
            Direction.READ, [GetOutcome.ERROR] * len(keys),
            lambda store, deadline: store.batch_get(keys, pages, deadline=deadline),
            lambda outcomes: GetOutcome.ERROR not in outcomes,
        )  # fmt: skip

    def write(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None) -> list[SetOutcome]:
        """Store pages, one outcome per key; see `batch_set`. While storage is not used, each is an ERROR."""
        return self._call(
            Direction.WRITE, [SetOutcome.ERROR] * len(keys),
            lambda store, deadline: store.batch_set(keys, pages, parent=parent, deadline=deadline),
            lambda outcomes: all(outcome.is_stored for outcome in outcomes),
        )  # fmt: skip

    def clear(self) -> int:
        """Remove all pages of the namespace, for all engines that use it; return their number."""
        return self._call(Direction.WRITE, 0, lambda store, deadline: store.clear(deadline=deadline))

    def statistics(self) -> EngineStorageStatistics:
        """Return the totals so far. Does not block."""
        with self._state:
            store, skipped, failures = self._gate.storage, dict(self._skipped), self._gate.open_failures
        copies = {} if store is None else copies_of(store.backend)
        return EngineStorageStatistics(skipped, failures, self._gate.leaves(), copies)

    def close(self) -> bool:
        """Stop using storage and close it. Idempotent. Blocks for `transfer.shutdown_deadline`, and for the store's own
        close; a store with a call that hangs stays open. Return False if a thread or the store remained."""
        ends_s = time.monotonic() + self._close_s
        with self._state:
            for direction in Direction:
                self._gate.stop(direction)
            if self._closed:
                return True
            self._closed = True
            idle = self._state.wait_for(lambda: not self._calls, self._close_s)
        if self._metrics is not None:
            self._metrics.close()
        return self._gate.close(max(0.0, ends_s - time.monotonic()), workers_ended=idle)

    def _call(
        self,
        direction: Direction,
        refused: Answer,
        verb: Callable[[StorageBackend, float], Answer],
        is_good: Callable[[Answer], bool] = lambda answer: True,
    ) -> Answer:
        """Return the result of `verb`, or `refused` while storage is not used. A late or failed result starts a
        back-off.
        """
        with self._using(direction) as store:
            if store is None:
                return refused
            deadline = time.monotonic() + self._deadline_s
            answer = verb(store.backend, deadline)
            is_late = time.monotonic() >= deadline
            with self._state:
                (self._gate.failed if is_late or not is_good(answer) else self._gate.succeeded)(direction)
            return answer

    @contextmanager
    def _using(self, direction: Direction) -> Iterator[OpenStore | None]:
        """Yield the store for one call, or None while it may not be used."""
        with self._state:
            self._gate.advance()
            self._gate.settle()
            store = self._gate.enter() if self._gate.may(direction) else None
            if store is None:
                self._skipped[direction] += 1
            else:
                self._calls += 1
        try:
            yield store
        finally:
            if store is not None:
                with self._state:
                    store.in_flight -= 1
                    self._calls -= 1
                    self._state.notify_all()
