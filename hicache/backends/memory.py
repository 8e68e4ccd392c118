"""The memory backend: a dictionary of frames. The template for a backend of your own, and the one that tests trust.

Locking design: one lock around every verb's work on a page, which is sealed, copied and proved under it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidInput, InvariantError
from ..frame import Damage, FrameCodec
from .base import BackendStatistics, EvictionListener, GetOutcome, SetOutcome, StorageBackend, Usage
from .calls import Tally, check_batch, check_keys, parents_of


@dataclass(slots=True)
class _Page:
    stored: bytes
    parent: bytes | None
    last_use: int  # a count of uses, not a time: larger is later


@dataclass(frozen=True, slots=True)
class _EvictedBytes:
    """An EvictedPage whose bytes simply live on."""

    stored: bytes

    @property
    def stored_bytes(self) -> int:
        """See EvictedPage."""
        return len(self.stored)

    def read(self, frame: memoryview) -> None:
        """See EvictedPage."""
        frame[: len(self.stored)] = self.stored

    def close(self) -> None:
        """See EvictedPage. The last reference frees the bytes."""


class MemoryBackend(StorageBackend):
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
        self._closed = False
        self._tally = Tally()
        self._listener: EvictionListener | None = None

    def on_eviction(self, listener: EvictionListener) -> None:
        """See EvictionSource."""
        self._listener = listener

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        check_keys(keys)
        with self._lock:
            if not self._may_start(deadline):
                return 0
            for position, key in enumerate(keys):
                if key not in self._pages:
                    return position
            return len(keys)

    def batch_get(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend."""
        check_batch(self.codec, keys, frames)
        return [self._get(key, frame, deadline) for key, frame in zip(keys, frames, strict=True)]

    def _get(self, key: bytes, frame: memoryview, deadline: float) -> GetOutcome:
        with self._lock:
            outcome = self._read(key, frame) if self._may_start(deadline) else GetOutcome.ERROR
            self._tally.gets[outcome] += 1
            return outcome

    def _read(self, key: bytes, frame: memoryview) -> GetOutcome:
        page = self._pages.get(key)
        if page is None:
            return GetOutcome.MISS
        damage: Damage | None = Damage.SIZE
        stored_bytes = len(page.stored)
        if self.codec.fits(stored_bytes):
            frame[:stored_bytes] = page.stored
            damage = self.codec.accept(key, frame, stored_bytes)
        if damage is not None and damage.is_misfit:
            self._tally.errors[damage.value] += 1
            return GetOutcome.MISS
        if damage is not None:
            self._tally.corrupt[damage.value] += 1
            self._drop(key)
            return GetOutcome.CORRUPT
        page.last_use = self._tick()
        return GetOutcome.HIT

    def batch_set(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend. Turns away the tail of a batch that does not fit; its head stays."""
        check_batch(self.codec, keys, frames, parent)
        outcomes: list[SetOutcome] = []
        for key, frame, before in zip(keys, frames, parents_of(keys, parent), strict=True):
            with self._lock:
                outcome = SetOutcome.ERROR
                if self._may_start(deadline):
                    # Behind a page that was turned away there is no chain to protect: a new page would evict the head.
                    outcome = self._write(key, frame, before, full=SetOutcome.REJECTED in outcomes)
                self._tally.sets[outcome] += 1
            outcomes.append(outcome)
        return outcomes

    def _write(self, key: bytes, frame: memoryview, parent: bytes | None, full: bool) -> SetOutcome:
        if key in self._pages:
            self._pages[key].last_use = self._tick()
            return SetOutcome.PRESENT
        if full:
            return SetOutcome.REJECTED
        stored = bytes(self.codec.seal(key, frame, parent=parent))
        if not self._make_room(len(stored), parent):
            return SetOutcome.REJECTED
        if self._is_above(key, parent):
            parent = None  # pages in a cycle would never be evicted
        self._pages[key] = _Page(stored, parent, self._tick())
        self._bytes += len(stored)
        if parent is not None:
            self._children.setdefault(parent, set()).add(key)
        return SetOutcome.STORED

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
            if self._listener is not None:
                self._listener(oldest, functools.partial(_EvictedBytes, self._pages[oldest].stored))
            self._drop(oldest)
            self._tally.evicted_pages += 1
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

    def _may_start(self, deadline: float) -> bool:
        if self._closed or time.monotonic() >= deadline:
            self._tally.errors["closed" if self._closed else "deadline"] += 1
            return False
        return True

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        check_keys(keys)
        with self._lock:
            if not self._may_start(deadline):
                return 0
            there = {key for key in keys if key in self._pages}
            for key in there:
                self._drop(key)
            return len(there)

    def usage(self) -> Usage:
        """See StorageBackend."""
        with self._lock:
            return Usage(len(self._pages), self._bytes, self._capacity_bytes)

    def statistics(self) -> BackendStatistics:
        """See StorageBackend."""
        with self._lock:
            return self._tally.statistics(self.codec.frame_bytes)

    def close(self) -> None:
        """See StorageBackend. Forgets all pages."""
        with self._lock:
            self._closed = True
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
        """The stored form as it is, unchecked; for tests."""
        with self._lock:
            page = self._pages.get(key)
            return None if page is None else page.stored

    def poke(self, key: bytes, stored: bytes) -> None:
        """Put bytes in place of a stored form, unchecked; for tests. A key that is not stored is added."""
        with self._lock:
            page = self._pages.get(key)
            self._bytes += len(stored) - (len(page.stored) if page else 0)
            self._pages[key] = _Page(stored, page.parent if page else None, self._tick())
