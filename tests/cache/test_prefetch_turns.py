"""Prefetches that cannot start at once, or whose pages have no room yet, wait instead of being given up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hicache.cache.prefetch
from hicache.backends.file import FileBackend
from hicache.backends.guard import Direction
from hicache.config import BreakEvenConfig, HiCacheConfig, PrefetchConfig
from hicache.config.storage import FileStorageOptions
from hicache.keys import RadixKey
from tests.cache.host_world import HostWorld
from tests.cache.world import GatedBackend, ShiftedClock, World, codec, prompt

PROMPTS = [prompt(*range(10 * number + 1, 10 * number + 9)) for number in range(100)]
HOST_PAGES = 40  # room for two prompts, because half of it is the share of prefetches


def configuration(**changes: object) -> HiCacheConfig:
    """Every hit is fetched, and a request waits long for it."""
    entries = {"policy": "wait_complete", "threshold_tokens": 4, **changes}
    return HiCacheConfig(
        load_back_threshold_tokens=4,
        break_even=BreakEvenConfig(mode="always"),
        prefetch=PrefetchConfig.model_validate(entries),
    )


def store_of(*keys: RadixKey) -> GatedBackend:
    """A store that has the pages of `keys`."""
    backend = GatedBackend()
    fill(World(device_pages=1000, host_pages=1000, backend=backend), *keys)
    backend.lookups = 0
    backend.entered.clear()
    return backend


def fill(world: World, *keys: RadixKey) -> None:
    for number, key in enumerate(keys):
        world.serve(f"store {number}", key)
        world.settle()
    world.close()


def file_store(path: Path) -> FileBackend:
    return FileBackend(codec(), FileStorageOptions(path=path, free_space_floor=0))


def world_of(backend: GatedBackend, **changes: object) -> World:
    return World(device_pages=32, host_pages=32, backend=backend, config=configuration(**changes))


def skipped(world: World | HostWorld) -> dict[str, int]:
    return {reason: count for reason, count in world.cache.statistics().skipped.items() if count}


# 100 at once


def stored_pages_of_radix_cache(path: Path) -> list[int]:
    """How many pages of each prompt came from storage, in an engine that embeds the cache."""
    fill(World(device_pages=1000, host_pages=1000, backend=file_store(path)), *PROMPTS)
    world = World(device_pages=32, host_pages=HOST_PAGES, backend=file_store(path), config=configuration())

    def serve(rid: str, key: RadixKey) -> int | None:
        request = world.try_begin(rid, key) if world.cache.check_prefetch_progress(rid) else None
        if request is None:
            return None
        world.cache.cache_finished_req(request, key)
        return request.storage_hit_tokens // 4

    return all_at_once(world, world.cache.prefetch_from_storage, serve)


def stored_pages_of_host_cache(path: Path) -> list[int]:
    """The same in an engine that has a device cache of its own."""
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
    world: World | HostWorld, prefetch: Callable[[str, RadixKey], bool], serve: Callable[[str, RadixKey], int | None]
) -> list[int]:
    """Let all prompts arrive, and serve each once it need not wait."""
    waiting = {str(number): key for number, key in enumerate(PROMPTS)}
    assert all(prefetch(rid, key) for rid, key in waiting.items())
    pages: list[int] = []

    def all_served() -> bool:
        for rid, key in list(waiting.items()):
            if (served := serve(rid, key)) is not None:
                pages.append(served)
                del waiting[rid]
        return not waiting

    world.until(all_served)
    assert skipped(world) == {} and world.controller.statistics().refused == {}
    world.close()
    return pages


@pytest.mark.parametrize("serve_all", [stored_pages_of_radix_cache, stored_pages_of_host_cache])
def test_100_stored_prompts_that_arrive_at_once_are_served_from_storage(
    serve_all: Callable[[Path], list[int]], tmp_path: Path
) -> None:
    assert serve_all(tmp_path / "store") == [8] * 100


# Turns


def test_a_prefetch_over_the_bound_starts_when_another_one_ends() -> None:
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
        world.until(lambda r=rid: world.cache.check_prefetch_progress(r))  # type: ignore[misc]
        assert world.attempt(rid, key).storage_hit_tokens == 32
    assert world.cache.statistics().prefetches_waiting == 0


def test_turns_come_in_order_of_arrival_also_for_requests_that_followed_first() -> None:
    backend = store_of(PROMPTS[0], PROMPTS[1])
    world = world_of(backend, operations_max=1)
    backend.reads.clear()
    world.cache.prefetch_from_storage("leader", PROMPTS[0])
    world.cache.prefetch_from_storage("follower", PROMPTS[0])
    world.cache.prefetch_from_storage("later", PROMPTS[1])
    world.cache.abort_prefetch("leader")
    assert [request.rid for request in world.cache._prefetcher._waiting._turns] == ["follower", "later"]
    backend.reads.set()
    world.until(lambda: world.cache.check_prefetch_progress("later"))
    assert world.attempt("follower", PROMPTS[0]).storage_hit_tokens == 32
    world.cache.abort_prefetch("later")


def test_a_request_that_begins_before_its_turn_is_computed_and_counted() -> None:
    backend = store_of(*PROMPTS[:2])
    world = world_of(backend, operations_max=1)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    world.cache.prefetch_from_storage("b", PROMPTS[1])
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 0
    assert skipped(world) == {"prefetch_queued": 1}
    backend.reads.set()
    world.cache.abort_prefetch("a")


def test_an_aborted_request_leaves_the_queue_and_is_not_counted() -> None:
    backend = store_of(*PROMPTS[:2])
    world = world_of(backend, operations_max=1)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    world.cache.prefetch_from_storage("b", PROMPTS[1])
    world.cache.abort_prefetch("b")
    assert world.cache.check_prefetch_progress("b")
    assert world.cache.statistics().prefetches_waiting == 0
    backend.reads.set()
    world.settle()
    assert backend.lookups == 1 and skipped(world) == {}
    world.cache.abort_prefetch("a")


def test_the_queue_is_bounded_and_counts_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
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
    world.until(lambda: world.cache.check_prefetch_progress("b"))
    for rid in "ab":
        world.cache.abort_prefetch(rid)


def test_the_time_of_a_request_runs_from_its_arrival_and_its_prefetch_stays_in_the_queue() -> None:
    backend, clock = store_of(*PROMPTS[:2]), ShiftedClock()
    options = configuration(policy="timeout", operations_max=1, timeout_base=5, timeout_per_1024_tokens=0)
    world = World(device_pages=32, host_pages=32, backend=backend, config=options, clock=clock)
    backend.reads.clear()
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    world.cache.prefetch_from_storage("b", PROMPTS[1])
    world.until(backend.entered.is_set)
    clock.shift_s = 6
    world.step()
    assert world.cache.check_prefetch_progress("b")
    backend.reads.set()
    world.until(lambda: world.controller.statistics().prefetched_pages == 16)
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 32
    world.cache.abort_prefetch("a")


def test_best_effort_waits_for_no_turn_and_uses_it_if_it_comes() -> None:
    backend = store_of(*PROMPTS[:2])
    world = world_of(backend, policy="best_effort", operations_max=1)
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    world.cache.prefetch_from_storage("b", PROMPTS[1])
    assert world.cache.check_prefetch_progress("b")
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


# A pause of storage


def test_a_prefetch_waits_out_a_pause_of_storage_but_its_request_does_not() -> None:
    backend = store_of(PROMPTS[0])
    world = world_of(backend)
    world.controller.gate.failed(Direction.READ)
    world.step()
    assert world.cache.prefetch_from_storage("a", PROMPTS[0])
    assert world.cache.check_prefetch_progress("a") and backend.lookups == 0
    world.until(lambda: world.controller.statistics().prefetched_pages == 8)
    assert world.attempt("a", PROMPTS[0]).storage_hit_tokens == 32
    assert skipped(world) == {}


def test_a_request_that_begins_in_a_pause_is_computed_and_counted() -> None:
    world = world_of(store_of(PROMPTS[0]))
    world.controller.gate.failed(Direction.READ)
    world.step()
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    assert world.attempt("a", PROMPTS[0]).storage_hit_tokens == 0
    assert skipped(world) == {"prefetch_paused": 1}


@pytest.mark.parametrize("end", ["clear", "detach"])
def test_waiting_prefetches_end_with_the_tree_and_with_their_store(end: str) -> None:
    backend = store_of(*PROMPTS[:4])
    world = world_of(backend, operations_max=2, host_share=0.25)
    for rid, key in zip("abcd", PROMPTS[:4], strict=True):  # one arrives, one waits for room, two for their turn
        world.cache.prefetch_from_storage(rid, key)
    world.until(lambda: world.controller.statistics().prefetched_pages == 8 and bool(for_room(world)))
    world.cache.clear() if end == "clear" else world.cache.storage.detach()
    assert all(world.cache.check_prefetch_progress(rid) for rid in "abcd")
    assert world.cache.statistics().prefetches_waiting == 0
    prefetcher = world.cache._prefetcher  # an operation on its way when the store went may end after the next step
    world.until(lambda: not prefetcher._active and not prefetcher._share.arrived_pages)


# Room on L2


def for_room(world: World) -> list[str]:
    """The requests whose prefetch waits for room."""
    return [prefetch.rid for prefetch in world.cache._prefetcher._for_room]


def test_what_was_found_is_read_when_what_arrived_for_another_request_is_used() -> None:
    world = world_of(store_of(*PROMPTS[:2]), host_share=0.25)
    for rid, key in zip("ab", PROMPTS[:2], strict=True):
        world.cache.prefetch_from_storage(rid, key)
    world.until(lambda: world.cache.check_prefetch_progress("a") and for_room(world) == ["b"])
    for _ in range(5):
        world.step()
    assert not world.cache.check_prefetch_progress("b")
    assert world.attempt("a", PROMPTS[0]).storage_hit_tokens == 32
    world.until(lambda: world.cache.check_prefetch_progress("b"))
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 32
    assert skipped(world) == {}


def test_a_request_that_begins_before_there_is_room_is_computed_and_counted() -> None:
    world = world_of(store_of(*PROMPTS[:2]), host_share=0.25)
    for rid, key in zip("ab", PROMPTS[:2], strict=True):
        world.cache.prefetch_from_storage(rid, key)
    world.until(lambda: for_room(world) == ["b"])
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 0
    assert skipped(world) == {"prefetch_host_share": 1}
    world.until(lambda: world.cache.check_prefetch_progress("a"))
    world.cache.abort_prefetch("a")


def test_a_short_prefetch_does_not_take_the_room_that_a_longer_one_waits_for() -> None:
    short = prompt(901, 902)
    world = world_of(store_of(*PROMPTS[:2], short), host_share=0.375)
    for rid, key in zip("abc", (*PROMPTS[:2], short), strict=True):  # 8 of 12 pages arrive; 8 and 2 wait
        world.cache.prefetch_from_storage(rid, key)
    world.until(lambda: for_room(world) == ["b", "c"])
    world.cache.abort_prefetch("a")
    world.until(lambda: all(world.cache.check_prefetch_progress(rid) for rid in "bc"))
    assert world.attempt("b", PROMPTS[1]).storage_hit_tokens == 32
    assert world.attempt("c", short).storage_hit_tokens == 8


def test_what_waits_for_room_holds_nothing_itself() -> None:
    """Prefixes that waiting prefetches held could be all of L2; then none of them would ever go on."""
    heads = [prompt(*range(10 * n + 1, 10 * n + 5)) for n in range(6)]
    world = World(device_pages=64, host_pages=32, backend=store_of(*PROMPTS[:6]), config=configuration(host_share=0.5))
    for number, head in enumerate(heads):  # 24 pages of L2 are heads of the prompts
        world.serve(f"head {number}", head)
    world.settle()
    world.cache.evict(100)
    assert world.cache.tree.host_evictable_pages == 24
    for number, key in enumerate(PROMPTS[:6]):
        world.cache.prefetch_from_storage(str(number), key)
    world.until(lambda: len(for_room(world)) > 1)
    for number, key in enumerate(PROMPTS[:6]):
        world.until(lambda n=number: world.cache.check_prefetch_progress(str(n)))  # type: ignore[misc]
        assert world.attempt(str(number), key).cached_tokens == 32
    assert skipped(world) == {}


def test_of_a_stored_prefix_that_is_longer_than_the_share_as_much_as_fits_is_read() -> None:
    long = prompt(*range(1, 25))
    world = world_of(store_of(long), host_share=0.25)
    world.cache._prefetcher.promote_with(None)  # or the rest would come by way of L1
    assert world.serve("a", long).storage_hit_tokens == 32


def test_what_fits_is_read_where_no_other_prefetch_will_give_room_back() -> None:
    long = prompt(*range(1, 17))
    world = world_of(store_of(long), host_share=1.0)
    world.cache._prefetcher.promote_with(None)
    kept = prompt(*range(900, 920))
    world.serve("kept", kept)
    world.settle()
    world.cache.tree.hold_host(held := world.cache.tree.match(kept).node)  # as a long load does
    world.cache.prefetch_from_storage("a", long)
    world.until(lambda: world.cache.check_prefetch_progress("a"))
    assert world.attempt("a", long).storage_hit_tokens == 12 * 4
    assert skipped(world).get("prefetch_no_host_room", 0) == 0
    world.cache.tree.release_host(held)


def test_a_prefetch_is_dropped_where_nothing_fits_and_no_other_one_will_give_room_back() -> None:
    world = world_of(store_of(PROMPTS[0]), host_share=1.0)
    held = world.cache.controller.host.alloc(32)
    assert held is not None
    world.cache._l2.reserved_pages += 32
    world.cache.prefetch_from_storage("a", PROMPTS[0])
    world.until(lambda: world.cache.check_prefetch_progress("a"))
    assert skipped(world) == {"prefetch_no_host_room": 1}
    world.cache._l2.release(held)


def test_no_prefetch_waits_for_pages_that_arrived_for_its_own_request() -> None:
    world = world_of(store_of(prompt(*range(1, 17))), host_share=0.25)
    world.cache.prefetch_from_storage("a", prompt(*range(1, 9)))
    world.until(lambda: world.cache.check_prefetch_progress("a"))
    world.cache.prefetch_from_storage("a", prompt(*range(1, 17)))
    world.until(lambda: world.cache.check_prefetch_progress("a"))
    assert skipped(world) == {"prefetch_host_share": 1}
    assert world.attempt("a", prompt(*range(1, 17))).storage_hit_tokens == 32


def test_what_others_bring_while_a_prefetch_waits_for_room_is_not_read_again() -> None:
    backend = store_of(*PROMPTS[:2])
    world = world_of(backend, host_share=0.25)
    for rid, key in zip("ab", PROMPTS[:2], strict=True):
        world.cache.prefetch_from_storage(rid, key)
    world.until(lambda: for_room(world) == ["b"])
    world.cache.cache_finished_req(world.begin("other", prompt(11, 12, 13)), prompt(11, 12, 13))
    world.settle()
    world.cache.abort_prefetch("a")
    world.until(lambda: world.cache.check_prefetch_progress("b"))
    assert backend.pages_read == 8 + 5
    assert world.attempt("b", PROMPTS[1]).cached_tokens == 32
