"""Chunked prefetch: stored pages that do not fit on L2 at once are loaded to L1 in parts."""

from __future__ import annotations

import pytest

from hicache.cache import RequestKV
from hicache.cache.prefetch_states import State
from hicache.controller import Load
from hicache.keys import RadixKey
from hicache.types import NO_PAGES
from tests.cache.world import (
    GEOMETRY,
    GatedBackend,
    LastingBackend,
    World,
    every_hit,
    filled,
    memory_backend,
    prefetch,
    prompt,
)
from tests.seeds import rng, seeds

PAGES = 24
KEY = prompt(*range(1, PAGES + 1))
HOST_PAGES = 8  # of which prefetches may hold four


@pytest.fixture
def backend() -> LastingBackend:
    """Return a store that has KEY."""
    return filled(memory_backend(), KEY)


def small_l2(backend: LastingBackend, device_pages: int = 64) -> World:
    config = every_hit(prefetch=prefetch(policy="wait_complete"))
    return World(device_pages=device_pages, host_pages=HOST_PAGES, backend=backend, config=config)


def full_l1(backend: LastingBackend) -> tuple[World, RequestKV]:
    """Return a world with room for one page on L1, and the request that has the rest."""
    world = small_l2(backend, device_pages=PAGES + 8)
    return world, world.begin("others", prompt(*range(100, 100 + PAGES + 7)))


def pages_from_storage(world: World, rid: str) -> int:
    return world.serve(rid, KEY).storage_hit_tokens // GEOMETRY.page_size


def load_first_part(world: World, rid: str) -> None:
    """Prefetch KEY, and step until its first part is on L1."""
    assert world.cache.prefetch_from_storage(rid, KEY)
    world.until(lambda: world.cache.tree.device_pages_total > 0)
    assert not world.cache.check_prefetch_progress(rid)


def test_a_prompt_three_times_as_long_as_l2_is_read_completely_from_storage(backend: LastingBackend) -> None:
    world = small_l2(backend)
    request = world.serve("a", KEY)
    hits = (request.device_hit_tokens, request.host_hit_tokens, request.storage_hit_tokens)
    assert hits == (0, 0, PAGES * GEOMETRY.page_size)
    assert world.compared_pages == PAGES and world.wrong_pages == 0


