"""How long a request waits for storage, and for the prefetch of another request."""

from __future__ import annotations

import pytest

from hicache.config import HiCacheConfig, PrefetchConfig
from tests.cache.world import GatedBackend, ShiftedClock, World, prompt

KEY = prompt(*range(1, 9))


def stored() -> GatedBackend:
    backend = GatedBackend()
    world = World(backend=backend)
    world.serve("store", KEY)
    world.settle()
    world.close()
    backend.lookups = 0
    return backend


def world_of(
    backend: GatedBackend, policy: str, clock: ShiftedClock | None = None, *, write_policy: str = "write_through"
) -> World:
    options = HiCacheConfig(
        load_back_threshold_tokens=4,
        write_policy=write_policy,
        prefetch=PrefetchConfig(policy=policy, threshold_tokens=4, timeout_per_1024_tokens=0),
    )
    return World(device_pages=64, host_pages=64, backend=backend, config=options, clock=clock or ShiftedClock())


def test_with_best_effort_a_request_does_not_wait() -> None:
    backend = stored()
    world = world_of(backend, "best_effort")
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("a", KEY)
    assert world.cache.check_prefetch_progress("a")
    assert world.attempt("a", KEY).cached_tokens == 0
    backend.reads.set()


def test_with_best_effort_a_read_that_ends_before_the_request_begins_is_used() -> None:
    world = world_of(stored(), "best_effort")
    world.cache.prefetch_from_storage("a", KEY)
    world.until(lambda: world.controller.statistics().prefetched_pages == 8)
    assert world.attempt("a", KEY).storage_hit_tokens == 32


def test_a_request_waits_longer_with_wait_complete_than_with_timeout() -> None:
    for policy, continues in (("timeout", True), ("wait_complete", False)):
        backend, clock = stored(), ShiftedClock()
        world = world_of(backend, policy, clock)
        backend.reads.clear()
        world.cache.prefetch_from_storage("a", KEY)
        world.until(lambda w=world: w.controller.statistics().queues.reads == 0 and w.controller.read_pages > 0)  # type: ignore[misc]
        assert not world.cache.check_prefetch_progress("a")
        clock.shift_s += 5
        world.step()
        assert world.cache.check_prefetch_progress("a") == continues
        backend.reads.set()
        world.until(lambda w=world: w.cache.check_prefetch_progress("a"))  # type: ignore[misc]
        world.cache.abort_prefetch("a")
        world.close()


def test_the_wait_of_wait_complete_is_bounded_too() -> None:
    backend, clock = stored(), ShiftedClock()
    world = world_of(backend, "wait_complete", clock)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    assert not world.cache.check_prefetch_progress("a")
    clock.shift_s += 100
    world.step()
    assert world.cache.check_prefetch_progress("a")
    backend.reads.set()


def test_equal_prompts_that_arrive_together_are_read_once() -> None:
    backend = stored()
    world = world_of(backend, "timeout")
    backend.reads.clear()
    for rid in "abc":
        assert world.cache.prefetch_from_storage(rid, KEY)
    assert not any(world.cache.check_prefetch_progress(rid) for rid in "abc")
    backend.reads.set()
    for rid in "abc":
        world.until(lambda r=rid: world.cache.check_prefetch_progress(r))  # type: ignore[misc]
        request = world.begin(rid, KEY)
        assert request.cached_tokens == 32
        world.cache.cache_finished_req(request, None)
    assert (backend.pages_read, backend.lookups) == (8, 1)


def test_a_follower_leads_when_its_leader_is_aborted() -> None:
    backend = stored()
    world = world_of(backend, "timeout")
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    world.cache.prefetch_from_storage("b", KEY)
    world.cache.abort_prefetch("a")
    assert not world.cache.check_prefetch_progress("b")
    backend.reads.set()
    world.until(lambda: world.cache.check_prefetch_progress("b"))
    assert world.attempt("b", KEY).storage_hit_tokens == 32


