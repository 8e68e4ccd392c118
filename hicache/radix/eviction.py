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
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ..policies import EvictionPolicy
from .node import Node

# Below this many stale entries a rebuild is not worth its call.
_STALE_MIN = 64


class EvictionQueue:
    """Candidates of one tier, in the order of `policy`.

    `may_leave` says whether a node may leave the tier now. `entry` is the attribute of a node that has the number of
    its valid entry, 0 for none.
    """

    def __init__(self, policy: EvictionPolicy, may_leave: Callable[[Node], bool], entry: str) -> None:
        self._policy = policy
        self._may_leave = may_leave
        self._entry = entry
        self._entry_of: Callable[[Node], int] = attrgetter(entry)
        # Rank, then the entry's number to break ties: nodes themselves are never compared.
        self._heap: list[tuple[Any, int, Node]] = []
        self._last_entry = 0
        self._stale = 0

    def push(self, node: Node) -> None:
        """Enter a candidate; an entry that it has already becomes stale."""
        if self._entry_of(node):
            self.forget(node)
        if self._stale > max(_STALE_MIN, len(self._heap) // 2):
            self._heap = [item for item in self._heap if self._entry_of(item[2]) == item[1]]
            heapq.heapify(self._heap)
            self._stale = 0
        self._last_entry += 1
        setattr(node, self._entry, self._last_entry)
        heapq.heappush(self._heap, (self._policy.rank(node), self._last_entry, node))

    def forget(self, node: Node) -> None:
        """A node has left the tree: its entry, if it has one, is stale."""
        if self._entry_of(node):
            setattr(node, self._entry, 0)
            self._stale += 1

    def pop(self) -> Node | None:
        """Remove and return the next victim, or None."""
        heap, rank_of, may_leave, entry_of = self._heap, self._policy.rank, self._may_leave, self._entry_of
        while heap:
            rank, entry, node = heap[0]
            if entry_of(node) != entry:
                heapq.heappop(heap)
                self._stale -= 1
                continue
            leaves = may_leave(node)
            if leaves and (current := rank_of(node)) != rank:
                heapq.heapreplace(heap, (current, entry, node))
                continue
            heapq.heappop(heap)
            setattr(node, self._entry, 0)
            if leaves:
                return node
        return None

    def nodes(self) -> list[Node]:
        """All nodes with a valid entry, for `check_tree`."""
        return [node for _, entry, node in self._heap if self._entry_of(node) == entry]


class CopyStack:
    """Copies on L2 of what is on L1 too, the newest on top. A node without a valid entry does not say `copy_listed`.

    Entries of a node that was held, or left one of the tiers, are stale, and cleared away as those of a queue are.
    """

    def __init__(self) -> None:
        self._stack: list[Node] = []
        self._listed = 0

    def push(self, node: Node) -> None:
        """Enter a node that has no valid entry."""
        if len(self._stack) > 2 * self._listed + _STALE_MIN:
            self._stack = self.nodes()
        self._stack.append(node)
        node.copy_listed = True
        self._listed += 1

    def forget(self, node: Node) -> None:
        """A node has left one of its tiers: its entry, if it has one, is stale."""
        self._listed -= node.copy_listed
        node.copy_listed = False

    def pop(self) -> Node | None:
        """Remove and return the newest copy that may leave L2, or None. One that is held comes back when released."""
        while self._stack:
            node = self._stack.pop()
            if node.copy_listed:
                self.forget(node)
                if not node.host_ref:
                    return node
        return None

    def nodes(self) -> list[Node]:
        """All nodes with a valid entry, the newest last."""
        return list(dict.fromkeys(node for node in reversed(self._stack) if node.copy_listed))[::-1]
