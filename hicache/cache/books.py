"""The books of one cache: what was decided, and which L2 pages are lent. Owned by the scheduler thread; no lock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..radix import RadixTree
from ..tiers import HostPool
from ..types import PageIds


@dataclass(slots=True, eq=False)
class Books:
    """Totals since start; see `CacheStatistics`."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    evicted_pages: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


class HostLedger:
    """L2 pages that no node holds yet, because an operation fills them.

    Invariant: used pages of the host pool = pages held by nodes + `lent_pages`.
    """

    def __init__(self, host: HostPool, tree: RadixTree, books: Books) -> None:
        self.host = host
        self.lent_pages = 0
        self._tree = tree
        self._books = books

    def lend(self, count: int) -> PageIds | None:
        """`count` unsealed pages for an operation, evicting as needed; None, evicting nothing, if there is no room."""
        missing = count - self.host.allocator.free_pages
        if missing > self._tree.host_evictable_pages:
            return None
        if missing > 0:
            freed = self._tree.evict_host(missing)
            self.host.free(freed)
            self._books.evicted_pages["host"] += len(freed)
        pages = self.host.alloc(count)
        if pages is not None:
            self.lent_pages += count
        return pages

    def settle(self, lent: int, unused: PageIds) -> None:
        """End the loan of `lent` pages: `unused` come back, the tree holds the others."""
        self.lent_pages -= lent
        self.host.free(unused)
