"""Keys and nodes as in SGLang's RadixCache, on `RadixTree`: match, split, insert."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import InvalidInput
from hicache.keys import RadixKey
from hicache.radix import Node, RadixTree, check_tree, make_policy
from hicache.types import PageIds

PAGE = 4


def tree(page_size: int = 1, *, bigram: bool = False) -> RadixTree:
    return RadixTree(page_size, make_policy("lru"), position_bytes=8 if bigram else 4)


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


def insert(t: RadixTree, tokens: list[int], *pages: int, extra_key: str | None = None, priority: int = 0) -> Node:
    node = t.insert(RadixKey.of(tokens, extra_key=extra_key), ids(*pages), priority=priority).node
    check_tree(t)
    return node


def matched(t: RadixTree, tokens: list[int], extra_key: str | None = None) -> list[int]:
    found: list[int] = t.match(RadixKey.of(tokens, extra_key=extra_key)).device_pages.tolist()
    check_tree(t)
    return found


def runs(t: RadixTree) -> list[list[int]]:
    """The L1 pages of all nodes."""
    return sorted(node.device.tolist() for node in t.nodes() if node.device is not None)


# match_prefix


def test_a_match_returns_the_pages_of_the_longest_cached_prefix_and_its_last_node() -> None:
    t = tree()
    node = insert(t, [1, 2, 3], 11, 12, 13)
    match = t.match(RadixKey.of([1, 2, 3, 13, 14]))
    assert match.device_pages.tolist() == [11, 12, 13] and match.device_pages.dtype == np.int32
    assert match.node is match.device_node is node and match.pages == 3


def test_an_empty_key_and_an_empty_tree_match_nothing_at_the_root() -> None:
    t = tree()
    for key in (RadixKey(b""), RadixKey.of([5])):
        match = t.match(key)
        assert match.pages == len(match.device_pages) == 0 and match.node.parent is None
    insert(t, [1], 11)
    assert t.match(RadixKey(b"")).pages == 0


def test_a_match_that_ends_inside_a_node_splits_it_and_its_pages_there() -> None:
    t = tree()
    tail = insert(t, [1, 2, 3], 11, 12, 13)
    assert matched(t, [1, 2, 9]) == [11, 12]
    head = t.match(RadixKey.of([1, 2])).node
    assert runs(t) == [[11, 12], [13]] and tail.parent is head
    assert tail.device is not None and tail.device.tolist() == [13]


def test_both_parts_of_a_split_node_are_as_locked_as_used_and_as_important_as_it_was() -> None:
    t = tree()
    tail = insert(t, [1, 2, 3], 11, 12, 13, priority=7)
    t.use(tail)
    t.lock(tail)
    matched(t, [1])
    head = tail.parent
    assert head is not None and head.lock_ref > 0 < tail.lock_ref
    assert (head.priority, head.hit_count, head.created) == (7, 2, tail.created)
    t.unlock(tail)
    assert head.lock_ref == tail.lock_ref == 0


def test_only_whole_pages_are_matched_and_cached() -> None:
    """Thirty-five tokens have two pages of sixteen."""
    t = tree(16)
    tokens = list(range(35))
    assert RadixKey.of(tokens).pages(16) == 2
    insert(t, tokens, 1, 2)
    assert matched(t, tokens) == [1, 2]
    assert matched(t, tokens[:31]) == [1]
    assert matched(t, tokens[:15]) == []
    assert matched(t, [*tokens[:20], 99, *tokens[21:]]) == [1]


def test_children_are_told_apart_by_their_whole_first_page() -> None:
    """With pages of one token, runs with the same first token share it; with longer pages they share nothing."""
    one, four = tree(1), tree(PAGE)
    for t, first, second in ((one, (1, 2, 3, 4), (5, 6, 7, 8)), (four, (1,), (2,))):
        insert(t, [7, 1, 1, 1], *first)
        t.insert(RadixKey.of([7, 2, 2, 2]), ids(*second))
    assert runs(one) == [[1], [2, 3, 4], [6, 7, 8]]
    assert runs(four) == [[1], [2]] and all(node.parent in four.roots() for node in four.nodes())


@pytest.mark.parametrize("other", [None, "adapter-b"])
def test_equal_tokens_under_different_extra_keys_share_no_node(other: str | None) -> None:
    t = tree(PAGE)
    tokens = [1] * 8
    insert(t, tokens, 1, 2, extra_key="adapter-a")
    assert matched(t, tokens, other) == []
    assert insert(t, tokens, 3, 4, extra_key=other).parent is not None
    assert matched(t, tokens, "adapter-a") == [1, 2] and matched(t, tokens, other) == [3, 4]
    assert t.node_count == 2


def test_bigram_keys_match_pairs_so_the_token_after_the_page_counts_too() -> None:
    """n tokens make n - 1 pairs; SGLang makes them for EAGLE."""
    t = tree(PAGE, bigram=True)
    tokens = list(range(1, 10))
    key = RadixKey.of(tokens, bigram=True)
    assert len(key) == 8 and key.prompt_tokens == 9
    t.insert(key, ids(1, 2))
    assert t.match(RadixKey.of([*tokens[:8], 77], bigram=True)).device_pages.tolist() == [1]
    assert t.match(RadixKey.of(tokens[:4], bigram=True)).pages == 0  # three pairs
    with pytest.raises(InvalidInput, match="bigram"):
        t.match(RadixKey.of(tokens))


# insert


def test_an_insert_returns_the_present_prefix_and_keeps_the_pages_of_the_tree() -> None:
    t = tree()
    insert(t, [1, 2, 3], 11, 12, 13)
    inserted = t.insert(RadixKey.of([1, 2, 3, 4, 5]), ids(21, 22, 23, 24, 25))
    assert inserted.present_pages == 3  # the caller frees 21, 22, 23
    assert matched(t, [1, 2, 3, 4, 5]) == [11, 12, 13, 24, 25]
    assert t.device_pages_total == 5


def test_an_insert_adds_one_node_for_the_new_suffix_and_splits_where_it_diverges() -> None:
    """The example of the documents: three prompts share a start, two of them more of it."""
    t = tree()
    what_is_the, capital_of, weather, france, germany = [1, 2, 3], [4, 5], [6, 7], [8], [9]
    insert(t, [*what_is_the, *capital_of, *france], 1, 2, 3, 4, 5, 6)
    t.insert(RadixKey.of([*what_is_the, *capital_of, *germany]), ids(91, 92, 93, 94, 95, 7))
    t.insert(RadixKey.of([*what_is_the, *weather]), ids(96, 97, 98, 8, 9))
    assert runs(t) == [[1, 2, 3], [4, 5], [6], [7], [8, 9]]
    assert t.device_pages_total == 9


def test_an_insert_raises_the_priority_along_its_path_and_never_lowers_it() -> None:
    t = tree()
    low = insert(t, [1, 2], 1, 2, priority=1)
    high = insert(t, [1, 2, 3], 91, 92, 3, priority=5)
    insert(t, [1, 2, 3], 91, 92, 93, priority=2)
    assert (low.priority, high.priority) == (5, 5)


def test_each_request_that_inserts_or_reuses_a_run_counts_one_hit() -> None:
    t = tree()
    node = insert(t, [1, 2], 1, 2)
    assert node.hit_count == 1
    insert(t, [1, 2], 91, 92)
    t.use(node)
    assert node.hit_count == 3
    t.match(RadixKey.of([1, 2]))  # a lookup alone is not a use
    assert node.hit_count == 3
