"""A backend in front of a store that can be replaced while it is in use.

Locking design: `_store_lock` guards the attached store and the counts of calls; it is held for a few instructions, and
for the statistics of a replaced store, which do not block.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..backends.base import BackendStatistics, StorageBackend
from ..backends.envelope import Compound
from ..errors import InvalidInput
from ..frame import FrameCodec
from .flights import Arrival, Flights


@dataclass(slots=True, eq=False)
class Attached:
    """A store, the number of its calls, and the pages that they move. Calls of one store never wait for those of
    another."""

    backend: StorageBackend | None
    calls: int = 0
    reads: Flights[Arrival] = field(default_factory=Flights)
    writes: Flights[bool] = field(default_factory=Flights)


class Replaceable(Compound):
    """A backend in front of `inner`, a store that it owns, or None. `is_awaited`: a store is wanted, but not open yet.
    Raises InvalidInput if `inner` is of another namespace or page size."""

    def __init__(self, codec: FrameCodec, inner: StorageBackend | None) -> None:
        super().__init__(codec)
        self._check(inner)
        self._store_lock = threading.Lock()
        self._ended = threading.Condition(self._store_lock)  # for the last call of a replaced store
        self._attached = Attached(inner)
        self.is_awaited = False
        self._leaving: list[StorageBackend] = []  # replaced, with calls in flight
        self._retired: dict[str, Counter[str]] = {"errors": Counter(), "corrupt": Counter(), "evicted": Counter()}

    def _check(self, inner: StorageBackend | None) -> None:
        ours = (self.codec.namespace, self.codec.payload_bytes)
        if inner is not None and (inner.codec.namespace, inner.codec.payload_bytes) != ours:
            raise InvalidInput("shared store: the inner store has another namespace or page size")

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """See Composite. Empty while no store is attached."""
        inner = self._attached.backend
        return () if inner is None else (inner,)

    @contextlib.contextmanager
    def _using(self) -> Iterator[Attached]:
        """Yield the store for one call, which keeps it even if it is replaced."""
        with self._store_lock:
            attached = self._attached
            attached.calls += 1
        try:
            yield attached
        finally:
            with self._store_lock:
                attached.calls -= 1
                if not attached.calls and attached is not self._attached:
                    self._ended.notify_all()

    def replace(self, inner: StorageBackend | None) -> StorageBackend | None:
        """Replace the store behind the pool; None for no store. The pool keeps its pages. Calls in flight end with
        their old store: blocks until then. Return the old store, which the caller now owns and may close or attach
        again. Raises InvalidInput as the constructor.
        """
        self._check(inner)
        with self._store_lock:
            old, self._attached = self._attached, Attached(inner)
            if inner is not None:
                self._retire(inner, -1)
            if old.backend is not None:
                self._leaving.append(old.backend)
                self._ended.wait_for(lambda: not old.calls)
                self._leaving.remove(old.backend)
                self._retire(old.backend, 1)
        return old.backend

    def _retire(self, store: StorageBackend, sign: int) -> None:
        """Keep the totals of a removed store, or subtract those of a new one, so that totals never decrease."""
        found = store.statistics()
        for kind, counts in (
            ("errors", found.errors), ("corrupt", found.corrupt), ("evicted", {"pages": found.evicted_pages}),
        ):  # fmt: skip
            for name, count in counts.items():
                self._retired[kind][name] += sign * count

    def statistics(self) -> BackendStatistics:
        """See StorageBackend and Compound. Includes the totals of replaced stores."""
        with self._store_lock:
            found = super().statistics()
            errors, corrupt = Counter(found.errors), Counter(found.corrupt)
            errors.update(self._retired["errors"])
            corrupt.update(self._retired["corrupt"])
            evicted = found.evicted_pages + self._retired["evicted"]["pages"]
            for store in self._leaving:
                last = store.statistics()
                errors.update(last.errors)
                corrupt.update(last.corrupt)
                evicted += last.evicted_pages
        return replace(found, errors=dict(+errors), corrupt=dict(+corrupt), evicted_pages=evicted)

    def shut(self) -> None:
        """See Envelope."""
        for part in self.parts:
            part.close()
