"""The checks of a tree: each finds the damage that it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from hicache.errors import InvariantError
from hicache.keys import RadixKey
from hicache.policies import POLICIES
from hicache.radix import Node, RadixTree, check_tree
from hicache.types import PageIds


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


@dataclass
class Sample:
    """A tree with a run on both tiers, one below it on L1, and one on L2."""

    tree: RadixTree
    both: Node
    device: Node
    host: Node

    @classmethod
    def make(cls) -> Sample:
        tree = RadixTree(2, POLICIES["lru"])
        both = tree.insert(RadixKey.of([1, 2, 3, 4]), ids(1, 2)).node
        device = tree.insert(RadixKey.of([1, 2, 3, 4, 5, 6]), ids(1, 2, 3)).node
        host = tree.insert(RadixKey.of([7, 8]), ids(4)).node
        tree.set_host(both, ids(1, 2))
        tree.set_host(host, ids(3))
        tree.leave_device(host)
        check_tree(tree)
        return cls(tree, both, device, host)

    def add(self, total: str) -> None:
        setattr(self.tree, total, getattr(self.tree, total) + 1)

    def file_under_another_page(self) -> None:
        self.both.children[b"x"] = self.both.children.pop(self.device.key)

    def leave_all_tiers(self) -> None:
        self.device.device, self.both.device_children = None, 0

    def leave_device_above(self) -> None:
        assert self.both.parent is not None
        self.both.device, self.both.parent.device_children = None, 0

    def queue_twice(self) -> None:
        heap = self.tree.queues.device._heap
        heap.append(heap[0])

    def remove_stored(self) -> None:
        self.tree.page_keys(self.device)
        self.tree.evict_device(1)
        self.tree.stored.mark(self.device)


DAMAGE: dict[str, Callable[[Sample], object]] = {
    "two valid entries in one eviction queue": Sample.queue_twice,
    "does not point back to its parent": lambda s: setattr(s.device, "parent", s.host),
    "is filed under another page": Sample.file_under_another_page,
    "1 of its children count in lock_ref": lambda s: setattr(s.device, "lock_ref", 1),
    "1 of its children count in host_ref": lambda s: setattr(s.device, "host_ref", 1),
    "1 of its children count in pin_ref": lambda s: setattr(s.device, "pin_ref", 1),
    "recent_child is not one of its children": lambda s: setattr(s.both, "recent_child", s.host),
    "counts 2 children on L1": lambda s: setattr(s.both, "device_children", 2),
    "is not whole pages": lambda s: setattr(s.device, "key", s.device.key + b"x"),
    "is on no tier": Sample.leave_all_tiers,
    "has 0 L1 pages for 1 pages": lambda s: setattr(s.device, "device", ids()),
    "has 2 L2 pages for 1 pages": lambda s: setattr(s.host, "host", ids(3, 5)),
    "is on L1 but its parent is not": Sample.leave_device_above,
    "wrong page keys": lambda s: setattr(s.device, "page_keys", b"x"),
    "impossible reference counts": lambda s: setattr(s.host, "pin_ref", 1),
    "was used before it was made": lambda s: setattr(s.device, "last_access", s.device.created - 1),
    "L1 queue mark is wrong": lambda s: setattr(s.both, "device_entry", 77),
    "L2 queue mark is wrong": lambda s: setattr(s.both, "host_entry", 77),
    "its mark as a copy is wrong": lambda s: setattr(s.device, "copy_listed", True),
    "may leave L1 but is not queued": lambda s: setattr(s.device, "device_entry", 0),
    "may leave L2 but is not queued": lambda s: setattr(s.host, "host_entry", 0),
    "may lose its copy but is not listed": lambda s: setattr(s.both, "copy_listed", False),
    "indexed as stored under a key that is not its last": lambda s: s.tree.stored._ends.update({bytes(32): s.device}),
    "indexed as stored but is not in the tree": Sample.remove_stored,
    "3 nodes, but 4 are counted": lambda s: s.add("node_count"),
    "two nodes hold the same L1 page": lambda s: setattr(s.device, "device", ids(1)),
    "two nodes hold the same L2 page": lambda s: setattr(s.host, "host", ids(1)),
    **{
        f"{total} is not the sum": lambda s, total=total: s.add(total)  # type: ignore[misc]
        for total in ("device_evictable_pages", "device_protected_pages", "pinned_pages", "host_evictable_pages",
                      "host_copy_pages", "host_pages")
    },
}


@pytest.mark.parametrize("found", DAMAGE)
def test_check_tree_finds(found: str) -> None:
    sample = Sample.make()
    DAMAGE[found](sample)
    with pytest.raises(InvariantError, match=found):
        check_tree(sample.tree)
