"""The tree against a brute-force oracle: random operations, compared and checked after each step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.keys import RadixKey, token_bytes
from hicache.radix import Node, RadixTree, check_tree
from hicache.radix.policies import LRUPolicy
from hicache.tiers import PageAllocator
from tests.radix.oracle import Oracle, Prefix
from tests.seeds import rng, seeds

STEPS = 400
SEEDS_OF_KEYS = (b"", bytes(31) + b"\x01")


class Machine:
    """Drives a tree and the oracle with the same operations."""

    def __init__(self, page_size: int, random_numbers: random.Random) -> None:
        self.random = random_numbers
        self.page_size = page_size
        self.tree = RadixTree(page_size, LRUPolicy())
        self.oracle = Oracle()
        self.device = PageAllocator(96, first=1)
        self.host = PageAllocator(160)
        self.locks: list[tuple[Node, list[int]]] = []

    def prompt(self) -> RadixKey:
        """Few different pages, so that prefixes collide; sometimes with a partial page at the end."""
        pages = [self.random.randrange(3) for _ in range(self.random.randint(1, 24))]
        tokens = [7 * page + (i % 2) for page in pages for i in range(self.page_size)]
        tokens += [1] * self.random.randrange(self.page_size)
        return RadixKey(token_bytes(tokens), self.random.choice(SEEDS_OF_KEYS))

    def pages_of(self, key: RadixKey) -> Prefix:
        size = self.page_size * 4
        return tuple(key.tokens[i : i + size] for i in range(0, len(key.tokens) - size + 1, size))

    def match(self) -> None:
        key = self.prompt()
        found = self.tree.match(key)
        device, host_hit = self.oracle.match(key.seed, self.pages_of(key))
        assert found.device_pages.tolist() == device
        assert (found.host_hit_pages, found.pages) == (host_hit, len(device) + host_hit)

    def insert(self) -> None:
        key = self.prompt()
        pages = self.pages_of(key)
        self.make_room(len(pages))
        ids = self.device.alloc(len(pages))
        if ids is None:
            return
        inserted = self.tree.insert(key, ids)
        assert inserted.present_pages == self.oracle.insert(key.seed, pages, ids.tolist())
        self.device.free(ids[: inserted.present_pages])

    def backup(self) -> None:
        """Copy the un-backed part of a matched path to L2, root first, as write-through does."""
        key = self.prompt()
        found = self.tree.match(key)
        missing = len(found.device_pages) - self.host_pages_on_path(found.device_node)
        ids = self.host.alloc(missing) if missing else None
        if ids is None:
            return
        assert len(self.tree.accept_backup(found.device_node, ids)) == 0
        pages = self.pages_of(key)
        start = len(found.device_pages) - missing
        for offset, page in enumerate(ids.tolist()):
            self.oracle.host[(key.seed, pages[: start + offset + 1])] = page

    def host_pages_on_path(self, node: Node) -> int:
        count = 0
        walk: Node | None = node
        while walk is not None:
            count += 0 if walk.host is None else len(walk.host)
            walk = walk.parent
        return count

    def load_back(self) -> None:
        key = self.prompt()
        found = self.tree.match(key)
        ids = self.device.alloc(found.host_hit_pages) if found.host_hit_pages else None
        if ids is None:
            return
        done = 0
        for node in reversed(list(self.tree.span(found.node, found.host_hit_pages))):
            assert node.host is not None
            self.tree.set_device(node, ids[done : done + len(node.host)].copy())
            done += len(node.host)
        pages = self.pages_of(key)
        start = len(found.device_pages)
        for offset, page in enumerate(ids.tolist()):
            self.oracle.device[(key.seed, pages[: start + offset + 1])] = page

    def prefetch(self) -> None:
        """Pages from storage arrive behind what is on L2; the oracle takes them where the prefix is on L2."""
        key = self.prompt()
        pages = self.pages_of(key)
        found = self.tree.match(key)
        missing = len(pages) - found.pages
        ids = self.host.alloc(missing) if missing and found.host_node is found.node else None
        if ids is None:
            return
        keys = [bytes([i]) * 32 for i in range(missing)]
        unused = self.tree.insert_host(key, found.pages, ids, keys).unused
        assert len(unused) == 0
        for offset, page in enumerate(ids.tolist()):
            self.oracle.host[(key.seed, pages[: found.pages + offset + 1])] = page

    def lock(self) -> None:
        found = self.tree.match(self.prompt())
        self.tree.lock(found.node)
        self.locks.append((found.node, found.device_pages.tolist()))

    def unlock(self) -> None:
        if self.locks:
            node, _ = self.locks.pop(self.random.randrange(len(self.locks)))
            self.tree.unlock(node)

    def make_room(self, pages: int) -> None:
        missing = pages - self.device.free_pages
        if missing > 0:
            self.evict_device(missing)

    def evict_device(self, pages: int | None = None) -> None:
        wanted = self.random.randint(1, 20) if pages is None else pages
        evictable = self.tree.device_evictable_pages
        freed = self.tree.evict_device(wanted).pages
        assert len(freed) >= min(wanted, evictable)
        assert not {page for _, pages_ in self.locks for page in pages_} & set(freed.tolist())
        self.device.free(freed)
        self.oracle.drop_device(set(freed.tolist()))

    def evict_host(self) -> None:
        freed = self.tree.evict_host(self.random.randint(1, 20))
        self.host.free(freed)
        self.oracle.drop_host(set(freed.tolist()))

    def check(self) -> None:
        check_tree(self.tree)
        self.device.check()
        self.host.check()
        held = self.tree.device_evictable_pages + self.tree.device_protected_pages
        assert held == self.device.used_pages == len(self.oracle.device)
        assert self.tree.host_pages == self.host.used_pages == len(self.oracle.host)


@pytest.mark.parametrize("seed", seeds(40))
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_random_operations_agree_with_the_oracle(page_size: int, seed: int) -> None:
    machine = Machine(page_size, rng(seed))
    operations = [
        machine.match, machine.insert, machine.insert, machine.backup, machine.load_back, machine.prefetch,
        machine.lock, machine.unlock, machine.evict_device, machine.evict_host,
    ]  # fmt: skip
    for _ in range(STEPS):
        machine.random.choice(operations)()
        machine.check()
    while machine.locks:
        machine.unlock()
    while len(machine.tree.evict_device(8).pages):
        pass
    while len(machine.tree.evict_host(8)):
        pass
    assert machine.tree.node_count == 0
    assert machine.tree.roots() == []


def test_the_oracle_notices_a_tree_that_forgets_a_split() -> None:
    """Negative control: a tree whose split hands the tail's pages to nobody fails the comparison."""
    machine = Machine(1, rng(0))
    key = RadixKey(token_bytes([1, 2, 3]))
    ids = np.array([1, 2, 3], dtype=np.int32)
    machine.tree.insert(key, ids)
    machine.oracle.insert(key.seed, machine.pages_of(key), ids.tolist())
    node = machine.tree.match(key).node
    assert node.device is not None
    node.device = node.device[:2]
    with pytest.raises(AssertionError):
        machine.check()
