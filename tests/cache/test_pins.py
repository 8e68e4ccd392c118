"""Pins: which pages stay, for how long, and the share of L2 that pins may use."""

from __future__ import annotations

import pytest

from hicache.cache import Pin
from hicache.config import HiCacheConfig
from hicache.keys import RadixKey
from tests.cache.world import StepClock, World, prompt


def pinned_world() -> tuple[World, Pin, StepClock]:
    """Return a cache that has served two pages, a pin of a minute on them, and the clock of the cache."""
    clock = StepClock()
    world = World(clock=clock)
    world.serve("a", prompt(1, 2))
    pin = world.cache.pin(prompt(1, 2), ttl_s=60)
    assert pin is not None
    return world, pin, clock


def is_active(pin: Pin) -> bool:
    return pin.active


def evict_all(world: World) -> None:
    """Evict all pages from L1 and L2 that can be evicted."""
    world.cache.evict(100)
    world.settle()
    world.host.free(world.cache.tree.evict_host(100))
    world.cache.check()


def test_a_pinned_prefix_is_evicted_from_l1_but_not_from_l2() -> None:
    world, pin, _ = pinned_world()
    assert pin.pages == 2
    world.serve("b", prompt(3, 4))
    world.settle()
    evict_all(world)
    assert world.serve("c", prompt(1, 2)).host_hit_tokens == 8
    assert world.serve("d", prompt(3, 4)).cached_tokens == 0
    pin.release()


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_a_pinned_page_is_copied_to_l2_with_any_write_policy(policy: str) -> None:
    world = World(config=HiCacheConfig(write_policy=policy, load_back_threshold_tokens=4))
    world.serve("a", prompt(1, 2))
    world.settle()
    assert world.cache.tree.host_pages == 0
    assert world.cache.pin(prompt(1, 2), ttl_s=60) is not None
    world.settle()
    assert world.cache.tree.host_pages == 2


def test_if_l2_has_no_room_a_pinned_page_stays_on_l1() -> None:
    world = World(host_pages=4, config=HiCacheConfig(write_policy="write_back", pin_host_share=1))
    blocker = world.host.alloc(3)
    assert blocker is not None
    world.serve("a", prompt(1, 2))
    assert world.cache.pin(prompt(1, 2), ttl_s=60) is not None
    eviction = world.cache.evict(2)
    assert (eviction.freed_pages, eviction.writeback_pages, eviction.short_pages) == (0, 0, 2)
    assert len(world.cache.match_prefix(prompt(1, 2)).device_pages) == 2
    world.host.free(blocker)


def test_a_pin_ends_after_its_ttl() -> None:
    world, pin, clock = pinned_world()
    clock.advance(59)
    world.cache.poll()
    assert is_active(pin)
    clock.advance(2)
    world.cache.poll()
    assert not is_active(pin) and world.cache.tree.pinned_pages == 0
    world.settle()
    evict_all(world)
    assert world.serve("b", prompt(1, 2)).cached_tokens == 0


@pytest.mark.parametrize(("used", "restarts"), [(prompt(1, 2, 3), True), (prompt(1, 3), False)])
def test_only_a_request_that_uses_the_whole_prefix_restarts_the_ttl_of_its_pin(used: RadixKey, restarts: bool) -> None:
    world, pin, clock = pinned_world()
    clock.advance(50)
    world.serve("b", used)
    for passed_s, active in ((11, restarts), (39, restarts), (20, False)):
        clock.advance(passed_s)
        world.cache.poll()
        assert is_active(pin) == active


def test_pins_of_one_prefix_count_its_pages_once_and_end_one_by_one() -> None:
    world = World()
    world.serve("a", prompt(1, 2, 3))
    first = world.cache.pin(prompt(1, 2, 3), ttl_s=60)
    with world.cache.pin(prompt(1, 2), ttl_s=60) as second:  # type: ignore[union-attr]
        assert second.pages == 2
        assert world.cache.tree.pinned_pages == 3
        world.cache.check()
    assert world.cache.tree.pinned_pages == 3
    assert first is not None
    first.release()
    first.release()
    assert world.cache.tree.pinned_pages == 0


def test_pins_above_their_share_of_l2_are_rejected() -> None:
    world = World(host_pages=8, config=HiCacheConfig(pin_host_share=0.25))
    world.serve("a", prompt(1, 2, 3))
    assert world.cache.pin(prompt(1, 2, 3), ttl_s=60) is None
    assert world.cache.pin(prompt(1, 2), ttl_s=60) is not None
    assert world.cache.statistics().skipped["pin_share"] == 1


def test_a_pin_without_pages_is_not_active() -> None:
    world = World()
    pin = world.cache.pin(prompt(1, 2), ttl_s=60)
    assert pin is not None and not pin.active
    pin.release()


def test_clearing_the_cache_ends_pins() -> None:
    world, pin, _ = pinned_world()
    world.cache.clear()
    assert not is_active(pin)
