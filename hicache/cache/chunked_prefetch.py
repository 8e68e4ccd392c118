"""The share of L2 that prefetches hold, and prompts that are larger than it.

Prefetches hold the pages that are being read, and those that have arrived for a request that has not begun. The latter
are held in the tree, so that they are not evicted before their first use.

When a prefetch has filled its share of L2 and storage has more pages, the pages that have arrived are loaded to L1.
Their frames on L2 are then copies and can be evicted for the next part, which the request looks up like a new one. So a
small L2 does not limit the length of a prefetched prompt.

L1 may evict a part before its request begins; then the next lookup begins before that part. A part waits for room on L1
at most as long as its request waits for storage.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from .. import tracing
from ..controller import HiCacheController, Load
from ..radix import Node, RadixTree
from ..types import PageIds
from .host_tier import HostTier
from .prefetch_states import Prefetch, PrefetchTable, State

# Starts to load those pages of the path to a node that are only on L2; None if L1 has no room for them now. The last
# argument is the parent of the span.
Promote: TypeAlias = Callable[[RadixTree, Node, "tracing.Context | None"], Load | None]


class _Arrived(NamedTuple):
    """Pages up to `node` that have arrived for a request that has not begun."""

    tree: RadixTree
    node: Node
    pages: int


class PrefetchShare:
    """Also moves the prefetches of `table` through AWAITING_L1 and LOADING. Invariant: `arrived_pages` is the sum of
    `arrived`, whose nodes are held once each.

    `pages_max` limits the pages that prefetches hold; `pages_min` is the smallest read that pays. `promote` is None if
    the engine owns L1.
    """

    def __init__(self, host: HostTier, controller: HiCacheController, table: PrefetchTable) -> None:
        config = controller.config.prefetch
        self.pages_max = int(config.host_share * host.host.pages)
        self.pages_min = -(-config.threshold_tokens // host.host.shape.tokens)
        self.arrived_pages = 0
        self._host = host
        self._controller = controller
        self._table = table
        self.arrived: dict[Prefetch, _Arrived] = {}
        self.promote: Promote | None = None

    @property
    def free_pages(self) -> int:
        """Return how many more pages prefetches may hold."""
        return self.pages_max - self._controller.read_pages - self.arrived_pages

    def others_hold(self, prefetch: Prefetch) -> bool:
        """Return True if other prefetches than this one hold pages, which will become free."""
        own = self.arrived.get(prefetch)
        return self._controller.read_pages + self.arrived_pages > (0 if own is None else own.pages)

    def reserve(self, pages: int, pages_min: int, *, all_of_them: bool, again: bool) -> PageIds | None:
        """Reserve `pages` pages of L2; without `all_of_them`, as many as fit. Return None if less than `pages_min` fit.

        `again`: dropping stores to make room has already been tried, so it is not repeated.
        """
        if all_of_them:
            return None if again and self._host.room < pages else self._host.reserve(pages)
        host_pages = self._host.reserve(pages)
        if host_pages is None and self._host.room >= pages_min:
            host_pages = self._host.reserve(self._host.room)
        return host_pages

    def arrive(self, prefetch: Prefetch, tree: RadixTree, node: Node, pages: int) -> None:
        """Hold the path to `node`, whose last `pages` pages have arrived, until `take` or `release`."""
        pages += self._end_hold(prefetch)
        tree.hold_host(node)
        self.arrived[prefetch] = _Arrived(tree, node, pages)
        self.arrived_pages += pages

    def take(self, prefetch: Prefetch) -> int:
        """Release the pages that have arrived for a request. Return their number, with those released before."""
        self.release(prefetch)
        pages, prefetch.released_pages = prefetch.released_pages, 0
        return pages

    def release(self, prefetch: Prefetch) -> None:
        """Release the pages that have arrived for a request that still waits. They stay on L2 while there is room."""
        prefetch.released_pages += self._end_hold(prefetch)

    def _end_hold(self, prefetch: Prefetch) -> int:
        arrived = self.arrived.pop(prefetch, None)
        if arrived is None:
            return 0
        self.arrived_pages -= arrived.pages
        arrived.tree.release_host(arrived.node)
        return arrived.pages

    # Prompts that are larger than the share

    def advance(self) -> None:
        """Start the waiting loads that have room now, in order. A request whose pages are on L1 because others have
        loaded them waits for its turn. Call it once per step; does nothing if no load waits.
        """
        while self.promote is not None and (prefetch := self._table.first(State.AWAITING_L1)) is not None:
            end = self.arrived.get(prefetch)
            if end is None or end.node.device is not None:
                self.take(prefetch)
                self._table.move(prefetch, State.QUEUED)
            elif (load := self.promote(end.tree, end.node, tracing.under(prefetch.span))) is not None:
                prefetch.load = load
                self._table.move(prefetch, State.LOADING)
            else:
                return

    def loaded(self, load: Load) -> None:
        """Handle the end of a load. If it made room on L2 for more pages of a request, the request is queued."""
        for prefetch in self._table.of(State.LOADING):
            if prefetch.load is load:
                self._end_load(prefetch)
                self._table.move(prefetch, State.QUEUED)

    def stop(self, prefetch: Prefetch) -> None:
        """Stop waiting for a load. Pages that are being loaded are not held any more."""
        if prefetch.state is State.LOADING:
            self._end_load(prefetch)
            self._table.move(prefetch, State.ENDED)

    def release_arrived(self) -> bool:
        """Stop holding pages that have arrived, and waiting for their loads. They stay while there is room, and a later
        request finds them on their tier. Return False if there are none."""
        holders = list(self.arrived)
        for prefetch in holders:
            self.stop(prefetch)
            self.release(prefetch)
            if prefetch.state in (State.ARRIVED, State.AWAITING_L1):
                self._table.move(prefetch, State.ENDED)
        return bool(holders)

    def _end_load(self, prefetch: Prefetch) -> None:
        prefetch.load = None
        prefetch.promoted_pages += self.take(prefetch)
