"""Dumps: complete, loadable as JSON, and silent about prompts."""

from __future__ import annotations

import json

import numpy as np

from hicache.keys import RadixKey
from hicache.radix import RadixTree, dump_tree, make_policy, pretty_print
from hicache.radix.dump import PRETTY_NODES_MAX


def tree() -> RadixTree:
    t = RadixTree(2, make_policy("lru"))
    t.insert(RadixKey.of([424242, 2, 3, 4]), np.array([1, 2], dtype=np.int32), priority=7)
    node = t.insert(RadixKey.of([424242, 2, 5, 6], cache_salt=None), np.array([3, 4], dtype=np.int32)).node
    t.accept_backup(node.parent or node, np.array([9], dtype=np.int32))
    t.lock(node)
    return t


def test_the_data_survive_json_and_name_each_node_and_parent() -> None:
    data = json.loads(json.dumps(dump_tree(tree())))
    nodes = {node["id"]: node for node in data["nodes"]}
    assert len(nodes) == data["node_count"] == 3
    heads = [node for node in nodes.values() if node["parent"] is None]
    assert len(heads) == 1 and heads[0]["host_pages"] == [9] and heads[0]["priority"] == 7
    assert {node["parent"] for node in nodes.values()} == {None, heads[0]["id"]}
    assert data["device_protected_pages"] == 2 and data["device_evictable_pages"] == 1


def test_tokens_are_shown_only_when_asked_for() -> None:
    assert "424242" not in json.dumps(dump_tree(tree())) + pretty_print(tree())
    assert [424242, 2] in [node["tokens"] for node in dump_tree(tree(), tokens=True)["nodes"]]
    assert "424242" in pretty_print(tree(), tokens=True)


def test_the_text_has_a_line_per_node_indented_below_its_parent() -> None:
    lines = pretty_print(tree()).splitlines()
    assert len(lines) == 4
    assert "3 nodes" in lines[0]
    assert [len(line) - len(line.lstrip()) for line in lines] == [0, 2, 4, 4]
    assert "L1+L2" in lines[1] and "locks 1" in lines[1]


def test_the_text_of_a_large_tree_is_cut() -> None:
    t = RadixTree(1, make_policy("lru"))
    for token in range(PRETTY_NODES_MAX + 5):
        t.insert(RadixKey.of([token]), np.array([token + 1], dtype=np.int32))
    lines = pretty_print(t).splitlines()
    assert len(lines) == PRETTY_NODES_MAX + 2
    assert "5 nodes more" in lines[-1]
