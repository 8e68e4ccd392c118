"""Warm-ups: pages that are read from storage to L2 for an operator, before a request wants them."""

from __future__ import annotations

import itertools

import pytest

from hicache.config import BreakEvenConfig
from hicache.errors import InvalidInput
from hicache.keys import PAGE_KEY_BYTES, RadixKey
from tests.cache.host_world import HostWorld
from tests.cache.world import GatedBackend, World, every_hit, filled, prefetch, prompt

KEY = prompt(*range(1, 9), tail=0)


def warm(world: World | HostWorld, key: RadixKey, rid: str = "warm") -> int:
    """Run a warm-up to its end. Return how many pages have arrived."""
    world.cache.start_warming(rid, key)
    world.until(lambda: not world.cache.is_warming(rid))
    return world.cache.end_warming(rid)


def test_a_request_after_a_warm_up_hits_l2_and_does_not_read_storage() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend)
    assert warm(world, KEY) == 8
    assert world.cache.tree.peek(KEY).host_pages == 8 and backend.pages_read == 8
    request = world.serve("a", prompt(*range(1, 9), 99))
    assert (request.host_hit_tokens, request.storage_hit_tokens, backend.pages_read) == (32, 0, 8)
    assert warm(world, KEY) == 0 and backend.pages_read == 8
    waits = world.cache.statistics().prefetch_wait
    assert waits is not None and sum(waits.counts) == 1  # that of the request


def test_a_slow_store_and_a_short_hit_are_warmed_although_they_do_not_pay() -> None:
    slow = BreakEvenConfig(prefill_tokens_per_second=1 << 30, storage_bandwidth=1024, host_bandwidth=1 << 30)
    config = every_hit(break_even=slow, prefetch=prefetch(threshold_tokens=16))
    backend = filled(GatedBackend(), KEY, prompt(50, tail=0))
    world = World(backend=backend, config=config)
    world.prefetch("a", prompt(*range(1, 9), 99))
    assert backend.pages_read == 0 and world.skipped == {"prefetch_does_not_pay": 1}
    assert not world.cache.prefetch_from_storage("b", prompt(50, 99))
    skipped = world.skipped
    assert warm(world, KEY) == 8 and warm(world, prompt(50, tail=0)) == 1
    assert world.skipped == skipped


@pytest.mark.parametrize(("used_pages", "arrives"), [(27, 5), (31, 1), (32, 0)])
def test_a_warm_up_takes_free_pages_and_evicts_none(used_pages: int, arrives: int) -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend, device_pages=64, host_pages=32)
    world.serve("a", prompt(*range(100, 100 + used_pages)))
    world.settle()
    assert world.host.allocator.free_pages == 32 - used_pages
    assert warm(world, KEY) == arrives
    assert world.cache.tree.peek(KEY).host_pages == arrives
    assert world.cache.statistics().evicted_pages.get("host", 0) == 0
    # A request is not limited to free pages: it evicts.
    request = world.serve("b", prompt(*range(1, 9), 99))
    assert request.storage_hit_tokens == 4 * (8 - arrives)


def test_a_prompt_beyond_the_share_of_prefetches_arrives_in_parts() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend, host_pages=32, config=every_hit(prefetch=prefetch(host_share=0.1)))
    arrived = list(itertools.takewhile(bool, (warm(world, KEY) for _ in range(9))))
    assert arrived == [3, 3, 2]
    assert world.cache.tree.peek(KEY).host_pages == 8 and world.cache.tree.peek(KEY).device_pages == 0


def test_a_warm_up_ends_when_requests_use_the_room_and_they_do_not_wait_for_it() -> None:
    other = prompt(*range(20, 28))
    backend = filled(GatedBackend(), KEY, other)
    world = World(backend=backend, host_pages=32, config=every_hit(prefetch=prefetch(host_share=0.25)))
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("a", other)
    world.until(lambda: world.controller.read_pages == 8)
    assert warm(world, KEY) == 0 and world.cache._prefetcher.waiting == 0
    backend.reads.set()
    assert world.serve("a", other).storage_hit_tokens == 32
    world.settle()
    assert warm(world, KEY) == 8


def test_a_request_for_the_same_pages_is_not_bound_by_the_end_of_a_warm_up() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend, device_pages=64, host_pages=32)
    world.serve("a", prompt(*range(100, 132)))
    world.settle()
    skipped = world.skipped
    assert world.cache.start_warming("warm", KEY)
    assert world.cache.prefetch_from_storage("b", prompt(*range(1, 9)))  # follows it
    request = world.serve("b", prompt(*range(1, 9)))
    assert request.storage_hit_tokens == 32
    assert world.skipped == skipped
    assert world.cache.end_warming("warm") == 0


def test_a_warm_up_that_is_ended_early_leaves_a_consistent_cache() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend)
    backend.reads.clear()
    assert world.cache.start_warming("warm", KEY)
    world.until(backend.entered.is_set)
    assert world.cache.end_warming("warm") == 0 and not world.cache.is_warming("warm")
    world.cache.check()
    backend.reads.set()
    world.settle()
    assert warm(world, KEY) == 8


def test_a_warm_up_ends_with_the_tree_that_it_was_for() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend)
    backend.reads.clear()
    assert world.cache.start_warming("warm", KEY)
    world.until(backend.entered.is_set)
    world.cache.clear()
    assert not world.cache.is_warming("warm") and world.cache.end_warming("warm") == 0
    backend.reads.set()
    world.settle()
    assert world.cache.tree.host_pages == 0


def test_a_cache_of_page_keys_is_warmed_by_page_keys() -> None:
    backend = GatedBackend()
    key = RadixKey.of_hashes([bytes([number]) * 32 for number in range(1, 6)])
    filler = HostWorld(backend=backend, position_bytes=PAGE_KEY_BYTES)
    filler.write("a", key)
    filler.close()
    world = HostWorld(backend=backend, position_bytes=PAGE_KEY_BYTES)
    assert warm(world, key.head(2)) == 2 and warm(world, key) == 3
    world.audit()
    backend.pages_read = 0
    assert world.load("b", key) == 5 and backend.pages_read == 0
    with pytest.raises(InvalidInput):
        world.cache.start_warming("warm", KEY)
    world.close()
