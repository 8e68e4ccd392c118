"""How long a request waits for storage, and for the prefetch of another request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache.backends.base import Direction
from hicache.backends.calls import Call
from tests.cache.world import WAIT_S, GatedBackend, ShiftedClock, World, every_hit, filled, prefetch, prompt
from tests.waiting import wait_for

KEY = prompt(*range(1, 9))


def stored() -> GatedBackend:
    return filled(GatedBackend(), KEY)


def world_of(
    backend: GatedBackend, policy: str, clock: ShiftedClock | None = None, *, write_policy: str = "write_through"
) -> World:
    options = every_hit(
        write_policy=write_policy, prefetch=prefetch(policy=policy, timeout_base=2, timeout_per_1024_tokens=0)
    )
    return World(device_pages=64, host_pages=64, backend=backend, config=options, clock=clock or ShiftedClock())


def test_with_best_effort_a_request_does_not_wait_but_uses_a_read_that_ends_before_it_begins() -> None:
    backend = stored()
    world = world_of(backend, "best_effort")
    backend.reads.clear()
    for rid in "ab":
        assert world.cache.prefetch_from_storage(rid, KEY) and world.cache.check_prefetch_progress(rid)
    assert world.attempt("a", KEY).cached_tokens == 0
    backend.reads.set()
    world.until(lambda: world.controller.statistics().prefetched_pages == 8)
    assert world.attempt("b", KEY).storage_hit_tokens == 32


@pytest.mark.parametrize(("policy", "limit_s"), [("timeout", 5), ("wait_complete", 100)])
def test_a_request_waits_a_bounded_time_and_longer_with_wait_complete_than_with_timeout(
    policy: str, limit_s: float
) -> None:
    backend, clock = stored(), ShiftedClock()
    world = world_of(backend, policy, clock)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    world.until(lambda: world.controller.statistics().queues.reads == 0 and world.controller.read_pages > 0)
    assert not world.cache.check_prefetch_progress("a")
    for passed_s in (5, 95):
        clock.shift_s += passed_s
        world.step()
        assert world.cache.check_prefetch_progress("a") == (clock.shift_s >= limit_s)
    backend.reads.set()
    world.arrive("a")
    world.cache.abort_prefetch("a")


def test_the_time_of_a_request_starts_when_the_engine_first_asks() -> None:
    backend, clock = stored(), ShiftedClock()
    world = world_of(backend, "timeout", clock)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    world.until(backend.entered.is_set)
    clock.shift_s = 100  # the device was busy, so the engine did not ask
    world.step()
    assert not world.cache.check_prefetch_progress("a")
    backend.reads.set()
    world.arrive("a")
    assert world.attempt("a", KEY).storage_hit_tokens == 32


def test_time_in_which_the_engine_does_not_ask_does_not_count() -> None:
    backend, clock = stored(), ShiftedClock()
    world = world_of(backend, "timeout", clock)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    assert not world.cache.check_prefetch_progress("a")
    for _ in range(100):
        clock.shift_s += 0.1
        world.step()
    assert not world.cache.check_prefetch_progress("a")
    assert world.prefetch_of("a").waited_s < 2
    backend.reads.set()
    world.arrive("a")
    assert world.attempt("a", KEY).storage_hit_tokens == 32


@pytest.mark.parametrize("polls_first", [True, False])
def test_it_does_not_matter_whether_a_waiting_engine_asks_before_or_after_it_polls(polls_first: bool) -> None:
    """If the pause between a poll and an ask did not count, an engine that only waits would wait almost for ever."""
    backend, clock = stored(), ShiftedClock()
    world = world_of(backend, "timeout", clock)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    world.until(backend.entered.is_set)
    asks = 1
    while not world.cache.check_prefetch_progress("a"):
        asks += 1
        clock.shift_s += 0.1 * polls_first
        world.step()
        clock.shift_s += 0.1 * (not polls_first)
        assert asks < 40
    assert asks > 15, "two seconds have passed"
    world.cache.abort_prefetch("a")
    backend.reads.set()


def test_steps_that_are_longer_than_the_timeout_cost_no_hits_and_do_not_pause_the_store() -> None:
    clock = ShiftedClock()
    world = world_of(stored(), "timeout", clock)
    world.cache.prefetch_from_storage("a", KEY)
    asks = 0
    while not world.cache.check_prefetch_progress("a"):
        asks += 1
        wait_for(lambda: world.controller._storage.any_finished, lambda: None, timeout_s=WAIT_S)
        clock.shift_s += 100
        world.step()
    assert asks <= 2, "one step for the lookup and one for the read"
    assert world.attempt("a", KEY).storage_hit_tokens == 32
    assert world.skipped == {} and world.controller.gate.may(Direction.READ)


def test_a_prefetch_continues_after_the_time_of_its_request_until_the_request_begins() -> None:
    backend, clock = stored(), ShiftedClock()
    world = world_of(backend, "timeout", clock)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    world.until(backend.entered.is_set)
    assert not world.cache.check_prefetch_progress("a")
    clock.shift_s = 100
    world.arrive("a")
    running = world.begin("running", prompt(*range(100, 160)))
    assert world.cache.begin_request("a", KEY) is None  # L1 has no room
    backend.reads.set()
    world.settle()
    world.cache.cache_finished_req(running, None)
    assert world.attempt("a", KEY).storage_hit_tokens == 32


def test_the_time_of_a_request_does_not_run_while_l1_has_no_room_for_it() -> None:
    backend, clock = stored(), ShiftedClock()
    world = world_of(backend, "timeout", clock)
    running = world.begin("running", prompt(*range(100, 160)))
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    world.until(backend.entered.is_set)
    for _ in range(9):
        assert not world.cache.check_prefetch_progress("a")
        clock.shift_s += 1
        world.step()
    world.cache.cache_finished_req(running, None)
    assert not world.cache.check_prefetch_progress("a")
    clock.shift_s += 3
    world.step()
    assert world.cache.check_prefetch_progress("a")
    backend.reads.set()
    world.cache.abort_prefetch("a")


def test_a_lookup_that_has_not_ended_when_its_request_begins_is_not_a_miss() -> None:
    class SlowLookups(GatedBackend):
        def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
            self.entered.set()
            assert self.reads.wait(WAIT_S)
            return super()._exists(call, keys)

    backend = filled(SlowLookups(), KEY)
    world = world_of(backend, "best_effort")
    backend.reads.clear()
    for rid, key in (("a", KEY), ("b", prompt(*range(20, 28)))):
        world.cache.prefetch_from_storage(rid, key)
    world.until(backend.entered.is_set)
    world.attempt("b", prompt(*range(20, 28)))  # its lookup waits for the worker
    assert world.skipped == {"prefetch_unanswered": 1}
    backend.reads.set()
    world.settle()
    assert world.cache.statistics().lookups == {"whole": 1, "part": 0, "miss": 0, "unanswered": 1, "failed": 0}
    world.cache.abort_prefetch("a")


def test_an_aborted_follower_stops_waiting() -> None:
    backend = stored()
    world = world_of(backend, "timeout")
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", KEY)
    world.cache.prefetch_from_storage("b", KEY)
    world.cache.abort_prefetch("b")
    assert world.cache.check_prefetch_progress("b")
    backend.reads.set()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
def test_a_prefetch_continues_behind_a_prefix_that_is_only_on_l1_or_being_copied_to_l2(write_policy: str) -> None:
    world = world_of(stored(), "timeout", write_policy=write_policy)
    world.cache.cache_finished_req(world.begin("a", prompt(1, 2)), prompt(1, 2))
    assert world.cache.tree.host_pages == 0
    world.prefetch("b", KEY)
    if write_policy != "write_through":
        assert world.cache.tree.peek(KEY) == (2, 6)
    request = world.serve("b", KEY)
    assert (request.device_hit_tokens, request.storage_hit_tokens) == (8, 24)


def test_l1_keeps_the_prefix_of_a_prefetch_in_flight() -> None:
    world = world_of(stored(), "timeout", write_policy="write_through_selective")
    world.cache.cache_finished_req(world.begin("a", prompt(1, 2)), prompt(1, 2))
    assert world.cache.prefetch_from_storage("b", KEY)
    assert world.cache.evict(100).freed_pages == 0
    world.arrive("b")
    assert world.cache.tree.peek(KEY).device_pages + world.cache.tree.peek(KEY).host_pages == 8
    world.settle()
    world.cache.abort_prefetch("b")
    world.cache.evict(100)
    world.cache.check()


@pytest.mark.parametrize("end", ["begin", "abort"])
def test_arrived_pages_stay_on_l2_until_their_request_begins_or_is_aborted(end: str) -> None:
    world = world_of(stored(), "timeout")
    world.prefetch("a", KEY)
    assert len(world.cache.tree.evict_host(100)) == 0
    if end == "begin":
        assert world.attempt("a", KEY).storage_hit_tokens == 32
        return
    world.cache.abort_prefetch("a")
    freed = world.cache.tree.evict_host(100)
    assert len(freed) == 8
    world.host.free(freed)


def test_with_a_share_of_zero_pages_storage_is_not_looked_up() -> None:
    world = World(backend=stored(), config=every_hit(prefetch=prefetch(host_share=0)))
    assert not world.cache.prefetch_from_storage("a", KEY)
    assert world.cache.check_prefetch_progress("a")
    assert world.cache.statistics().skipped["prefetch_host_share"] == 1
