"""SGLang's storage tier: page hashes, the verbs of a backend, and prefetches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hicache import HiRadixCache, PrefixIndex, create_cache, open_storage
from hicache.backends.base import GetOutcome
from hicache.backends.calls import Call
from hicache.config import HiCacheConfig, PrefetchConfig
from hicache.events import EventStream, Medium
from hicache.frame import PageBuffer
from hicache.keys import RadixKey, page_keys
from tests.cache.world import (
    GEOMETRY,
    NAMESPACE,
    GatedBackend,
    ShiftedClock,
    World,
    every_hit,
    filled,
    memory_backend,
    prefetch,
    prompt,
)
from tests.ranks import Exchange
from tests.waiting import wait_for

PAGE = GEOMETRY.page_size
KEY = prompt(1, 2, 3, 4)


def world_of(backend: Any, *, clock: ShiftedClock | None = None, host_pages: int = 32, **entries: Any) -> World:
    """Return a cache over `backend` whose section `prefetch` has `entries`."""
    config = every_hit(prefetch=prefetch(**entries))
    return World(backend=backend, config=config, clock=clock or ShiftedClock(), host_pages=host_pages)


# Page hashes


def sglang_hash(tokens: Sequence[int | tuple[int, int]], prior: str | None = None) -> str:
    """SGLang's `get_hash_str`, written from its description: the previous hash, then each token in four bytes."""
    hasher = hashlib.sha256(bytes.fromhex(prior or ""))
    for token in tokens:
        for part in token if isinstance(token, tuple) else (token,):
            hasher.update(part.to_bytes(4, "little"))
    return hasher.hexdigest()


