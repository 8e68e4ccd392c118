"""PrefetchShare: the share of L2 that prefetches hold until their requests begin.

Prefetches hold the pages that are being read, and those that have arrived for a request that has not begun. The latter
are held in the tree, so that they are not evicted before their first use.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from typing import NamedTuple

from ..controller import HiCacheController
from ..radix import Node, RadixTree
from ..types import PageIds
from .host_tier import HostTier
from .prefetch_states import Prefetch


class _Arrived(NamedTuple):
    """Pages up to `node` that have arrived for a request that has not begun."""

    tree: RadixTree
    node: Node
    pages: int


class PrefetchShare:
    """Invariant: `arrived_pages` is the sum of `_arrived`, whose nodes are held once each.

    `pages_max` limits the pages that prefetches hold; `pages_min` is the smallest read that pays.
    """

    def __init__(self, host: HostTier, controller: HiCacheController) -> None:
        config = controller.config.prefetch
        self.pages_max = int(config.host_share * host.host.pages)
        self.pages_min = -(-config.threshold_tokens // host.host.shape.tokens)
        self.arrived_pages = 0
        self._host = host
        self._controller = controller
        self._arrived: dict[Prefetch, _Arrived] = {}

    @property
    def free_pages(self) -> int:
        """Return how many more pages prefetches may hold."""
        return self.pages_max - self._controller.read_pages - self.arrived_pages

    def others_hold(self, prefetch: Prefetch) -> bool:
        """Return True if other prefetches than this one hold pages, which will become free."""
        own = self._arrived.get(prefetch)
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
        self._arrived[prefetch] = _Arrived(tree, node, pages)
        self.arrived_pages += pages

    @property
    def holders(self) -> list[Prefetch]:
        """Return the prefetches whose arrived pages are held."""
        return list(self._arrived)

    def end_of(self, prefetch: Prefetch) -> tuple[RadixTree, Node] | None:
        """Return the end of the arrived pages that are held for a request; None if there are none."""
        arrived = self._arrived.get(prefetch)
        return None if arrived is None else (arrived.tree, arrived.node)

    def take(self, prefetch: Prefetch) -> int:
        """Release the pages that have arrived for a request. Return their number, with those released before."""
        self.release(prefetch)
        pages, prefetch.released_pages = prefetch.released_pages, 0
        return pages

    def release(self, prefetch: Prefetch) -> None:
        """Release the pages that have arrived for a request that still waits. They stay on L2 while there is room."""
        prefetch.released_pages += self._end_hold(prefetch)

    def _end_hold(self, prefetch: Prefetch) -> int:
        arrived = self._arrived.pop(prefetch, None)
        if arrived is None:
            return 0
        self.arrived_pages -= arrived.pages
        arrived.tree.release_host(arrived.node)
        return arrived.pages