def test_arrived_pages_are_loaded_as_soon_as_l1_has_room(backend: LastingBackend) -> None:
    world, others = full_l1(backend)
    assert world.cache.prefetch_from_storage("a", KEY)
    world.until(lambda: world.cache.tree.host_pages == HOST_PAGES // 2)
    for _ in range(20):
        world.step()
    assert not world.cache.check_prefetch_progress("a"), "the request waits for room on L1"
    world.cache.cache_finished_req(others, None)
    assert pages_from_storage(world, "a") == PAGES


def test_a_request_whose_pages_wait_for_l1_begins_without_their_load_if_another_needs_the_room(
    backend: LastingBackend,
) -> None:
    world, others = full_l1(backend)
    assert world.cache.prefetch_from_storage("a", KEY)
    world.until(lambda: world.prefetch_of("a").state is State.AWAITING_L1)
    assert world.cache._l1._release_arrived()
    assert world.prefetch_of("a").state is State.ENDED
    assert world.cache.check_prefetch_progress("a")
    world.cache.cache_finished_req(others, None)
    assert world.attempt("a", KEY).storage_hit_tokens == HOST_PAGES // 2 * GEOMETRY.page_size


def test_a_request_that_begins_early_gets_the_pages_that_have_arrived(backend: LastingBackend) -> None:
    world = small_l2(backend)
    load_first_part(world, "a")
    request = world.begin("a", KEY)
    assert (request.device_hit_tokens, request.storage_hit_tokens) == (0, HOST_PAGES // 2 * GEOMETRY.page_size)
    world.cache.cache_finished_req(request, KEY)
    world.settle()


@pytest.mark.parametrize("end", ["abort", "clear", "detach"])
def test_a_chunked_prefetch_that_is_stopped_holds_no_pages(backend: LastingBackend, end: str) -> None:
    world = small_l2(backend)
    load_first_part(world, "a")
    if end == "abort":
        world.cache.abort_prefetch("a")
    elif end == "clear":
        world.cache.clear()
    else:
        world.cache.storage.detach()
    world.settle()
    assert world.cache.check_prefetch_progress("a")
    world.cache.evict(PAGES)
    world.cache.check()
    assert world.cache._prefetcher.take_arrived("a") == (0, 0)


def test_several_long_prompts_are_loaded_in_turn(backend: LastingBackend) -> None:
    world = small_l2(backend, device_pages=128)
    other = prompt(*range(1, 9), *range(50, 66))
    filled(backend, other)
    for rid, key in (("a", KEY), ("b", other)):
        assert world.cache.prefetch_from_storage(rid, key)
    for rid, key in (("a", KEY), ("b", other)):
        world.arrive(rid)
        assert world.attempt(rid, key).cached_tokens == PAGES * GEOMETRY.page_size


def test_pages_that_other_requests_have_loaded_are_not_loaded_again(backend: LastingBackend) -> None:
    world = small_l2(backend, device_pages=PAGES + 8)
    others = world.begin("others", prompt(*range(100, 100 + PAGES + 2)))
    assert world.cache.prefetch_from_storage("a", KEY)
    world.until(lambda: world.cache.tree.host_pages == HOST_PAGES // 2)
    assert world.attempt("b", KEY.head(17)).cached_tokens == 16
    world.cache.cache_finished_req(others, None)
    world.arrive("a")
    assert world.attempt("a", KEY).cached_tokens == PAGES * GEOMETRY.page_size


@pytest.mark.parametrize("device_pages", range(8, 13))
@pytest.mark.parametrize("busy_pages", range(1, 6))
def test_a_full_l1_never_evicts_the_first_parts_to_make_room_for_the_next_one(
    backend: LastingBackend, device_pages: int, busy_pages: int
) -> None:
    world = small_l2(backend, device_pages)
    busy = world.begin("busy", prompt(*range(100, 99 + busy_pages)))
    assert world.cache.prefetch_from_storage("a", KEY)
    for _ in range(60):
        world.step()  # checks that the parent of each node on L1 is on L1
    world.cache.abort_prefetch("a")
    world.cache.cache_finished_req(busy, None)
    world.settle()
    world.attempt("b", KEY.head(21))
    assert world.wrong_pages == 0


def test_prompts_that_are_together_larger_than_l1_do_not_read_each_others_parts_again_without_end() -> None:
    prompts = [prompt(*range(first, first + PAGES)) for first in (100, 200, 300, 400)]
    backend = filled(GatedBackend(), *prompts)
    world = small_l2(backend, device_pages=PAGES + 8)
    waiting = {str(number): key for number, key in enumerate(prompts)}
    for rid, key in waiting.items():
        assert world.cache.prefetch_from_storage(rid, key)

    def all_served() -> bool:
        for rid in [rid for rid in waiting if world.cache.check_prefetch_progress(rid)]:
            request = world.try_begin(rid, waiting[rid])
            if request is not None:
                world.cache.cache_finished_req(request, waiting.pop(rid))
        return not waiting

    world.until(all_served)
    assert backend.pages_read <= 2 * len(prompts) * PAGES


def test_if_another_request_computes_the_part_that_is_being_read_the_rest_is_fetched() -> None:
    backend = filled(GatedBackend(), KEY)
    world = small_l2(backend)
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("a", KEY)
    world.until(backend.entered.is_set)
    part = KEY.head(HOST_PAGES // 2 * GEOMETRY.page_size)
    world.cache.cache_finished_req(world.begin("b", part), part)
    world.until(lambda: world.cache.tree.host_pages > 0)
    backend.reads.set()
    world.arrive("a")
    assert world.attempt("a", KEY).cached_tokens == PAGES * GEOMETRY.page_size


def test_after_clear_no_pages_count_as_loaded_for_a_request(backend: LastingBackend) -> None:
    world = small_l2(backend)
    load_first_part(world, "a")
    world.until(lambda: world.prefetch_of("a").promoted_pages > 0)
    world.cache.clear()
    assert world.cache._prefetcher.take_arrived("a") == (0, 0)


def test_the_load_of_another_request_does_not_end_a_prefetch_without_a_name(backend: LastingBackend) -> None:
    world, others = full_l1(backend)
    assert world.cache.prefetch_from_storage("", KEY)
    world.until(lambda: world.cache.tree.host_pages == HOST_PAGES // 2)
    world.cache._prefetcher.share.loaded(Load(NO_PAGES, NO_PAGES, 0))
    world.cache.cache_finished_req(others, None)
    assert pages_from_storage(world, "") == PAGES


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(10))
def test_random_requests_that_are_loaded_in_parts_beside_each_other_get_the_right_pages(seed: int) -> None:
    random = rng(seed)
    prompts = [prompt(*range(first, first + PAGES)) for first in (100, 200, 300)]
    world = small_l2(filled(memory_backend(), *prompts), random.randint(PAGES + 2, PAGES + 16))
    waiting: dict[str, RadixKey] = {}
    running: dict[str, tuple[RequestKV, RadixKey]] = {}

    def begin(rid: str) -> None:
        request = world.try_begin(rid, waiting[rid]) if world.cache.check_prefetch_progress(rid) else None
        if request is not None:
            running[rid] = request, waiting.pop(rid)

    def finish(rid: str) -> None:
        request, key = running.pop(rid)
        world.cache.cache_finished_req(request, random.choice([key, None]))

    for number in range(400):
        action = random.random()
        if action < 0.2 and len(waiting) < 6:
            waiting[str(number)] = random.choice(prompts).head(4 * random.randint(2, PAGES) + 1)
            world.cache.prefetch_from_storage(str(number), waiting[str(number)])
        elif action < 0.4 and waiting:
            begin(random.choice(list(waiting)))
        elif action < 0.43 and waiting:
            rid = random.choice(list(waiting))
            del waiting[rid]
            world.cache.abort_prefetch(rid)
        elif action < 0.55 and running:
            finish(random.choice(list(running)))
        elif action < 0.6:
            world.cache.evict(random.randint(1, PAGES))
        world.step()
    for rid in waiting:
        world.cache.abort_prefetch(rid)
    for rid in list(running):
        finish(rid)
    world.settle()
    assert world.compared_pages > 0 and world.wrong_pages == 0
