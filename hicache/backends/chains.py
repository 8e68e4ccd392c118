"""The chains of stored pages: the order for removing pages, tails first, and for copying them, heads first.

A listing of a store has keys and sizes; the parents are in the pages' headers. `Chains` combines both, for the
operator's tools and for limits of stores that do not enforce limits themselves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import InvariantError, PageUnreadable
from ..frame import HEADER_BYTES, NO_PARENT, FrameHeader
from .base import PageId, StoredPage
from .stored import StoredPages


@dataclass(slots=True)
class _Link:
    page: StoredPage
    parent: PageId | None
    listed_s: float | None
    told_s: float | None = None  # `listed_s` at the last `uses`


def read_header(stored: StoredPages, page: StoredPage) -> FrameHeader | None:
    """Return the header of a page; None if the page is missing, or its header is unreadable or of another page. Blocks
    and raises as `stored.read`."""
    try:
        data = stored.read(page, HEADER_BYTES)
    except PageUnreadable:
        return None
    header = None if data is None else FrameHeader.parse(data)
    if header is None or header.page_key != page.key or header.namespace != page.namespace:
        return None
    return header


def parent_in(header: FrameHeader) -> bytes | None:
    """Return the key of the page before this one, None at the start of a chain."""
    return None if header.parent_key == NO_PARENT else header.parent_key


class Chains:
    """Pages with their parents; about 600 bytes of memory each. For one thread.

    Invariant: `_children` counts the known children of each parent (which may be unknown); a page is never its own
    parent. `_unread` are known pages.
    """

    def __init__(self) -> None:
        self._links: dict[PageId, _Link] = {}
        self._children: dict[PageId, int] = {}
        self._unread: set[PageId] = set()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._links)

    def __contains__(self, where: PageId) -> bool:
        return where in self._links

    def add(
        self, page: StoredPage, parent: bytes | None, listed_s: float | None = None, *, is_unread: bool = False
    ) -> None:
        """Add or replace a stored page. `listed_s` is the time that its listing showed. A page whose header was not
        read begins a chain until `read`."""
        where = page.id
        self.discard(where)
        self._links[where] = _Link(page, None, listed_s)
        self.bytes += page.bytes
        if is_unread:
            self._unread.add(where)
        else:
            self.read(where, parent)

    def read(self, where: PageId, parent: bytes | None) -> None:
        """Record the parent of a page that was added without one."""
        link = self._links[where]
        self._unread.discard(where)
        if parent is not None and parent != where[1]:
            link.parent = (where[0], parent)
            self._children[link.parent] = self._children.get(link.parent, 0) + 1

    def listed_s(self, where: PageId) -> float | None:
        """Return the time that the last listing showed for a page; None for an unknown page."""
        link = self._links.get(where)
        return None if link is None else link.listed_s

    def unread(self) -> list[StoredPage]:
        """Return the pages whose headers were not read."""
        return [self._links[where].page for where in self._unread]

    def parent(self, where: PageId) -> PageId | None:
        """Return the page before a page; None at the start of a chain and for an unknown page."""
        link = self._links.get(where)
        return None if link is None else link.parent

    def uses(self) -> Iterator[list[PageId]]:
        """Yield the pages whose listed times have changed since the last call as prompts, head first, in the order of
        their uses. A prompt ends with a page without such children; a page of several prompts is in the first one.
        REQUIRES: no changes during the iteration."""
        used = {where for where, link in self._links.items() if link.listed_s != link.told_s}
        tails = used - {self._links[where].parent for where in used}
        visited = set[PageId]()
        for tail in sorted(tails, key=lambda where: (_used(self._links[where].page), where)):
            prompt: list[PageId] = []
            above: PageId | None = tail
            while above is not None and above not in visited and (link := self._links.get(above)) is not None:
                visited.add(above)
                if above in used:
                    link.told_s = link.listed_s
                    prompt.append(above)
                above = link.parent
            if prompt:
                yield prompt[::-1]

    def renew(self, page: StoredPage, listed_s: float | None = None) -> bool:
        """Update size and last use of a page from a listing that showed the time `listed_s` (the later use counts).
        Return False for an unknown page."""
        link = self._links.get((page.namespace, page.key))
        if link is None:
            return False
        self.bytes += page.bytes - link.page.bytes
        used_s = max(filter(None, (page.used_s, link.page.used_s)), default=None)
        link.page, link.listed_s = StoredPage(page.namespace, page.key, page.bytes, used_s), listed_s
        return True

    def discard(self, where: PageId) -> bool:
        """Forget a page; return False if it was unknown."""
        link = self._links.pop(where, None)
        if link is None:
            return False
        self.bytes -= link.page.bytes
        self._unread.discard(where)
        if link.parent is not None:
            self._children[link.parent] -= 1
            if not self._children[link.parent]:
                del self._children[link.parent]
        return True

    def keep(self, where: set[PageId]) -> None:
        """Forget all pages except these."""
        for gone in [known for known in self._links if known not in where]:
            self.discard(gone)

    def heads(self) -> int:
        """Return the number of pages that begin a chain."""
        return sum(link.parent is None for link in self._links.values())

    def orphans(self) -> int:
        """Return the number of pages with an unknown parent. Lookups reach them once the parent is stored again."""
        return sum(link.parent is not None and link.parent not in self._links for link in self._links.values())

    def tails(self) -> int:
        """Return the number of pages without children."""
        return sum(where not in self._children for where in self._links)

    def tails_first(self, keeps: Callable[[PageId], bool] | None = None) -> Iterator[StoredPage]:
        """Yield all pages in the order of eviction: always the least recently used one without remaining children, but
        pages that `keeps` returns True for, and those before them in their chains, after all others.

        Changes nothing. REQUIRES: no changes during the iteration. Engines do not make cycles. A page in a cycle is
        evicted as if it had no parent; otherwise cycles would outlast the pages of engines.
        """
        children, cycles = self._cut_cycles()
        order = [(_used(link.page), where) for where, link in self._links.items() if not children.get(where)]
        heapq.heapify(order)
        kept: list[tuple[float, PageId]] = []
        while order or kept:
            if not order:
                order, kept, keeps = sorted(kept), [], None
            used_s, where = heapq.heappop(order)
            if keeps is not None and keeps(where):
                kept.append((used_s, where))
                continue
            link = self._links[where]
            yield link.page
            above = link.parent
            if above is None or where in cycles:
                continue
            children[above] -= 1
            if not children[above] and above in self._links:
                heapq.heappush(order, (_used(self._links[above].page), above))

    def _cut_cycles(self) -> tuple[dict[PageId, int], set[PageId]]:
        """Return the number of children of each page without the links of cycles, and the pages in cycles."""
        children = dict(self._children)
        tails = [where for where in self._links if where not in children]
        cycles = set(self._links)
        while tails:
            where = tails.pop()
            cycles.discard(where)
            above = self._links[where].parent
            if above is not None:
                children[above] -= 1
                if not children[above] and above in self._links:
                    tails.append(above)
        # Only pages in cycles remain, since a page has at most one parent.
        children = dict(self._children)
        for where in cycles:
            above = self._links[where].parent
            assert above is not None
            children[above] -= 1
        return children, cycles

    def heads_first(self) -> Iterator[tuple[StoredPage, bytes | None]]:
        """Yield all pages with the keys of their parents, each after its parent, the most recently used chain first.

        Changes nothing. REQUIRES: no changes during the iteration. A page in a cycle is treated like the first of a
        chain. At any point the yielded pages are whole prefixes.
        """
        newest: dict[PageId, float] = {}
        below: dict[PageId, list[PageId]] = {}
        roots: list[PageId] = []
        _, cycles = self._cut_cycles()
        for page in self.tails_first():
            where = (page.namespace, page.key)
            newest[where] = max(newest.get(where, 0.0), _used(page))
            above = self._links[where].parent
            if above is None or above not in self._links or where in cycles:
                roots.append(where)
            else:
                newest[above] = max(newest.get(above, 0.0), newest[where])
                below.setdefault(above, []).append(where)
        roots.sort(key=newest.__getitem__)
        while roots:
            where = roots.pop()
            link = self._links[where]
            yield link.page, None if link.parent is None else link.parent[1]
            roots += sorted(below.get(where, ()), key=newest.__getitem__)

    def check(self) -> None:
        """Raise InvariantError if a sum or a count contradicts the pages."""
        counts: dict[PageId, int] = {}
        for link in self._links.values():
            if link.parent is not None:
                counts[link.parent] = counts.get(link.parent, 0) + 1
        if not self._unread <= self._links.keys():
            raise InvariantError("chains: an unread page is unknown")
        if counts != self._children or self.bytes != sum(link.page.bytes for link in self._links.values()):
            raise InvariantError("chains: the counts and the pages disagree")


def _used(page: StoredPage) -> float:
    return page.used_s or 0.0


def read_chains(stored: StoredPages, namespace: str) -> Iterator[Chains]:
    """List a store and read all headers; yield the same growing `Chains` after each page. A page without a valid header
    begins a chain."""
    chains = Chains()
    yield chains
    for page in stored.pages(namespace):
        header = read_header(stored, page)
        chains.add(page, None if header is None else parent_in(header))
        yield chains
