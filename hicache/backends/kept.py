"""Frames that a previous process has left in host memory (`host.shared.keep`): a read-only level above storage.

An engine that ends or dies keeps its frames in a shared mapping. The next engine indexes them by the page keys in their
headers. They stay in place until a prompt needs them, or until the cache needs their memory.

A header is only a hint. A requested page is copied to the frame that the cache has reserved for it, and the copy is
verified there, like a page of any store. So the cache never uses a frame that another process could still write to, and
pages do not change their owner between threads; the copy is faster than the verification. Then the old frame is free.

    KeptFrames    the remaining frames, by key
    KeptDriver    the store of them; without another store it also seals computed pages in place
    open_kept     makes storage of them, alone or in front of the configured storage

Locking design: `_lock` of a KeptFrames guards its fields. It is held for a few instructions per page of a batch, and
never while a frame is read, because the scheduler thread takes it in `give_way`. A frame that is being read is not in
the tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from ..clock import SYSTEM_CLOCK, Clock
from ..frame import FrameCodec, PageBuffer, unseal
from .base import Direction, SetOutcome, StoredPage, Usage
from .calls import Call
from .compose import Levels, Part
from .order import EvictionOrder
from .pages import PageReads, PageWrites
from .storage import Storage
from .store import UNGUARDED, Store

_END = object()


class KeptFrames:
    """The kept frames, among `pages` frames, whose pages `codec` may be able to verify. `frame` returns a frame by its
    number.

    Invariant: each page is in `_pages`, under its key, is being read, or waits in `_unused`. `held` is their number.
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
        """Free up to `count` pages: those that were read, then the least recently looked up, tails before heads."""
        with self._lock:
            while len(self._unused) < count and (oldest := self._order.oldest()) is not None:
                self._discard(oldest[0])
            freed, self._unused = self._unused[:count], self._unused[count:]
            self.held -= len(freed)
            return freed

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
        """Return which of `keys` are here, and refresh them: the read that follows needs room, which others give."""
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


class KeptDriver:
    """See the module's docstring. A page can be read once: then its copy is on L2.

    Pages that are written are sealed in their frames, where the next process finds them. REQUIRES: it is the only store
    that gets them. `Driver` documents the functions.
    """

    def __init__(self, codec: FrameCodec, frames: KeptFrames) -> None:
        self._codec = codec
        self._frames = frames

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Driver. Refreshes recency, see KeptFrames."""
        return self._frames.find(keys, namespace)

    def read(self, pages: PageReads[int]) -> None:
        for position in pages:
            key = pages.keys[position]
            page = self._frames.take(key, pages.codec.namespace)
            if page is None:
                pages.miss(position)
                continue
            proved = False
            try:
                proved = pages.take(position, self._frames.frame(page), found=page)
            finally:
                self._frames.end(page, key if proved else None)

    def write(self, pages: PageWrites) -> None:
        """See Driver. Seals each frame in place."""
        for position in pages:
            pages.sealed(position)
            pages.stored(position)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[int] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. `read` has already taken damaged pages out."""
        return (self._frames.remove(keys) if found is None and namespace == self._codec.namespace else 0), ()

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        space, size = self._codec.namespace, self._codec.frame_bytes
        if space.hex().startswith(namespace):
            keys = self._frames.keys()
            yield from (StoredPage(space, key, size, None) for key in keys)

    def measure(self) -> Usage:
        """See Driver. Counts the pages that have not been requested."""
        pages = len(self._frames.keys())
        return Usage(pages, pages * self._codec.frame_bytes, None)

    def close(self) -> None:
        """See Driver. The frames stay for a store that is opened later."""


class _KeptFirst(Levels):
    """The kept frames in front of `storage`, which alone gets pages, and whose guards decide whether it is used."""

    def __init__(self, codec: FrameCodec, kept: Store, storage: Storage, clock: Clock) -> None:
        parts = [Part("kept", kept), Part("storage", storage)]
        super().__init__(codec, parts, promote=False, cascade_bytes_max=None, clock=clock)
        self._storage = storage

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        return self._storage.batch_set(keys, pages, parent=parent, deadline=call.deadline, errors=call.report)

    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]:
        """See Verbs. A page that only has its kept frame is missing: the frame can be freed at any time."""
        return self._storage.batch_touch(keys, deadline=call.deadline, errors=call.report)

    def may_pass(self, direction: Direction) -> bool:
        return self._storage.may_pass(direction)


def open_kept(codec: FrameCodec, frames: KeptFrames, storage: Storage | None, clock: Clock = SYSTEM_CLOCK) -> Storage:
    """Return storage of the kept frames: in front of `storage`, or alone, and then computed pages are sealed in their
    frames. Owns `storage`."""
    kept = Store(KeptDriver(codec, frames), codec, UNGUARDED, name="kept", clock=clock)
    return kept if storage is None else _KeptFirst(codec, kept, storage, clock)
