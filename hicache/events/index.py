"""An index of the cached pages of a remote tree, built from events only, for routers and monitors.

It has the media of each page and nothing else, because a router keeps an index of each engine: 110 to 140 bytes a page,
80 of them for the key.

Invariants; `check` verifies them as far as the index can know:
1. Each page in the index is on at least one medium.
2. The parent of a page on the device is on the device. The parent of a page on the host is on the device or the host.
   The parent of a page that is only on storage may be unknown: storage evicts in any order.
3. At most `stored_pages_max` pages are only on storage. Storage may not report evictions, so the pages that left the
   other media first are forgotten.
4. No event has contradicted the index. It does not keep parents, so it does not see that one left before its child.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from ..errors import InvariantError
from .stream import first_beyond
from .types import Cleared, Event, Medium, Removed, Stored

STORED_PAGES_MAX = 1_000_000  # 140 bytes each at most
_DEVICE, _HOST, _STORAGE = 1, 2, 4
_BITS = {Medium.DEVICE: _DEVICE, Medium.HOST: _HOST, Medium.STORAGE: _STORAGE}
# For each set of media, as a sum of bits: the sets that share one with it.
_SHARING = [frozenset(media for media in range(8) if media & wanted) for wanted in range(8)]


class PrefixIndex:
    """See the module's docstring. An index starts in sync with an empty tree. Not thread-safe."""

    def __init__(self, *, stored_pages_max: int = STORED_PAGES_MAX) -> None:
        self._stored_pages_max = stored_pages_max
        # The media of each page as a sum of bits: of those on the device or the host, and of those that are only on
        # storage, in the order of that change.
        self._near: dict[bytes, int] = {}
        self._stored_alone: dict[bytes, int] = {}
        self.in_sync = True  # it has applied every event since it last had the whole tree
        self._contradictions = 0

    # Following

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events in order. While the index is out of sync, events before a `Cleared` are ignored."""
        for event in events:
            if isinstance(event, Cleared):
                self._forget_all()
                self.in_sync = True
            elif not self.in_sync:
                continue
            elif isinstance(event, Stored):
                self._store(event)
            else:
                self._remove(event)

    def lose(self) -> None:
        """Forget everything because events were missed. A snapshot, which begins with `Cleared`, restarts it."""
        self._forget_all()
        self.in_sync = False

    def _forget_all(self) -> None:
        self._near.clear()
        self._stored_alone.clear()

    def _store(self, event: Stored) -> None:
        bit, near, alone = _BITS[event.medium], self._near, self._stored_alone
        if bit == _STORAGE:
            for key in event.keys:
                if key in near:
                    near[key] |= _STORAGE
                else:
                    alone.setdefault(key, _STORAGE)
            self._limit()
            return
        # The parent is on the same medium, or on the device.
        if event.parent is not None and not near.get(event.parent, 0) & (bit | _DEVICE):
            self._contradictions += 1
        for key in event.keys:
            near[key] = (near.get(key) or alone.pop(key, 0)) | bit

    def _remove(self, event: Removed) -> None:
        bit, near, alone = _BITS[event.medium], self._near, self._stored_alone
        for key in event.keys:
            media = near.get(key, 0)
            if not media & bit:
                # Not an error for storage: the page's arrival may not have been reported, or was forgotten here.
                self._contradictions += bit != _STORAGE
                if bit == _STORAGE:
                    alone.pop(key, None)
            elif media & ~bit & ~_STORAGE:
                near[key] = media & ~bit
            else:
                del near[key]
                if media & _STORAGE:
                    alone[key] = _STORAGE
        self._limit()

    def _limit(self) -> None:
        """Restore invariant 3."""
        for key in first_beyond(self._stored_alone, self._stored_pages_max):
            del self._stored_alone[key]

    # Queries

    def __len__(self) -> int:
        return len(self._near) + len(self._stored_alone)

    def prefix_pages(self, keys: Sequence[bytes], *media: Medium) -> int:
        """Return how many leading pages of a prompt, identified by its page keys, are on one of `media`. With the
        device among them it tries few of the pages there, by invariant 2; on other media it tries each."""
        wanted = sum(_BITS[medium] for medium in set(media))
        near, alone = self._near.get, self._stored_alone.get
        found = 0
        if wanted & _DEVICE:
            is_near = _SHARING[wanted & ~_STORAGE].__contains__
            if keys and is_near(near(keys[0])):  # most engines have nothing of a prompt
                found = bisect_left(keys, True, 1, key=lambda key: not is_near(near(key)))
            if not wanted & _STORAGE:
                return found
        # No page takes a step of the interpreter. The default in the second dictionary is what the first one has.
        rest = keys[found:]
        media_of = map(alone, rest, map(near, rest)) if wanted & _STORAGE else map(near, rest)
        return found + len(list(takewhile(_SHARING[wanted].__contains__, media_of)))

    def media(self, key: bytes) -> frozenset[Medium]:
        """Return the media that have the page `key`; none for an unknown page."""
        media = self._near.get(key) or self._stored_alone.get(key, 0)
        return frozenset(medium for medium, bit in _BITS.items() if media & bit)

    def keys(self, medium: Medium) -> set[bytes]:
        """Return the keys of all pages on `medium`."""
        near = {key for key, media in self._near.items() if media & _BITS[medium]}
        return near.union(self._stored_alone) if medium is Medium.STORAGE else near

    def pages(self) -> Counter[Medium]:
        """Return the number of pages on each medium. Visits all pages."""
        counted = Counter(self._near.values())
        counted[_STORAGE] += len(self._stored_alone)
        return Counter(
            {medium: pages for medium, bit in _BITS.items()
             if (pages := sum(counted[media] for media in range(8) if media & bit))}
        )

    def check(self) -> None:
        """Raise InvariantError if an invariant of the module does not hold."""
        if self._contradictions:
            raise InvariantError(f"prefix index: {self._contradictions} events contradict the index")
        if not all(media & ~_STORAGE for media in self._near.values()):
            raise InvariantError("prefix index: a page that is on neither device nor host is listed as one that is")
        if not self._near.keys().isdisjoint(self._stored_alone):
            raise InvariantError("prefix index: a page that is only on storage is listed as one that is not")
        if len(self._stored_alone) > self._stored_pages_max:
            raise InvariantError("prefix index: too many pages are only on storage")