@pytest.mark.parametrize("bigram", [False, True])
def test_page_keys_are_the_chained_hashes_of_sglang(bigram: bool) -> None:
    tokens = [5, 70_000, 0, 2**31 - 1, *range(20)]
    positions: list[Any] = [*pairwise(tokens)] if bigram else tokens
    expected, prior = [], None
    for start in range(0, len(positions) // PAGE * PAGE, PAGE):
        prior = sglang_hash(positions[start : start + PAGE], prior)
        expected.append(prior)
    key = RadixKey.of(tokens, bigram=bigram)
    assert [page.hex() for page in key.page_keys(PAGE, b"", 0, key.pages(PAGE))] == expected


def test_a_page_key_names_all_tokens_before_it_and_the_seed() -> None:
    same, other = prompt(1, 2, 3), prompt(9, 2, 3)
    keys = [set(key.page_keys(PAGE, key.seed, 0, 3)) for key in (same, other, prompt(1, 2, 3, salt="tenant"))]
    assert not keys[0] & keys[1] and not keys[0] & keys[2]


# batch_exists, batch_get, batch_set


def test_exists_counts_the_longest_stored_prefix_and_stops_at_the_first_hole() -> None:
    config = HiCacheConfig.model_validate({"page_size": PAGE, "storage": {"type": "memory"}})
    store = open_storage(config, NAMESPACE)
    keys, far = KEY.page_keys(PAGE, b"", 0, 4), math.inf
    pages = [memoryview(bytearray(store.codec.frame_bytes)) for _ in keys]
    for number, page in enumerate(pages):
        page[-GEOMETRY.payload_bytes :] = bytes([number]) * GEOMETRY.payload_bytes
    assert all(outcome.is_stored for outcome in store.batch_set(keys, pages, parent=None, deadline=far))
    assert store.batch_exists(keys, deadline=far) == 4
    assert store.delete([keys[2]], deadline=far) == 1
    assert store.batch_exists(keys, deadline=far) == 2
    assert store.batch_has(keys, deadline=far) == [True, True, False, True]  # for engines that need single pages
    found = store.batch_get(keys, pages, deadline=far)
    assert found == [GetOutcome.HIT, GetOutcome.HIT, GetOutcome.MISS, GetOutcome.HIT]
    store.close()


class WatchedBackend(GatedBackend):
    """Notes the buffers that it reads into."""

    buffers: tuple[PageBuffer, ...] = ()

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        self.buffers += tuple(pages)
        return super()._get(call, keys, pages)


def test_a_backend_reads_straight_into_the_memory_of_l2() -> None:
    """As with SGLang's `_v1` verbs; a backend has no others here."""
    backend = filled(WatchedBackend(), KEY)
    world = world_of(backend)
    world.prefetch("a", KEY)
    pages = world.cache.match_prefix(KEY).node.host
    assert pages is not None and len(backend.buffers) == 4
    for buffer, frame in zip(backend.buffers, world.host.frames(pages), strict=True):
        assert isinstance(buffer, memoryview) and buffer.obj is frame.obj
    world.cache.abort_prefetch("a")


# Prefetch


def test_a_prompt_or_a_hit_below_the_threshold_is_not_prefetched() -> None:
    assert HiCacheConfig().prefetch.threshold_tokens == 256
    backend = filled(GatedBackend(), prompt(1, 2))
    world = world_of(backend, threshold_tokens=3 * PAGE)
    assert not world.cache.prefetch_from_storage("a", prompt(1, 2)) and backend.lookups == 0
    # This prompt is long enough and its stored part is not: the prefetch is revoked after the lookup.
    world.prefetch("b", KEY)
    assert backend.lookups == 1 and backend.pages_read == 0 and world.host.allocator.used_pages == 0
    assert world.serve("b", KEY).cached_tokens == 0


def test_best_effort_does_not_wait() -> None:
    backend = filled(GatedBackend(), KEY)
    world = world_of(backend, policy="best_effort")
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("a", KEY) and world.cache.check_prefetch_progress("a")
    assert world.attempt("a", KEY).cached_tokens == 0
    backend.reads.set()


def test_wait_complete_waits_for_all_pages() -> None:
    backend, clock = filled(GatedBackend(), KEY), ShiftedClock()
    world = world_of(backend, clock=clock, policy="wait_complete", timeout_base=1)
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("a", KEY)
    wait_for(backend.entered.is_set, world.step)
    for _ in range(10):
        clock.shift_s += 5
        world.step()
        assert not world.cache.check_prefetch_progress("a")
    backend.reads.set()
    world.arrive("a")
    assert world.attempt("a", KEY).storage_hit_tokens == 4 * PAGE


def test_done_otherwise_wait_complete_ends_after_a_minute() -> None:
    """In SGLang such a request waits as long as the store hangs."""
    backend, clock = filled(GatedBackend(), KEY), ShiftedClock()
    world = world_of(backend, clock=clock, policy="wait_complete")
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("a", KEY)
    wait_for(backend.entered.is_set, world.step)
    assert not world.cache.check_prefetch_progress("a")
    clock.shift_s += 61
    world.step()
    assert world.cache.check_prefetch_progress("a")
    world.cache.abort_prefetch("a")
    backend.reads.set()


@pytest.mark.parametrize(("waited_s", "may_begin"), [(2.5, False), (3.5, True)])
def test_timeout_waits_for_a_base_and_a_time_per_token(waited_s: float, may_begin: bool) -> None:
    """A base of one second, and two for a prompt of 16 whole-page tokens at 128 seconds per 1024."""
    backend, clock = filled(GatedBackend(), KEY), ShiftedClock()
    world = world_of(backend, clock=clock, policy="timeout", timeout_base=1, timeout_per_1024_tokens=128)
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("a", KEY)
    wait_for(backend.entered.is_set, world.step)
    assert not world.cache.check_prefetch_progress("a")
    clock.shift_s += waited_s
    world.step()
    assert world.cache.check_prefetch_progress("a") is may_begin
    backend.reads.set()
    world.arrive("a")
    world.cache.abort_prefetch("a")


def test_the_policies_are_those_of_sglang() -> None:
    for policy in ("best_effort", "wait_complete", "timeout"):
        assert PrefetchConfig(policy=policy).policy == policy


def test_a_request_uses_the_part_of_its_prefix_that_arrived_and_the_other_frames_are_free_again() -> None:
    backend = filled(memory_backend(), KEY)
    backend.delete([KEY.page_keys(PAGE, b"", 0, 4)[2]], deadline=math.inf)
    world = world_of(backend)
    world.prefetch("a", KEY)
    assert world.host.allocator.used_pages == 2
    assert world.attempt("a", KEY).storage_hit_tokens == 2 * PAGE


def test_prefetches_hold_at_most_their_share_of_l2_and_further_ones_wait() -> None:
    other = prompt(5, 6, 7, 8)
    backend = filled(GatedBackend(), KEY, other)
    world = world_of(backend, host_pages=8, host_share=0.5)
    backend.reads.clear()
    for rid, key in (("a", KEY), ("b", other)):
        assert world.cache.prefetch_from_storage(rid, key)
    world.until(lambda: backend.lookups == 2 and backend.entered.is_set())
    world.step()
    assert world.host.allocator.used_pages == 4
    backend.reads.set()
    world.arrive("a")
    assert world.attempt("a", KEY).storage_hit_tokens == 4 * PAGE
    world.arrive("b")
    assert world.attempt("b", other).storage_hit_tokens == 4 * PAGE


def test_an_aborted_request_frees_the_pages_of_its_prefetch() -> None:
    backend = filled(GatedBackend(), KEY)
    world = world_of(backend)
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("a", KEY)
    wait_for(backend.entered.is_set, world.step)
    assert world.host.allocator.used_pages == 4
    world.cache.abort_prefetch("a")
    backend.reads.set()
    world.settle()
    assert world.host.allocator.used_pages == 0


def test_all_ranks_use_the_shortest_prefix_that_any_of_them_has() -> None:
    stored = [prompt(1, 2, 3, 4), prompt(1, 2)]
    worlds = [
        World(backend=filled(memory_backend(), key), config=every_hit(), ranks=rank)
        for key, rank in zip(stored, Exchange(2).ranks(), strict=True)
    ]
    for world in worlds:
        assert world.cache.prefetch_from_storage("a", KEY)

    def arrived() -> bool:
        return all([world.cache.check_prefetch_progress("a") for world in worlds])

    def step() -> None:
        for world in worlds:
            world.step()

    wait_for(arrived, step)
    assert [world.cache.match_prefix(KEY).host_hit_pages for world in worlds] == [2, 2]
    for world in worlds:
        world.cache.abort_prefetch("a")
    wait_for(lambda: all(world.controller.idle for world in worlds), step)
    for world in worlds:
        world.leave()
        assert world.cache.close()


# The whole


def test_another_engine_finds_the_prefixes_of_one_that_has_ended(tmp_path: Path) -> None:
    config = HiCacheConfig.model_validate({
        "page_size": PAGE, "device": {"tokens": 64}, "host": {"tokens": 64},
        "prefetch": {"threshold_tokens": PAGE, "policy": "wait_complete"}, "break_even": {"mode": "always"},
        "storage": {
            "type": "file", "options": {"path": str(tmp_path), "capacity": "8MiB", "free_space_floor": 0}
        },
    })
    hits = []
    for _ in range(2):
        with create_cache(config, NAMESPACE) as cache:
            cache.prefetch_from_storage("a", KEY)
            wait_for(partial(cache.check_prefetch_progress, "a"), cache.poll)
            request = cache.begin_request("a", KEY)
            assert request is not None
            cache.start_loading()
            hits.append(request.storage_hit_tokens)
            cache.cache_finished_req(request, KEY)
            assert cache.drain(30)
    assert hits == [0, 4 * PAGE]


def test_an_index_of_events_is_the_view_of_all_tiers() -> None:
    world = World(config=every_hit(), backend=memory_backend())
    assert isinstance(world.cache, HiRadixCache)
    stream, index = EventStream(1 << 20), PrefixIndex()
    world.cache.record_events(stream)
    reader = stream.subscribe()
    world.serve("a", KEY)
    world.leave_l1()
    world.cache.poll()
    index.apply(reader.drain(1000))
    keys = page_keys(KEY.tokens, PAGE, KEY.seed)
    assert [index.prefix_pages(keys, medium) for medium in (Medium.DEVICE, Medium.HOST, Medium.STORAGE)] == [0, 4, 4]
