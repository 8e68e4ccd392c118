"""Mistakes of the calling engine: each is an error that changes nothing, or one warning that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.cache import ChunkCache, SessionCache
from hicache.cache.misuse import CALLS_PER_LOOK, STARVED_LOG_S, STARVED_S, UNPOLLED_S
from hicache.errors import InvalidInput, WrongThread
from hicache.tiers import create_device_pool
from tests.cache.host_world import HostWorld
from tests.cache.ranked import decisions
from tests.cache.world import GEOMETRY, GatedBackend, StepClock, World, prompt
from tests.log_records import messages_of, records_of

KEY = prompt(1, 2, 3)


def on_another_thread(*calls: Callable[[], object]) -> None:
    """Make calls on a thread that ends afterwards; raise its error."""
    with ThreadPoolExecutor(1) as pool:
        for call in calls:
            pool.submit(call).result(30)


CALLS: dict[str, Callable[[World], object]] = {
    "poll": lambda world: world.cache.poll(),
    "begin_request": lambda world: world.cache.begin_request("b", KEY),
    "prefetch_from_storage": lambda world: world.cache.prefetch_from_storage("b", KEY),
    "check_prefetch_progress": lambda world: world.cache.check_prefetch_progress("b"),
    "evict": lambda world: world.cache.evict(1),
    "pin": lambda world: world.cache.pin(KEY, 1),
    "clear": lambda world: world.cache.clear(),
    "update_weights": lambda world: world.cache.update_weights(1),
    "drain": lambda world: (world.admit("c", KEY), world.cache.drain(1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_second_thread_is_an_error_that_changes_nothing(name: str) -> None:
    world = World()
    request = world.begin("a", KEY)
    before = decisions(world, [request])
    with pytest.raises(WrongThread, match=r"owns the cache.*take_over\(\)"):
        on_another_thread(lambda: CALLS[name](world))
    assert decisions(world, [request]) == before
    with pytest.raises(WrongThread):
        on_another_thread(lambda: world.cache.cache_unfinished_req(request, KEY))
    with pytest.raises(WrongThread):
        on_another_thread(lambda: world.cache.cache_finished_req(request, KEY))
    assert decisions(world, [request]) == before
    world.cache.cache_finished_req(request, KEY)


def test_the_thread_that_builds_a_cache_need_not_be_the_one_that_steps_it() -> None:
    world = World()
    world.leave()
    on_another_thread(lambda: world.serve("a", KEY))
    on_another_thread(world.close)  # the thread before has ended


def test_a_thread_may_take_the_cache_over_from_one_that_still_runs() -> None:
    world = World()
    world.serve("a", KEY)
    on_another_thread(world.cache.take_over, lambda: world.serve("b", KEY))
    world.serve("c", KEY)  # the other thread has ended, so this one is the owner again


def test_any_thread_may_read_statistics_and_close() -> None:
    world = World()
    world.serve("a", KEY)
    on_another_thread(world.cache.statistics)
    world.leave()
    on_another_thread(world.cache.close)
    assert not world.cache.poll()


def test_a_host_cache_and_a_chunk_cache_have_one_owner_too() -> None:
    world = HostWorld()
    key = KEY.head(12)
    world.write("a", key)
    load = world.begin_load("b", key, 0, 2)
    for call in (lambda: world.cache.lookup("c", key), lambda: world.cache.end_load(load, 0.1),
                 lambda: world.cache.begin_write("c", key), lambda: world.cache.prefetch("c", key)):
        with pytest.raises(WrongThread):
            on_another_thread(call)
    world.cache.end_load(load, 0.1)
    chunk = ChunkCache(create_device_pool(GEOMETRY, 8))
    chunk.begin_request("a", KEY)
    with pytest.raises(WrongThread):
        on_another_thread(lambda: chunk.begin_request("b", KEY))
    on_another_thread(chunk.take_over, lambda: chunk.begin_request("b", KEY))


def test_a_request_that_begins_twice_is_an_error_that_changes_nothing() -> None:
    world = World(kind=SessionCache)
    request = world.begin("a", KEY)
    before = decisions(world, [request])
    with pytest.raises(InvalidInput, match="'a' has already begun"):
        world.cache.begin_request("a", prompt(7))
    assert decisions(world, [request]) == before
    world.cache.cache_finished_req(request, KEY)


def test_a_request_may_begin_again_after_it_was_refused_preempted_or_aborted() -> None:
    world = World(device_pages=5)
    other = world.begin("other", prompt(8, 9))
    assert world.cache.begin_request("a", prompt(1, 2, 3, 4)) is None
    world.cache.cache_finished_req(other, None)
    for key in (prompt(1, 2, 3, 4), None):
        world.cache.cache_finished_req(world.begin("a", prompt(1, 2, 3, 4)), key)
    assert world.begin("a", prompt(1, 2, 3, 4)).cached_tokens == 16
    world.leave()


def test_a_cache_that_is_not_polled_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = StepClock()
    world = World(backend=GatedBackend(), clock=clock)
    world.cache.poll()
    world.cache.cache_finished_req(world.admit("a", prompt(1)), prompt(1))  # whose copy ends only in a poll
    clock.advance(0.9 * UNPOLLED_S)
    for number in range(CALLS_PER_LOOK):
        world.cache.check_prefetch_progress(f"b{number}")
    assert not messages_of(caplog, "cache.misuse")
    clock.advance(0.2 * UNPOLLED_S)
    for number in range(2 * CALLS_PER_LOOK):
        world.cache.check_prefetch_progress(f"c{number}")
    assert [record.levelname for record in records_of(caplog, "cache.misuse")] == ["WARNING"]
    assert "poll() was not called for 11 s, in which 16 calls for requests were made" in caplog.text
    world.leave()


def test_a_cache_that_is_polled_or_has_nothing_in_flight_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    clock = StepClock()
    world = World(clock=clock)
    for number in range(4):
        world.cache.cache_finished_req(world.admit(f"r{number}", prompt(number)), prompt(number))
        clock.advance(2 * UNPOLLED_S)
        world.cache.poll()
    world.settle()
    for number in range(2 * CALLS_PER_LOOK):
        world.cache.check_prefetch_progress(f"s{number}")
        clock.advance(UNPOLLED_S)
    assert not messages_of(caplog, "cache.misuse")
    world.leave()


def test_requests_that_never_end_are_named_when_another_cannot_begin(caplog: pytest.LogCaptureFixture) -> None:
    clock = StepClock()
    world = World(device_pages=8, clock=clock)
    for rid, key in (("small", prompt(1)), ("large", prompt(2, 3, 4))):
        world.admit(rid, key)
    waiting = prompt(5, 6, 7, 8)
    for _ in range(3):
        assert world.cache.begin_request("waiting", waiting) is None and not messages_of(caplog, "cache.misuse")
        clock.advance(STARVED_S / 2.5)
    assert world.cache.begin_request("waiting", waiting) is None
    assert world.cache.begin_request("waiting", waiting) is None
    (line,) = messages_of(caplog, "cache.misuse")
    assert "request 'waiting' has found no room on L1 for 36 s" in line
    assert "2 running requests use most: 'large' (4), 'small' (2)" in line
    clock.advance(STARVED_LOG_S)
    world.cache.begin_request("waiting", waiting)
    assert len(messages_of(caplog, "cache.misuse")) == 2
    world.leave()


def test_a_request_that_waits_a_while_and_begins_is_not_a_mistake(caplog: pytest.LogCaptureFixture) -> None:
    clock = StepClock()
    world = World(device_pages=4, clock=clock)
    for number in range(5):
        running = world.begin(f"a{number}", prompt(1, 2))
        assert world.cache.begin_request("b", prompt(3, 4)) is None
        clock.advance(0.9 * STARVED_S)
        world.cache.cache_finished_req(running, None)
        world.cache.cache_finished_req(world.begin("b", prompt(3, 4)), None)
    assert not messages_of(caplog, "cache.misuse")
