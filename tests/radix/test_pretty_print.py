"""A tree as text: complete, and silent about prompts."""

from __future__ import annotations

import numpy as np

from hicache.keys import RadixKey
from hicache.radix import RadixTree, make_policy, pretty_print
from hicache.radix.check import PRETTY_NODES_MAX


def tree() -> RadixTree:
    t = RadixTree(2, make_policy("lru"))
    t.insert(RadixKey.of([424242, 2, 3, 4]), np.array([1, 2], dtype=np.int32), priority=7)
    node = t.insert(RadixKey.of([424242, 2, 5, 6], cache_salt=None), np.array([3, 4], dtype=np.int32)).node
    t.accept_backup(node.parent or node, np.array([9], dtype=np.int32))
    t.lock(node)
    return t


def test_the_text_has_a_line_per_node_indented_below_its_parent() -> None:
    lines = pretty_print(tree()).splitlines()
    assert len(lines) == 4
    assert "3 nodes" in lines[0]
    assert [len(line) - len(line.lstrip()) for line in lines] == [0, 2, 4, 4]
    assert "L1+L2" in lines[1] and "locks 1" in lines[1]
    assert "424242" not in pretty_print(tree()), "tokens are prompts"


def test_the_text_of_a_large_tree_is_cut() -> None:
    t = RadixTree(1, make_policy("lru"))
    for token in range(PRETTY_NODES_MAX + 5):
        t.insert(RadixKey.of([token]), np.array([token + 1], dtype=np.int32))
    lines = pretty_print(t).splitlines()
    assert len(lines) == PRETTY_NODES_MAX + 2
    assert "5 nodes more" in lines[-1]
