"""The guarantees of the tree, case by case."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import InvalidInput, InvariantError
from hicache.keys import PageChain, RadixKey, page_keys
from hicache.policies import POLICIES
from hicache.radix import EvictionChoice, Node, RadixTree, UseHistory, check_tree, pretty_print
from hicache.radix.check import PRETTY_NODES_MAX
from hicache.types import PageIds


def tree(page_size: int = 2) -> RadixTree:
    return RadixTree(page_size, POLICIES["lru"])


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


def test_a_prompt_matches_in_whole_pages_only() -> None:
    t = tree()
    t.insert(RadixKey.of([1, 2, 3, 4, 5]), ids(7, 8))
    assert t.match(RadixKey.of([1, 2, 3, 4, 5])).device_pages.tolist() == [7, 8]
    assert t.match(RadixKey.of([1, 2, 3])).device_pages.tolist() == [7]
    assert t.match(RadixKey.of([1])).pages == 0


def test_lookups_of_unknown_salts_add_no_roots() -> None:
    t = tree()
    for i in range(50):
        t.match(RadixKey.of([1, 2], cache_salt=f"tenant {i}"))
    assert t.roots() == []


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_run_grows_unless_its_backup_is_in_flight(in_flight: bool) -> None:
    t = tree()
    key = RadixKey.of([1, 2, 3, 4])
    node = t.insert(key.head(2), ids(1)).node
    t.lock(node)
    node.backup_pending = in_flight
    t.insert(key, ids(2), below=node, start_page=1)
    assert t.pages(node) == (1 if in_flight else 2)


def test_an_eviction_counts_the_pages_that_are_lost_and_those_that_are_written_back() -> None:
    t = tree()
    for first, page in ((1, 1), (2, 2), (3, 3)):
        t.insert(RadixKey.of([first, first]), ids(page))
    choices = iter([EvictionChoice.LOSE, EvictionChoice.WRITING_BACK, EvictionChoice.DROP])
    found = t.evict_device(3, lambda node: next(choices))
    assert (found.pages.tolist(), found.writeback_pages, found.lost_pages) == ([3, 1], 1, 1)


def test_an_insert_with_the_wrong_number_of_pages_changes_nothing() -> None:
    t = tree()
    with pytest.raises(InvalidInput):
        t.insert(RadixKey.of([1, 2, 3, 4]), ids(1))
    assert t.node_count == 0


def test_unlocking_an_unlocked_node_is_rejected() -> None:
    t = tree()
    t.insert(RadixKey.of([1, 2]), ids(1))
    with pytest.raises(InvariantError):
        t.unlock(t.match(RadixKey.of([1, 2])).node)


def test_a_long_prompt_becomes_a_chain_of_bounded_nodes() -> None:
    t = RadixTree(1, POLICIES["lru"], run_pages_max=30)
    key = RadixKey.of(list(range(100)))
    t.insert(key, np.arange(1, 101, dtype=np.int32))
    assert t.node_count == 4
    assert t.match(key).device_pages.tolist() == list(range(1, 101))
    t = RadixTree(1, POLICIES["lru"], run_pages_max=30)
    assert len(t.insert_host(key, 0, np.arange(100, dtype=np.int32), page_keys(key.tokens, 1))[1]) == 0
    assert t.node_count == 4 and t.match(key).host_hit_pages == 100
    check_tree(t)


def test_the_check_finds_a_run_above_the_limit() -> None:
    t = RadixTree(1, POLICIES["lru"], run_pages_max=30)
    t.insert(RadixKey.of(list(range(30))), np.arange(1, 31, dtype=np.int32))
    check_tree(t)
    t.run_pages_max = 29
    with pytest.raises(InvariantError, match="has more than 29 pages"):
        check_tree(t)


def test_new_pages_keep_their_earlier_uses_and_are_split_where_these_change() -> None:
    for host in (False, True):
        t, key = tree(page_size=1), RadixKey.of(list(range(6)))
        uses = UseHistory(0, ((2, 5), (4, 3)))
        if host:
            t.insert_host(key, 0, ids(0, 1, 2, 3, 4, 5), uses=uses)
        else:
            t.insert(key, ids(1, 2, 3, 4, 5, 6), uses=uses)
        assert [(t.pages(node), node.hit_count) for node in t.nodes()] == [(2, 5), (2, 3), (2, 1)]
        check_tree(t)


def test_a_request_counts_its_pages_once() -> None:
    t, key = tree(page_size=1), RadixKey.of(list(range(4)))
    t.insert(key.head(2), ids(1, 2))
    t.insert(key, ids(1, 2, 3, 4))
    t.insert(key, ids(1, 2, 3, 4), uses=UseHistory(2))
    t.use(t.match(key).node, new_pages=2)
    t.use(t.match(key).node, new_pages=1)  # less than a whole run is not counted
    assert [node.hit_count for node in t.nodes()] == [2, 3]


def on_host(t: RadixTree, key: RadixKey, first: int) -> Node:
    """Return the node of `key`, whose last run is on both tiers."""
    node = t.insert(key, np.arange(first, first + len(key) // 2, dtype=np.int32)).node
    t.accept_backup(node, np.arange(first, first + t.pages(node), dtype=np.int32))
    return node


def test_a_store_chains_its_keys_from_the_store_above() -> None:
    t = tree()
    key = RadixKey.of([1, 2, 3, 4, 5, 6], extra_key="adapter")
    chain = page_keys(key.tokens, 2, key.seed)
    above = on_host(t, key.head(4), 10)
    first = t.stored.begin(above)
    t.insert(key, ids(1, 2, 3))
    below = t.match(key).node
    second = t.stored.begin(below)
    assert first.hashed is None and second.hashed is None
    assert second.keys() == chain[2:] and second.prior_key() == chain[1]
    t.stored.end(below, second, stored=False)
    t.stored.end(above, first, stored=True)
    assert above.stored and not below.stored
    assert (above.page_keys, below.page_keys) == (b"".join(chain[:2]), chain[2])
    check_tree(t)


def test_the_keys_of_a_chain_become_those_of_its_node() -> None:
    t = tree()
    key = RadixKey.of([1, 2, 3, 4, 5, 6], extra_key="adapter")
    above = t.insert(key.head(4), ids(1, 2)).node
    below = t.insert(key, ids(1, 2, 3)).node
    chain = t.run_keys(below)
    assert isinstance(chain, PageChain)
    keys = page_keys(key.tokens, 2, key.seed)
    assert (t.page_keys(below), t.page_keys(above), chain.keys()) == (keys[2:], keys[:2], keys[2:])


@pytest.mark.parametrize(("loading", "waits"), [("none", False), ("above", False), ("below", True), ("last", True)])
def test_an_insert_waits_only_for_loads_of_runs_that_it_would_find(loading: str, waits: bool) -> None:
    t = tree()
    key = RadixKey.of([1, 2, 3, 4, 5, 6])
    above = t.insert(key.head(2), ids(1)).node
    below = t.insert(key.head(4), ids(1, 2)).node
    last = t.insert(key, ids(1, 2, 3)).node
    for name, node in (("above", above), ("below", below), ("last", last)):
        node.load_pending = name == loading
    assert t.awaits_load(key, above, 1) is waits
    assert t.awaits_load(key.head(4), above, 1) is (loading == "below")
    assert not t.awaits_load(RadixKey.of([1, 2, 9, 9]), above, 1)
    assert t.awaits_load(key, t.roots()[0], 0) is (loading != "none")


def test_a_run_that_is_split_while_it_is_stored_keeps_its_keys_in_both_parts() -> None:
    t = tree()
    key = RadixKey.of([1, 2, 3, 4, 5, 6])
    chain = page_keys(key.tokens, 2)
    tail = on_host(t, key, 10)
    store = t.stored.begin(tail)
    fork = RadixKey.of([1, 2, 9, 9])
    head = t.match(fork).node
    on_fork = t.stored.begin(on_host(t, fork, 20))
    assert on_fork.keys() == page_keys(fork.tokens, 2)[1:]
    store.keys()
    t.stored.end(tail, store, stored=True)
    assert (head.page_keys, tail.page_keys) == (chain[0], b"".join(chain[1:]))
    assert head.stored and tail.stored and not (head.store_pending or tail.store_pending)
    check_tree(t)


def test_a_run_that_is_split_twice_while_it_is_stored_gives_each_part_its_chain() -> None:
    t = tree()
    key = RadixKey.of(range(12), extra_key="adapter")
    chain = page_keys(key.tokens, 2, key.seed)
    tail = on_host(t, key, 10)
    store = t.stored.begin(tail)
    late = t.match(key.head(8)).node
    early = t.match(key.head(4)).node
    assert [t.pages(node) for node in (early, late, tail)] == [2, 2, 2]
    assert [node.page_keys for node in (early, late, tail)] == [None, None, None]
    for node, pages in ((early, 2), (late, 4), (tail, 6)):
        prior = t.prior(node)
        assert isinstance(prior, PageChain) and prior.keys()[-1] == chain[pages - 1]
    t.stored.end(tail, store, stored=True)
    assert [node.chain for node in (early, late, tail)] == [None, None, None]
    store.keys()
    check_tree(t)


def test_the_prior_of_a_key_is_found_without_hashing() -> None:
    t = tree()
    key = RadixKey.of(range(8), extra_key="adapter")
    chain = page_keys(key.tokens, 2, key.seed)
    t.insert(key.head(4), ids(1, 2))
    t.insert(key, ids(3, 4, 5, 6))
    node = t.match(key).node
    prior = t.prior(node)
    assert isinstance(prior, PageChain) and prior.hashed is None
    assert prior.keys()[-1] == chain[-1]
    assert node.page_keys is None
    assert t.last_key(node) == t.prior(node) == chain[-1]
    assert t.prior(t.match(RadixKey.of([9], extra_key="adapter")).node) == key.seed


@pytest.mark.parametrize(("needed", "left"), [(20, [20]), (21, []), (40, []), (8, [24])])
def test_a_victim_is_split_only_if_the_rest_is_at_least_as_long_as_needed(needed: int, left: list[int]) -> None:
    t = tree()
    t.insert(RadixKey.of(range(80)), np.arange(40, dtype=np.int32))
    freed = len(t.evict_device(needed).pages)
    assert freed == 40 - sum(left) and [t.pages(node) for node in t.nodes()] == left
    check_tree(t)


def test_after_a_store_without_hashing_the_keys_can_still_be_computed() -> None:
    t = tree()
    key = RadixKey.of([1, 2, 3, 4])
    node = on_host(t, key, 10)
    t.stored.end(node, t.stored.begin(node), stored=True)
    assert node.page_keys is None
    assert t.page_keys(node) == page_keys(key.tokens, 2)
    again = t.stored.begin(node)
    assert again.hashed == page_keys(key.tokens, 2)


# As text


def test_the_text_has_a_line_per_node_indented_below_its_parent_and_no_tokens() -> None:
    t = tree()
    t.insert(RadixKey.of([424242, 2, 3, 4]), ids(1, 2), priority=7)
    node = t.insert(RadixKey.of([424242, 2, 5, 6]), ids(3, 4)).node
    t.accept_backup(node.parent or node, ids(9))
    t.lock(node)
    lines = pretty_print(t).splitlines()
    assert "3 nodes" in lines[0] and "L1+L2" in lines[1] and "locks 1" in lines[1]
    assert [len(line) - len(line.lstrip()) for line in lines] == [0, 2, 4, 4]
    assert "424242" not in pretty_print(t), "tokens are prompts"


def test_the_text_of_a_large_tree_is_truncated() -> None:
    t = RadixTree(1, POLICIES["lru"])
    for token in range(PRETTY_NODES_MAX + 5):
        t.insert(RadixKey.of([token]), np.array([token + 1], dtype=np.int32))
    lines = pretty_print(t).splitlines()
    assert len(lines) == PRETTY_NODES_MAX + 2
    assert "5 nodes more" in lines[-1]


# What storage has lost


def stored_on(t: RadixTree, key: RadixKey, first: int) -> Node:
    """Add the missing run of `key` on L2 and stored; return its node."""
    node = on_host(t, key, first)
    chain = t.stored.begin(node)
    chain.keys()
    t.stored.end(node, chain, stored=True)
    return node


def test_a_lost_page_marks_its_run_and_the_runs_below_as_not_stored() -> None:
    t = tree()
    key = RadixKey.of(range(12))
    chain = page_keys(key.tokens, 2)
    head, middle, tail = (stored_on(t, key.head(size), size * 10) for size in (4, 8, 12))
    assert t.stored.forget([chain[2]]) == 0, "the last page of a run tells"
    assert t.stored.forget([chain[3], chain[3]]) == 4
    assert [node.stored for node in (head, middle, tail)] == [True, False, False]
    check_tree(t)
    t.stored.add(middle)
    assert t.stored.forget(chain) == 4 and not head.stored


def test_both_parts_of_a_run_that_was_split_can_be_lost() -> None:
    t = tree()
    key = RadixKey.of(range(8))
    chain = page_keys(key.tokens, 2)
    tail = stored_on(t, key, 10)
    head = t.match(key.head(4)).node
    assert head is not tail and (head.stored, tail.stored) == (True, True)
    assert t.stored.forget([chain[3]]) == 2
    assert (head.stored, tail.stored) == (True, False)
    assert t.stored.forget([chain[1]]) == 2
    assert (head.stored, tail.stored) == (False, False)
    check_tree(t)


def test_a_run_that_left_the_tree_is_not_lost_again() -> None:
    t = tree()
    key = RadixKey.of(range(4))
    stored_on(t, key, 10)
    t.evict_device(2)
    assert len(t.evict_host(2)) == 2 and not t.node_count
    assert t.stored.forget(page_keys(key.tokens, 2)) == 0
    stored_on(t, key, 20)
    assert t.stored.forget(page_keys(key.tokens, 2)) == 2
    check_tree(t)


def test_after_a_change_of_stores_no_page_counts_as_stored() -> None:
    t = tree()
    key = RadixKey.of(range(4))
    stored_on(t, key, 10)
    t.stored.forget_all()
    assert t.stored.forget(page_keys(key.tokens, 2)) == 0 and not t.stored.ends()