def test_a_follower_with_a_longer_prompt_fetches_the_rest_itself() -> None:
    backend = stored()
    world = world_of(backend, "timeout")
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", prompt(1, 2, 3))
    world.cache.prefetch_from_storage("b", KEY)
    backend.reads.set()
    world.until(lambda: world.cache.check_prefetch_progress("b"))
    request = world.begin("b", KEY)
    assert request.cached_tokens == 32
    assert backend.pages_read == 8
    world.cache.cache_finished_req(request, None)


def test_an_aborted_follower_stops_waiting() -> None:
    backend = stored()
    world = world_of(backend, "timeout")
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    world.cache.prefetch_from_storage("b", KEY)
    world.cache.abort_prefetch("b")
    assert world.cache.check_prefetch_progress("b")
    backend.reads.set()


def test_a_prefetch_continues_behind_a_prefix_that_is_being_copied_to_l2() -> None:
    backend = stored()
    world = world_of(backend, "timeout")
    request = world.begin("a", prompt(1, 2))
    world.cache.cache_finished_req(request, prompt(1, 2))
    assert world.cache.prefetch_from_storage("b", KEY)
    world.until(lambda: world.cache.check_prefetch_progress("b"))
    later = world.begin("b", KEY)
    assert (later.device_hit_tokens, later.storage_hit_tokens) == (8, 24)
    world.cache.cache_finished_req(later, None)


@pytest.mark.parametrize("write_policy", ["write_back", "write_through_selective"])
def test_a_prefetch_continues_behind_a_prefix_that_is_only_on_l1(write_policy: str) -> None:
    world = world_of(stored(), "timeout", write_policy=write_policy)
    world.cache.cache_finished_req(world.begin("a", prompt(1, 2)), prompt(1, 2))
    assert world.cache.tree.host_pages == 0
    assert world.cache.prefetch_from_storage("b", KEY)
    world.until(lambda: world.cache.check_prefetch_progress("b"))
    assert world.cache.tree.peek(KEY) == (2, 6)
    world.cache.check()
    request = world.serve("b", KEY)
    assert (request.device_hit_tokens, request.storage_hit_tokens) == (8, 24)


def test_l1_keeps_the_prefix_of_a_prefetch_in_flight() -> None:
    world = world_of(stored(), "timeout", write_policy="write_through_selective")
    world.cache.cache_finished_req(world.begin("a", prompt(1, 2)), prompt(1, 2))
    assert world.cache.prefetch_from_storage("b", KEY)
    assert world.cache.evict(100).freed_pages == 0
    world.until(lambda: world.cache.check_prefetch_progress("b"))
    assert world.cache.tree.peek(KEY).device_pages + world.cache.tree.peek(KEY).host_pages == 8
    world.settle()
    world.cache.abort_prefetch("b")
    world.cache.evict(100)
    world.cache.check()


def test_arrived_pages_stay_on_l2_until_their_request_begins() -> None:
    world = world_of(stored(), "timeout")
    world.cache.prefetch_from_storage("a", KEY)
    world.until(lambda: world.cache.check_prefetch_progress("a"))
    assert len(world.cache.tree.evict_host(100)) == 0
    assert world.attempt("a", KEY).storage_hit_tokens == 32


def test_pages_that_arrived_for_an_aborted_request_can_be_evicted() -> None:
    world = world_of(stored(), "timeout")
    world.cache.prefetch_from_storage("a", KEY)
    world.until(lambda: world.cache.check_prefetch_progress("a"))
    world.cache.abort_prefetch("a")
    freed = world.cache.tree.evict_host(100)
    assert len(freed) == 8
    world.host.free(freed)


def test_with_a_share_of_zero_pages_storage_is_not_looked_up() -> None:
    options = HiCacheConfig(prefetch=PrefetchConfig(threshold_tokens=4, host_share=0))
    world = World(backend=stored(), config=options)
    assert not world.cache.prefetch_from_storage("a", KEY)
    assert world.cache.check_prefetch_progress("a")
    assert world.cache.statistics().skipped["prefetch_host_share"] == 1
