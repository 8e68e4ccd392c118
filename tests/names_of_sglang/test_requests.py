"""The life of a request: cache_unfinished_req, cache_finished_req, and the caches in front of them."""

from __future__ import annotations

import pytest

from hicache import ChunkCache, HiRadixCache, SessionCache, create_cache
from hicache.cache import RequestKV
from hicache.config import HiCacheConfig
from hicache.errors import SessionBusy, UnknownSession
from hicache.keys import RadixKey
from tests.cache.world import GEOMETRY, NAMESPACE, StepClock, World, every_hit, prompt

PAGE = GEOMETRY.page_size


def world_without_copies() -> World:
    """A copy to L2 locks its node too, and with write_back there is none before an eviction."""
    return World(config=every_hit(write_policy="write_back"))


def used(world: World) -> int:
    return world.device.allocator.used_pages


def test_an_unfinished_request_shares_its_pages_and_its_lock_moves_to_their_end() -> None:
    world = world_without_copies()
    key = prompt(1, 2, 3)
    request = world.begin("a", key)
    root = request.last_node
    assert root.parent is None and request.shared_pages == 0
    world.cache.cache_unfinished_req(request, key.head(PAGE))
    first = request.last_node
    assert first.lock_ref == 1 and request.shared_pages == 1
    world.cache.cache_unfinished_req(request, key)
    assert request.last_node.lock_ref == 1 and request.shared_pages == 3
    assert world.cache.match_prefix(key).node is request.last_node
    assert world.cache.tree.device_protected_pages == 3
    assert world.cache.evict(16).freed_pages == 0


def test_of_two_requests_that_compute_one_prefix_the_second_gets_the_pages_of_the_first() -> None:
    world = World()
    key = prompt(1, 2)
    first, second = world.begin("a", key), world.begin("b", key)
    assert used(world) == 6
    world.cache.cache_unfinished_req(first, key)
    world.cache.cache_unfinished_req(second, key)
    assert second.pages[:2].tolist() == first.pages[:2].tolist() and used(world) == 4
    world.compare(key, second.pages[:2])


def test_a_finished_request_frees_its_duplicates_and_its_partial_page_and_unlocks_its_path() -> None:
    world = world_without_copies()
    key = prompt(1, 2, tail=3)
    first, second = world.begin("a", key), world.begin("b", key)
    assert used(world) == 6
    world.cache.cache_finished_req(first, key)
    assert used(world) == 2 + 3 and world.cache.tree.device_evictable_pages == 2
    world.cache.cache_finished_req(second, key)
    assert used(world) == 2 == world.cache.tree.device_evictable_pages


def test_a_request_that_ends_without_a_key_leaves_nothing_in_the_tree() -> None:
    world = World()
    world.cache.cache_finished_req(world.begin("a", prompt(1, 2)), None)
    assert used(world) == 0 and world.cache.match_prefix(prompt(1, 2)).pages == 0


def test_output_tokens_are_cached_with_the_prompt() -> None:
    world = World()
    request = world.begin("a", prompt(1, 2))
    key = prompt(1, 2).extended([999] * (PAGE - 1) + [5] * PAGE)
    assert world.cache.extend(request, len(key))
    world.fill(key, request.pages, 2)
    world.cache.cache_finished_req(request, key)
    assert world.serve("b", key.extended([7])).device_hit_tokens == 4 * PAGE


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_cached() -> None:
    world = World()
    key = prompt(1, 2, tail=0)
    world.serve("a", key)
    assert world.cache.match_prefix(key).pages == 2
    assert world.serve("b", key).cached_tokens == PAGE


def test_reset_forgets_all_prefixes() -> None:
    world = World()
    world.serve("a", prompt(1, 2))
    world.settle()
    world.cache.clear()
    assert world.cache.match_prefix(prompt(1, 2)).pages == 0
    assert used(world) == world.host.allocator.used_pages == world.cache.statistics().nodes == 0


# --disable-radix-cache


