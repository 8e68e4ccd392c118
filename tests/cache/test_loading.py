"""Loads from L2 to L1: their length, their cancellation, and their grouping."""

from __future__ import annotations

from hicache.config import HiCacheConfig, PrefetchConfig, TransferConfig
from tests.cache.world import World, prompt
from tests.tuned import tuned

OPTIONS = HiCacheConfig(load_back_threshold_tokens=4, prefetch=PrefetchConfig(threshold_tokens=4))


def on_host_only(*prompts: tuple[int, ...], device_pages: int = 64, host_pages: int = 64) -> World:
    world = World(device_pages=device_pages, host_pages=host_pages, config=OPTIONS)
    for number, pages in enumerate(prompts):
        world.serve(f"stored-{number}", prompt(*pages))
    world.settle()
    world.cache.evict(1000)
    return world


def test_a_long_load_is_cut_where_the_load_queue_is_full() -> None:
    short, long = tuple(range(50, 62)), tuple(range(1, 33))
    world = World(device_pages=60, host_pages=60, transfer=tuned(TransferConfig, load_pages_max=32))
    for pages in (short, long):
        world.serve(f"store {pages[0]}", prompt(*pages))
    world.settle()
    world.cache.evict(1000)
    first, second = (world.cache.begin_request(f"{pages[0]}", prompt(*pages)) for pages in (short, long))
    assert first is not None and first.host_hit_tokens == 12 * 4
    assert second is not None and second.host_hit_tokens == 20 * 4
    world.cache.start_loading()
    world.settle()
    world.compare(prompt(*long), second.pages[:20])
    for request in (first, second):
        world.cache.cache_finished_req(request, None)


def test_an_abort_before_the_copy_starts_cancels_the_load() -> None:
    world = on_host_only((1, 2, 3))
    request = world.admit("a", prompt(1, 2, 3))
    assert request.host_hit_tokens == 12
    world.cache.cache_finished_req(request, None)
    assert world.cache.start_loading() is None
    assert world.device.allocator.used_pages == 0
    world.cache.check()
    assert world.serve("b", prompt(1, 2, 3)).host_hit_tokens == 12


def test_loads_of_one_step_are_one_copy() -> None:
    world = on_host_only((1, 2), (3, 4))
    requests = [world.cache.begin_request(str(i), prompt(*pages)) for i, pages in enumerate([(1, 2), (3, 4)])]
    transfer = world.cache.start_loading()
    assert transfer is not None and world.controller.statistics().queues.load == 1
    waited_for = [world.device.loading]
    world.settle()
    world.cache.start_loading()
    assert [*waited_for, world.device.loading] == [transfer, None]
    for request, pages in zip(requests, [(1, 2), (3, 4)], strict=True):
        assert request is not None
        world.compare(prompt(*pages), request.pages[:2])
        world.cache.cache_finished_req(request, None)
