"""The radix tree in use, and those of earlier weights that requests and operations still refer to.

Emptying the cache makes a new tree at once. What requests and operations hold in the old one stays lent to them, where
nobody else can find it, and comes back as they end. So nothing has to be waited for, and no operation can carry a page
of the old tree into the new one: each refers to its tree.

Invariant: in a retired tree nothing is left but what is locked, held, or above such a node.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InvariantError
from ..radix import RadixTree, check_tree
from ..tiers import HostPool, PageAllocator


class Trees:
    """`make` makes an empty tree. Owned by the scheduler thread; no lock."""

    def __init__(self, make: Callable[[], RadixTree], device: PageAllocator, host: HostPool) -> None:
        self._make = make
        self._device = device
        self._host = host
        self._retired: list[RadixTree] = []
        self.current = make()

    def all(self) -> list[RadixTree]:
        """The tree in use and the retired ones."""
        return [self.current, *self._retired]

    def retire(self) -> None:
        """Begin with an empty tree. What nobody needs in the old one is free now, the rest as soon as `sweep` finds it
        unused.
        """
        self.current.observer = None
        self._retired.append(self.current)
        self.current = self._make()
        self.sweep()

    def sweep(self) -> None:
        """Free what has become unused in retired trees. Costs nothing while there is none."""
        for tree in self._retired:
            self._device.free(tree.evict_device(tree.device_pages_total).pages)
            self._host.free(tree.evict_host(tree.host_pages))
        if self._retired:
            self._retired = [tree for tree in self._retired if tree.node_count]

    def check(self, request_pages: int, lent_host_pages: int) -> None:
        """Raises InvariantError if a tree or a pool is inconsistent, or a page is neither free nor anybody's.

        `request_pages` L1 pages are requests' own, `lent_host_pages` L2 pages are lent to operations.
        """
        trees = self.all()
        for tree in trees:
            check_tree(tree)
        self._device.check()
        self._host.allocator.check()
        device_pages = sum(tree.device_pages_total for tree in trees)
        host_pages = sum(tree.host_pages for tree in trees)
        for tier, pool, nodes, lent in (
            ("L1", self._device, device_pages, request_pages),
            ("L2", self._host.allocator, host_pages, lent_host_pages),
        ):
            if pool.used_pages != nodes + lent:
                raise InvariantError(f"{tier}: {pool.used_pages} pages in use, {nodes} held by nodes and {lent} lent")

