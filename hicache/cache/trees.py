"""The current radix tree, and retired trees that requests and operations still use.

Clearing the cache starts a new tree at once. Requests and operations keep their pages of the old tree, which no other
request can find, and free them at their end. So clearing waits for nothing. An operation cannot move a page of the old
tree into the new one, because each refers to its tree.

Invariant: each node of a retired tree is locked, held, or an ancestor of such a node.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InvariantError
from ..radix import RadixTree
from ..tiers import HostPool, PagePool


class Trees:
    """`make` creates an empty tree; `device` and `host` are the pages of L1 and L2. Without an L1, `device` has zero
    pages. Owned by the scheduler thread; no lock.
    """

    def __init__(self, make: Callable[[], RadixTree], device: PagePool, host: HostPool) -> None:
        self._make = make
        self._device = device
        self._host = host
        self._retired: list[RadixTree] = []
        self.current = make()

    def all(self) -> list[RadixTree]:
        """Return the current tree and the retired ones."""
        return [self.current, *self._retired]

    def retire(self) -> None:
        """Start an empty tree. Free the unused pages of the old one; `sweep` frees the used ones later."""
        self.current.observer = self.current.queues.device.keeps = self.current.queues.host.keeps = None
        self._retired.append(self.current)
        self.current = self._make()
        self.sweep()

    def sweep(self) -> None:
        """Free the pages of retired trees that are unused now. Does nothing without retired trees."""
        for tree in self._retired:
            self._host.free(tree.evict_host(tree.host_pages))
            self._device.free(tree.evict_device(tree.device_pages_total).pages)
            self._host.free(tree.evict_host(tree.host_pages))
        if self._retired:
            self._retired = [tree for tree in self._retired if tree.node_count]


def require_conservation(tier: str, pool: PagePool, node_pages: int, other_pages: int) -> None:
    """Raises InvariantError unless `pool` is consistent and its used pages are those of nodes and `other_pages`."""
    pool.check()
    if pool.used_pages != node_pages + other_pages:
        raise InvariantError(
            f"{tier}: {pool.used_pages} pages in use, {node_pages} held by nodes and {other_pages} by others"
        )
