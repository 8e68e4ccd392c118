"""Storage (L3) for an engine with its own tree and host memory.

    EngineGate       the store, opened now or later; whether it may be used; skipped calls and metrics
    EngineStorage    the verbs over it, with a deadline, for an engine that calls them from its threads

Each failure of storage is a miss or a page that is not stored.

Locking design: an EngineGate is made for one thread. `_state` of EngineStorage guards its gate; it is held for a few
instructions, not while the store works. Verbs run on their callers' threads, several at the same time.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ..backends.base import Direction, GetOutcome, SetOutcome
from ..backends.compose import copies_of
from ..backends.slot import OpenBackend
from ..backends.storage import Storage
from ..cache.factory import storage_opener
from ..clock import SYSTEM_CLOCK, Clock
from ..config import HiCacheConfig
from ..controller.gate import StorageGate
from ..errors import BackendUnavailable, ConfigError
from ..frame import PageBuffer
from ..keys import Namespace
from ..metrics.server import serve_collector
from ..supervised import SupervisedPool
from .figures import EngineStorageStatistics, storage_collector

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class EngineGate(StorageGate):
    """The gate of a store without a cache. The constructor opens the store, which blocks; if it is unavailable, a
    thread opens it during a later `advance` of the slot. `user` is for a log line.

    Registers no memory: stores do not transfer pages in parts through registered memory. Serves metrics as the section
    `metrics` configures them, on the first free port of `processes`, because an engine has several processes with one
    configuration. Raises ConfigError, and BackendError if the store fails to open.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        open_backend: OpenBackend,
        user: str,
        *,
        processes: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(None, SupervisedPool, clock)
        self._skipped = dict.fromkeys(Direction, 0)
        try:
            self.start(open_backend())
        except BackendUnavailable as error:
            logger.warning("storage is not open yet; the %s starts without it and tries again: %s", user, error)
            self.replace(open_backend)
        try:
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

    def statistics(self) -> EngineStorageStatistics:
        """Return the totals so far. Any thread may call it; does not block."""
        copies = {name: one for backend in self.slot.open_backends() for name, one in copies_of(backend).items()}
        return EngineStorageStatistics(dict(self._skipped), self.slot.open_failures, self.slot.leaves(), copies)

    def close(self, timeout_s: float, *, calls_ended: bool) -> bool:
        """End the metrics and the slot, and close the store unless a call hangs. Blocks. Return False if a thread or
        the store remained."""
        if self.metrics is not None:
            self.metrics.close()
        ended = self.slot.end(timeout_s)
        return calls_ended and self.slot.close() and ended


class EngineStorage:
    """See the module's docstring. Thread-safe. The store is that of `config`, with the pages of `namespace`; it is
    opened as by EngineGate. The deadline of a call is `transfer.storage_deadline`, at most `deadline_s_max`.

    Raises as EngineGate, and ConfigError for a configuration without storage.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        namespace: Namespace,
        *,
        processes: int = 1,
        deadline_s_max: float = math.inf,
        environ: Mapping[str, str] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        opener = storage_opener(config, namespace, environ, clock=clock)
        if opener is None:
            raise ConfigError("storage: is not configured; add the section `storage` with the type of the store")
        self.namespace = namespace
        self._clock = clock
        self._deadline_s = min(config.transfer.storage_deadline, deadline_s_max)
        self._close_s = config.transfer.shutdown_deadline
        self._state = threading.Lock()
        self._closed = False
        open_store = functools.partial(opener, namespace.weights_epoch)
        self._gate = EngineGate(config, open_store, "engine", processes=processes, clock=clock)

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
        return self._gate.statistics()

    def close(self) -> bool:
        """Stop using storage and close it. Idempotent. Blocks for `transfer.shutdown_deadline`, and for the store's own
        close; a store with a call that hangs stays open. Return False if a thread or the store remained."""
        ends_s = self._clock() + self._close_s
        with self._state:
            for direction in Direction:
                self._gate.stop(direction)
            if self._closed:
                return True
            self._closed = True
        idle = self._gate.slot.wait_idle(self._close_s)
        return self._gate.close(max(0.0, ends_s - self._clock()), calls_ended=idle)

    def _call(
        self,
        direction: Direction,
        refused: Answer,
        verb: Callable[[Storage, float], Answer],
        is_good: Callable[[Answer], bool] = lambda answer: True,
    ) -> Answer:
        """Return the result of `verb`, or `refused` while storage is not used. A late or failed result starts a
        back-off.
        """
        with self._state:
            self._gate.slot.advance()
            self._gate.settle()
            if not self._gate.admits(direction):
                return refused
            store = self._gate.enter()
        try:
            deadline = self._clock() + self._deadline_s
            answer = verb(store.backend, deadline)
            is_late = self._clock() >= deadline
            with self._state:
                (self._gate.failed if is_late or not is_good(answer) else self._gate.succeeded)(direction)
            return answer
        finally:
            self._gate.slot.leave(store)
