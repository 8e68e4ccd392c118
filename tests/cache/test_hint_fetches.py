"""Prefetches that hints ask for: towards L2 or L1, now or shortly before the pages are needed."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.cache.break_even import BreakEven
from hicache.cache.hint_fetches import FETCHES_MAX
from hicache.config import BreakEvenConfig
from hicache.keys import RadixKey
from tests.cache.hinting import bounds, counted, require_nothing_left, send, tokens
from tests.cache.host_world import HostWorld
from tests.cache.world import GatedBackend, StepClock, World, every_hit, filled, memory_backend, prefetch, prompt

A, LONG = prompt(1, 2, 3), prompt(*range(1, 9))


def fetching(*keys: RadixKey, **arguments: Any) -> tuple[World, GatedBackend]:
    """Return an empty cache of 16 pages on L1 and 32 on L2, and its store, which has the pages of `keys`."""
    backend = filled(GatedBackend(), *keys)
    return World(**{"backend": backend, "clock": StepClock(), **arguments}), backend


def fetch(world: World | HostWorld, key: RadixKey, **payload: Any) -> tuple[str, int]:
    """Ask for pages. Return status and pages of the outcome."""
    found = send(world.cache, "kv.prefetch", tokens=tokens(key), **payload)
    return found.status.value, found.pages


def end(world: World) -> None:
    """Step until nothing is fetched."""
    world.until(lambda: not world.cache._hints.is_busy)
    world.settle()
    require_nothing_left(world.cache)


@pytest.mark.parametrize("destination", ["host", "device"])
def test_pages_arrive_at_their_destination(destination: str) -> None:
    world, _ = fetching(A)
    assert fetch(world, A, destination=destination) == ("accepted", 3)
    end(world)
    assert world.cache.peek(A) == ((3, 0) if destination == "device" else (0, 3))
    assert fetch(world, A, destination=destination) == ("accepted", 3)
    assert not world.cache._hints.is_busy  # they are there
    request = world.serve("a", A)
    assert (request.device_hit_tokens, request.host_hit_tokens)[destination == "host"] == 12


def test_a_cache_without_l1_fetches_to_l2() -> None:
    backend = filled(memory_backend(), A)
    world = HostWorld(backend=backend)
    assert fetch(world, A, destination="device") == ("accepted", 3)
    world.until(lambda: not world.cache._hints.is_busy)
    assert world.cache.tree.peek(A) == (0, 3)


def test_pages_that_are_needed_later_are_fetched_shortly_before() -> None:
    world, backend = fetching(A)
    clock = world.controller.clock
    assert isinstance(clock, StepClock)
    assert fetch(world, A, needed_in_s=60) == ("deferred", 3)
    clock.advance(50)
    world.settle()
    world.step()
    assert backend.lookups == 0 and world.cache._hints.is_busy
    clock.advance(9.5)
    end(world)
    assert world.cache.peek(A) == (0, 3)


def test_pages_that_are_needed_after_the_longest_time_are_rejected() -> None:
    world, _ = fetching(A, config=every_hit(hints={"ttl_max": 20}))
    found = send(world.cache, "kv.prefetch", tokens=tokens(A), needed_in_s=21)
    assert found.status == "rejected" and "hints.ttl_max" in found.detail
    assert not world.cache._hints.is_busy


def test_an_empty_store_ends_a_prefetch_without_pages() -> None:
    world, backend = fetching()
    assert fetch(world, A, destination="device") == ("accepted", 3)
    end(world)
    assert backend.lookups == 1
    assert world.cache.peek(A) == (0, 0)


def test_without_storage_only_pages_of_l2_can_go_to_l1() -> None:
    world = World()
    assert fetch(world, A) == ("rejected", 0)
    assert fetch(world, A, destination="device") == ("rejected", 0)
    world.serve("a", prompt(1, 2))
    world.leave_l1()
    assert fetch(world, A) == ("rejected", 0)
    assert fetch(world, A, destination="device") == ("clipped", 2)
    end(world)
    assert world.cache.peek(A) == (2, 0)
    assert counted(world.cache, "kv.prefetch") == {"rejected": 3, "clipped": 1}


def test_a_prefetch_to_l1_takes_no_more_than_the_share_of_a_session() -> None:
    world, _ = fetching(LONG)
    for number in range(16):
        world.serve(f"{number}", prompt(100 + number))
        world.settle()
    assert fetch(world, LONG, destination="device") == ("clipped", 4)
    end(world)
    assert world.cache.peek(LONG) == (4, 4)
    assert sum(world.cache.peek(prompt(100 + number)).device_pages for number in range(16)) == 12


def test_without_room_on_l1_the_pages_wait_on_l2() -> None:
    world, _ = fetching(A)
    running = world.begin("r", prompt(*range(20, 35)))
    assert fetch(world, A, destination="device") == ("accepted", 3)
    end(world)
    assert world.cache.peek(A) == (0, 3)
    world.cache.cache_finished_req(running, None)


def test_a_request_that_arrives_while_its_pages_are_fetched_waits_for_them_and_reads_nothing_twice() -> None:
    world, backend = fetching(A)
    backend.reads.clear()
    fetch(world, A)
    world.until(backend.entered.is_set)
    assert world.cache.prefetch_from_storage("a", A)
    assert not world.cache.check_prefetch_progress("a")
    backend.reads.set()
    world.arrive("a")
    assert world.begin("a", A).host_hit_tokens == 12
    assert backend.pages_read == 3
    end_of_hint = world.cache._hints
    world.until(lambda: not end_of_hint.is_busy)


def test_a_request_that_begins_while_its_pages_are_fetched_leaves_the_rest_to_the_hint() -> None:
    world, backend = fetching(A)
    backend.reads.clear()
    fetch(world, A, destination="device")
    world.until(backend.entered.is_set)
    request = world.begin("a", A)  # it does not wait, and computes them
    world.cache.cache_finished_req(request, A)
    backend.reads.set()
    end(world)
    assert world.cache.peek(A) == (3, 0)
    assert world.wrong_pages == 0


def test_prefetches_of_hints_are_not_requests_that_wait() -> None:
    """They change neither the estimates of requests nor the times for which requests have waited."""
    world, backend = fetching(A)
    backend.reads.clear()
    for number in range(6):
        world.cache.record_arrival(f"r{number}", 40)
    queue, waits = world.cache._queue, world.cache.statistics().prefetch_wait
    before = (list(queue._left.items()), queue.wait_s("r5", 10, 1.0), queue.arrivals_per_s(1.0))
    fetch(world, A)
    world.until(backend.entered.is_set)
    assert (list(queue._left.items()), queue.wait_s("r5", 10, 1.0), queue.arrivals_per_s(1.0)) == before
    backend.reads.set()
    end(world)
    assert (list(queue._left.items()), queue.wait_s("r5", 10, 1.0), queue.arrivals_per_s(1.0)) == before
    assert world.cache.statistics().prefetch_wait == waits


class Busy(BreakEven):
    """A cache that knows its speeds: each prompt is computed for long, so prefetches of the last requests wait."""

    def fetch_s(self, pages: int) -> float | None:
        return 0.001 * pages

    @property
    def prefill_tokens_per_s(self) -> int:
        return 1


def test_requests_do_not_wait_behind_a_hint_for_its_turn() -> None:
    first, mine, last = prompt(31, 32), A, prompt(41, 42)
    config = every_hit(prefetch=prefetch(operations_max=1))
    backend = filled(GatedBackend(), first, mine, last)
    world = World(backend=backend, config=config, break_even=Busy(BreakEvenConfig(mode="always"), 64))
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("first", first)
    world.until(backend.entered.is_set)
    assert fetch(world, mine) == ("accepted", 3)
    assert world.cache.prefetch_from_storage("last", last)
    backend.reads.set()
    world.arrive("last")
    assert world.cache.peek(last).host_pages == 2


@pytest.mark.parametrize("destination", ["host", "device"])
def test_of_a_prompt_longer_than_the_share_of_prefetches_the_first_part_arrives(destination: str) -> None:
    """A request would load it to L1 and go on. For a hint, that would take more of L1 than its share, and could wait
    for room on L1 for ever."""
    world, _ = fetching(LONG, host_pages=8)
    assert fetch(world, LONG, destination=destination)[0] in ("accepted", "clipped")
    end(world)
    assert world.cache.peek(LONG) == ((0, 4) if destination == "host" else (4, 0))


def test_requests_do_not_wait_behind_a_hint_for_room_on_l2() -> None:
    first, mine = prompt(31, 32, 33), prompt(41, 42, 43)
    world, _ = fetching(first, mine, host_pages=8)
    world.prefetch("first", first)  # its pages are held until it begins: three of four
    assert fetch(world, mine) == ("accepted", 3)
    end(world)
    assert world.cache.peek(mine) == (0, 0)
    assert world.skipped == {"prefetch_host_share": 1}
    assert world.begin("first", first).storage_hit_tokens == 12


def test_few_prefetches_of_hints_are_in_flight() -> None:
    keys = [prompt(10 * number, 10 * number + 1) for number in range(FETCHES_MAX + 4)]
    world, backend = fetching(*keys, host_pages=200)
    backend.reads.clear()
    found = [fetch(world, key)[0] for key in keys]
    assert found == ["accepted"] * FETCHES_MAX + ["rejected"] * 4
    backend.reads.set()
    end(world)
    assert sum(world.cache.peek(key).host_pages for key in keys) == 2 * FETCHES_MAX


@pytest.mark.parametrize("change", ["clear", "detach", "update_weights"])
def test_a_cache_that_is_emptied_or_loses_its_store_forgets_the_prefetches_of_hints(change: str) -> None:
    world, backend = fetching(A, open_storage=lambda epoch: memory_backend(epoch=epoch))
    backend.reads.clear()
    fetch(world, A, destination="device")
    fetch(world, LONG, destination="device", needed_in_s=30)
    world.until(backend.entered.is_set)
    if change == "clear":
        world.cache.clear()
    elif change == "detach":
        world.cache.storage.detach()
    else:
        world.cache.update_weights(1)
    world.cache.check()
    backend.reads.set()
    clock = world.controller.clock
    assert isinstance(clock, StepClock)
    clock.advance(40)
    end(world)
    assert len(world.cache._prefetcher._table) == 0
    assert bounds(world.cache)[4:] == (0, 0)
    assert world.host.allocator.used_pages == world.cache.tree.host_evictable_pages
