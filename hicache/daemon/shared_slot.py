"""The slot of a daemon's namespace, whose totals include those of replaced stores.

Locking design: as Slot. `_totals` guards the totals and the list of stores that they lack; it is held for their
statistics, which do not block. It is not held together with the lock of the slot.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..backends.base import BackendStatistics, EvictionListener
from ..backends.slot import Entry, Overrides, Slot
from ..backends.storage import Storage
from ..clock import SYSTEM_CLOCK, Clock
from ..errors import InvalidInput
from ..frame import FrameCodec
from ..logs import LimitedLog
from .flights import Arrival, Flights


@dataclass(slots=True, eq=False)
class Attached:
    """A store or none, and the pages that its calls move. Calls of one store never wait for those of another. Each call
    has a copy, for the errors of the store."""

    backend: Storage | None
    reads: Flights[Arrival] = field(default_factory=Flights)
    writes: Flights[bool] = field(default_factory=Flights)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SharedEntry(Entry):
    """A store behind the pool."""

    attached: Attached


class SharedSlot(Slot[SharedEntry]):
    """A slot for stores with the namespace and the page size of `codec`. The options are those of Slot."""

    def __init__(
        self, codec: FrameCodec, *, overrides: Overrides | None = None, log: LimitedLog | None = None,
        changed: Callable[[], object] = lambda: None, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(
            self._make_entry, name=f"namespace {codec.namespace.hex()[:8]}: its store", user="it",
            overrides=overrides, log=log, changed=changed, clock=clock,
        )
        self.on_evicted: EvictionListener = lambda keys: None  # of the stores that are opened from now on
        self._codec = codec
        self._totals = threading.Lock()
        self._entered: list[SharedEntry] = []  # all stores whose counts are not in `_ended`
        self._ended = BackendStatistics({}, {}, {}, {}, 0, 0, 0)

    def _make_entry(self, backend: Storage) -> SharedEntry:
        ours = self._codec.namespace, self._codec.payload_bytes
        if (backend.codec.namespace, backend.codec.payload_bytes) != ours:
            raise InvalidInput("shared store: the inner store has another namespace or page size")
        backend.watch_evictions(self.on_evicted)
        entry = SharedEntry(backend, Attached(backend))
        with self._totals:
            self._entered.append(entry)
        return entry

    def with_totals(self, own: BackendStatistics) -> BackendStatistics:
        """Return `own` with the errors, the damage, the evicted and the expired pages of all stores so far: they never
        decrease."""
        with self._totals:
            for entry in [one for one in self._entered if one.is_retired and not one.in_flight]:
                self._entered.remove(entry)
                self._ended = _sum(self._ended, entry.backend.statistics())
            found = _sum(own, self._ended)
            for entry in self._entered:
                found = _sum(found, entry.backend.statistics())
        return found


def _sum(found: BackendStatistics, more: BackendStatistics) -> BackendStatistics:
    return replace(
        found, errors=dict(Counter(found.errors) + Counter(more.errors)),
        corrupt=dict(Counter(found.corrupt) + Counter(more.corrupt)),
        evicted_pages=found.evicted_pages + more.evicted_pages, expired_pages=found.expired_pages + more.expired_pages,
    )
