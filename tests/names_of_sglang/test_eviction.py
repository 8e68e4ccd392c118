"""Locks, sizes and eviction as SGLang's RadixCache and evict_policy.py have them, on `RadixTree`."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.keys import RadixKey
from hicache.radix import POLICIES, Node, RadixTree, check_tree, make_policy


def tree(policy: str = "lru") -> RadixTree:
    return RadixTree(1, make_policy(policy))


def insert(t: RadixTree, tokens: list[int], *pages: int, priority: int = 0) -> Node:
    return t.insert(RadixKey.of(tokens), np.array(pages, dtype=np.int32), priority=priority).node


def victims(t: RadixTree) -> list[list[int]]:
    """Evict everything that may leave, one victim at a time. Return the pages of each."""
    found = []
    while pages := t.evict_device(1).pages.tolist():
        check_tree(t)
        found.append(pages)
    return found


# Locks


def test_a_lock_protects_the_path_up_to_the_root_and_moves_its_pages_between_the_two_sizes() -> None:
    t = tree()
    insert(t, [1, 2], 1, 2)
    leaf, sibling = insert(t, [1, 2, 3], 91, 92, 3), insert(t, [1, 2, 4], 91, 92, 4)
    assert (t.device_evictable_pages, t.device_protected_pages) == (4, 0)
    t.lock(leaf)
    assert (t.device_evictable_pages, t.device_protected_pages) == (1, 3)
    t.lock(sibling)
    t.lock(leaf)
    assert (t.device_evictable_pages, t.device_protected_pages) == (0, 4)
    t.unlock(sibling)
    t.unlock(leaf)
    assert (t.device_evictable_pages, t.device_protected_pages) == (1, 3)
    assert victims(t) == [[4]]
    t.unlock(leaf)
    assert (t.device_evictable_pages, t.device_protected_pages) == (3, 0)
    assert victims(t) == [[3], [1, 2]]


def test_the_root_is_never_a_victim() -> None:
    t = tree()
    insert(t, [1], 1)
    root = t.roots()[0]
    assert victims(t) == [[1]] and t.node_count == 0
    t.unlock(root)  # counts nothing: a root needs no lock
    assert t.match(RadixKey.of([1])).pages == 0


# Policies


# The history below gives the four runs these values; each order is worked out from them by hand.
#
#     run             A  B  C  D
#     created         1  2  3  4
#     last access     8  9  7  4
#     requests        2  1  3  1
#     priority        2  1  1  2
@pytest.mark.parametrize(("policy", "order"), [
    ("lru", "DCAB"),
    ("lfu", "DBAC"),  # among equal counts the least recently used
    ("fifo", "ABCD"),
    ("mru", "BACD"),
    ("filo", "DCBA"),
    ("priority", "CBDA"),  # among equal priorities the least recently used
    ("slru", "DBCA"),  # runs that one request used, then the others; each part least recently used first
])
def test_each_of_the_seven_policies_has_its_order(policy: str, order: str) -> None:
    t = tree(policy)
    tokens = dict(zip("ABCD", (1, 2, 3, 4), strict=True))
    nodes = {
        name: insert(t, [tokens[name]], tokens[name], priority=priority)
        for name, priority in zip("ABCD", (2, 1, 1, 2), strict=True)
    }
    for name in "CCA":
        t.match(RadixKey.of([tokens[name]]))
        t.use(nodes[name])
    t.match(RadixKey.of([tokens["B"]]))
    assert "".join("?ABCD"[page] for (page,) in victims(t)) == order


def test_there_are_these_seven_policies_and_one_of_our_own() -> None:
    assert set(POLICIES) == {"lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "adaptive"}


# Order in the tree


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a_leaf_leaves_before_its_parent_which_then_is_a_victim_itself(policy: str) -> None:
    """With fifo the parent is older than its children and than the other branch, and still leaves after them."""
    t = tree(policy)
    insert(t, [1, 2], 1, 2)
    insert(t, [1, 2, 3], 91, 92, 3)
    insert(t, [1, 2, 4], 91, 92, 4)
    insert(t, [9], 9)
    assert victims(t) == [[3], [4], [1, 2], [9]]


def test_a_lookup_makes_its_path_the_most_recently_used() -> None:
    t = tree()
    insert(t, [1], 1)
    insert(t, [2], 2)
    t.match(RadixKey.of([1]))
    assert victims(t) == [[2], [1]]


def test_an_eviction_ends_once_enough_pages_are_free_and_its_victims_leave_the_tree() -> None:
    t = tree()
    for token in (1, 2, 3):
        insert(t, [token], token)
    assert t.evict_device(2).pages.tolist() == [1, 2]
    assert t.node_count == 1 and t.device_pages_total == 1
    assert [t.match(RadixKey.of([token])).pages for token in (1, 2, 3)] == [0, 0, 1]
    assert t.evict_device(5).pages.tolist() == [3]  # fewer than asked for


def test_done_otherwise_a_victim_that_is_much_longer_than_needed_loses_its_end_only() -> None:
    """SGLang evicts whole nodes."""
    t = tree()
    insert(t, list(range(64)), *range(1, 65))
    assert t.evict_device(16).pages.tolist() == list(range(49, 65))
    assert t.match(RadixKey.of(list(range(64)))).pages == 48
