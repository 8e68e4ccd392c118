"""Frames that an earlier process has kept in host memory (`host.shared.keep`): read like a very fast store.

An engine that ends or dies keeps its frames in a shared mapping. The next engine indexes them by the page keys in their
headers. They stay in place until a prompt needs them, or until the cache needs their memory.

A header is only a hint. A requested page is copied to the frame that the cache has reserved for it, and the copy is
verified there, like a page of any store. So the cache never uses a frame that another process could still write to, and
pages do not change their owner between threads; the copy is faster than the verification. Then the old frame is free.

    KeptFrames    the remaining frames, by key
    KeptBackend   the store of them; without another store it also seals computed pages in place
    KeptLevel     a KeptBackend in front of the configured storage

Locking design: `_lock` of a KeptFrames guards its fields. It is held for a few instructions per page of a batch, and
never while a frame is read, because the scheduler thread takes it in `give_way`. A frame that is being read is not in
the tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from ..frame import FrameCodec, PageBuffer, unseal
from .base import GetOutcome, StorageBackend, Usage
from .envelope import Wrapper
from .order import EvictionOrder
from .pages import Damaged, PageReads, PageWrites
from .store import PageStore

_END = object()


class KeptFrames:
    """The kept frames, among `pages` frames, whose pages `codec` may be able to verify. `frame` returns a frame by its
    number.

    Invariant: each page is in `_pages`, under its key, or is being read, or waits in `_unused` to be freed. `held` is
    their number.
    """

    def __init__(self, codec: FrameCodec, pages: int, frame: Callable[[int], memoryview]) -> None:
        self.frame = frame
        self._namespace = codec.namespace
        self._lock = threading.Lock()
        self._pages: dict[bytes, int] = {}
        self._unused: list[int] = []
        self._order = EvictionOrder()
        self._read: set[bytes] = set()
        for page in range(pages):
            claim = codec.claim_of(frame(page))
            if claim is not None and claim[0] not in self._pages:
                self._pages[claim[0]] = page
                self._order.add(*claim)
        self._order.use(list(self._pages))
        self.held = len(self._pages)

    @property
    def pages(self) -> list[int]:
        """Return the pages that have not been requested."""
        with self._lock:
            return list(self._pages.values())

    # On the scheduler thread

    @property
    def room(self) -> int:
        """The number of pages that `give_way` can free now."""
        with self._lock:
            return len(self._pages) + len(self._unused)

    def give_way(self, count: int) -> list[int]:
        """Free up to `count` pages: those that were read, then the least recently looked-up ones, tails before
        heads."""
        with self._lock:
            while len(self._unused) < count and (oldest := self._order.oldest()) is not None:
                self._discard(oldest[0])
            given, self._unused = self._unused[:count], self._unused[count:]
            self.held -= len(given)
            return given

    def drop(self) -> None:
        """Forget all pages; `give_way` frees them. A page that is being read stays with its reader."""
        with self._lock:
            for key in list(self._pages):
                self._discard(key)

    def were_read(self, keys: Sequence[bytes]) -> bool:
        """Return True if one of `keys` was read from here since the last call for it."""
        with self._lock:
            found = not self._read.isdisjoint(keys)
            self._read.difference_update(keys)
            return found

    # On workers

    def find(self, keys: Sequence[bytes], namespace: bytes) -> list[bool]:
        """Return which of `keys` are here, and refresh them: the following read needs room, for which others are freed.
        """
        if namespace != self._namespace:
            return [False] * len(keys)
        with self._lock:
            found = [key in self._pages for key in keys]
            uses = self._order.uses(keys)
        has_more = True
        while has_more:  # visits the ancestors of the pages too, so the lock is released between parts
            with self._lock:
                has_more = next(uses, _END) is not _END
        return found

    def take(self, key: bytes, namespace: bytes) -> int | None:
        """Return the page of `key` for a read, or None if it is not here. The reader must call `end`."""
        with self._lock:
            if namespace != self._namespace or key not in self._pages:
                return None
            self._order.discard(key)
            return self._pages.pop(key)

    def end(self, page: int, key: bytes | None) -> None:
        """End the read of a page. `key` means that it was copied and verified, None that it failed."""
        unseal(self.frame(page))  # the next process finds the copy, unless that is removed
        with self._lock:
            self._unused.append(page)
            if key is not None:
                self._read.add(key)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages, also for the next process; return how many were kept."""
        removed = 0
        for key in keys:
            with self._lock:
                if key in self._pages:
                    unseal(self.frame(self._pages[key]))
                    self._discard(key)
                    removed += 1
        return removed

    def keys(self) -> list[bytes]:
        """Return the keys of the pages."""
        with self._lock:
            return list(self._pages)

    def _discard(self, key: bytes) -> None:
        self._order.discard(key)
        self._unused.append(self._pages.pop(key))


