"""The memory driver: a dictionary of frames. It is the template for new drivers, and the reference in tests.

Locking design: one lock around every function's work on a page, which is sealed, copied and verified under it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from ..errors import InvalidInput, InvariantError
from ..frame import FrameCodec
from .base import EvictionListener, Usage
from .driver import Incidents
from .order import EvictionOrder
from .pages import PageReads, PageWrites


class MemoryDriver:
    """Pages in this process's memory, lost with it. Thread-safe; blocks only for its own lock.

    With `capacity_bytes` it evicts the least recently used page without children, so tails before heads. A batch does
    not evict its own pages or their ancestors. Raises InvalidInput for a capacity that is not a positive number.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and (type(capacity_bytes) is not int or capacity_bytes < 1):
            raise InvalidInput(f"memory driver: capacity_bytes must be a positive number, got {capacity_bytes!r}")
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._pages: dict[bytes, bytes] = {}
        self._order = EvictionOrder()
        self._bytes = 0
        self._evicted_pages = 0
        self._on_evicted: EvictionListener = lambda keys: None

    def watch_evictions(self, listener: EvictionListener) -> None:
        """See ReportsEvictions."""
        self._on_evicted = listener

    def touch(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Touches."""
        with self._lock:
            self._order.use(keys)
            return [key in self._pages for key in keys]

    def find(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Driver."""
        with self._lock:
            return [key in self._pages for key in keys]

    def read(self, pages: PageReads[bytes]) -> None:
        """See Driver."""
        hits: list[bytes] = []
        for position in pages:
            key = pages.keys[position]
            with self._lock:
                stored = self._pages.get(key)
                if stored is None:
                    pages.miss(position)
                elif pages.take(position, stored, found=stored):
                    hits.append(key)
        with self._lock:
            self._order.use(hits)

    def write(self, pages: PageWrites) -> None:
        """See Driver. Rejects the tail of a batch that does not fit; its head stays."""
        with self._lock:
            since = self._order.now()
            self._order.use([*filter(None, pages.parents[:1]), *pages.keys])
        for position, key in enumerate(pages.keys):
            if pages.is_late:
                break
            with self._lock:
                if key in self._pages:
                    pages.present(position)
                elif not pages.is_full:
                    self._write(pages, position, since)
        with self._lock:
            self._order.use(pages.keys)

    def _write(self, pages: PageWrites, position: int, since: int) -> None:
        key, stored = pages.keys[position], b"".join(pages.sealed(position))
        if not self._make_room(len(stored), since):
            pages.reject(position)
            return
        self._pages[key] = stored
        self._order.add(key, pages.parents[position])
        self._bytes += len(stored)
        pages.stored(position)

    def _make_room(self, need: int, since: int) -> bool:
        """Evict pages last used before `since` until `need` bytes more fit."""
        if self._capacity_bytes is None:
            return True
        if need > self._capacity_bytes:
            return False
        while self._bytes + need > self._capacity_bytes:
            oldest = self._order.oldest()
            if oldest is None or oldest[1] > since:
                return False
            self._drop(oldest[0])
            self._on_evicted(oldest[:1])
            self._evicted_pages += 1
        return True

    def _drop(self, key: bytes) -> None:
        self._bytes -= len(self._pages.pop(key))
        self._order.discard(key)

    def remove(
        self, keys: Sequence[bytes], deadline: float, found: Sequence[bytes] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver."""
        removed = 0
        with self._lock:
            for number, key in enumerate(keys):
                if key in self._pages and (found is None or self._pages[key] is found[number]):
                    self._drop(key)
                    removed += 1
        return removed, ()

    def keys(self, deadline: float) -> Iterator[bytes]:
        """See Driver."""
        with self._lock:
            return iter(list(self._pages))

    def measure(self) -> Usage:
        """See Driver."""
        with self._lock:
            return Usage(len(self._pages), self._bytes, self._capacity_bytes)

    def incidents(self) -> Incidents:
        """See HasIncidents."""
        return Incidents(evicted_pages=self._evicted_pages)

    def close(self) -> None:
        """See Driver. Forgets all pages."""
        with self._lock:
            self._pages.clear()
            self._order = EvictionOrder()
            self._bytes = 0

    def check(self) -> None:
        """Raise InvariantError if order or sum contradict the pages, or the capacity is exceeded. REQUIRES: no verb is
        in flight."""
        with self._lock:
            self._order.check()
            if self._order.keys() != self._pages.keys():
                raise InvariantError("memory driver: the order does not match the pages")
            if self._bytes != sum(map(len, self._pages.values())):
                raise InvariantError("memory driver: the sum of bytes does not match the pages")
            if self._capacity_bytes is not None and self._bytes > self._capacity_bytes:
                raise InvariantError("memory driver: over its capacity")

    def peek(self, key: bytes) -> bytes | None:
        """Return the encoded page, unverified; for tests."""
        with self._lock:
            return self._pages.get(key)

    def poke(self, key: bytes, stored: bytes) -> None:
        """Replace or add an encoded page, unchecked; for tests."""
        with self._lock:
            if key not in self._pages:
                self._order.add(key, None)
            self._bytes += len(stored) - len(self._pages.get(key, b""))
            self._pages[key] = stored


def open_memory(codec: FrameCodec, capacity_bytes: int | None = None) -> MemoryDriver:
    """Open an empty store of the type `memory`. It has the pages of one namespace, so it does not need the codec."""
    del codec
    return MemoryDriver(capacity_bytes)
