"""Write policies, and evictions with each of them."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.backends.storage import Storage
from hicache.cache import Eviction
from hicache.config import TransferConfig
from hicache.keys import RadixKey
from tests.cache.world import World, every_hit, memory_backend, prompt
from tests.tuned import tuned


def world(write_policy: str, *, backend: Storage | None = None, **options: Any) -> World:
    """Return a world of 16 pages on L1 and 32 on L2, or as `options` say, which also has entries of a configuration."""
    pages = {name: options.pop(name) for name in ("device_pages", "host_pages") if name in options}
    return World(backend=backend, config=every_hit(write_policy=write_policy, **options), **pages)


def insert(w: World, key: RadixKey) -> None:
    """Insert all pages of `key`, like a request that computes and shares them at once."""
    pages = w.cache.page_source.alloc(key.pages(w.cache.page_size))
    assert pages is not None
    w.cache.page_source.free(pages[: w.cache.insert(key, pages).present_pages])


def full_on_l2(host_pages: int) -> World:
    """Return a world with two pages of L2 in use."""
    w = world("write_back", host_pages=host_pages)
    insert(w, prompt(9, 10))
    w.cache.evict(2)
    w.settle()
    w.cache.tree.hold_host(w.cache.match_prefix(prompt(9, 10)).node)
    return w


@pytest.mark.parametrize(
    ("policy", "selective_hits", "expected"),
    [("write_through", 2, (2, 3, 4)), ("write_through_selective", 2, (0, 1, 1)),
     ("write_through_selective", 3, (0, 0, 1))],
)
def test_a_page_is_copied_when_as_many_requests_have_used_it_as_the_policy_requires(
    policy: str, selective_hits: int, expected: tuple[int, ...]
) -> None:
    w = world(policy, selective_hits=selective_hits)
    for count, pages in enumerate(expected, 1):
        w.serve(f"r{count}", prompt(1, count + 1))
        w.settle()
        assert w.cache.tree.host_pages == pages


def test_a_chunked_prefill_counts_as_one_use() -> None:
    w = world("write_through_selective")
    key = prompt(1, 2, 3, 4)
    request = w.begin("a", key)
    for pages in (1, 2, 3, 4):
        w.cache.cache_unfinished_req(request, key.head(pages * 4))
    w.cache.cache_finished_req(request, key)
    w.settle()
    assert {node.hit_count for node in w.cache.tree.nodes()} == {1}
    assert w.cache.tree.host_pages == 0


def test_two_requests_that_computed_the_same_pages_count_as_two_uses() -> None:
    w = world("write_through_selective")
    first, second = w.begin("a", prompt(1, 2)), w.begin("b", prompt(1, 2))
    w.cache.cache_finished_req(first, prompt(1, 2))
    w.cache.cache_finished_req(second, prompt(1, 2))
    w.settle()
    assert w.cache.tree.host_pages == 2


def test_an_aborted_request_that_reused_a_prefix_counts_as_a_use() -> None:
    w = world("write_through_selective")
    w.serve("a", prompt(1, 2))
    request = w.begin("b", prompt(1, 2, 3))
    w.cache.cache_finished_req(request, None)
    w.settle()
    assert w.cache.tree.host_pages == 2


def test_the_second_use_of_a_page_counts_after_it_was_evicted_from_l1() -> None:
    backend = memory_backend()
    w = world("write_through_selective", backend=backend)
    w.serve("a", prompt(1, 2))
    w.cache.evict(2)
    assert w.cache.tree.node_count == 0
    w.serve("b", prompt(1, 2, 3))
    w.settle()
    assert w.cache.tree.host_pages == 2 == backend.usage().pages  # the third page is new
    w.cache.evict(3)
    assert w.serve("c", prompt(1, 2, 3)).host_hit_tokens == 8
    w.settle()
    assert backend.usage().pages == 3


def test_a_share_of_new_prompts_is_copied_at_once() -> None:
    w = world("write_through_selective", selective_first_share=0.5, device_pages=80, host_pages=80)
    for number in range(40):
        w.serve(f"r{number}", prompt(number, 50))
        w.settle()
        assert w.cache.tree.host_pages % 2 == 0
    assert 20 < w.cache.tree.host_pages < 60


def test_clearing_the_cache_resets_the_uses() -> None:
    w = world("write_through_selective")
    w.serve("a", prompt(1, 2))
    w.cache.clear()
    w.serve("b", prompt(1, 2))
    w.settle()
    assert w.cache.tree.host_pages == 0


@pytest.mark.parametrize("evicted", [False, True])
def test_a_request_that_is_preempted_and_runs_again_counts_as_one_use(evicted: bool) -> None:
    w = world("write_through_selective")
    longer = prompt(1, 2, 3, 4)
    for rid in ("a", "a", "b"):
        request = w.begin(rid, prompt(1, 2, 3, tail=0))
        w.cache.cache_unfinished_req(request, prompt(1, 2, 3, tail=0))
        assert w.cache.extend(request, len(longer))
        w.fill(longer, request.pages, request.shared_pages)
        w.cache.cache_finished_req(request, longer)  # generated tokens are shared too
        w.settle()
        assert w.cache.tree.host_pages == (4 if rid == "b" else 0)
        if evicted:
            w.cache.evict(16)


def test_each_call_of_insert_counts_as_a_use() -> None:
    w = world("write_through_selective")
    for uses in (1, 2):
        insert(w, prompt(1, 2, tail=0))
        w.settle()
        assert w.cache.tree.host_pages == (0 if uses == 1 else 2)
        w.cache.evict(2)


def test_with_write_back_a_victim_is_copied_and_then_freed() -> None:
    w = world("write_back")
    w.serve("a", prompt(1, 2))
    w.settle()
    assert w.cache.tree.host_pages == 0
    assert w.cache.evict(2) == Eviction(freed_pages=0, writeback_pages=2, short_pages=0)
    assert w.cache.writeback_pages == 2
    w.settle()
    assert w.cache.writeback_pages == 0
    assert (w.cache.tree.device_pages_total, w.cache.tree.host_pages) == (0, 2)
    assert w.serve("b", prompt(1, 2)).host_hit_tokens == 8
    assert w.compared_pages == 2


def test_write_back_drops_a_victim_if_l2_has_no_room() -> None:
    w = full_on_l2(host_pages=2)
    insert(w, prompt(1, 2))
    assert w.cache.evict(2) == Eviction(freed_pages=2, writeback_pages=0, short_pages=0)
    assert w.cache.statistics().skipped["write_back_dropped"] == 2


def test_pages_on_l2_behind_a_dropped_victim_are_evicted_too() -> None:
    w = full_on_l2(host_pages=3)
    insert(w, prompt(1, 2))
    insert(w, prompt(1, 2, 3))
    assert w.cache.evict(1) == Eviction(freed_pages=0, writeback_pages=1, short_pages=0)
    w.settle()
    assert w.cache.tree.peek(prompt(1, 2, 3)) == (2, 1)
    assert w.cache.evict(2) == Eviction(freed_pages=2, writeback_pages=0, short_pages=0)
    assert (w.cache.tree.peek(prompt(1, 2, 3)), w.cache.host.allocator.free_pages) == ((0, 0), 1)
    w.cache.check()
    assert w.cache.statistics().evicted_pages["host"] == 1


def test_eviction_reports_the_pages_that_it_could_not_free() -> None:
    w = world("write_through")
    request = w.begin("a", prompt(1, 2))
    w.cache.cache_unfinished_req(request, prompt(1, 2))
    w.settle()
    assert w.cache.evict(5) == Eviction(freed_pages=0, writeback_pages=0, short_pages=5)
    w.cache.cache_finished_req(request, None)
    assert w.cache.evict(5) == Eviction(freed_pages=2, writeback_pages=0, short_pages=3)


def test_a_victim_that_a_full_write_queue_rejects_is_dropped() -> None:
    w = world("write_back", transfer=tuned(TransferConfig, write_pages_max=1))
    w.serve("a", prompt(1))
    w.serve("b", prompt(2))
    assert w.cache.evict(2) == Eviction(freed_pages=1, writeback_pages=1, short_pages=0)
    assert w.controller.refused["write"] == 1
    w.settle()


def test_a_higher_priority_keeps_the_whole_prefix_longer() -> None:
    w = world("write_through", device_pages=8, eviction_policy="priority")
    for rid, key, priority in (("low", prompt(1, 2), 0), ("high", prompt(3, 4), 5), ("later", prompt(5, 6), 0)):
        request = w.cache.begin_request(rid, key, priority=priority)
        assert request is not None
        w.fill(key, request.pages, 0)
        w.cache.cache_finished_req(request, key)
    w.settle()
    w.cache.evict(4)
    assert len(w.cache.match_prefix(prompt(3, 4)).device_pages) == 2
    assert len(w.cache.match_prefix(prompt(1, 2)).device_pages) == 0


def test_with_bigram_keys_requests_share_pages_with_equal_pairs() -> None:
    """A page has four pairs. A page that ends before a different token is not shared, because its last pair differs."""
    w = World(position_bytes=8)
    first = RadixKey.of([1, 2, 3, 4, 5, 6, 7, 8, 9], bigram=True)
    request = w.begin("a", first)
    assert len(request.pages) == 3  # eight pairs, but nine tokens of KV
    w.cache.cache_finished_req(request, first)
    assert len(w.cache.match_prefix(RadixKey.of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], bigram=True)).device_pages) == 2
    assert len(w.cache.match_prefix(RadixKey.of([1, 2, 3, 4, 99], bigram=True)).device_pages) == 0
    assert w.attempt("b", first).device_hit_tokens == 8