class KeptBackend(PageStore[int]):
    """See the module's docstring. A page can be read once: then its copy is on L2.

    With `seals` it is the only store: pages are sealed in their frames, where the next process finds them. Otherwise it
    does not accept pages.
    """

    def __init__(self, codec: FrameCodec, frames: KeptFrames, *, seals: bool) -> None:
        super().__init__(codec)
        self._frames = frames
        self._seals = seals

    def find(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See PageStore. Refreshes recency, see KeptFrames."""
        return self._frames.find(keys, self.codec.namespace)

    def read(self, pages: PageReads[int]) -> None:
        """See PageStore."""
        for position in pages:
            key = pages.keys[position]
            page = self._frames.take(key, self.codec.namespace)
            if page is None:
                pages.miss(position)
                continue
            proved = False
            try:
                proved = pages.take(position, self._frames.frame(page), found=page)
            finally:
                self._frames.end(page, key if proved else None)

    def remove_damaged(self, damaged: Sequence[Damaged[int]], deadline: float) -> None:
        """See PageStore. `read` has taken the page out."""

    def write(self, pages: PageWrites) -> None:
        """See PageStore. Seals each frame in place."""
        for position in pages:
            if self._seals:
                pages.sealed(position)
                pages.stored(position)
            else:
                pages.reject(position)

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See PageStore."""
        return self._frames.remove(keys)

    def keys(self, deadline: float) -> Iterator[bytes]:
        """See PageStore."""
        return iter(self._frames.keys())

    def measure(self) -> Usage:
        """See PageStore. Counts the pages that have not been requested."""
        pages = len(self._frames.keys())
        return Usage(pages, pages * self.codec.frame_bytes, None)

    def shut(self) -> None:
        """See PageStore. The frames stay for a store that is opened later."""


class KeptLevel(Wrapper):
    """`inner`, with the kept frames in front of it. Pages are stored only in `inner`."""

    def __init__(self, inner: StorageBackend, kept: KeptBackend) -> None:
        super().__init__(inner)
        self._kept = kept

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """See Composite."""
        return (self._kept, self._inner)

    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope. Looks up both alternately, each from the end of the other's prefix."""
        found, more = self._kept.batch_exists(keys, deadline=deadline), 1
        while found < len(keys) and more:
            below = self._inner.batch_exists(keys[found:], deadline=deadline)
            more = self._kept.batch_exists(keys[found + below :], deadline=deadline) if below else 0
            found += below + more
        return found

    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Envelope."""
        kept = self._kept.batch_has(keys, deadline=deadline)
        below = self._inner.batch_has(keys, deadline=deadline)
        return [one or other for one, other in zip(kept, below, strict=True)]

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope. Pages that are missing or damaged in the kept frames are read from `inner`."""
        outcomes = self._kept.batch_get(keys, pages, deadline=deadline)
        missing = [position for position, outcome in enumerate(outcomes) if outcome is not GetOutcome.HIT]
        if missing:
            below = self._inner.batch_get([keys[p] for p in missing], [pages[p] for p in missing], deadline=deadline)
            for position, outcome in zip(missing, below, strict=True):
                outcomes[position] = outcome
        return outcomes

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope. A page that both have counts as one of `inner`."""
        self._kept.delete(keys, deadline=deadline)
        return super().remove(keys, deadline)

    def remove_all(self, deadline: float) -> int:
        """See Envelope. Counts the pages of `inner`."""
        self._kept.clear(deadline=deadline)
        return super().remove_all(deadline)

    def shut(self) -> None:
        """See Envelope."""
        self._kept.close()
        super().shut()
