"""The memory driver: a dictionary of frames by namespace and key, joined to 64 bytes. It is the template for new
drivers, and the reference in tests.

Locking design: one lock around every function's work on a page, which is sealed, copied and verified under it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from ..errors import InvalidInput, InvariantError
from ..frame import FrameCodec
from ..units import parse_size
from .base import EvictionListener, StoredPage, Usage
from .driver import Incidents
from .order import AdaptivePages, EvictionOrder
from .pages import PageReads, PageWrites

_SPACE_BYTES = 32  # of a namespace


class MemoryDriver:
    """Pages in this process's memory, lost with it. Thread-safe; blocks only for its own lock.

    With `capacity_bytes` it evicts the least recently used page without children, so tails before heads. A batch does
    not evict its own pages or their ancestors. With `adaptive` it evicts pages last that this keeps. Raises
    InvalidInput for a capacity that is not a positive number. `Driver` documents the functions.
    """

    def __init__(self, capacity_bytes: int | None = None, adaptive: AdaptivePages | None = None) -> None:
        if capacity_bytes is not None and (type(capacity_bytes) is not int or capacity_bytes < 1):
            raise InvalidInput(f"memory driver: capacity_bytes must be a positive number, got {capacity_bytes!r}")
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._pages: dict[bytes, bytes] = {}
        self._adaptive = adaptive
        self._order = EvictionOrder(adaptive=adaptive)
        self._bytes = 0
        self._evicted_pages = 0
        self._listeners: dict[bytes, EvictionListener] = {}

    def watch_evictions(self, namespace: bytes, listener: EvictionListener) -> None:
        self._listeners[namespace] = listener

    def touch(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[bool]:
        names = [namespace + key for key in keys]
        with self._lock:
            self._order.use(names)
            if self._adaptive is not None:
                self._adaptive.use([name for name in names if name in self._pages])
            return [name in self._pages for name in names]

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[bool]:
        with self._lock:
            return [namespace + key in self._pages for key in keys]

    def read(self, pages: PageReads[bytes]) -> None:
        hits: list[bytes] = []
        for position in pages:
            name = pages.codec.namespace + pages.keys[position]
            with self._lock:
                stored = self._pages.get(name)
                if stored is None:
                    pages.miss(position)
                elif pages.take(position, stored, found=stored):
                    hits.append(name)
        with self._lock:
            self._order.use(hits)
            if self._adaptive is not None and hits:
                self._adaptive.use(hits, self._order.parent_of(hits[0]))

    def write(self, pages: PageWrites) -> None:
        """See Driver. Rejects the tail of a batch that does not fit; its head stays."""
        space = pages.codec.namespace
        names = [space + key for key in pages.keys]
        with self._lock:
            since = self._order.now()
            self._order.use([*(space + parent for parent in pages.parents[:1] if parent), *names])
            if self._adaptive is not None and names:  # the shadows make room before the store does
                parent = pages.parents[0]
                self._adaptive.use(names, None if parent is None else space + parent)
        for position, name in enumerate(names):
            if pages.is_late:
                break
            with self._lock:
                if name in self._pages:
                    pages.present(position)
                elif not pages.is_full:
                    self._write(pages, position, since)
        with self._lock:
            self._order.use(names)

    def _write(self, pages: PageWrites, position: int, since: int) -> None:
        space, parent, stored = pages.codec.namespace, pages.parents[position], b"".join(pages.sealed(position))
        if not self._make_room(len(stored), since):
            pages.reject(position)
            return
        self._pages[name := space + pages.keys[position]] = stored
        self._order.add(name, None if parent is None else space + parent)
        self._bytes += len(stored)
        pages.stored(position)

    def _make_room(self, need: int, since: int) -> bool:
        """Evict pages last used before `since` until `need` bytes more fit."""
        if self._capacity_bytes is None:
            return True
        if need > self._capacity_bytes:
            return False
        while self._bytes + need > self._capacity_bytes:
            name = self._order.victim(since)
            if name is None:
                return False
            self._drop(name)
            if name[:_SPACE_BYTES] in self._listeners:
                self._listeners[name[:_SPACE_BYTES]]([name[_SPACE_BYTES:]])
            self._evicted_pages += 1
        return True

    def _drop(self, name: bytes) -> None:
        self._bytes -= len(self._pages.pop(name))
        self._order.discard(name)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[bytes] | None = None
    ) -> tuple[int, Sequence[str]]:
        removed = 0
        with self._lock:
            for number, key in enumerate(keys):
                name = namespace + key
                if name in self._pages and (found is None or self._pages[name] is found[number]):
                    self._drop(name)
                    removed += 1
        return removed, ()

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. The stored bytes are the identity of a page."""
        with self._lock:
            found = sorted(self._pages.items())
        for name, stored in found:
            if name[:_SPACE_BYTES].hex().startswith(namespace):
                yield StoredPage(name[:_SPACE_BYTES], name[_SPACE_BYTES:], len(stored), None, identity=stored)

    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, bytes] | None:
        stored = self.peek(page.namespace, page.key)
        return None if stored is None else (stored[:bytes_max], stored)

    def measure(self) -> Usage:
        with self._lock:
            return Usage(len(self._pages), self._bytes, self._capacity_bytes)

    def incidents(self) -> Incidents:
        return Incidents(evicted_pages=self._evicted_pages)

    def close(self) -> None:
        """See Driver. Forgets all pages."""
        with self._lock:
            self._pages.clear()
            self._order = EvictionOrder(adaptive=self._adaptive)
            self._bytes = 0

    def check(self) -> None:
        """Raise InvariantError if order or sum contradict the pages, or exceed the capacity. REQUIRES: no verb runs."""
        with self._lock:
            self._order.check()
            if self._order.keys() != self._pages.keys():
                raise InvariantError("memory driver: the order does not match the pages")
            if self._bytes != sum(map(len, self._pages.values())):
                raise InvariantError("memory driver: the sum of bytes does not match the pages")
            if self._capacity_bytes is not None and self._bytes > self._capacity_bytes:
                raise InvariantError("memory driver: over its capacity")

    def peek(self, namespace: bytes, key: bytes) -> bytes | None:
        """Return the encoded page, unverified; for tests."""
        with self._lock:
            return self._pages.get(namespace + key)

    def poke(self, namespace: bytes, key: bytes, stored: bytes) -> None:
        """Replace or add an encoded page, unchecked; for tests."""
        name = namespace + key
        with self._lock:
            if name not in self._pages:
                self._order.add(name, None)
            self._bytes += len(stored) - len(self._pages.get(name, b""))
            self._pages[name] = stored


def open_memory(codec: FrameCodec, capacity: int | str | None = None, eviction_policy: str = "lru") -> MemoryDriver:
    """Open an empty store of the type `memory`, in which pages of any size have room. `capacity` is in bytes, or a text
    such as `16GiB`; `eviction_policy` is `lru` or `adaptive`. Raises InvalidInput."""
    if eviction_policy not in ("lru", "adaptive"):
        raise InvalidInput(f"eviction_policy: {eviction_policy!r} is not a policy; use lru or adaptive")
    try:
        capacity_bytes = parse_size(capacity)
    except ValueError as error:
        raise InvalidInput(f"capacity: {error}") from error
    is_adaptive = eviction_policy == "adaptive" and capacity_bytes is not None
    return MemoryDriver(capacity_bytes, AdaptivePages(capacity_bytes // codec.frame_bytes) if is_adaptive else None)
