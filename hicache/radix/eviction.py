"""Which run of pages leaves a tier next.

An eviction queue holds candidates in a heap and is never rebuilt. Invariant: a node has at most one entry, and a node
that may be evicted has exactly one. Entries are lazy: one whose node is no candidate any more is dropped when it comes
up, one whose node was used since is put back with its new priority. Each use costs at most one such detour, so a victim
costs O(log n), whatever the number of candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from .node import Node


class EvictionPolicy(Protocol):
    """Orders candidates. REQUIRES: a node's priority never falls while it is in the tree."""

    def priority(self, node: Node) -> int:
        """The candidate with the smallest priority leaves first."""


class LRUPolicy:
    """Least recently used first."""

    def priority(self, node: Node) -> int:
        return node.last_access


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRUPolicy}


class EvictionQueue:
    """Candidates of one tier.

    `is_candidate` tells whether a node may leave it now, `forget` is told of each node that loses its entry.
    """

    def __init__(
        self, policy: EvictionPolicy, is_candidate: Callable[[Node], bool], forget: Callable[[Node], None]
    ) -> None:
        self._policy = policy
        self._is_candidate = is_candidate
        self._forget = forget
        # Priority, then node id to break ties: nodes themselves are never compared.
        self._heap: list[tuple[int, int, Node]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Add a candidate. REQUIRES: it has no entry."""
        heapq.heappush(self._heap, (self._policy.priority(node), node.id, node))

    def pop(self) -> Node | None:
        """Remove and return the next victim, or None."""
        heap, priority_of, is_candidate, forget = self._heap, self._policy.priority, self._is_candidate, self._forget
        while heap:
            priority, _, node = heap[0]
            if not is_candidate(node):
                heapq.heappop(heap)
                forget(node)
                continue
            current = priority_of(node)
            if current != priority:
                heapq.heapreplace(heap, (current, node.id, node))
                continue
            heapq.heappop(heap)
            forget(node)
            return node
        return None

    def nodes(self) -> list[Node]:
        """All nodes with an entry, for `check_tree`."""
        return [node for _, _, node in self._heap]
