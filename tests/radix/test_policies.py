"""Eviction policies: the order of victims, against a search of the whole tree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache.config import HiCacheConfig
from hicache.errors import InvalidInput
from hicache.keys import RadixKey, token_bytes
from hicache.radix import POLICIES, Node, RadixTree, check_tree, make_policy, may_leave_device
from hicache.radix.node import may_leave_host
from tests.seeds import rng, seeds

# The documented meaning of each policy, independent of the code: the node with the smallest rank leaves first.
MEANING: dict[str, Callable[[Node], Any]] = {
    "lru": lambda node: node.last_access,
    "adaptive": lambda node: node.last_access,  # without a tournament; see test_adaptive.py
    "lfu": lambda node: (node.hit_count, node.last_access),
    "fifo": lambda node: node.created,
    "mru": lambda node: -node.last_access,
    "filo": lambda node: -node.created,
    "priority": lambda node: (node.priority, node.last_access),
    "slru": lambda node: (node.hit_count >= 2, node.last_access),
}


def key(*tokens: int) -> RadixKey:
    return RadixKey(token_bytes(list(tokens)))


def tree(policy: str) -> RadixTree:
    return RadixTree(1, make_policy(policy))


def insert(t: RadixTree, *tokens: int, page: int, priority: int = 0) -> Node:
    pages = np.arange(page, page + len(tokens), dtype=np.int32)
    return t.insert(key(*tokens), pages, priority=priority).node


def test_slru_protects_nodes_that_two_requests_used() -> None:
    t = tree("slru")
    twice, once = insert(t, 1, page=1), insert(t, 2, page=2)
    t.use(twice)
    t.match(key(2))
    assert (twice.hit_count, once.hit_count) == (2, 1)
    assert t.evict_device(2).pages.tolist() == [2, 1]


class Walk:
    """Random operations on a tree under one policy; before each eviction the whole tree is searched for its victims."""

    def __init__(self, policy: str, numbers: random.Random) -> None:
        self.random = numbers
        self.tree = tree(policy)
        self.meaning = MEANING[policy]
        self.next_page = 1
        self.locked: list[Node] = []

    def step(self) -> None:
        action = self.random.choice([self.insert, self.insert, self.match, self.use, self.lock, self.unlock,
                                     self.back_up, self.evict_device, self.evict_host])
        action()
        check_tree(self.tree)

    def key(self) -> RadixKey:
        return key(*[self.random.randrange(3) for _ in range(self.random.randint(1, 8))])

    def insert(self) -> None:
        chosen = self.key()
        pages = np.arange(self.next_page, self.next_page + len(chosen), dtype=np.int32)
        self.next_page += len(chosen)
        self.tree.insert(chosen, pages, priority=self.random.randrange(3))

    def match(self) -> None:
        self.tree.match(self.key())

    def use(self) -> None:
        self.tree.use(self.tree.match(self.key()).node, self.random.randrange(4))

    def lock(self) -> None:
        node = self.tree.match(self.key()).node
        self.tree.lock(node)
        self.locked.append(node)

    def unlock(self) -> None:
        if self.locked:
            self.tree.unlock(self.locked.pop(self.random.randrange(len(self.locked))))

    def back_up(self) -> None:
        path = []
        node = self.tree.match(self.key()).device_node
        while node.parent is not None and node.host is None:
            path.append(node)
            node = node.parent
        for part in reversed(path):
            pages = np.arange(self.next_page, self.next_page + self.tree.pages(part), dtype=np.int32)
            self.next_page += len(pages)
            self.tree.set_host(part, pages)

    def evict_device(self) -> None:
        ranks = {tuple(n.device): self.meaning(n) for n in self.tree.nodes() if may_leave_device(n)}  # type: ignore[arg-type]
        self.compare(ranks, self.tree.evict_device(1).pages.tolist())

    def evict_host(self) -> None:
        ranks = {tuple(n.host): self.meaning(n) for n in self.tree.nodes() if may_leave_host(n)}  # type: ignore[arg-type]
        if ranks:  # copies of nodes on L1 are evicted after these
            self.compare(ranks, self.tree.evict_host(1, copy_pages_max=self.tree.host_pages).tolist())

    def compare(self, ranks: dict[tuple[int, ...], Any], freed: list[int]) -> None:
        best = min(ranks.values(), default=None)
        assert (ranks[tuple(freed)] if freed else None) == best


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("policy", POLICIES)
def test_each_victim_equals_the_result_of_a_search_of_the_whole_tree(policy: str, seed: int) -> None:
    walk = Walk(policy, rng(seed))
    for _ in range(400):
        walk.step()


def test_the_search_detects_a_queue_that_ignores_uses() -> None:
    """Negative control: mru without a new entry at each use evicts by old ranks."""
    found = 0
    for seed in seeds(6):
        walk = Walk("mru", rng(seed))
        walk.tree.queues.fall_on_use = False
        try:
            for _ in range(400):
                walk.step()
        except AssertionError:
            found += 1
    assert found


def test_mru_evicts_from_l2_the_run_that_was_used_last() -> None:
    t = tree("mru")
    for token in range(1, 5):
        t.set_host(insert(t, token, page=token), np.array([10 * token], dtype=np.int32))
    t.evict_device(4)
    for token in (3, 1, 2):
        t.match(key(token))
    assert [t.evict_host(1).tolist() for _ in range(4)] == [[20], [10], [30], [40]]
    check_tree(t)


def test_queues_stay_small_after_many_uses_of_a_node() -> None:
    t = tree("mru")
    for token in range(10):
        insert(t, token, page=10 * token)
    for _ in range(10_000):
        t.match(key(3))
    device_queue = t.queues.device
    assert len(device_queue._heap) < 200
    check_tree(t)


def test_the_stack_of_copies_stays_small_after_many_copies_of_a_node() -> None:
    t = tree("lru")
    nodes = [insert(t, token, page=token + 1) for token in range(10)]
    for number, node in enumerate(nodes):
        t.set_host(node, np.array([number], dtype=np.int32))
    for _ in range(2_000):
        t.hold_host(nodes[3])
        t.release_host(nodes[3])
        t.leave_host(nodes[4])
        t.set_host(nodes[4], np.array([4], dtype=np.int32))
    assert len(t.queues.copies._stack) < 200
    check_tree(t)


class Biggest:
    """A custom policy: the longest run first."""

    falls_on_use = False

    def rank(self, node: Node) -> int:
        return -len(node.key)


def test_a_custom_policy_is_configured_by_its_class_name() -> None:
    name = f"{__name__}:Biggest"
    t = tree(name)
    insert(t, 1, page=1)
    insert(t, 2, 3, page=2)
    assert t.evict_device(1).pages.tolist() == [2, 3]
    assert HiCacheConfig(eviction_policy=name).eviction_policy == name


@pytest.mark.parametrize(
    "name", ["newest", "nowhere:Class", "hicache.keys:RadixKey", "json:JSONDecoder", f"{__name__}:no"]
)
def test_invalid_policies_are_rejected(name: str) -> None:
    with pytest.raises(InvalidInput, match="eviction policy"):
        make_policy(name)
