"""The tier for vLLM over storage that is dead, hangs, is full or lies: it loses hits, and nothing else."""

from __future__ import annotations

import math
import threading

import pytest

from hicache.backends.base import Direction
from hicache.errors import BackendError
from hicache.integrations.vllm_tier.identity import chunk_keys
from hicache.integrations.vllm_tier.jobs import TierJob
from tests.seeds import rng, seeds
from tests.waiting import wait_for

from .chunk_engine import CHUNK_BYTES, ROOT, ROWS, ChunkEngine, Store, engine_on, names_of

BOTH_WAYS = pytest.mark.parametrize("in_place", [False, True])
# Short deadlines, for tests that wait for the end of a hang.
SHORT = {"prefetch": {"timeout_base": "50ms", "timeout_per_1024_tokens": 0}, "transfer": {"storage_deadline": "50ms"}}


@BOTH_WAYS
def test_a_dead_store_costs_only_hits(in_place: bool) -> None:
    names, store = names_of("a", 4), Store()
    with engine_on(store, in_place=in_place) as engine:
        engine.save(names)
        store.raises = BackendError("no route to host")
        assert engine.find(names, "s") == [False] * 4
        assert engine.fetch(names) == [] and engine.save(names_of("b", 4)) == []
        store.raises = None
        wait_for(lambda: engine.fetch(names) == names)  # once the back-off is over


def test_an_exception_of_a_store_ends_one_job() -> None:
    names, store = names_of("a", 4), Store()
    with engine_on(store) as engine:
        engine.save(names)
        store.raises = KeyError("a bug in a backend")
        assert engine.fetch(names) == []
        store.raises = None
        wait_for(lambda: engine.fetch(names) == names)


@BOTH_WAYS
def test_a_hit_whose_buffer_was_not_filled_is_a_miss(in_place: bool) -> None:
    names, store = names_of("a", 3), Store()
    with engine_on(store, in_place=in_place) as engine:
        engine.save(names)
        for page in store.driver.pages("", 0.0):
            store.damage(page.key)
        assert engine.fetch(names) == []  # damaged; the bytes that were read are still in a buffer
        store.lies = True
        assert engine.fetch(names) == []


def test_a_failed_call_ends_its_job() -> None:
    names, store = names_of("a", 9), Store()
    with engine_on(store, transfer={"storage_batch_pages": 2}) as engine:
        engine.save(names)
        store.fails = True
        assert engine.fetch(names) == [] and store.pages_asked == 2
        store.fails = False
        wait_for(lambda: engine.fetch(names) == names)  # once the back-off is over


@BOTH_WAYS
def test_a_job_abandoned_before_its_rows_are_read_stores_nothing(in_place: bool) -> None:
    """Otherwise the next KV in the rows would be sealed as the chunks of this job."""
    names, store = names_of("a", 1), Store()
    with engine_on(store, in_place=in_place) as engine:
        engine.step()
        opened = engine.tier._gate.enter()
        keys = [chunk_keys(ROOT)(name) for name in names]
        job = TierJob(0, Direction.WRITE, names, keys, [0], opened, math.inf)

        def abandon() -> None:
            job.is_left = True

        engine.tier._write(job, abandon)
        engine.tier._gate.slot.leave(opened)
        assert not job.done and not store.driver.measure().pages


# Stores that hang


def test_a_request_does_not_wait_for_a_lookup_that_hangs() -> None:
    store = Store()
    with engine_on(store, **SHORT) as engine:
        store.lookups.clear()
        assert engine.find(names_of("a", 2)) == [False] * 2


def test_a_hanging_promotion_ends_and_never_writes_to_freed_rows() -> None:
    names, store = names_of("a", 3), Store()
    with engine_on(store, **SHORT) as engine:
        wait_for(lambda: engine.save(names) == names)
        store.reads.clear()
        assert engine.fetch(names) == []
        store.release()
        wait_for(lambda: engine.fetch(names) == names)
    assert engine.is_clean()


def test_in_place_the_tier_waits_for_a_hanging_promotion() -> None:
    """The control of the test above: the late read fills the rows, so they must not be freed before."""
    names, store = names_of("a", 3), Store()
    with engine_on(store, in_place=True) as engine:
        engine.save(names)
        store.reads.clear()
        number = engine.begin(names, load=True)
        assert store.hanging.acquire(timeout=60)
        engine.tier._leave(before_s=float("inf"))
        engine.step()
        assert number not in engine.ended
        store.release()
        assert engine.end(number) == names


def test_a_hanging_cascade_stores_the_contents_of_its_rows_at_its_start() -> None:
    names, store = names_of("a", 3), Store()
    with engine_on(store, **SHORT) as engine:
        store.writes.clear()
        assert engine.save(names) == []  # the rows have other KV now
        store.release()
        wait_for(lambda: store.driver.measure().pages == 3)
        wait_for(lambda: engine.fetch(names) == names)


