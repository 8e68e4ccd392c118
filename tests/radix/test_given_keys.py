"""A tree of page keys that the engine gives. The oracle tests show that it behaves as a tree of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import InvalidInput, InvariantError
from hicache.keys import BIGRAM_BYTES, PAGE_KEY_BYTES, TOKEN_BYTES, RadixKey
from hicache.radix import RadixTree, check_tree, make_policy
from hicache.types import PageIds

PAGE_SIZE = 4


def given_tree() -> RadixTree:
    return RadixTree(PAGE_SIZE, make_policy("lru"), position_bytes=PAGE_KEY_BYTES)


def given(key: RadixKey) -> RadixKey:
    """Return the same prompt as page keys, as an engine that hashes its pages gives it."""
    return RadixKey.of_hashes(key.page_keys(PAGE_SIZE, key.seed, 0, key.pages(PAGE_SIZE)))


def ids(start: int, count: int) -> PageIds:
    return np.arange(start, start + count, dtype=np.int32)


def test_pages_are_stored_under_the_given_keys() -> None:
    tree = given_tree()
    key = given(RadixKey.of(list(range(7 * PAGE_SIZE))))
    hashes = key.page_keys(PAGE_SIZE, b"", 0, 7)
    node = tree.insert(key, ids(1, 7)).node
    chain = tree.stored.begin(node)
    assert chain.hashed == hashes
    head = tree.split(node, 3)
    assert (tree.page_keys(head), tree.page_keys(node)) == (hashes[:3], hashes[3:])
    assert tree.prior(node) == tree.last_key(node) == hashes[6]
    assert (chain.pages, chain.prior_key(), tree.last_key(node.parent)) == (7, b"", hashes[2])
    tree.stored.end(node, chain, stored=True)
    assert head.stored and node.stored
    check_tree(tree)


def test_check_finds_a_node_whose_page_keys_differ_from_the_given_keys() -> None:
    tree = given_tree()
    node = tree.insert(given(RadixKey.of(list(range(8)))), ids(1, 2)).node
    node.page_keys = bytes(64)
    with pytest.raises(InvariantError, match="differ from those of the engine"):
        check_tree(tree)


@pytest.mark.parametrize("position_bytes", [TOKEN_BYTES, BIGRAM_BYTES])
def test_keys_of_tokens_and_given_keys_do_not_mix(position_bytes: int) -> None:
    key = RadixKey.of(list(range(9)), bigram=position_bytes == BIGRAM_BYTES)
    with pytest.raises(InvalidInput, match="of_hashes"):
        given_tree().match(key)
    tree = RadixTree(PAGE_SIZE, make_policy("lru"), position_bytes=position_bytes)
    with pytest.raises(InvalidInput, match="a cache of page keys"):
        tree.insert(given(key), ids(1, 2))
    assert tree.node_count == 0
