"""The radix tree in use, and those of earlier weights that requests and operations still refer to.

Emptying the cache makes a new tree at once. What requests and operations hold in the old one stays lent to them, where
nobody else can find it, and comes back as they end. So nothing has to be waited for, and no operation can carry a page
of the old tree into the new one: each refers to its tree.

Invariant: in a retired tree nothing is left but what is locked, held, or above such a node.
"""

from __future__ import annotations

from collections.abc import Callable

from ..radix import Fate, Node, RadixTree
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
            self._device.free(tree.evict_device(tree.device_pages_total, _drop).pages)
            self._host.free(tree.evict_host(tree.host_pages))
        if self._retired:
            self._retired = [tree for tree in self._retired if tree.node_count]


def _drop(_: Node) -> Fate:
    return Fate.DROP
