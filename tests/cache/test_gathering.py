"""A prompt that is computed in many chunks becomes few nodes, which are copied and stored in few operations."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.cache import RequestKV
from hicache.cache.leaders import first_pages
from hicache.config import HiCacheConfig
from hicache.keys import RadixKey
from hicache.policies import POLICIES
from hicache.radix import RadixTree
from hicache_lab.conformance import memory_store
from tests.cache.world import GEOMETRY, World, codec, prompt

KEY = prompt(*range(1, 13))  # 12 pages, copied four at a time: a sixteenth of L2
PAGE = GEOMETRY.page_size


def world(policy: str = "write_through") -> World:
    return World(
        device_pages=32, host_pages=64, backend=memory_store(codec()), config=HiCacheConfig(write_policy=policy)
    )


def share(w: World, request: RequestKV, pages: int, key: RadixKey = KEY) -> None:
    w.cache.cache_unfinished_req(request, key.head(pages * PAGE))


def test_chunks_are_copied_and_stored_in_groups() -> None:
    w = world()
    request = w.begin("a", KEY)
    copied = []
    for pages in range(1, 13):
        share(w, request, pages)
        w.settle()
        copied.append(w.cache.tree.host_pages)
    assert copied == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12]
    w.cache.cache_finished_req(request, KEY)
    assert w.cache.tree.node_count == 3
    assert w.serve("b", KEY).cached_tokens == 12 * PAGE
    assert w.wrong_pages == 0 and w.compared_pages


def test_the_last_chunk_is_copied_at_once() -> None:
    w = world()
    request = w.begin("a", prompt(1, 2))
    share(w, request, 1)
    w.settle()
    assert w.cache.tree.host_pages == 0
    w.cache.cache_unfinished_req(request, prompt(1, 2))
    w.settle()
    assert w.cache.tree.host_pages == 2


@pytest.mark.parametrize("shares", [True, False])
def test_the_chunks_of_a_request_that_ends_early_are_copied_and_stored(shares: bool) -> None:
    w = world()
    request = w.begin("a", KEY)
    share(w, request, 2)
    w.settle()
    assert w.cache.tree.host_pages == 0
    w.cache.cache_finished_req(request, KEY.head(3 * PAGE) if shares else None)
    w.settle()
    stored = w.controller.statistics().stored_pages
    assert w.cache.tree.host_pages == stored == (3 if shares else 2)


def test_chunks_that_another_request_reuses_are_copied_at_once() -> None:
    w = world()
    request = w.begin("a", KEY)
    share(w, request, 2)
    w.cache.cache_finished_req(w.begin("b", KEY.head(2 * PAGE + 1)), None)
    w.settle()
    assert w.cache.tree.host_pages == 2
    share(w, request, 3)  # a new node, because the run before is on L2
    w.cache.cache_finished_req(request, KEY)
    w.settle()
    assert w.cache.tree.host_pages == 12 and w.cache.tree.node_count == 2


def test_chunks_that_two_requests_compute_are_copied_in_groups_too() -> None:
    """Their nodes cannot grow, but their pages count together."""
    w = world()
    requests = w.begin("a", KEY), w.begin("b", KEY)
    copied = []
    for pages in range(1, 9):
        for request in requests:
            share(w, request, pages)
        w.settle()
        copied.append(w.cache.tree.host_pages)
    assert copied == [0, 0, 0, 4, 4, 4, 4, 8]
    for request in requests:
        w.cache.cache_finished_req(request, None)
    w.cache.check()


def test_a_run_that_another_request_uses_does_not_grow() -> None:
    w = world("write_back")
    first = w.begin("a", KEY)
    share(w, first, 2)
    second = w.begin("b", prompt(1, 2, 99))
    share(w, first, 4)
    assert second.shared_pages == 2 and w.cache.tree.node_count == 2
    w.cache.check()
    w.cache.cache_finished_req(second, prompt(1, 2, 99))
    w.cache.cache_finished_req(first, KEY)
    w.cache.check()
    assert w.serve("c", KEY).cached_tokens == 12 * PAGE and w.wrong_pages == 0


def test_waiting_chunks_are_dropped_when_the_cache_is_cleared() -> None:
    w = world()
    request = w.begin("a", KEY)
    share(w, request, 2)
    w.cache.clear()
    w.cache.cache_finished_req(request, KEY)
    w.settle()
    assert w.cache.tree.node_count == w.cache.tree.host_pages == 0
    w.cache.check()


def test_a_request_does_not_follow_another_one_behind_a_run_that_has_grown() -> None:
    """Both lack a page with the same tokens behind the same node, but at different positions."""
    tree, wanted = RadixTree(PAGE, POLICIES["lru"]), []
    node = tree.insert(prompt(1).head(PAGE), np.array([1], np.int32)).node
    tree.lock(node)
    for pages in (1, 2):
        key = prompt(*range(1, pages + 1), 9)
        assert tree.insert(key.head(pages * PAGE), np.array([2] * (pages - 1), np.int32), below=node, start_page=1)
        match = tree.match(key)
        assert match.node is node and match.pages == pages
        wanted.append(first_pages(key, tree, match, 0))
    assert wanted[0] != wanted[1]


def test_a_run_whose_copy_was_evicted_from_l2_does_not_grow() -> None:
    """A grown run would not be copied again, so its new pages would not be copied at all."""
    tree = RadixTree(PAGE, POLICIES["lru"])
    node = tree.insert(prompt(1).head(PAGE), np.array([1], np.int32)).node
    tree.lock(node)
    tree.accept_backup(node, np.array([0], np.int32))
    tree.leave_host(node)
    assert tree.insert(prompt(1, 2).head(2 * PAGE), np.array([2], np.int32), below=node, start_page=1).node is not node
