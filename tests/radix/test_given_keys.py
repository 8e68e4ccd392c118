"""A tree of page keys that the engine gives behaves as the tree of the tokens behind them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.errors import InvalidInput, InvariantError
from hicache.keys import BIGRAM_BYTES, PAGE_KEY_BYTES, TOKEN_BYTES, RadixKey
from hicache.radix import RadixTree, check_tree, make_policy
from hicache.types import PageIds
from tests.seeds import rng, seeds

PAGE_SIZE = 4


def token_tree() -> RadixTree:
    return RadixTree(PAGE_SIZE, make_policy("lru"))


def given_tree() -> RadixTree:
    return RadixTree(PAGE_SIZE, make_policy("lru"), position_bytes=PAGE_KEY_BYTES)


def given(key: RadixKey) -> RadixKey:
    """The same prompt by its page keys, as an engine that hashes its pages has them."""
    return RadixKey.of_hashes(key.page_keys(PAGE_SIZE, key.seed, 0, key.pages(PAGE_SIZE)))


def ids(start: int, count: int) -> PageIds:
    return np.arange(start, start + count, dtype=np.int32)


def random_prompt(dice: random.Random) -> RadixKey:
    """Whole pages of few kinds, so that prefixes collide."""
    pages = dice.choices(range(3), (6, 3, 1), k=dice.randint(1, 12))
    return RadixKey.of([page for page in pages for _ in range(PAGE_SIZE)], cache_salt=dice.choice((None, "a")))


@pytest.mark.parametrize("seed", seeds(5))
def test_it_finds_takes_and_evicts_the_same_pages(seed: int) -> None:
    dice, trees, next_id = rng(seed), (token_tree(), given_tree()), 1
    for _ in range(400):
        key, kind, wanted = random_prompt(dice), dice.randrange(4), dice.randint(1, 8)
        keys = (key, given(key))
        found = [tree.match(one) for tree, one in zip(trees, keys, strict=True)]
        assert found[0].device_pages.tolist() == found[1].device_pages.tolist()
        assert found[0][4:] == found[1][4:] and trees[0].peek(key) == trees[1].peek(keys[1])
        pages = key.pages(PAGE_SIZE)
        if kind == 0:
            inserted = [t.insert(k, ids(next_id, pages)) for t, k in zip(trees, keys, strict=True)]
            assert inserted[0].present_pages == inserted[1].present_pages
        elif kind == 1 and found[0].host_node is found[0].node:
            start = found[0].pages
            names = keys[1].page_keys(PAGE_SIZE, b"", start, pages)
            unused = [t.insert_host(k, start, ids(next_id, pages - start), names)[1].tolist()
                      for t, k in zip(trees, keys, strict=True)]  # fmt: skip
            assert unused[0] == unused[1]
        elif kind == 2:
            assert trees[0].evict_device(wanted).pages.tolist() == trees[1].evict_device(wanted).pages.tolist()
        elif kind == 3:
            assert trees[0].evict_host(wanted).tolist() == trees[1].evict_host(wanted).tolist()
        next_id += pages
        for tree in trees:
            check_tree(tree)
        nodes = [tree.match(one).node for tree, one in zip(trees, keys, strict=True)]
        if nodes[0].parent is not None:
            assert trees[0].page_keys(nodes[0]) == trees[1].page_keys(nodes[1])
            assert trees[0].prior(nodes[0]) == trees[1].prior(nodes[1])


def test_the_pages_of_a_run_are_stored_under_the_keys_that_were_given() -> None:
    tree = given_tree()
    key = given(RadixKey.of(list(range(7 * PAGE_SIZE))))
    hashes = key.page_keys(PAGE_SIZE, b"", 0, 7)
    node = tree.insert(key, ids(1, 7)).node
    chain = tree.begin_store(node)
    assert chain.hashed == hashes
    head = tree.split(node, 3)
    assert (tree.page_keys(head), tree.page_keys(node)) == (hashes[:3], hashes[3:])
    assert tree.prior(node) == tree.last_key(node) == hashes[6]
    assert (chain.pages, chain.prior_key(), tree.last_key(node.parent)) == (7, b"", hashes[2])
    tree.end_store(node, chain, stored=True)
    assert head.stored and node.stored
    check_tree(tree)


def test_a_node_whose_page_keys_are_not_the_given_ones_is_noticed() -> None:
    tree = given_tree()
    node = tree.insert(given(RadixKey.of(list(range(8)))), ids(1, 2)).node
    node.page_keys = bytes(64)
    with pytest.raises(InvariantError, match="not those given"):
        check_tree(tree)


@pytest.mark.parametrize("position_bytes", [TOKEN_BYTES, BIGRAM_BYTES])
def test_keys_of_tokens_and_given_keys_do_not_mix(position_bytes: int) -> None:
    key = RadixKey.of(list(range(9)), bigram=position_bytes == BIGRAM_BYTES)
    with pytest.raises(InvalidInput, match="of_hashes"):
        given_tree().match(key)
    tree = RadixTree(PAGE_SIZE, make_policy("lru"), position_bytes=position_bytes)
    with pytest.raises(InvalidInput, match="a cache that takes given page keys"):
        tree.insert(given(key), ids(1, 2))
    assert tree.node_count == 0
