"""Prefetches wait, and are not dropped, if they cannot start at once or if L2 has no room for their pages yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import hicache.cache.prefetch
from hicache.backends.base import Direction
from hicache.backends.calls import Call
from hicache.backends.file import FileDriver
from hicache.backends.store import Store
from hicache.cache.prefetch_states import State
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config import HiCacheConfig
from hicache.config.storage import FileStorageOptions
from hicache.errors import BackendError
from hicache.keys import RadixKey
from hicache_lab import conformance
from tests.cache.host_world import HostWorld
from tests.cache.world import GatedBackend, ShiftedClock, World, codec, every_hit, filled, prefetch, prompt
from tests.waiting import WAIT_S, wait_for

PROMPTS = [prompt(*range(10 * number + 1, 10 * number + 9)) for number in range(100)]
HOST_PAGES = 40  # prefetches may use half of them: room for two prompts


def configuration(**changes: object) -> HiCacheConfig:
    """Return a configuration that fetches every hit, and lets a request wait for it for a long time."""
    return every_hit(prefetch=prefetch(**{"policy": "wait_complete", **changes}))


def store_of(*keys: RadixKey) -> GatedBackend:
    """Return a store that has the pages of `keys`."""
    return filled(GatedBackend(), *keys)


def file_store(path: Path) -> Store:
    return conformance.store_of(FileDriver, codec(), FileStorageOptions(path=path, free_space_floor=0))


def world_of(backend: GatedBackend, clock: Clock = SYSTEM_CLOCK, **changes: object) -> World:
    return World(device_pages=32, host_pages=32, backend=backend, config=configuration(**changes), clock=clock)


def two_turns(clock: Clock = SYSTEM_CLOCK, **changes: object) -> tuple[GatedBackend, World]:
    """Return a store, and a world in which "b" waits for its turn behind the prefetch of "a", whose read waits."""
    backend = store_of(*PROMPTS[:2])
    world = world_of(backend, clock, operations_max=1, **changes)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    world.cache.prefetch_from_storage("b", PROMPTS[1])
    return backend, world


def no_room() -> World:
    """Return a world in which the prefetches of "a" and "b" are started, and the share of L2 has room for one."""
    world = world_of(store_of(*PROMPTS[:2]), host_share=0.25)
    for rid, key in zip("ab", PROMPTS[:2], strict=True):
        world.cache.prefetch_from_storage(rid, key)
    return world


# 100 requests at once


def stored_pages_of_radix_cache(path: Path) -> list[int]:
    """Serve all prompts with an engine that embeds the cache; return how many pages of each came from storage."""
    filled(file_store(path), *PROMPTS)
    world = World(device_pages=32, host_pages=HOST_PAGES, backend=file_store(path), config=configuration())

    def serve(rid: str, key: RadixKey) -> int | None:
        request = world.try_begin(rid, key) if world.cache.check_prefetch_progress(rid) else None
        if request is None:
            return None
        world.cache.cache_finished_req(request, key)
        return request.storage_hit_tokens // 4

    return all_at_once(world, world.cache.prefetch_from_storage, serve)


def stored_pages_of_host_cache(path: Path) -> list[int]:
    """As `stored_pages_of_radix_cache`, with an engine that has its own device cache."""
    filler = HostWorld(host_pages=1000, backend=file_store(path))
    for number, key in enumerate(PROMPTS):
        filler.write(f"store {number}", key)
        filler.settle()
    filler.close()
    world = HostWorld(host_pages=HOST_PAGES, backend=file_store(path), config=configuration())

    def serve(rid: str, key: RadixKey) -> int | None:
        return world.load(rid, key) if world.cache.check_prefetch(rid) else None

    return all_at_once(world, world.cache.prefetch, serve)


def all_at_once(
    world: World | HostWorld, start: Callable[[str, RadixKey], bool], serve: Callable[[str, RadixKey], int | None]
) -> list[int]:
    """Start the prefetches of all prompts, and serve each prompt as soon as it need not wait."""
    waiting = {str(number): key for number, key in enumerate(PROMPTS)}
    assert all(start(rid, key) for rid, key in waiting.items())
    pages: list[int] = []

    def all_served() -> bool:
        for rid, key in list(waiting.items()):
            if (served := serve(rid, key)) is not None:
                pages.append(served)
                del waiting[rid]
        return not waiting

    world.until(all_served)
    assert world.skipped == {} and world.controller.statistics().refused == {}
    world.close()
    return pages


@pytest.mark.parametrize("serve_all", [stored_pages_of_radix_cache, stored_pages_of_host_cache])
def test_100_stored_prompts_that_arrive_at_once_are_served_from_storage(
    serve_all: Callable[[Path], list[int]], tmp_path: Path
) -> None:
    assert serve_all(tmp_path / "store") == [8] * 100


# Turns


def test_a_prefetch_above_the_limit_starts_when_another_one_ends() -> None:
    backend = store_of(*PROMPTS[:3])
    world = world_of(backend, operations_max=1)
    backend.reads.clear()
    for rid, key in zip("abc", PROMPTS[:3], strict=True):
        assert world.cache.prefetch_from_storage(rid, key)
    world.until(backend.entered.is_set)
    assert not any(world.cache.check_prefetch_progress(rid) for rid in "abc")
    assert (backend.lookups, world.cache.statistics().prefetches_waiting) == (1, 2)
    backend.reads.set()
    for rid, key in zip("abc", PROMPTS[:3], strict=True):
        world.arrive(rid)
        assert world.attempt(rid, key).storage_hit_tokens == 32
    assert world.cache.statistics().prefetches_waiting == 0


def test_requests_take_turns_in_order_of_arrival_even_if_they_were_followers() -> None:
    backend = store_of(PROMPTS[0], PROMPTS[1])
    world = world_of(backend, operations_max=1)
    backend.reads.clear()
    world.cache.prefetch_from_storage("leader", PROMPTS[0])
    world.cache.prefetch_from_storage("follower", PROMPTS[0])
    world.cache.prefetch_from_storage("later", PROMPTS[1])
    world.cache.abort_prefetch("leader")
    assert [prefetch.rid for prefetch in world.cache._prefetcher._table.of(State.QUEUED)] == ["follower", "later"]
    backend.reads.set()
    world.arrive("later")
    assert world.attempt("follower", PROMPTS[0]).storage_hit_tokens == 32
    world.cache.abort_prefetch("later")


def test_a_request_that_begins_before_its_turn_is_computed_and_counted() -> None:
    backend, world = two_turns()
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 0
    assert world.skipped == {"prefetch_queued": 1}
    backend.reads.set()
    world.cache.abort_prefetch("a")


def test_an_aborted_request_leaves_the_queue_and_is_not_counted() -> None:
    backend, world = two_turns()
    world.cache.abort_prefetch("b")
    assert world.cache.check_prefetch_progress("b")
    assert world.cache.statistics().prefetches_waiting == 0
    backend.reads.set()
    world.settle()
    assert backend.lookups == 1 and world.skipped == {}
    world.cache.abort_prefetch("a")


def test_the_queue_is_bounded_and_rejected_prefetches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hicache.cache.prefetch, "WAITING_MAX", 1)
    backend = store_of(*PROMPTS[:3])
    world = world_of(backend, operations_max=1)
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("a", PROMPTS[0])
    assert world.cache.prefetch_from_storage("b", PROMPTS[1])
    assert not world.cache.prefetch_from_storage("c", PROMPTS[2])
    assert world.cache.check_prefetch_progress("c")
    assert world.controller.statistics().refused == {"prefetch": 1}
    backend.reads.set()
    world.arrive("b")
    for rid in "ab":
        world.cache.abort_prefetch(rid)


def test_the_prefetch_of_a_request_stays_queued_after_the_timeout() -> None:
    clock = ShiftedClock()
    backend, world = two_turns(clock, policy="timeout", timeout_base=5, timeout_per_1024_tokens=0)
    world.until(backend.entered.is_set)
    assert not world.cache.check_prefetch_progress("b")
    clock.shift_s = 6
    world.step()
    assert world.cache.check_prefetch_progress("b")
    backend.reads.set()
    world.until(lambda: world.controller.statistics().prefetched_pages == 16)
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 32
    world.cache.abort_prefetch("a")


def test_with_best_effort_a_request_does_not_wait_for_its_turn_but_uses_it_if_it_comes() -> None:
    backend, world = two_turns(policy="best_effort")
    assert world.cache.check_prefetch_progress("b")
    backend.reads.set()
    world.until(lambda: world.controller.statistics().prefetched_pages == 16)
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 32
    world.cache.abort_prefetch("a")


def test_a_request_that_finds_no_room_on_l1_keeps_its_turn() -> None:
    backend = store_of(*PROMPTS[:2])
    world = world_of(backend, policy="best_effort", operations_max=1)
    running = world.begin("running", prompt(*range(900, 930)))
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    world.cache.prefetch_from_storage("b", PROMPTS[1])
    assert world.cache.begin_request("b", PROMPTS[1]) is None
    backend.reads.set()
    world.until(lambda: world.controller.statistics().prefetched_pages == 16)
    world.cache.cache_finished_req(running, None)
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 32
    world.cache.abort_prefetch("a")


# While storage is paused


def test_a_prefetch_waits_until_storage_works_again_but_its_request_does_not(long_back_off: float) -> None:
    backend, clock = store_of(PROMPTS[0]), ShiftedClock()
    world = world_of(backend, clock)
    world.controller.gate.failed(Direction.READ)
    world.step()
    assert world.cache.prefetch_from_storage("a", PROMPTS[0])
    assert world.cache.check_prefetch_progress("a") and backend.lookups == 0
    clock.shift_s = long_back_off
    world.until(lambda: world.controller.statistics().prefetched_pages == 8)
    assert world.attempt("a", PROMPTS[0]).storage_hit_tokens == 32
    assert world.skipped == {}


@pytest.mark.usefixtures("long_back_off")
def test_a_request_that_begins_while_storage_is_paused_is_computed_and_counted() -> None:
    world = world_of(store_of(PROMPTS[0]))
    world.controller.gate.failed(Direction.READ)
    world.step()
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    assert world.attempt("a", PROMPTS[0]).storage_hit_tokens == 0
    assert world.skipped == {"prefetch_paused": 1}


@pytest.mark.parametrize("end", ["clear", "detach"])
def test_waiting_prefetches_end_when_the_cache_is_cleared_or_the_store_detached(end: str) -> None:
    backend = store_of(*PROMPTS[:4])
    world = world_of(backend, operations_max=2, host_share=0.25)
    for rid, key in zip("abcd", PROMPTS[:4], strict=True):  # one arrives, one waits for room, two wait for their turn
        world.cache.prefetch_from_storage(rid, key)
    world.until(lambda: world.controller.statistics().prefetched_pages == 8 and bool(for_room(world)))
    world.cache.clear() if end == "clear" else world.cache.storage.detach()
    assert all(world.cache.check_prefetch_progress(rid) for rid in "abcd")
    assert world.cache.statistics().prefetches_waiting == 0
    prefetcher = world.cache._prefetcher  # an operation in flight may end after the next step
    world.until(lambda: not prefetcher._operations and not prefetcher.share.arrived_pages)


# Room on L2


def for_room(world: World) -> list[str]:
    """Return the ids of the requests whose prefetch waits for room."""
    return [prefetch.rid for prefetch in world.cache._prefetcher._table.of(State.AWAITING_ROOM)]


def test_found_pages_are_read_when_another_request_uses_its_arrived_pages() -> None:
    world = no_room()
    world.until(lambda: world.cache.check_prefetch_progress("a") and for_room(world) == ["b"])
    for _ in range(5):
        world.step()
    assert not world.cache.check_prefetch_progress("b")
    assert world.attempt("a", PROMPTS[0]).storage_hit_tokens == 32
    world.arrive("b")
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 32
    assert world.skipped == {}


def test_a_request_that_begins_before_its_prefetch_has_room_is_computed_and_counted() -> None:
    world = no_room()
    world.until(lambda: for_room(world) == ["b"])
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 0
    assert world.skipped == {"prefetch_host_share": 1}
    world.arrive("a")
    world.cache.abort_prefetch("a")


def test_a_short_prefetch_does_not_overtake_a_longer_one_that_waits_for_room() -> None:
    short = prompt(901, 902)
    world = world_of(store_of(*PROMPTS[:2], short), host_share=0.375)
    for rid, key in zip("abc", (*PROMPTS[:2], short), strict=True):  # 8 of 12 pages arrive; 8 and 2 wait
        world.cache.prefetch_from_storage(rid, key)
    world.until(lambda: for_room(world) == ["b", "c"])
    world.cache.abort_prefetch("a")
    world.until(lambda: all(world.cache.check_prefetch_progress(rid) for rid in "bc"))
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 32
    assert world.attempt("c", short).storage_hit_tokens == 8


def test_a_prefetch_that_waits_for_room_holds_no_pages() -> None:
    """If waiting prefetches held their prefixes, these could fill L2, and no prefetch could continue."""
    heads = [prompt(*range(10 * n + 1, 10 * n + 5)) for n in range(6)]
    world = World(device_pages=64, host_pages=32, backend=store_of(*PROMPTS[:6]), config=configuration(host_share=0.5))
    for number, head in enumerate(heads):  # 24 pages of L2 are heads of the prompts
        world.serve(f"head {number}", head)
    world.leave_l1()
    assert world.cache.tree.host_evictable_pages == 24
    for number, key in enumerate(PROMPTS[:6]):
        world.cache.prefetch_from_storage(str(number), key)
    world.until(lambda: len(for_room(world)) > 1)
    for number, key in enumerate(PROMPTS[:6]):
        world.until(lambda n=number: world.cache.check_prefetch_progress(str(n)))  # type: ignore[misc]
        assert world.attempt(str(number), key).cached_tokens == 32
    assert world.skipped == {}


def test_of_a_stored_prefix_longer_than_the_share_the_pages_that_fit_are_read() -> None:
    long = prompt(*range(1, 25))
    world = world_of(store_of(long), host_share=0.25)
    world.cache._prefetcher.share.promote = None  # otherwise the other pages would follow through L1
    assert world.serve("a", long).storage_hit_tokens == 32


def test_if_no_other_prefetch_will_free_room_the_pages_that_fit_are_read() -> None:
    long = prompt(*range(1, 17))
    world = world_of(store_of(long), host_share=1.0)
    world.cache._prefetcher.share.promote = None
    kept = prompt(*range(900, 920))
    world.serve("kept", kept)
    world.settle()
    world.cache.tree.hold_host(held := world.cache.tree.match(kept).node)  # as a long load does
    world.prefetch("a", long)
    assert world.attempt("a", long).storage_hit_tokens == 12 * 4
    assert world.skipped.get("prefetch_no_host_room", 0) == 0
    world.cache.tree.release_host(held)


def test_if_no_other_prefetch_will_free_room_and_no_page_fits_the_prefetch_is_dropped() -> None:
    world = world_of(store_of(PROMPTS[0]), host_share=1.0)
    held = world.cache.controller.host.alloc(32)
    assert held is not None
    world.cache._l2.reserved_pages += 32
    world.prefetch("a", PROMPTS[0])
    assert world.skipped == {"prefetch_no_host_room": 1}
    world.cache._l2.release(held)


def test_a_prefetch_does_not_wait_for_pages_that_arrived_for_its_own_request() -> None:
    world = world_of(store_of(prompt(*range(1, 17))), host_share=0.25)
    world.prefetch("a", prompt(*range(1, 9)))
    world.prefetch("a", prompt(*range(1, 17)))
    assert world.skipped == {"prefetch_host_share": 1}
    assert world.attempt("a", prompt(*range(1, 17))).storage_hit_tokens == 32


def test_pages_that_others_compute_while_a_prefetch_waits_for_room_are_not_read() -> None:
    world = no_room()
    world.until(lambda: for_room(world) == ["b"])
    world.cache.cache_finished_req(world.begin("other", prompt(11, 12, 13)), prompt(11, 12, 13))
    world.settle()
    world.cache.abort_prefetch("a")
    world.arrive("b")
    assert world.controller.statistics().prefetched_pages == 8 + 5
    assert world.attempt("b", PROMPTS[1]).cached_tokens == 32


# The share of L2, and the pages that have arrived


def test_a_lookup_that_ends_in_the_step_of_a_read_does_not_get_the_room_of_its_pages() -> None:
    backend = store_of(*PROMPTS[:2])
    world = World(device_pages=64, host_pages=32, backend=backend, config=configuration(host_share=0.25))
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    world.until(lambda: world.controller.read_pages == 8)
    lookups = backend.lookups
    world.cache.prefetch_from_storage("b", PROMPTS[1])
    wait_for(lambda: backend.lookups > lookups)
    backend.reads.set()
    wait_for(lambda: world.controller._storage._finished.qsize() == 2)
    world.step()
    assert world.cache._prefetcher.share.free_pages >= 0
    assert world.attempt("a", PROMPTS[0]).storage_hit_tokens == 32
    world.arrive("b")
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 32


def world_whose_l1_is_held() -> tuple[World, dict[str, RadixKey]]:
    """Return a world with two requests that can begin. Their arrived pages hold their prefixes, which fill L1 except
    for one page, and L2 has no room for these."""
    keys = {rid: prompt(*range(first, first + 20)) for rid, first in (("a", 1), ("b", 101))}
    store = store_of(*keys.values())
    world = World(device_pages=33, host_pages=8, backend=store, config=configuration(host_share=1.0))
    world.cache._prefetcher.share.promote = None
    for key in keys.values():
        part = key.head(64)
        world.cache.cache_finished_req(world.begin("first", part), part)
        world.settle()
    for rid, key in keys.items():
        assert world.cache.prefetch_from_storage(rid, key)
    world.until(lambda: all(map(world.cache.check_prefetch_progress, keys)))
    world.settle()
    assert world.cache._prefetcher.share.arrived_pages == 8
    return world, keys


def test_requests_whose_arrived_pages_keep_each_others_room_on_l1_can_begin() -> None:
    world, keys = world_whose_l1_is_held()

    def all_have_begun() -> bool:
        for rid, key in list(keys.items()):
            if (request := world.try_begin(rid, key)) is not None:
                assert request.host_hit_tokens == 0  # also for the request whose pages were released for the other one
                world.cache.cache_finished_req(request, None)
                del keys[rid]
        return not keys

    world.until(all_have_begun)


def test_a_running_request_gets_the_room_on_l1_that_arrived_pages_hold() -> None:
    world, _ = world_whose_l1_is_held()
    request = world.begin("running", prompt(500).head(2))
    world.until(lambda: world.cache.extend(request, 9))
    world.cache.cache_finished_req(request, None)


@pytest.mark.parametrize("turn", ["follows", "waits for room"])
def test_a_request_that_starts_again_does_not_wait_for_one_that_waits_for_its_room(turn: str) -> None:
    key, other = prompt(*range(1, 25)), prompt(*range(101, 109))
    world = World(device_pages=64, host_pages=32, backend=store_of(key, other), config=configuration(host_share=0.25))
    world.cache._prefetcher.share.promote = None
    world.prefetch("a", key.head(33))
    assert world.cache._prefetcher.share.free_pages == 0
    key_b = key if turn == "follows" else other
    assert world.cache.prefetch_from_storage("b", key_b)
    if turn == "follows":
        world.until(lambda: for_room(world) == ["b"])
    assert world.cache.prefetch_from_storage("a", key)
    world.arrive("b")
    assert world.attempt("b", key_b).storage_hit_tokens == 32
    world.arrive("a")
    request = world.attempt("a", key)
    # Pages that arrived at the first start are hits in storage too, although they were not held.
    assert (request.storage_hit_tokens, request.host_hit_tokens) == (32 if turn == "follows" else 64, 0)


def test_a_request_that_starts_again_and_waits_for_its_turn_releases_its_pages() -> None:
    key = prompt(*range(1, 17))
    backend = store_of(key, PROMPTS[5])
    world = world_of(backend, operations_max=1)
    world.prefetch("a", key.head(33))
    assert world.cache._prefetcher.share.arrived_pages == 8
    backend.reads.clear()
    world.cache.prefetch_from_storage("b", PROMPTS[5])
    assert world.cache.prefetch_from_storage("a", key)
    waiting = world.cache._prefetcher._table.get("a")
    assert waiting is not None and waiting.state is State.QUEUED
    assert world.cache._prefetcher.share.arrived_pages == 0
    backend.reads.set()
    world.arrive("b", "a")
    assert world.attempt("a", key).storage_hit_tokens == 64


def test_a_failure_of_a_store_that_was_replaced_does_not_pause_the_new_one() -> None:
    class Failing(GatedBackend):
        def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
            self.entered.set()
            assert self.reads.wait(WAIT_S)
            raise BackendError("the old store is dead")

    old = Failing()
    world = world_of(old)
    old.reads.clear()
    world.cache.prefetch_from_storage("a", PROMPTS[1])
    world.until(old.entered.is_set)
    world.cache.storage.attach(lambda epoch: store_of(PROMPTS[0]))
    world.until(lambda: world.controller.gate.may(Direction.READ))
    old.reads.set()
    world.until(lambda: world.cache.statistics().lookups["failed"] == 1)
    assert world.controller.gate.may(Direction.READ)
