"""The memory backend: a dictionary of frames. The template for a backend of your own, and the one that tests trust.

Locking design: one lock around every verb's work on a page, which is sealed, copied and proved under it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import InvalidInput, InvariantError
from ..frame import FrameCodec
from .base import Usage
from .pages import Damaged, PageReads, PageWrites
from .store import PageStore


@dataclass(slots=True)
class _Page:
    stored: bytes
    parent: bytes | None
    last_use: int  # a count of uses, not a time: larger is later


class MemoryBackend(PageStore[bytes]):
    """Pages in this process's memory, lost with it. Thread-safe; blocks for its own lock only.

    With a `capacity_bytes` it evicts the least recently used page that no other page hangs on, tails before heads,
    which costs a look at every page. Raises InvalidInput for a capacity that is no positive number.
    """

    def __init__(self, codec: FrameCodec, capacity_bytes: int | None = None) -> None:
        super().__init__(codec)
        if capacity_bytes is not None and (type(capacity_bytes) is not int or capacity_bytes < 1):
            raise InvalidInput(f"memory backend: capacity_bytes must be a positive number, got {capacity_bytes!r}")
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._pages: dict[bytes, _Page] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._bytes = 0
        self._clock = 0

    def find(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See PageStore."""
        with self._lock:
            return [key in self._pages for key in keys]

    def read(self, pages: PageReads[bytes]) -> None:
        """See PageStore."""
        for position in pages:
            with self._lock:
                page = self._pages.get(pages.keys[position])
                if page is None:
                    pages.miss(position)
                elif pages.take(position, page.stored, found=page.stored):
                    page.last_use = self._tick()

    def remove_damaged(self, damaged: Sequence[Damaged[bytes]], deadline: float) -> None:
        """See PageStore."""
        with self._lock:
            for one in damaged:
                page = self._pages.get(one.key)
                if page is not None and page.stored is one.found:
                    self._drop(one.key)

    def write(self, pages: PageWrites) -> None:
        """See PageStore. Rejects the tail of a batch that does not fit; its head stays."""
        for position, key in enumerate(pages.keys):
            if pages.is_late:
                return
            with self._lock:
                if key in self._pages:
                    self._pages[key].last_use = self._tick()
                    pages.present(position)
                elif not pages.is_full:
                    self._write(pages, position)

    def _write(self, pages: PageWrites, position: int) -> None:
        key, parent = pages.keys[position], pages.parents[position]
        stored = b"".join(pages.sealed(position))
        if not self._make_room(len(stored), parent):
            pages.reject(position)
            return
        if self._is_above(key, parent):
            parent = None  # pages in a cycle would never be evicted
        self._pages[key] = _Page(stored, parent, self._tick())
        self._bytes += len(stored)
        if parent is not None:
            self._children.setdefault(parent, set()).add(key)
        pages.stored(position)

    def _is_above(self, key: bytes, below: bytes | None) -> bool:
        """True if the stored page `below` hangs on `key`, at any distance. At once for a page without children."""
        while key in self._children and below is not None:
            if below == key:
                return True
            page = self._pages.get(below)
            below = None if page is None else page.parent
        return False

    def _make_room(self, need: int, parent: bytes | None) -> bool:
        """Evict until `need` bytes more fit; never `parent`, which is about to get a child, and nothing in vain."""
        if self._capacity_bytes is None:
            return True
        if need > self._capacity_bytes:
            return False
        while self._bytes + need > self._capacity_bytes:
            leaves = [key for key in self._pages if key not in self._children and key != parent]
            if not leaves:
                return False
            oldest = min(leaves, key=lambda key: self._pages[key].last_use)
            self._drop(oldest)
            self._calls.count(evicted_pages=1)
        return True

    def _drop(self, key: bytes) -> None:
        page = self._pages.pop(key)
        self._bytes -= len(page.stored)
        parent = page.parent
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(key)
            if not siblings:
                del self._children[parent]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See PageStore."""
        with self._lock:
            there = [key for key in keys if key in self._pages]
            for key in there:
                self._drop(key)
            return len(there)

    def keys(self, deadline: float) -> Iterator[bytes]:
        """See PageStore."""
        with self._lock:
            return iter(list(self._pages))

    def measure(self) -> Usage:
        """See PageStore."""
        with self._lock:
            return Usage(len(self._pages), self._bytes, self._capacity_bytes)

    def shut(self) -> None:
        """See PageStore. Forgets all pages."""
        with self._lock:
            self._pages.clear()
            self._bytes = 0
            self._children.clear()

    def check(self) -> None:
        """Raise InvariantError if links or sum contradict the pages, or the capacity is exceeded."""
        with self._lock:
            links = {(page.parent, key) for key, page in self._pages.items() if page.parent is not None}
            if links != {(parent, key) for parent, keys in self._children.items() for key in keys}:
                raise InvariantError("memory backend: links and pages disagree")
            if self._bytes != sum(len(page.stored) for page in self._pages.values()):
                raise InvariantError("memory backend: the sum of bytes is not that of the pages")
            if self._capacity_bytes is not None and self._bytes > self._capacity_bytes:
                raise InvariantError("memory backend: over its capacity")

    def peek(self, key: bytes) -> bytes | None:
        """The encoded page as it is, unchecked; for tests."""
        with self._lock:
            page = self._pages.get(key)
            return None if page is None else page.stored

    def poke(self, key: bytes, stored: bytes) -> None:
        """Put bytes in place of a encoded page, unchecked; for tests. A key that is not stored is added."""
        with self._lock:
            page = self._pages.get(key)
            self._bytes += len(stored) - (len(page.stored) if page else 0)
            self._pages[key] = _Page(stored, page.parent if page else None, self._tick())
