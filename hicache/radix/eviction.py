"""Which run of pages leaves a tier next.

An eviction queue holds candidates in a heap and is never rebuilt per eviction. Invariant: a node that may leave the
tier has exactly one valid entry; an entry is valid if its number is the one the node carries. Other entries are stale
and dropped when they come up, or all at once when they are more than the valid ones.

Entries are lazy: a node that was locked since is dropped when it comes up, one that was used since is put back with its
new rank. A rank that falls with use (mru) cannot wait for that, so there the node gets a new entry at each use. Each
use costs at most one such detour, so a victim costs O(log n), whatever the number of candidates.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import Any

from ..policies import EvictionPolicy
from .node import Node, may_leave_device, may_leave_host

# Below this many stale entries a rebuild is not worth its call.
_STALE_MIN = 64


class EvictionQueue(ABC):
    """Candidates of one tier, in the order of `policy`."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        # Rank, then the entry's number to break ties: nodes themselves are never compared.
        self._heap: list[tuple[Any, int, Node]] = []
        self._last_entry = 0
        self._stale = 0

    @abstractmethod
    def may_leave(self, node: Node) -> bool:
        """Whether `node` may leave the tier now."""

    @abstractmethod
    def entry(self, node: Node) -> int:
        """The number of the node's valid entry, 0 for none."""

    @abstractmethod
    def set_entry(self, node: Node, entry: int) -> None:
        """Make `entry` the node's valid one."""

    def push(self, node: Node) -> None:
        """Enter a candidate; an entry that it has already becomes stale."""
        if self.entry(node):
            self._stale += 1
            self.set_entry(node, 0)
        if self._stale > max(_STALE_MIN, len(self._heap) // 2):
            self._compact()
        self._last_entry += 1
        self.set_entry(node, self._last_entry)
        heapq.heappush(self._heap, (self._policy.rank(node), self._last_entry, node))

    def forget(self, node: Node) -> None:
        """A node has left the tree: its entry, if it has one, is stale."""
        if self.entry(node):
            self.set_entry(node, 0)
            self._stale += 1

    def pop(self) -> Node | None:
        """Remove and return the next victim, or None."""
        heap, rank_of, may_leave, entry_of = self._heap, self._policy.rank, self.may_leave, self.entry
        while heap:
            rank, entry, node = heap[0]
            if entry_of(node) != entry:
                heapq.heappop(heap)
                self._stale -= 1
                continue
            if may_leave(node):
                current = rank_of(node)
                if current != rank:
                    heapq.heapreplace(heap, (current, entry, node))
                    continue
                heapq.heappop(heap)
                self.set_entry(node, 0)
                return node
            heapq.heappop(heap)
            self.set_entry(node, 0)
        return None

    def nodes(self) -> list[Node]:
        """All nodes with a valid entry, for `check_tree`."""
        return [node for _, entry, node in self._heap if self.entry(node) == entry]

    def _compact(self) -> None:
        self._heap = [item for item in self._heap if self.entry(item[2]) == item[1]]
        heapq.heapify(self._heap)
        self._stale = 0


class DeviceQueue(EvictionQueue):
    """Candidates to leave L1."""

    def may_leave(self, node: Node) -> bool:
        return may_leave_device(node)

    def entry(self, node: Node) -> int:
        return node.device_entry

    def set_entry(self, node: Node, entry: int) -> None:
        node.device_entry = entry


class HostQueue(EvictionQueue):
    """Candidates to leave L2."""

    def may_leave(self, node: Node) -> bool:
        return may_leave_host(node)

    def entry(self, node: Node) -> int:
        return node.host_entry

    def set_entry(self, node: Node, entry: int) -> None:
        node.host_entry = entry
