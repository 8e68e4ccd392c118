"""The radix tree in use, and those of earlier weights that requests and operations still refer to.

Emptying the cache makes a new tree at once. The pages that requests and operations hold in the old one stay theirs,
where no other request can find them, and come back as they end. So nothing has to be waited for, and no operation can
carry a page of the old tree into the new one: each refers to its tree.

Invariant: in a retired tree nothing is left but what is locked, held, or above such a node.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InvariantError
from ..radix import RadixTree
from ..tiers import HostPool, PageAllocator


class Trees:
    """`make` makes an empty tree; `device` and `host` are the pages of L1 and L2. A cache without an L1 has a `device`
    of no pages. Owned by the scheduler thread; no lock.
    """

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
        """Begin with an empty tree. Unused pages of the old one are free now, the others once `sweep` finds them
        unused.
        """
        self.current.observer = None
        self._retired.append(self.current)
        self.current = self._make()
        self.sweep()

    def sweep(self) -> None:
        """Free what has become unused in retired trees. Costs nothing while there is none."""
        for tree in self._retired:
            self._host.free(tree.evict_host(tree.host_pages))
            self._device.free(tree.evict_device(tree.device_pages_total).pages)
            self._host.free(tree.evict_host(tree.host_pages))
        if self._retired:
            self._retired = [tree for tree in self._retired if tree.node_count]


def require_conservation(tier: str, pool: PageAllocator, node_pages: int, other_pages: int) -> None:
    """Raises InvariantError unless `pool` is consistent and nodes hold all its used pages but `other_pages`."""
    pool.check()
    if pool.used_pages != node_pages + other_pages:
        raise InvariantError(
            f"{tier}: {pool.used_pages} pages in use, {node_pages} held by nodes and {other_pages} by others"
        )
