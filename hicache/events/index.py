"""A second index of cached pages, kept by events alone: what a router or a monitor knows of a tree that it cannot see.

Invariants, verified by `check`:
1. A page is on at least one medium, else it is not in the index.
2. A page on the device has the page before it there too; one on the host has it on the device or on the host. Of a page
   that is on storage alone, the page before it may be unknown: storage evicts as it likes.
3. At most `stored_pages_max` pages are on storage alone. What storage evicts may never be told, so the pages that left
   the other media first are forgotten.
4. Where tokens are known, a page's key is the hash of what it is chained from and of its tokens.
5. No event has contradicted what was known.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import InvariantError
from .types import NO_ORIGIN, Cleared, Event, Medium, Origin, Removed, Stored

# Some 500 bytes each, and 4 for each token.
STORED_PAGES_MAX = 1_000_000
_STORED_ALONE = {Medium.STORAGE}


@dataclass(slots=True)
class IndexedPage:
    """A page as events told it: the key of the page before it, or None and the seed where a prompt begins; its tokens
    as in `Stored`, empty if withheld; whose it was when it was stored first; the media that it is on."""

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
        self._stored_alone: dict[bytes, None] = {}  # pages on storage alone, in the order in which they became so
        self._in_sync = True
        self._contradictions = 0

    # Following

    def apply(self, events: Iterable[Event]) -> None:
        """Follow events in their order. While the index is out of sync, all before a `Cleared` are ignored."""
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
        """Forget everything, because events were missed; a `Cleared` starts it over, and with it each snapshot."""
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
                # Storage is known by hearsay: it may lose what nobody has reported, or what was forgotten here.
                self._contradictions += event.medium is not Medium.STORAGE
                continue
            page.media.discard(event.medium)
            self._note(key, page)

    def _note(self, key: bytes, page: IndexedPage) -> None:
        """Keep the invariants for a page whose media have changed."""
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
        """Whether a page may be on `medium` behind the page `parent`."""
        page = self._pages.get(parent)
        if medium is Medium.STORAGE:
            return True
        return page is not None and (Medium.DEVICE in page.media or (medium is Medium.HOST and medium in page.media))

    # Asking

    @property
    def in_sync(self) -> bool:
        """Whether the index has followed every event since the last time it knew the whole tree."""
        return self._in_sync

    def __len__(self) -> int:
        return len(self._pages)

    def prefix_pages(self, keys: Sequence[bytes], medium: Medium) -> int:
        """How many of the leading pages of a prompt, given by its page keys, are on `medium`."""
        for number, key in enumerate(keys):
            page = self._pages.get(key)
            if page is None or medium not in page.media:
                return number
        return len(keys)

    def keys(self, medium: Medium) -> set[bytes]:
        """The keys of all pages on `medium`."""
        return {key for key, page in self._pages.items() if medium in page.media}

    def page(self, key: bytes) -> IndexedPage:
        """The page `key`; do not change it. Raises KeyError for an unknown page."""
        return self._pages[key]

    def pages(self) -> Counter[Medium]:
        """How many pages are on each medium, counted over all pages."""
        return Counter(medium for page in self._pages.values() for medium in page.media)

    def check(self) -> None:
        """Raises InvariantError if an invariant of the module does not hold."""
        if self._contradictions:
            raise InvariantError(f"prefix index: {self._contradictions} events contradict what was known")
        for key, page in self._pages.items():
            if not page.media:
                raise InvariantError("prefix index: a page is on no medium")
            if page.parent is not None and not all(self._may_follow(page.parent, medium) for medium in page.media):
                raise InvariantError("prefix index: a page is on a medium, the page before it is not")
            if (page.media == _STORED_ALONE) is not (key in self._stored_alone):
                raise InvariantError("prefix index: the pages on storage alone are not those that are listed")
            prior = page.seed if page.parent is None else page.parent
            if page.tokens and hashlib.sha256(prior + page.tokens).digest() != key:
                raise InvariantError("prefix index: a key is not the hash of its tokens")
