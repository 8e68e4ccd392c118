"""Chooses the hottest chains of a store, for a warm-up: those of its most recently used pages."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Generator, Sequence

from ...frame import HEADER_BYTES
from ..base import PageId, StoredPage
from ..chains import parent_in, read_header
from ..stored import StoredPages

# The interval of steps while a store is listed.
_LISTED_STEP = 1000


class HottestChains:
    """Chains of one store, or of several in turn, whose distinct pages have at most `top_bytes` together.

    Needs the memory of two entries per chosen page, and one per page that was read in vain. For one thread.

    Invariant: the parent of a chosen page is chosen, before it.
    """

    def __init__(self, top_bytes: int) -> None:
        self._left = top_bytes
        self._parents: dict[PageId, PageId | None] = {}  # of the chosen pages

    def of(
        self, stored: StoredPages, namespaces: Sequence[bytes]
    ) -> Generator[tuple[bytes, list[bytes]] | None, None, None]:
        """Yield the namespace and the page keys, root first, of each further chain in `namespaces`; None for a step
        without a result.

        The most recently used pages are chosen in turn, each after its ancestors, as far as they fit. Then the chains
        follow, from roots to pages without a chosen child, in the order in which these were chosen. A page whose last
        use is unknown is the oldest, and a page with a missing ancestor or in a cycle is skipped. Reads the header of a
        page once, or twice if it is not chosen. Blocks, and raises as `StoredPages`.
        """
        newest, before = (yield from self._newest(stored, namespaces)), len(self._parents)
        useless: set[PageId] = set()
        for where in newest:
            yield None
            for page, parent, size_bytes in self._climb(stored, where, useless):
                if size_bytes > self._left:
                    useless.add(page)
                    break
                self._left -= size_bytes
                self._parents[page] = parent
        inner = set(self._parents.values())
        for end in itertools.islice(self._parents, before, None):
            if end not in inner:
                keys: list[bytes] = []
                at: PageId | None = end
                while at is not None:
                    keys.append(at[1])
                    at = self._parents[at]
                yield end[0], keys[::-1]

    def _newest(self, stored: StoredPages, namespaces: Sequence[bytes]) -> Generator[None, None, list[PageId]]:
        """Return the most recently used pages that may be chosen, the newest first."""
        heap: list[tuple[float, PageId, int]] = []
        heap_bytes = 0
        listed = itertools.chain.from_iterable(stored.pages(namespace.hex()) for namespace in namespaces)
        for number, page in enumerate(listed if self._left > 0 else ()):
            if number % _LISTED_STEP == 0:
                yield
            if page.damage is None and page.id not in self._parents:
                heapq.heappush(heap, (page.used_s or 0.0, page.id, page.bytes))
                heap_bytes += page.bytes
                while heap_bytes - heap[0][2] >= self._left:
                    heap_bytes -= heapq.heappop(heap)[2]
        return [where for _, where, _ in sorted(heap, reverse=True)]

    def _climb(
        self, stored: StoredPages, where: PageId, useless: set[PageId]
    ) -> list[tuple[PageId, PageId | None, int]]:
        """Return the path from a chosen page or a root to `where`, with parents and sizes; empty if there is none."""
        path: dict[PageId, tuple[PageId | None, int]] = {}
        at: PageId | None = where
        while at is not None and at not in self._parents:
            header = None if at in path or at in useless else read_header(stored, StoredPage(*at, HEADER_BYTES, None))
            if header is None:
                useless.update(path, [at])
                return []
            parent = parent_in(header)
            path[at] = None if parent is None else (at[0], parent), header.object_bytes
            at = path[at][0]
        return [(page, *path[page]) for page in reversed(path)]
