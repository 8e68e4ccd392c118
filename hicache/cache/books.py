"""The books of one cache: what was decided, which pages are a request's own, and which are lent to an operation.

Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from ..arguments import whole
from ..radix import Fate, Node
from ..tiers import HostPool, PageAllocator
from ..types import PageIds
from .requests import RequestKV
from .trees import Trees, require_books

# Why something was not done, for each an entry in `Books.skipped`.
SKIP_REASONS = (
    "backup_failed",
    "backup_no_host_room",
    "backup_prefix_not_on_host",
    "load_does_not_pay",
    "load_failed",
    "load_too_short",
    "no_device_room",
    "pin_share",
    "prefetch_does_not_pay",
    "prefetch_failed",
    "prefetch_hit_too_short",
    "prefetch_host_share",
    "prefetch_no_host_room",
    "prefetch_paused",
    "prefetch_prefix_not_on_host",
    "prefetch_timeout",
    "prefetch_too_late",
    "prefetch_too_short",
    "store_gave_way",
    "store_incomplete",
    "store_paused",
    "write_back_dropped",
)


@dataclass(slots=True, eq=False)
class Books:
    """Totals since start; see `CacheStatistics`."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    evicted_pages: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0))

    def count(self, request: RequestKV) -> None:
        """A request has begun."""
        self.requests += 1
        self.prompt_tokens += request.key.prompt_tokens
        self.hit_tokens["device"] += request.device_hit_tokens
        self.hit_tokens["host"] += request.host_hit_tokens
        self.hit_tokens["storage"] += request.storage_hit_tokens


@dataclass(frozen=True, slots=True)
class Eviction:
    """What an eviction from L1 did: pages that are free now, pages that will be free once they are copied to L2, and
    pages that were asked for and cannot be had now.
    """

    freed_pages: int
    saving_pages: int
    short_pages: int


class Saver(Protocol):
    """What copies L1 victims to L2."""

    def save(self, victim: Node) -> Fate:
        """Start a copy of `victim`, or say what else becomes of it."""

    def launch(self) -> None:
        """Have the copies that were started begin now."""

    @property
    def saving_pages(self) -> int:
        """Pages of victims that are on their way to L2."""


class DeviceLedger:
    """L1: who has which pages. A `PageSource` for token allocators.

    Invariant: used pages of the device pool = pages held by nodes + `request_pages`. `saver` knows what becomes of a
    victim without a copy on L2.
    """

    def __init__(self, allocator: PageAllocator, trees: Trees, books: Books, saver: Saver) -> None:
        self.allocator = allocator
        self.request_pages = 0
        self._trees = trees
        self._books = books
        self._saver = saver

    def make_room(self, pages: int) -> bool:
        """Evict until `pages` pages are free. False if they are not: then nothing was evicted because it would not have
        been enough, or what was evicted is on its way to L2, or pinned pages turned out not to fit there.

        Inside a free group nothing is evicted: what it frees comes too late for this call.
        """
        free = self.allocator.free_pages
        coming = self._saver.saving_pages
        evictable = 0 if self.allocator.group_open else self._trees.current.device_evictable_pages
        if free + coming < pages <= free + coming + evictable:
            self.evict(pages - free - coming)
        if self.allocator.free_pages >= pages:
            return True
        self._books.skipped["no_device_room"] += 1
        return False

    def may_have_room(self, pages: int) -> bool:
        """Whether `make_room` could succeed now, or once what is on its way to L2 has arrived. Changes nothing."""
        return pages <= self.free_pages + self._saver.saving_pages

    def evict(self, pages: int) -> Eviction:
        """Take `pages` pages off L1, as far as they may leave."""
        evicted = self._trees.current.evict_device(pages, self._saver.save)
        freed, saving = len(evicted.pages), evicted.saving_pages
        if saving:
            self._saver.launch()
        self.allocator.free(evicted.pages)
        self._books.evicted_pages["device"] += freed
        return Eviction(freed, saving, max(0, pages - freed - saving))

    def alloc(self, count: int) -> PageIds | None:
        """`count` pages for a request, evicting as needed; None if there is no room now."""
        count = whole("count", count)
        pages = self.allocator.alloc(count) if self.make_room(count) else None
        if pages is not None:
            self.request_pages += count
        return pages

    def free(self, pages: PageIds) -> None:
        """Take pages of a request back."""
        self.allocator.free(pages)
        self.request_pages -= len(pages)

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold."""
        node_pages = sum(tree.device_pages_total for tree in self._trees.all())
        require_books("L1", self.allocator, node_pages, self.request_pages)

    def free_group(self) -> AbstractContextManager[None]:
        """What is freed inside becomes free at the end of the block."""
        return self.allocator.free_group()

    @property
    def first(self) -> int:
        """The smallest page id."""
        return self.allocator.first

    @property
    def capacity(self) -> int:
        """Pages of L1."""
        return self.allocator.capacity

    @property
    def free_pages(self) -> int:
        """Pages that are free or may be evicted now."""
        return self.allocator.free_pages + self._trees.current.device_evictable_pages


class HostLedger:
    """L2 pages that no node holds yet, because an operation fills them. `give_way(pages)` cancels stores that wait, so
    that so many more pages may be evicted, if it can.

    Invariant: used pages of the host pool = pages held by nodes + `lent_pages`.
    """

    def __init__(self, host: HostPool, trees: Trees, books: Books, give_way: Callable[[int], None]) -> None:
        self.host = host
        self.lent_pages = 0
        self._give_way = give_way
        self._trees = trees
        self._books = books

    def lend(self, count: int) -> PageIds | None:
        """`count` unsealed pages for an operation, evicting as needed; None, evicting nothing, if there is no room.

        Pages that wait to be stored give way before that.
        """
        tree = self._trees.current
        missing = count - self.host.allocator.free_pages
        if missing > tree.host_evictable_pages:
            self._give_way(missing - tree.host_evictable_pages)
        if missing > tree.host_evictable_pages:
            return None
        if missing > 0:
            freed = tree.evict_host(missing)
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
