"""An index of the cached pages of a remote tree, built from events only, for routers and monitors.

Invariants, verified by `check`:
1. Each page in the index is on at least one medium.
2. The parent of a page on the device is on the device. The parent of a page on the host is on the device or the host.
   The parent of a page that is only on storage may be unknown: storage evicts in any order.
3. At most `stored_pages_max` pages are only on storage. Storage may not report evictions, so the pages that left the
   other media first are forgotten.
4. If its tokens are known, a page's key is the hash of its parent's key (or seed) and its tokens.
5. No event has contradicted the index.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import InvariantError
from .types import NO_ORIGIN, Cleared, Event, Medium, Origin, Removed, Stored

# About 500 bytes each, and 4 for each token.
STORED_PAGES_MAX = 1_000_000
_STORED_ALONE = {Medium.STORAGE}


@dataclass(slots=True)
class IndexedPage:
    """A page as described by events: its parent's key, or None and the seed for the first page of a prompt; its tokens
    as in `Stored`, empty if withheld; its origin when it was first stored; the media that it is on."""

    parent: bytes | None
    seed: bytes
    tokens: bytes
    origin: Origin = NO_ORIGIN
    media: set[Medium] = field(default_factory=set)


class PrefixIndex:
    """See the module's docstring. An index starts in sync with an empty tree. Not thread-safe."""

    def __init__(self, *, stored_pages_max: int = STORED_PAGES_MAX) -> None:
        self._stored_pages_max = stored_pages_max
        self._pages: dict[bytes, IndexedPage] = {}
        self._stored_alone: dict[bytes, None] = {}  # pages that are only on storage, in the order of that change
        self._in_sync = True
        self._contradictions = 0

    # Following

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events in order. While the index is out of sync, events before a `Cleared` are ignored."""
        for event in events:
            if isinstance(event, Cleared):
                self._forget_all()
                self._in_sync = True
            elif not self._in_sync:
                continue
            elif isinstance(event, Stored):
                self._store(event)
            else:
                self._remove(event)

    def lose(self) -> None:
        """Forget everything because events were missed. The next `Cleared`, with which a snapshot begins, restarts
        it."""
        self._forget_all()
        self._in_sync = False

    def _forget_all(self) -> None:
        self._pages.clear()
        self._stored_alone.clear()

    def _store(self, event: Stored) -> None:
        if event.parent is not None and not self._may_follow(event.parent, event.medium):
            self._contradictions += 1
        page_bytes = len(event.tokens) // len(event.keys)
        parent = event.parent
        for number, key in enumerate(event.keys):
            page = self._pages.get(key)
            if page is None:
                tokens = event.tokens[number * page_bytes : (number + 1) * page_bytes]
                seed = event.seed if parent is None else b""
                page = self._pages[key] = IndexedPage(parent, seed, tokens, event.origin)
            page.media.add(event.medium)
            self._note(key, page)
            parent = key

    def _remove(self, event: Removed) -> None:
        for key in event.keys:
            page = self._pages.get(key)
            if page is None or event.medium not in page.media:
                # Not an error: the page's arrival on storage may not have been reported, or was forgotten here.
                self._contradictions += event.medium is not Medium.STORAGE
                continue
            page.media.discard(event.medium)
            self._note(key, page)

    def _note(self, key: bytes, page: IndexedPage) -> None:
        """Restore the invariants for a page whose media have changed."""
        if not page.media:
            del self._pages[key]
        if page.media == _STORED_ALONE:
            self._stored_alone.setdefault(key)
            if len(self._stored_alone) > self._stored_pages_max:
                oldest = next(iter(self._stored_alone))
                del self._stored_alone[oldest], self._pages[oldest]
        else:
            self._stored_alone.pop(key, None)

    def _may_follow(self, parent: bytes, medium: Medium) -> bool:
        """True if invariant 2 allows a page on `medium` after the page `parent`."""
        page = self._pages.get(parent)
        if medium is Medium.STORAGE:
            return True
        return page is not None and (Medium.DEVICE in page.media or (medium is Medium.HOST and medium in page.media))

    # Queries

    @property
    def in_sync(self) -> bool:
        """True if the index has applied every event since it last had the whole tree."""
        return self._in_sync

    def __len__(self) -> int:
        return len(self._pages)

    def prefix_pages(self, keys: Sequence[bytes], medium: Medium) -> int:
        """Return how many leading pages of a prompt, identified by its page keys, are on `medium`."""
        for number, key in enumerate(keys):
            page = self._pages.get(key)
            if page is None or medium not in page.media:
                return number
        return len(keys)

    def keys(self, medium: Medium) -> set[bytes]:
        """Return the keys of all pages on `medium`."""
        return {key for key, page in self._pages.items() if medium in page.media}

    def page(self, key: bytes) -> IndexedPage:
        """Return the page `key`; do not change it. Raises KeyError for an unknown page."""
        return self._pages[key]

    def pages(self) -> Counter[Medium]:
        """Return the number of pages on each medium. Visits all pages."""
        return Counter(medium for page in self._pages.values() for medium in page.media)

    def check(self) -> None:
        """Raise InvariantError if an invariant of the module does not hold."""
        if self._contradictions:
            raise InvariantError(f"prefix index: {self._contradictions} events contradict the index")
        for key, page in self._pages.items():
            if not page.media:
                raise InvariantError("prefix index: a page is not on any medium")
            if page.parent is not None and not all(self._may_follow(page.parent, medium) for medium in page.media):
                raise InvariantError("prefix index: a page is on a medium but its parent is not")
            if (page.media == _STORED_ALONE) is not (key in self._stored_alone):
                raise InvariantError("prefix index: the list of pages that are only on storage is wrong")
            prior = page.seed if page.parent is None else page.parent
            if page.tokens and hashlib.sha256(prior + page.tokens).digest() != key:
                raise InvariantError("prefix index: a key is not the hash of its tokens")
