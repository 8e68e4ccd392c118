"""HostCache: L2 and L3 for an engine that keeps its own device cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import Direction, GetOutcome
from hicache.backends.calls import Call
from hicache.cache import HostCache, HostLoad, HostMatch, create_host_cache
from hicache.cache.break_even import BreakEven, Rates
from hicache.cache.statistics import NO_TIER
from hicache.config import HiCacheConfig, TransferConfig
from hicache.errors import ConfigError, InvalidInput
from hicache.events import EventStream, Medium, PrefixIndex
from hicache.frame import PageBuffer
from hicache.geometry import PageShape, Piece
from hicache.keys import PAGE_KEY_BYTES, Namespace, RadixKey
from hicache.metrics.families import cache_collector
from hicache.tiers import HostPool
from tests.cache.host_world import GEOMETRY, NAMESPACE, HostWorld, every_hit, memory_backend, prompt
from tests.cache.test_factory import file_storage
from tests.cache.world import GatedBackend, ShiftedClock, filled, prefetch

KEY = prompt(1, 2, 3, 4, tail=0)
NOTHING = HostMatch(0, loading=False)
PAGE = GEOMETRY.page_size
SELECTIVE = every_hit(write_policy="write_through_selective")


def decisions(world: HostWorld) -> int:
    return sum(world.cache.statistics().break_even.decisions.values())


# Writes


def test_pages_are_offered_when_all_workers_have_copied_them() -> None:
    world = HostWorld()
    write = world.begin_write("a", KEY)
    assert (write.start_page, len(write.host_pages)) == (0, 4)
    assert world.cache.lookup("b", KEY) == NOTHING
    world.copy(KEY, write)
    world.cache.end_write(write, complete=True)
    assert world.cache.lookup("b", KEY) == HostMatch(4, loading=False)
    assert world.cache.lookup("b", KEY, 3) == HostMatch(1, loading=False)
    assert world.cache.lookup("b", KEY, 9) == NOTHING
    assert world.load("b", KEY) == 4


def test_a_partial_last_page_is_not_written() -> None:
    world = HostWorld()
    assert len(world.write("a", prompt(1, 2, tail=3)).host_pages) == 2
    assert world.cache.begin_write("a", prompt(1, 2, tail=2)) is None


def test_a_failed_write_frees_its_pages_and_those_of_writes_that_follow_it() -> None:
    world = HostWorld()
    first = world.begin_write("a", prompt(1, 2, tail=0))
    second = world.begin_write("a", KEY)
    assert world.free_pages == 28
    world.cache.end_write(second, complete=True)
    world.cache.end_write(first, complete=False)
    assert world.free_pages == 32 and world.skipped["backup_failed"] == 1
    assert world.cache.lookup("b", KEY) == NOTHING
    world.cache.abort("b")
    assert len(world.write("c", KEY).host_pages) == 4


def test_the_pages_of_a_write_stay_while_a_later_write_needs_them_as_prefix() -> None:
    """Otherwise the complete pages of `last` could not be shown, and their copies would be wasted."""
    world = HostWorld(host_pages=4)
    first, second, last = (world.cache.begin_write("a", prompt(*range(pages), tail=0)) for pages in (2, 3, 4))
    assert first is not None and second is not None and last is not None
    key = prompt(*range(4), tail=0)
    for write in (last, first):
        world.copy(key, write)
        world.cache.end_write(write, complete=True)
        world.cache.check()
    assert world.cache.begin_write("b", prompt(8, tail=0)) is None
    world.cache.check()
    world.copy(key, second)
    world.cache.end_write(second, complete=True)
    assert world.load("c", key) == 4


class _CountingCache(HostCache):
    """A HostCache that counts its calls of `_reach`."""

    calls = 0

    def _reach(self, key: RadixKey, pages: int) -> int:
        self.calls += 1
        return super()._reach(key, pages)


@pytest.mark.parametrize("complete", [True, False])
def test_the_cost_of_ending_a_write_does_not_grow_with_the_number_of_waiting_writes(complete: bool) -> None:
    count = 40
    world = HostWorld(host_pages=count, kind=_CountingCache)
    cache = world.cache
    assert isinstance(cache, _CountingCache)
    key = prompt(*range(count), tail=0)
    writes = [cache.begin_write("a", prompt(*range(pages), tail=0)) for pages in range(1, count + 1)]
    cache.calls = 0
    for write in reversed(writes):
        assert write is not None
        world.copy(key, write)
        cache.end_write(write, complete=complete or write is not writes[0])
    assert cache.calls <= 2 * count
    assert world.load("b", key) == (count if complete else 0)


def test_a_write_is_rejected_if_pages_before_its_first_one_are_missing() -> None:
    world = HostWorld()
    assert world.cache.begin_write("a", KEY, 1) is None
    assert world.skipped["backup_prefix_not_on_host"] == 1 and world.free_pages == 32
    world.write("a", prompt(1, tail=0))
    assert world.write("a", KEY, 1).start_page == 1


def test_eviction_makes_room_for_a_write_and_keeps_its_prefix() -> None:
    world = HostWorld(host_pages=4, config=every_hit(eviction_policy="mru"))
    world.write("a", prompt(1, 2, tail=0))
    world.write("b", prompt(8, 9, tail=0))
    write = world.write("a", KEY)  # its own prefix was used last, so the policy would evict it first
    assert write.start_page == 2 and world.load("c", KEY) == 4
    assert world.cache.lookup("d", prompt(8, 9, tail=0)).pages == 0


def test_a_write_without_room_changes_nothing() -> None:
    world = HostWorld(host_pages=4)
    world.write("a", prompt(1, 2, tail=0))
    load = world.begin_load("b", prompt(1, 2, tail=0), 0, 2)
    assert world.cache.begin_write("c", prompt(5, 6, 7, tail=0)) is None
    assert world.skipped["backup_no_host_room"] == 1 and world.free_pages == 2
    world.compare(KEY, load)
    world.cache.end_load(load, 0.1)
    world.write("c", prompt(5, 6, 7, tail=0))


# Storage behind the device


LONG = prompt(*range(1, 9), tail=0)


def test_pages_that_the_device_has_are_not_read_from_storage() -> None:
    backend = filled(GatedBackend(), KEY)
    world = HostWorld(backend=backend)
    assert not world.cache.prefetch("a", KEY, device_pages=4) and not backend.lookups
    assert world.cache.prefetch("b", LONG, device_pages=4)  # storage has no more than these
    world.until(lambda: world.cache.check_prefetch("b", 4))
    assert (backend.lookups, backend.pages_read) == (1, 0) and world.skipped["prefetch_hit_too_short"] == 1


def test_storage_behind_the_device_is_read_with_the_pages_before_it() -> None:
    backend = filled(GatedBackend(), LONG)
    world = HostWorld(backend=backend)
    assert world.cache.prefetch("a", LONG, device_pages=6)
    world.until(lambda: world.cache.check_prefetch("a", 6))
    assert backend.pages_read == 8 and world.cache.lookup("a", LONG, 6) == HostMatch(2, loading=False)
    world.cache.abort("a")


def test_pages_on_the_device_are_only_read_if_those_behind_them_pay_for_both() -> None:
    """Storage reads two pages in the time in which one is computed."""
    given = Rates(prefill_tokens_per_s=1000, host_bytes_per_s=1 << 40,
                  storage_bytes_per_s=GEOMETRY.payload_bytes * 2000 // GEOMETRY.page_size)
    for device_pages, reads in ((3, 8), (5, 0)):
        backend = filled(GatedBackend(), LONG)
        rule = BreakEven(None, GEOMETRY.payload_bytes, given=given)
        world = HostWorld(backend=backend, config=every_hit(), break_even=rule)
        assert world.cache.prefetch("a", LONG, device_pages=device_pages)
        world.until(lambda: world.cache.check_prefetch("a", device_pages))  # noqa: B023
        assert backend.pages_read == reads
        world.cache.abort("a")


def test_a_read_that_has_no_room_for_pages_behind_the_device_is_not_made() -> None:
    backend = filled(GatedBackend(), LONG)
    world = HostWorld(backend=backend, host_pages=8)
    limit = int(world.cache.config.prefetch.host_share * 8)
    assert world.cache.prefetch("a", LONG, device_pages=limit)
    world.until(lambda: world.cache.check_prefetch("a", limit))
    assert not backend.pages_read and world.skipped["prefetch_host_share"] == 1


def test_a_request_does_not_wait_for_pages_that_the_device_has_got_since_and_does_not_blame_the_store() -> None:
    backend, clock = filled(GatedBackend(), KEY), ShiftedClock()
    backend.reads.clear()
    world = HostWorld(backend=backend, clock=clock)
    assert world.cache.prefetch("a", LONG)
    world.until(backend.entered.is_set)
    assert not world.cache.check_prefetch("a", 3)
    clock.shift_s = 60.0  # the read takes long, but the time of the request is not over
    assert world.cache.check_prefetch("a", 4) and world.controller.gate.may(Direction.READ)
    assert world.cache.lookup("a", LONG, 4) == NOTHING
    world.cache.abort("a")
    backend.reads.set()


def test_a_follower_with_fewer_pages_on_the_device_looks_up_storage_by_itself() -> None:
    backend = filled(GatedBackend(), KEY)
    world = HostWorld(backend=backend)
    assert world.cache.prefetch("a", LONG, device_pages=4) and world.cache.prefetch("b", LONG, device_pages=4)
    assert world.cache.prefetch("c", LONG)
    world.until(lambda: all(world.cache.check_prefetch(rid, pages) for rid, pages in (("a", 4), ("b", 4), ("c", 0))))
    assert backend.lookups == 2 and world.cache.lookup("c", LONG) == HostMatch(4, loading=False)
    world.cache.abort("c")


# Loads


def test_after_a_failed_load_pages_are_offered_only_to_other_requests() -> None:
    world = HostWorld()
    world.write("a", KEY)
    load = world.begin_load("b", KEY, 0, 4)
    world.cache.end_load(load, None)
    assert world.cache.lookup("b", KEY) == NOTHING and world.cache.lookup("c", KEY).pages == 4
    state = world.cache.statistics()
    assert state.skipped["load_failed"] == 1 and state.controller.loaded_pages == 0 and not state.hit_tokens["host"]
    world.cache.abort("b")
    assert world.cache.lookup("b", KEY).pages == 4


def test_failed_loads_are_not_measured() -> None:
    world = HostWorld()
    world.write("a", KEY)
    for seconds in (None, None, None, None):
        load = world.begin_load("b", KEY, 0, 4)
        world.cache.end_load(load, seconds)
    world.cache.poll()
    assert world.cache.statistics().break_even.rates.host_bytes_per_s == 0
    for _ in range(3):
        world.load("c", KEY, seconds=0.5)
    world.cache.poll()
    assert world.cache.statistics().break_even.rates.host_bytes_per_s == 2 * 4 * GEOMETRY.payload_bytes


# Break-even


def test_break_even_decides_once_per_length_until_the_load_begins_or_the_request_ends() -> None:
    world = HostWorld()
    world.write("a", KEY)
    for _ in range(5):
        assert world.cache.lookup("b", KEY).pages == 4
    assert decisions(world) == 1
    world.cache.lookup("b", KEY, 1)
    assert decisions(world) == 2
    load = world.begin_load("b", KEY, 1, 4)
    world.cache.end_load(load, 0.1)
    world.cache.lookup("b", KEY, 1)
    assert decisions(world) == 3
    world.cache.abort("b")
    world.cache.lookup("b", KEY, 1)
    assert decisions(world) == 4


def test_a_load_that_does_not_pay_is_not_offered() -> None:
    slow = BreakEven(given=Rates(prefill_tokens_per_s=10**9, host_bytes_per_s=1))
    world = HostWorld(config=HiCacheConfig(load_back_threshold_tokens=8), break_even=slow)
    world.write("a", KEY)
    world.cache.poll()
    for _ in range(20):
        assert world.cache.lookup("b", KEY) == NOTHING
    assert world.cache.lookup("c", KEY, 3) == NOTHING
    assert world.skipped["load_does_not_pay"] == 1 and world.skipped["load_too_short"] == 1


def test_break_even_does_not_decide_while_another_request_loads_the_pages() -> None:
    world = HostWorld()
    world.write("a", KEY)
    load = world.begin_load("b", KEY, 0, 4)
    assert world.cache.lookup("c", KEY).loading and decisions(world) == 0
    world.cache.end_load(load, 0.1)
    assert not world.cache.lookup("c", KEY).loading and decisions(world) == 1


# Who waits for the device


def left(world: HostWorld) -> dict[str, int]:
    """Return the tokens that are left to compute, by request."""
    return world.cache._queue._left


def test_a_lookup_tells_how_much_of_a_waiting_request_is_left() -> None:
    world = HostWorld()
    world.write("a", KEY)
    world.cache.record_arrival("b", 4 * PAGE + 3)
    assert left(world) == {"b": 4 * PAGE + 3}
    world.cache.lookup("b", prompt(1, 2, 9, 8, tail=0))
    assert left(world) == {"b": 2 * PAGE}
    world.cache.lookup("b", prompt(1, 2, 9, 8, tail=0), 3)
    assert left(world) == {"b": PAGE}
    world.cache.record_progress("b", 2)
    world.cache.lookup("b", KEY)
    assert left(world) == {"b": 2}  # it has begun
    world.cache.abort("b")
    assert left(world) == {}


def test_pages_that_do_not_pay_are_left_to_compute() -> None:
    slow = BreakEven(given=Rates(prefill_tokens_per_s=10**9, host_bytes_per_s=1))
    world = HostWorld(break_even=slow)
    world.write("a", KEY)
    world.cache.poll()
    world.cache.record_arrival("b", 1)
    assert world.cache.lookup("b", KEY) == NOTHING and left(world) == {"b": 4 * PAGE}


def test_the_wait_of_a_request_with_page_keys_has_the_tokens_of_those_before_it() -> None:
    world = HostWorld(position_bytes=PAGE_KEY_BYTES, backend=memory_backend())
    key = RadixKey.of_hashes([bytes([number]) * 32 for number in range(4)])
    assert world.cache.prefetch("a", key) and world.cache.prefetch("b", key, device_pages=1)
    assert left(world) == {"a": 4 * PAGE, "b": 3 * PAGE}
    assert world.cache._queue.wait_s("b", 100, 0.0) == 4 * PAGE / 100


def test_a_preempted_request_waits_before_others_and_does_not_arrive_again() -> None:
    world = HostWorld()
    for rid in "abcd":
        world.cache.record_arrival(rid, 100)
    world.cache.record_progress("a", 0)
    world.cache.record_arrival("a", 150, again=True)
    world.cache.record_arrival("b", 50)  # waits already
    assert left(world) == {"a": 150, "b": 50, "c": 100, "d": 100} and world.cache._queue.first(2) == ["a", "b"]
    assert len(world.cache._queue._arrived_s) == 4
    world.cache.check()


# Storage


def test_written_pages_are_read_back_from_a_file_store_after_a_restart(tmp_path: Path) -> None:
    settings = config(storage=file_storage(tmp_path))
    world = HostWorld()
    for hits in (0, 4):
        with create_host_cache(settings, NAMESPACE, environ={}) as cache:
            world.cache, world.host, world.controller = cache, cache.host, cache.controller
            assert world.prefetch("a", KEY) and world.load("a", KEY) == hits
            assert cache.statistics().hit_tokens.get("storage", 0) == hits * 4
            if not hits:
                world.write("a", KEY)
            assert cache.drain(20)
            world.audit()


def test_write_through_selective_stores_pages_that_a_second_request_uses() -> None:
    store = memory_backend()
    world = HostWorld(backend=store, config=SELECTIVE)
    world.write("a", KEY)
    world.load("a", KEY)  # as after a preemption: the request that wrote them counts once
    world.settle()
    assert store.usage().pages == 0
    world.cache.lookup("b", prompt(1, 2, tail=0))
    world.cache.lookup("b", prompt(1, 2, tail=0))
    world.settle()
    assert store.usage().pages == 2
    world.load("c", KEY)
    world.settle()
    assert store.usage().pages == 4


def test_the_second_use_of_a_page_counts_after_it_was_evicted_from_l2() -> None:
    store = memory_backend()
    world = HostWorld(backend=store, config=SELECTIVE, host_pages=4)
    world.write("a", KEY)
    world.write("b", prompt(5, 6, 7, 8, tail=0))
    world.settle()
    assert store.usage().pages == 0 and world.cache.tree.peek(KEY).host_pages == 0
    world.write("c", prompt(1, 2, 9, tail=0))
    world.settle()
    assert store.usage().pages == 2


def test_pages_that_two_requests_compute_at_once_count_two_uses() -> None:
    store = memory_backend()
    world = HostWorld(backend=store, config=SELECTIVE)
    write = world.begin_write("a", KEY)
    assert world.cache.begin_write("b", prompt(1, 2, tail=0)) is None  # the first write adds them
    assert world.cache.begin_write("a", KEY) is None
    world.copy(KEY, write)
    world.cache.end_write(write, complete=True)
    world.settle()
    assert store.usage().pages == 2


def test_hits_on_the_device_of_the_engine_count_as_uses() -> None:
    store = memory_backend()
    world = HostWorld(backend=store, config=SELECTIVE, host_pages=4)
    world.write("a", KEY)
    world.write("b", prompt(5, 6, 7, 8, tail=0))
    world.cache.lookup("c", KEY, 3)
    world.cache.abort("c")
    world.write("c", KEY)  # evicted from the device during the request, and computed again
    world.settle()
    assert store.usage().pages == 4


def test_pages_that_were_not_stored_are_stored_when_a_request_finds_them() -> None:
    store = memory_backend()
    world = HostWorld(backend=store, open_storage=lambda _: store)
    world.cache.storage.detach()
    world.write("a", KEY)
    world.settle()
    assert store.usage().pages == 0
    world.cache.storage.attach()
    world.until(lambda: world.controller.backend is store and world.controller.gate.may(Direction.WRITE))
    world.cache.lookup("b", KEY)
    world.settle()
    assert store.usage().pages == 4


# Keys, events, statistics


def test_keys_from_the_engine_are_the_page_keys_on_both_tiers() -> None:
    hashes = [hashlib.sha256(bytes([n])).digest() for n in range(4)]
    key = RadixKey.of_hashes(hashes)
    world = HostWorld(position_bytes=PAGE_KEY_BYTES, backend=memory_backend())
    index = PrefixIndex()
    stream = EventStream(1 << 20)
    reader = stream.subscribe()
    world.cache.record_events(stream)
    first = world.begin_write("a", RadixKey.of_hashes(hashes[:2]))
    second = world.begin_write("b", key)
    assert second.start_page == 2
    for write in (second, first):
        world.copy(key, write)
        world.cache.end_write(write, complete=True)
    world.settle()
    index.apply(reader.drain(1000))
    assert index.keys(Medium.HOST) == set(hashes) == index.keys(Medium.STORAGE)
    world.cache.clear()
    salted = RadixKey.of_hashes(hashes, cache_salt="another tenant")
    assert world.prefetch("b", salted) and world.load("b", salted) == 0
    assert world.prefetch("c", key) and world.load("c", key) == 4
    with pytest.raises(InvalidInput, match="of_hashes"):
        world.cache.lookup("d", KEY)


def test_statistics_include_l2_storage_and_the_copies_of_the_engine() -> None:
    world = HostWorld(backend=memory_backend())
    world.write("a", KEY)
    load = world.begin_load("b", KEY, 1, 4)
    write = world.begin_write("c", prompt(5, tail=0))
    queues = world.cache.statistics().controller.queues
    assert (queues.load, queues.write) == (1, 1) and queues.host_pages_reserved >= 4
    world.cache.end_load(load, 0.1)
    world.cache.end_write(write, complete=False)
    world.settle()
    state = world.cache.statistics()
    assert state.device == NO_TIER and state.host.cached_pages == 4
    assert (state.controller.loaded_pages, state.controller.written_pages) == (3, 4)
    assert (state.requests, state.prompt_tokens) == (1, 16)
    assert state.hit_tokens == {"device": 4, "host": 12, "storage": 0}
    names = {
        sample.name: sample.value
        for family in cache_collector(world.cache.statistics).collect()
        for sample in family.samples
        if sample.labels.get("direction") == "host_to_device"
    }
    assert names == {"hicache_moved_pages_total": 3}


# Errors


def test_a_handle_can_be_ended_only_once_and_only_by_its_own_cache() -> None:
    world, other = HostWorld(), HostWorld()
    world.write("a", KEY)
    load = world.begin_load("b", KEY, 0, 4)
    write = world.begin_write("c", prompt(9, tail=0))
    with pytest.raises(InvalidInput, match="another cache"):
        other.cache.end_load(load, 0.1)
    with pytest.raises(InvalidInput, match="another cache"):
        other.cache.end_write(write, complete=True)
    world.cache.end_load(load, 0.1)
    world.cache.end_write(write, complete=False)
    with pytest.raises(InvalidInput, match="has ended"):
        world.cache.end_load(load, None)
    with pytest.raises(InvalidInput, match="has ended"):
        world.cache.end_write(write, complete=False)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.prefetch(5, KEY),
        lambda cache: cache.prefetch("b", [1, 2]),
        lambda cache: cache.check_prefetch(None),
        lambda cache: cache.abort(7),
        lambda cache: cache.lookup(None, KEY),
        lambda cache: cache.lookup("b", b"key"),
        lambda cache: cache.lookup("b", KEY, -1),
        lambda cache: cache.lookup("b", RadixKey.of([1, 2, 3], bigram=True)),
        lambda cache: cache.begin_load("b", KEY, 0, 5),
        lambda cache: cache.begin_load("b", KEY, 2, 2),
        lambda cache: cache.begin_load("b", KEY, -1, 2),
        lambda cache: cache.begin_load(4, KEY, 0, 2),
        lambda cache: cache.end_load("load", 0.1),
        lambda cache: cache.begin_write(4, KEY),
        lambda cache: cache.begin_write("b", "key"),
        lambda cache: cache.begin_write("b", KEY, 0.5),
        lambda cache: cache.end_write(None, complete=True),
        lambda cache: cache.record_prefill(-1, 1.0),
        lambda cache: cache.record_arrival(5, 1),
        lambda cache: cache.record_arrival("b", -1),
        lambda cache: cache.record_progress(None, 1),
        lambda cache: cache.record_progress("b", 0.5),
    ],
)
def test_invalid_arguments_are_rejected_and_change_nothing(call: Callable[[Any], object]) -> None:
    world = HostWorld()
    world.write("a", KEY)
    before = world.cache.statistics()
    with pytest.raises(InvalidInput):
        call(world.cache)
    assert world.cache.statistics() == before


@pytest.mark.parametrize("seconds", ["1", -1, float("nan"), True])
def test_an_invalid_time_of_a_load_is_rejected(seconds: Any) -> None:
    world = HostWorld()
    world.write("a", KEY)
    load = world.cache.begin_load("b", KEY, 0, 4)
    assert isinstance(load, HostLoad)
    with pytest.raises(InvalidInput, match="seconds"):
        world.cache.end_load(load, seconds)
    world.cache.end_load(load, 0.1)


def test_a_closed_cache_rejects_new_operations_and_ends_running_ones() -> None:
    world = HostWorld(backend=memory_backend())
    world.write("a", KEY)
    load = world.begin_load("b", KEY, 0, 4)
    write = world.begin_write("c", prompt(9, tail=0))
    assert world.cache.close()
    assert not world.cache.prefetch("d", KEY)
    for call in (lambda: world.cache.lookup("d", KEY), lambda: world.cache.begin_load("d", KEY, 0, 1),
                 lambda: world.cache.begin_write("d", KEY)):
        with pytest.raises(InvalidInput, match="closed"):
            call()
    world.cache.end_load(load, 0.1)
    world.cache.end_write(write, complete=True)
    world.cache.check()
    assert world.host.allocator.used_pages == world.cache.tree.host_evictable_pages == 4


def test_pages_that_arrive_after_a_lookup_are_found_by_the_next_one_until_the_request_begins() -> None:
    class SlowReads(GatedBackend):
        def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
            if self.pages_read < 3:
                self.pages_read += len(keys)
                return self.inner.batch_get(keys, pages, deadline=call.deadline)
            return super()._get(call, keys, pages)

    key = prompt(*range(1, 9), tail=0)
    backend = filled(SlowReads(), key)
    backend.pages_read = 0
    backend.reads.clear()
    config = every_hit(prefetch=prefetch(policy="best_effort"))
    world = HostWorld(backend=backend, config=config, transfer=TransferConfig(storage_batch_pages=1, io_workers=1))
    assert world.cache.prefetch("a", key) and world.cache.check_prefetch("a")
    world.until(lambda: world.cache.lookup("a", key).pages == 3)
    world.step()
    assert world.cache.lookup("a", key).pages == 3  # the engine has no room, and asks again
    backend.reads.set()
    world.until(lambda: world.cache.lookup("a", key).pages == 8)
    load = world.cache.begin_load("a", key, 0, 8)
    assert load is not None and load.storage_pages == 8
    world.cache.end_load(load, 0.001)
    world.cache.abort("a")
    world.settle()


def test_write_back_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="use write_through or write_through_selective"):
        HostWorld(config=HiCacheConfig(write_policy="write_back"))


# From a configuration


def config(**sections: object) -> HiCacheConfig:
    return HiCacheConfig.model_validate({"page_size": 4, "host": {"tokens": 64},
                                         "prefetch": {"threshold_tokens": 4, "timeout_base": 30},
                                         "load_back_threshold_tokens": 4, "break_even": {"mode": "always"},
                                         **sections})


def test_the_pool_and_the_options_of_the_configuration_are_used() -> None:
    with create_host_cache(config(), NAMESPACE) as cache:
        assert cache.host.pages == 16 and cache.page_size == 4
        assert cache.config.prefetch.threshold_tokens == 4 and not cache.storage.attached


def test_a_pool_and_keys_of_the_engine_are_used() -> None:
    shape = PageShape(4, (Piece("rank0", 96), Piece("rank1", 32)))
    namespace = Namespace(model="m", geometry=shape, key_hash="sha256")
    host = HostPool(shape, 8)
    with create_host_cache(config(host={"ratio": 2}), namespace, host=host) as cache:
        assert cache.host is host
        assert cache.begin_write("a", RadixKey.of_hashes([b"1" * 32, b"2" * 32])) is not None
        cache.check()


@pytest.mark.parametrize(
    ("sections", "namespace", "host", "error", "match"),
    [
        ({"host": {"ratio": 2}}, NAMESPACE, None, ConfigError, "needs the size of L1"),
        ({"host": {"tokens": 1}}, NAMESPACE, None, ConfigError, "smaller than one page"),
        ({"page_size": 8}, NAMESPACE, None, ConfigError, "page_size"),
        ({"write_policy": "write_back"}, NAMESPACE, None, ConfigError, "write_through"),
        ({}, NAMESPACE, PageShape(4, (Piece("kv", 8),)), InvalidInput, "one page shape"),
    ],
)
def test_an_invalid_configuration_is_rejected(
    sections: dict[str, object], namespace: Namespace, host: PageShape | None, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        create_host_cache(config(**sections), namespace, host=None if host is None else HostPool(host, 2))


def test_a_pool_that_is_in_use_is_rejected() -> None:
    host = HostPool(GEOMETRY, 4)
    assert host.alloc(1) is not None
    with pytest.raises(ConfigError, match="in use"):
        create_host_cache(config(), NAMESPACE, host=host)
