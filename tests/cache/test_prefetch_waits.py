"""Prefetches of requests that wait for the device: when they start, what they read, and that they leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hicache.backends.calls import Call
from hicache.cache import HiRadixCache, SessionCache
from hicache.cache.break_even import BreakEven, Rates
from hicache.cache.prefetch import AGAIN_S, EARLY_S, FIRST
from hicache.cache.prefetch_states import State
from hicache.config import BreakEvenConfig
from hicache.keys import RadixKey
from tests.cache.host_world import HostWorld
from tests.cache.world import (
    GEOMETRY,
    GatedBackend,
    ShiftedClock,
    Stepped,
    World,
    codec,
    every_hit,
    filled,
    prefetch,
    prompt,
)

PAGES = 8
PROMPTS = [prompt(*range(10 * number + 1, 10 * number + 1 + PAGES)) for number in range(20)]
PROMPT_TOKENS = PAGES * GEOMETRY.page_size
PAGE_S = 0.1


def known_rates(page_tokens_s: float, read_s: float = PAGE_S) -> BreakEven:
    """Return a `BreakEven` that knows the speeds of computing a page, and of reading one."""
    given = Rates(
        prefill_tokens_per_s=round(GEOMETRY.page_size / page_tokens_s),
        host_bytes_per_s=1 << 50,
        storage_bytes_per_s=round(GEOMETRY.payload_bytes / read_s),
    )
    return BreakEven(None, GEOMETRY.payload_bytes, given=given)


def world_of(backend: GatedBackend, page_s: float = 1.0, **changes: Any) -> World:
    """Return a world that computes a page in `page_s`, and reads one in `PAGE_S`."""
    changes.setdefault("config", every_hit(prefetch=prefetch(timeout_base=5, timeout_per_1024_tokens=0)))
    changes.setdefault("break_even", known_rates(page_s))
    return World(device_pages=64, host_pages=400, backend=backend, **changes)


def state(world: World, rid: str) -> State:
    return world.prefetch_of(rid).state


def remains(world: Stepped) -> list[object]:
    """Return the requests that the table of prefetches and the queue know."""
    prefetcher, queue = world.cache._prefetcher, world.cache._queue
    return [*prefetcher._table.all(), *queue._left]


# When a prefetch starts


def test_the_first_prefetches_start_at_once_and_one_deep_in_the_queue_when_its_turn_is_near() -> None:
    backend = filled(GatedBackend(), PROMPTS[FIRST + 1])
    world = world_of(backend)
    for number in range(FIRST + 2):
        assert world.cache.prefetch_from_storage(f"r{number}", PROMPTS[number])
    last = f"r{FIRST + 1}"
    world.settle()
    assert [state(world, f"r{number}") is State.QUEUED for number in range(FIRST + 2)] == [False] * FIRST + [True] * 2
    assert backend.lookups == FIRST
    world.cache.abort_prefetch("r0")
    world.step()
    world.settle()
    assert state(world, f"r{FIRST}") is not State.QUEUED, "it is among the first now"
    assert state(world, last) is State.QUEUED
    world.cache.abort_prefetch("r1")
    world.step()
    world.settle()
    assert state(world, last) is State.ARRIVED


def test_a_prefetch_starts_before_its_turn_by_the_time_for_fetching_twice_and_some_seconds() -> None:
    backend = filled(GatedBackend(), PROMPTS[FIRST])
    world = world_of(backend)
    for number in range(FIRST + 1):
        world.cache.prefetch_from_storage(f"r{number}", PROMPTS[number])
    world.settle()
    # It waits for eight prompts of eight pages, a second each, and the tokens after them.
    early_s, last = 2 * PAGES * PAGE_S + EARLY_S, f"r{FIRST}"
    assert world.cache._prefetcher._wait_s(last) == 66.0 > early_s
    queue = world.cache._queue
    for rid in queue.first(FIRST):
        queue.expect(rid, 1)
    queue.expect("r0", int(early_s * GEOMETRY.page_size) - FIRST + 2)
    world.step()
    assert state(world, last) is State.QUEUED
    queue.expect("r0", int(early_s * GEOMETRY.page_size) - FIRST)
    world.settle()
    world.until(lambda: state(world, last) is State.ARRIVED)


def test_while_speeds_are_unknown_all_prefetches_start_at_once() -> None:
    backend = filled(GatedBackend(), *PROMPTS)
    config = every_hit(prefetch=prefetch(operations_max=20))
    world = World(device_pages=64, host_pages=400, backend=backend, config=config)
    for number, key in enumerate(PROMPTS):
        world.cache.prefetch_from_storage(f"r{number}", key)
    assert world.cache._prefetcher._table.count(State.QUEUED) == 0


def test_a_request_deep_in_the_queue_that_could_run_starts_its_prefetch_when_it_asks() -> None:
    world = world_of(filled(GatedBackend(), PROMPTS[FIRST]))
    for number in range(FIRST + 1):
        world.cache.prefetch_from_storage(f"r{number}", PROMPTS[number])
    world.settle()
    assert state(world, f"r{FIRST}") is State.QUEUED
    world.arrive(f"r{FIRST}")
    assert world.attempt(f"r{FIRST}", PROMPTS[FIRST]).storage_hit_tokens == PROMPT_TOKENS


# Second looks


def test_a_waiting_request_gets_pages_that_another_engine_has_stored_meanwhile() -> None:
    backend, clock = GatedBackend(), ShiftedClock()
    world = world_of(backend, clock=clock)
    world.prefetch("a", PROMPTS[0])
    filled(backend, PROMPTS[0])
    world.step()
    assert world.controller.idle and backend.lookups == 0, "it is too early"
    clock.shift_s += 2 * AGAIN_S
    world.step()
    world.settle()
    assert backend.lookups == 1
    assert world.attempt("a", PROMPTS[0]).storage_hit_tokens == PROMPT_TOKENS


class SlowLookups(GatedBackend):
    """A store whose lookups wait while `reads` is not set."""

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        assert self.reads.wait(30)
        return super()._exists(call, keys)


def test_a_second_lookup_neither_delays_its_request_nor_counts_as_cut_off() -> None:
    backend, clock = SlowLookups(), ShiftedClock()
    world = world_of(backend, clock=clock)
    world.prefetch("a", PROMPTS[0])
    backend.reads.clear()
    clock.shift_s += 2 * AGAIN_S
    world.step()
    assert state(world, "a") is State.LOOKING_UP
    assert world.cache.check_prefetch_progress("a")
    skipped = world.skipped
    assert world.attempt("a", PROMPTS[0]).cached_tokens == 0
    assert world.skipped == skipped
    backend.reads.set()
    world.settle()
    assert remains(world) == []


def test_only_the_first_waiting_requests_are_looked_up_again_and_each_once_per_interval() -> None:
    backend, clock = GatedBackend(), ShiftedClock()
    world = world_of(
        backend, clock=clock, break_even=BreakEven(BreakEvenConfig(mode="always")),
        config=every_hit(prefetch=prefetch(operations_max=20)),
    )
    for number in range(FIRST + 4):
        world.cache.prefetch_from_storage(f"r{number}", PROMPTS[number])
    world.settle()
    for rounds in (1, 2):
        clock.shift_s += 2 * AGAIN_S
        for _ in range(3):
            world.step()
            world.settle()
        assert backend.lookups == FIRST + 4 + rounds * FIRST


def test_a_prompt_that_is_cached_is_looked_up_after_its_pages_have_been_evicted() -> None:
    backend, clock = filled(GatedBackend(), PROMPTS[0]), ShiftedClock()
    world = world_of(backend, clock=clock)
    world.serve("before", PROMPTS[0])
    assert not world.cache.prefetch_from_storage("a", PROMPTS[0])
    assert world.skipped == {"prefetch_too_short": 1}
    world.forget()
    clock.shift_s += 2 * AGAIN_S
    world.step()
    world.settle()
    assert world.attempt("a", PROMPTS[0]).storage_hit_tokens == PROMPT_TOKENS


# Parts


def test_only_the_pages_that_pay_are_read() -> None:
    backend = filled(GatedBackend(), PROMPTS[1])
    # A page is computed in 50 ms and read in 100, so a wait for 7 pages and a token pays for 7 pages.
    world = world_of(backend, 0.05)
    world.cache.prefetch_from_storage("first", prompt(*range(1, 8)))
    world.cache.prefetch_from_storage("a", PROMPTS[1])
    world.settle()
    assert world.cache.statistics().break_even.decisions["prefetch", "partly"] == 1
    assert backend.pages_read == 7
    assert world.attempt("a", PROMPTS[1]).storage_hit_tokens == 7 * GEOMETRY.page_size


def test_a_hit_on_a_slow_store_is_refused_if_its_request_does_not_wait() -> None:
    # The control of the test above.
    backend = filled(GatedBackend(), PROMPTS[1])
    world = world_of(backend, 0.05)
    world.cache.prefetch_from_storage("a", PROMPTS[1])
    world.settle()
    assert world.skipped == {"prefetch_does_not_pay": 1} and backend.pages_read == 0


# L1


def test_a_prefetch_that_alone_locks_l1_gives_way_when_nothing_runs() -> None:
    key = prompt(*range(1, 17))
    backend = filled(GatedBackend(), key)
    world = World(device_pages=12, host_pages=64, backend=backend)
    world.serve("head", prompt(*range(1, 5), tail=0))
    world.settle()
    backend.entered.clear()
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", prompt(*range(1, 11)))
    world.until(backend.entered.is_set)
    other = prompt(*range(50, 60))
    running = world.begin("running", prompt(99, tail=0))
    assert world.cache.begin_request("b", other) is None, "a request runs, and will leave room"
    world.cache.cache_finished_req(running, None)
    request = world.begin("b", other)
    assert state(world, "a") is State.CANCELLED
    backend.reads.set()
    world.cache.cache_finished_req(request, None)
    world.cache.abort_prefetch("a")


# Nothing remains


def begin_and_end(world: World, rid: str, key: RadixKey) -> None:
    world.attempt(rid, key)


def abort(world: World, rid: str, key: RadixKey) -> None:
    world.cache.abort_prefetch(rid)


def preempt(world: World, rid: str, key: RadixKey) -> None:
    """Compute a part of the prompt, end the request, and serve it again."""
    request = world.begin(rid, key)
    computed = key.head(request.shared_pages * GEOMETRY.page_size)
    world.cache.cache_unfinished_req(request, computed)
    world.cache.cache_finished_req(request, computed)
    world.serve(rid, key)


def clear_then_begin(world: World, rid: str, key: RadixKey) -> None:
    world.cache.clear()
    world.attempt(rid, key)


def clear_while_it_runs(world: World, rid: str, key: RadixKey) -> None:
    request = world.begin(rid, key)
    world.cache.clear()
    world.cache.cache_unfinished_req(request, key.head(PROMPT_TOKENS))
    world.cache.cache_finished_req(request, key.head(PROMPT_TOKENS))


def clear_then_abort(world: World, rid: str, key: RadixKey) -> None:
    world.cache.clear()
    world.cache.abort_prefetch(rid)


WAYS = [begin_and_end, abort, preempt, clear_then_begin, clear_while_it_runs, clear_then_abort]


@pytest.mark.parametrize("kind", [HiRadixCache, SessionCache])
@pytest.mark.parametrize("end", WAYS)
def test_nothing_of_a_request_remains_however_it_ends(
    end: Callable[[World, str, RadixKey], None], kind: type[HiRadixCache]
) -> None:
    backend = filled(GatedBackend(), *PROMPTS[:3])
    world = world_of(backend, kind=kind)
    world.serve("cached", PROMPTS[1])
    for number, waits in enumerate((True, True, False)):  # from storage; too short; while its operation is in flight
        world.cache.prefetch_from_storage(f"r{number}", PROMPTS[number])
        if waits:
            world.arrive(f"r{number}")
    assert len(remains(world)) == 6
    for number in range(3):
        end(world, f"r{number}", PROMPTS[number])
    world.settle()
    assert remains(world) == []


def test_requests_are_still_waiting_or_running_after_new_weights() -> None:
    backend = GatedBackend()
    world = world_of(backend, open_storage=lambda epoch: GatedBackend(codec(epoch)))
    for rid, key in (("waiting", PROMPTS[0]), ("running", PROMPTS[1])):
        world.prefetch(rid, key)
    request = world.begin("running", PROMPTS[1])
    world.cache.update_weights(1)
    assert remains(world) == ["waiting", "running"]  # in the order of their arrivals
    world.cache.cache_finished_req(request, None)
    world.attempt("waiting", PROMPTS[0])
    assert remains(world) == []


def test_a_turn_that_ends_before_its_prompt_is_computed_does_not_remain() -> None:
    world = world_of(GatedBackend(), kind=SessionCache)
    cache = world.cache
    assert isinstance(cache, SessionCache)
    cache.open_session("s")
    cache.join_session("r", "s")
    request = world.begin("r", PROMPTS[0])
    cache.cache_finished_req(request, PROMPTS[0].head(10))
    assert remains(world) == []


def test_a_turn_that_waits_again_keeps_its_place_when_its_session_releases_its_kv() -> None:
    world = world_of(GatedBackend(), kind=SessionCache)
    cache = world.cache
    assert isinstance(cache, SessionCache)
    cache.open_session("s")
    cache.join_session("r", "s")
    cache.cache_finished_req(world.begin("r", PROMPTS[0]), PROMPTS[0].head(10))
    world.prefetch("r", PROMPTS[0])
    cache.drop_all()
    assert cache._queue.first(9) == ["r"]
    cache.abort_prefetch("r")


def test_the_time_of_a_turn_runs_while_idle_sessions_alone_fill_l1() -> None:
    backend, clock = filled(GatedBackend(), PROMPTS[0]), ShiftedClock()
    world = world_of(backend, kind=SessionCache, clock=clock)
    cache = world.cache
    assert isinstance(cache, SessionCache)
    for rid, key in (("idle", prompt(*range(1000, 1055))), ("turn", prompt(1, 2))):
        cache.open_session(rid)
        cache.join_session(rid, rid)
        request = world.begin(rid, key)
        if rid == "idle":
            cache.cache_finished_req(request, key)
    world.settle()
    backend.reads.clear()
    cache.prefetch_from_storage("a", PROMPTS[0])
    world.until(backend.entered.is_set)
    assert not HiRadixCache._may_have_room(cache, 9)
    assert not cache.check_prefetch_progress("a")
    clock.shift_s += 10
    world.step()
    assert cache.check_prefetch_progress("a")
    backend.reads.set()
    world.attempt("a", PROMPTS[0])
    cache.cache_finished_req(request, None)


# Engines with a device cache of their own


def test_an_aborted_request_of_a_host_cache_does_not_remain() -> None:
    world = HostWorld(backend=GatedBackend())
    world.cache.prefetch("a", prompt(1, 2))
    world.cache.abort("a")
    world.settle()
    assert remains(world) == []


def test_keys_without_tokens_wait_by_their_pages() -> None:
    world = HostWorld(host_pages=100, backend=GatedBackend(), position_bytes=32)
    for rid in "ab":
        world.cache.prefetch(rid, RadixKey.of_hashes([bytes([ord(rid), page]) * 16 for page in range(8)]))
    assert world.cache._queue.wait_s("b", 32, 0.0) == 1.0
    for rid in "ab":
        world.cache.abort(rid)
