"""Eviction queues: which run of pages a tier evicts next.

An eviction queue holds candidates in a heap; an eviction does not rebuild it. Invariant: a node that may leave the tier
has exactly one valid entry. An entry is valid if the node carries its number. Other entries are stale. Stale entries
are dropped when they reach the top, or all at once when they outnumber the valid ones.

Entries are updated lazily. When the entry of a locked node reaches the top, it is dropped; the entry of a node that was
used since is put back with the new rank. This is too late for a rank that falls with use (mru), so there each use makes
a new entry. Each use causes at most one such update, so one victim costs O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ..lazy import untrack
from ..policies import EvictionPolicy
from ..tournament import PASSED_MAX
from .node import Node, may_leave_device, may_leave_host, may_lose_copy

# With fewer stale entries, a rebuild costs more than it gains.
_STALE_MIN = 64


class EvictionQueue:
    """The eviction candidates of one tier, in the order of `policy`.

    `may_leave` returns True if a node may leave the tier now. `entry` names the attribute of a node that holds the
    number of its valid entry, 0 for none.
    """

    def __init__(self, policy: EvictionPolicy, may_leave: Callable[[Node], bool], entry: str) -> None:
        self._rank = policy.rank
        self._may_leave = may_leave
        self._entry = entry
        self._entry_of: Callable[[Node], int] = attrgetter(entry)
        # True if an adaptive eviction passes over the node, whose rank has changed so that it comes last then.
        self.keeps: Callable[[Node], bool] | None = None
        # The entry's number breaks ties of the rank, so nodes are never compared.
        self._heap: list[tuple[Any, int, Node]] = []
        untrack(self._heap)
        self._last_entry = 0
        self._stale = 0

    def push(self, node: Node) -> None:
        """Add a candidate. Its previous entry, if any, becomes stale."""
        if self._entry_of(node):
            self.forget(node)
        if self._stale > max(_STALE_MIN, len(self._heap) // 2):
            self._heap[:] = [item for item in self._heap if self._entry_of(item[2]) == item[1]]
            heapq.heapify(self._heap)
            self._stale = 0
        self._last_entry += 1
        setattr(node, self._entry, self._last_entry)
        heapq.heappush(self._heap, _item(self._rank(node), self._last_entry, node))

    def use_ranks(self, rank: Callable[[Node], Any]) -> None:
        """Order the candidates by another rank from now on."""
        self._rank, self._stale = rank, 0
        self._heap[:] = [_item(rank(node), i, node) for _, i, node in self._heap if self._entry_of(node) == i]
        heapq.heapify(self._heap)

    def forget(self, node: Node) -> None:
        """Mark the entry of `node`, if any, as stale, because the node has left the tree."""
        if self._entry_of(node):
            setattr(node, self._entry, 0)
            self._stale += 1

    def pop(self) -> Node | None:
        """Remove and return the next victim, or None."""
        heap, rank_of, may_leave, entry_of = self._heap, self._rank, self._may_leave, self._entry_of
        passed = 0
        while heap:
            rank, entry, node = heap[0]
            if entry_of(node) != entry:
                heapq.heappop(heap)
                self._stale -= 1
                continue
            leaves = may_leave(node)
            if leaves and (current := rank_of(node)) != rank:
                heapq.heapreplace(heap, _item(current, entry, node))
                continue
            if leaves and self.keeps is not None and passed < PASSED_MAX and self.keeps(node):
                heapq.heapreplace(heap, _item(rank_of(node), entry, node))
                passed += 1
                continue
            heapq.heappop(heap)
            setattr(node, self._entry, 0)
            if leaves:
                return node
        return None

    def nodes(self) -> list[Node]:
        """Return all nodes with a valid entry, for `check_tree`."""
        return [node for _, entry, node in self._heap if self._entry_of(node) == entry]


def _item(rank: Any, entry: int, node: Node) -> tuple[Any, int, Node]:
    item = rank, entry, node
    untrack(item)
    return item


class CopyStack:
    """The L2 copies of nodes that are also on L1, the newest on top. `copy_listed` of a node marks a valid entry.

    Entries of a node that left one of the tiers are stale. They are removed as in an `EvictionQueue`.
    """

    def __init__(self) -> None:
        self._stack: list[Node] = []
        untrack(self._stack)
        self._listed = 0

    def push(self, node: Node) -> None:
        """Add a node. REQUIRES: it does not have a valid entry."""
        if len(self._stack) > 2 * self._listed + _STALE_MIN:
            self._stack[:] = self.nodes()
        self._stack.append(node)
        node.copy_listed = True
        self._listed += 1

    def forget(self, node: Node) -> None:
        """Mark the entry of `node`, if any, as stale, because the node has left one of its tiers."""
        self._listed -= node.copy_listed
        node.copy_listed = False

    def pop(self) -> Node | None:
        """Remove and return the newest copy that may leave L2, or None.

        Held copies found on the way are removed too; they are pushed again when they are released.
        """
        while self._stack:
            node = self._stack.pop()
            if node.copy_listed:
                self.forget(node)
                if not node.host_ref:
                    return node
        return None

    def nodes(self) -> list[Node]:
        """Return all nodes with a valid entry, the newest last."""
        return list(dict.fromkeys(node for node in reversed(self._stack) if node.copy_listed))[::-1]


class EvictionQueues:
    """The eviction candidates of both tiers: a queue of L1, a queue of the nodes on L2 only, and the copies on L2 of
    nodes that are also on L1.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.device = EvictionQueue(policy, may_leave_device, "device_entry")
        self.host = EvictionQueue(policy, may_leave_host, "host_entry")
        self.copies = CopyStack()
        self.fall_on_use = policy.falls_on_use

    def offer(self, node: Node) -> None:
        """Add `node` to the queues of the tiers that it may leave now."""
        if node.device is not None:
            if not node.device_entry and node.device_children == 0 and not node.lock_ref:
                self.device.push(node)
            if node.host is not None and not node.copy_listed and may_lose_copy(node):
                self.copies.push(node)
        elif not node.host_entry and may_leave_host(node):
            self.host.push(node)

    def forget(self, node: Node) -> None:
        """Remove the entries of `node`, which has left the tree."""
        if node.device_entry:
            self.device.forget(node)
        if node.host_entry:
            self.host.forget(node)

    def requeue(self, node: Node) -> None:
        """Make new entries for `node`, whose rank has fallen: by use if ranks `fall_on_use`, or otherwise."""
        if node.device_entry:
            self.device.push(node)
        if node.host_entry:
            self.host.push(node)
