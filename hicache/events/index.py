"""A second index of cached pages, kept by events alone: what a router or a monitor knows of a tree that it cannot see.

Invariants, verified by `check`:
1. A page is on at least one medium, else it is not in the index.
2. A page on the device or on the host has the page before it there too; on storage it has it in the index.
3. Where tokens are known, a page's key is the hash of what it is chained from and of its tokens.
4. No event has contradicted what was known.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import InvariantError
from .types import Cleared, Event, Medium, Removed, Stored


@dataclass(slots=True)
class IndexedPage:
    """A page as events told it: the key of the page before it, or None and the seed where a prompt begins; its tokens
    as in `Stored`, empty if withheld; the media that it is on."""

    parent: bytes | None
    seed: bytes
    tokens: bytes
    media: set[Medium] = field(default_factory=set)


class PrefixIndex:
    """See the module's docstring. An index starts in sync with an empty tree. Not thread-safe."""

    def __init__(self) -> None:
        self._pages: dict[bytes, IndexedPage] = {}
        self._in_sync = True
        self._contradictions = 0

    # Following

    def apply(self, events: Iterable[Event]) -> None:
        """Follow events in their order. While the index is out of sync, all before a `Cleared` are ignored."""
        for event in events:
            if isinstance(event, Cleared):
                self._pages.clear()
                self._in_sync = True
            elif not self._in_sync:
                continue
            elif isinstance(event, Stored):
                self._store(event)
            else:
                self._remove(event)

    def lose(self) -> None:
        """Forget everything, because events were missed; a `Cleared` starts it over, and with it each snapshot."""
        self._pages.clear()
        self._in_sync = False

    def _store(self, event: Stored) -> None:
        if event.parent is not None and not self._holds(event.parent, event.medium):
            self._contradictions += 1
        page_bytes = len(event.tokens) // len(event.keys)
        parent = event.parent
        for number, key in enumerate(event.keys):
            page = self._pages.get(key)
            if page is None:
                tokens = event.tokens[number * page_bytes : (number + 1) * page_bytes]
                page = self._pages[key] = IndexedPage(parent, event.seed if parent is None else b"", tokens)
            page.media.add(event.medium)
            parent = key

    def _remove(self, event: Removed) -> None:
        for key in event.keys:
            page = self._pages.get(key)
            if page is None or event.medium not in page.media:
                # Storage is known by hearsay: a page may leave the tree before its store was reported.
                self._contradictions += event.medium is not Medium.STORAGE
                continue
            page.media.discard(event.medium)
            if not page.media:
                del self._pages[key]

    def _holds(self, key: bytes, medium: Medium) -> bool:
        page = self._pages.get(key)
        return page is not None and (medium in page.media or medium is Medium.STORAGE)

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
            if page.parent is not None and not all(self._holds(page.parent, medium) for medium in page.media):
                raise InvariantError("prefix index: a page is on a medium, the page before it is not")
            prior = page.seed if page.parent is None else page.parent
            if page.tokens and hashlib.sha256(prior + page.tokens).digest() != key:
                raise InvariantError("prefix index: a key is not the hash of its tokens")