def test_cascades_behind_a_hanging_one_are_dropped_above_the_limit() -> None:
    store = Store()
    with engine_on(store, transfer={"store_host_share": 0.25}) as engine:
        store.writes.clear()
        first = engine.begin(names_of("a", 10), load=False)
        assert store.hanging.acquire(timeout=60)
        second = engine.begin(names_of("b", ROWS // 4 - 10), load=False)
        assert engine.save(names_of("c", 1)) == []
        store.release()
        assert len(engine.end(first)) == 10 and len(engine.end(second)) == ROWS // 4 - 10
        assert engine.save(names_of("c", 1)) == names_of("c", 1)


def test_a_single_cascade_above_the_limit_is_stored() -> None:
    with engine_on(Store(), transfer={"store_host_share": 0.01}) as engine:
        assert engine.save(names_of("a", 20)) == names_of("a", 20)


def test_a_reset_ends_within_its_deadline_and_does_not_touch_the_rows() -> None:
    names, store = names_of("a", 3), Store()
    with engine_on(store, transfer={"shutdown_deadline": "100ms"}) as engine:
        engine.save(names)
        store.reads.clear()
        store.writes.clear()
        jobs = [engine.begin(names, load=True), engine.begin(names_of("b", 2), load=False)]
        for _ in jobs:
            assert store.hanging.acquire(timeout=60)
        engine.tier.reset(1)
        engine.step()
        assert set(jobs) <= set(engine.ended), "vLLM empties its primary tier after the reset"
        store.release()
        # Before the tier closes, which takes at most 100 ms. A late write goes to the namespace in which it began.
        wait_for(lambda: store.driver.measure().pages == 5)
    assert engine.is_clean()


def test_in_place_a_reset_waits_for_calls_in_flight() -> None:
    """The control of the test above: the jobs end with their calls."""
    names, store = names_of("a", 3), Store()
    with engine_on(store, in_place=True, transfer={"shutdown_deadline": "10ms"}) as engine:
        engine.save(names)
        store.reads.clear()
        number = engine.begin(names, load=True)
        assert store.hanging.acquire(timeout=60)
        threading.Timer(0.1, store.release).start()
        engine.tier.reset(1)
        assert engine.end(number) == names


def test_close_ends_within_its_deadline() -> None:
    names, store = names_of("a", 3), Store()
    engine = ChunkEngine(store, transfer={"shutdown_deadline": "100ms"})
    store.writes.clear()
    engine.begin(names, load=False)
    assert store.hanging.acquire(timeout=60)
    assert not engine.tier.close()
    store.release()
    with engine_on(store) as other:
        assert other.tier.close()


# Full stores


def test_a_full_store_keeps_its_chunks() -> None:
    names, store = names_of("a", 2), Store(capacity_bytes=3 * (CHUNK_BYTES + 4096))
    with engine_on(store) as engine:
        assert engine.save(names) == names
        assert len(engine.save(names_of("b", 8))) < 8  # a batch does not evict its own pages
        assert engine.fetch(names + names_of("b", 8)) != []


@pytest.mark.parametrize("seed", seeds(4))
def test_no_wrong_chunk_is_delivered_under_random_faults_of_the_store(seed: int) -> None:
    """The engine compares the bytes of each delivered chunk."""
    dice, store = rng(seed), Store()
    fetched = 0
    with engine_on(store, in_place=bool(seed % 2), transfer={"storage_batch_pages": 3}) as engine:
        open_jobs: list[int] = []
        for _ in range(150):
            names = dice.sample(names_of("a", 12) + names_of("b", 12, group=1), dice.randint(1, 6))
            if len(open_jobs) < 6:
                open_jobs.append(engine.begin(names, load=dice.random() < 0.6))
            engine.tier.lookup(dice.choice(names), dice.choice("rst"))
            if dice.random() < 0.1:
                engine.tier.forget(dice.choice("rst"))
            driver = store.driver
            stored = list(driver.pages("", 0.0))
            if stored and dice.random() < 0.2:
                victim, other = dice.choice(stored), dice.choice(stored)
                page = driver.peek(*victim.id) or b""
                changed = [page[:300] + b"\0" + page[301:], page[:4096], driver.peek(*other.id) or b""]
                driver.poke(*victim.id, dice.choice(changed))
            if dice.random() < 0.1:
                store.raises = None if store.raises else BackendError("down")
            engine.step()
            if open_jobs and dice.random() < 0.5:
                fetched += len(engine.end(open_jobs.pop(0)))
        store.raises = None
        for number in open_jobs:
            engine.end(number)
    assert fetched