def test_without_a_prefix_cache_requests_run_and_reuse_nothing() -> None:
    config = HiCacheConfig.model_validate({"page_size": PAGE, "device": {"tokens": 64}, "prefix_cache": False})
    with create_cache(config, NAMESPACE) as cache:
        assert isinstance(cache, ChunkCache)
        for rid in "ab":
            request = cache.begin_request(rid, prompt(1, 2))
            assert request is not None and request.cached_tokens == 0
            cache.cache_unfinished_req(request, prompt(1, 2))
            assert cache.match_prefix(prompt(1, 2)).pages == 0 and cache.device.allocator.used_pages == 3
            cache.cache_finished_req(request, prompt(1, 2))
            assert cache.device.allocator.used_pages == 0


# Sessions


def turn(world: World, rid: str, tokens: int) -> RequestKV:
    """Run a turn of session `s` with `tokens` tokens. The returned object keeps its hit counts."""
    assert isinstance(world.cache, SessionCache)
    world.cache.join_session(rid, "s")
    key = RadixKey.of(range(tokens))
    request = world.cache.begin_request(rid, key)
    assert request is not None
    world.cache.cache_finished_req(request, key)
    return request


def test_a_session_keeps_its_kv_to_the_last_token_between_turns() -> None:
    world = World(kind=SessionCache, clock=StepClock())
    assert isinstance(world.cache, SessionCache)
    world.cache.open_session("s")
    assert turn(world, "a", 6).cached_tokens == 0
    world.settle()
    assert world.cache.evict(16).freed_pages == 0 and used(world) == 2
    assert turn(world, "b", 11).cached_tokens == 6  # without a session: 4, the whole page
    world.cache.close_session("s")
    world.settle()
    assert world.cache.evict(16).freed_pages == 2 and used(world) == 0
    with pytest.raises(UnknownSession):
        world.cache.join_session("c", "s")


def test_a_session_has_one_turn_at_a_time_and_other_requests_are_not_affected() -> None:
    world = World(kind=SessionCache)
    assert isinstance(world.cache, SessionCache)
    world.cache.open_session("s")
    world.cache.join_session("a", "s")
    with pytest.raises(SessionBusy):
        world.cache.join_session("b", "s")
    assert world.serve("c", prompt(1, 2)).cached_tokens == 0
    assert world.serve("d", prompt(1, 2)).cached_tokens == 2 * PAGE
    world.cache.abort_prefetch("a")


def test_done_otherwise_a_session_cache_is_a_tree_cache_and_does_not_wrap_one() -> None:
    """SGLang's SessionAwareCache wraps any cache. Here `sessions.enabled` selects the class."""
    assert issubclass(SessionCache, HiRadixCache)
    config = HiCacheConfig.model_validate(
        {"page_size": PAGE, "device": {"tokens": 64}, "host": {"tokens": 64}, "sessions": {"enabled": True}}
    )
    with create_cache(config, NAMESPACE) as cache:
        assert type(cache) is SessionCache and not hasattr(cache, "inner")


# Pins


def test_a_pinned_prefix_leaves_l1_but_not_the_tree_and_each_hit_restarts_its_time() -> None:
    clock = StepClock()
    world = World(clock=clock)
    world.serve("a", prompt(1, 2))
    pin = world.cache.pin(prompt(1, 2), ttl_s=60)
    assert pin is not None
    world.leave_l1()
    assert len(world.cache.tree.evict_host(32)) == 0
    clock.advance(50)
    assert world.serve("b", prompt(1, 2)).host_hit_tokens == 2 * PAGE
    active = []
    for passed_s in (50, 11):
        clock.advance(passed_s)
        world.cache.poll()
        active.append(pin.active)
    assert active == [True, False]
    world.leave_l1()
    freed = world.cache.tree.evict_host(32)
    assert len(freed) == 2
    world.host.free(freed)


# Bigram keys (EAGLE)


def test_with_bigram_keys_a_request_hits_pages_of_pairs() -> None:
    world = World(position_bytes=8, config=every_hit(bigram_keys=True))
    key = RadixKey.of(range(11), bigram=True)
    world.serve("a", key)
    # 10 pairs are two pages and two pairs; both pages end before the last token.
    assert world.serve("b", key).device_hit_tokens == 2 * PAGE
    other = RadixKey.of([*range(8), 99, 100, 101], bigram=True)  # differs in token 8, so in the last pair of page 1
    assert world.serve("c", other).device_hit_tokens == PAGE
