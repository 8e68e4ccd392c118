"""With a pool, a store that is full, fails, hangs or is not open is never worse than no store."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.storage import Storage
from hicache.backends.store import UNGUARDED, Store
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config.guard import GuardConfig
from hicache.daemon.pool import DaemonPool
from hicache.daemon.sharing import SharedStore
from hicache.frame import HEADER_BYTES
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    HIT,
    MISS,
    PRESENT,
    STORED,
    Subject,
    bare,
    delete,
    empty_frames,
    exists,
    full_frames,
    holds,
    in_threads,
    load,
    make_keys,
    memory_store,
    memory_subject,
    soon,
    store_chain,
)
from tests.backends._subjects import doorless
from tests.backends._troubled import CODEC, Troubled
from tests.seeds import seeds
from tests.tuned import tuned
from tests.waiting import wait_for

GET_ERROR, SET_ERROR, REJECTED = GetOutcome.ERROR, SetOutcome.ERROR, SetOutcome.REJECTED
UNIT = 4096
PAGE_UNITS = -(-(HEADER_BYTES + CODEC.payload_bytes) // UNIT)


def full() -> Store:
    """A store without room."""
    return memory_store(CODEC, capacity_bytes=1)


def down() -> Store:
    """A store whose calls fail."""
    return bare(failing(), CODEC)


def failing() -> Troubled:
    driver = Troubled()
    driver.down = True
    return driver


def switched_off() -> Store:
    """A store that fails, behind a guard that has noticed it."""
    driver = failing()
    guard = Store(driver, CODEC, tuned(GuardConfig, retry_share=0, backoff_min=3600, backoff_max=3600))
    for _ in range(3):
        guard.batch_exists(make_keys(1, "probe"), deadline=soon())
        store_chain(memory_subject(guard, driver), make_keys(1, "probe"))
    wait_for(lambda: not any(guard.may_pass(direction) for direction in guard.guard_statistics().breakers))
    return guard


BAD_STORES: dict[str, Callable[[], Store]] = {"full": full, "down": down, "switched-off": switched_off}


@pytest.fixture
def shared() -> Iterator[Callable[..., Subject]]:
    """A function that makes a shared store with a pool of so many pages in front of a store."""
    with contextlib.ExitStack() as opened:

        def make(inner: Storage | None, pool_pages: int = 64, clock: Clock = SYSTEM_CLOCK) -> Subject:
            pool = DaemonPool(pool_pages * PAGE_UNITS * UNIT, unit_bytes=UNIT)
            backend = SharedStore(CODEC, pool, inner, label="test", clock=clock)
            opened.callback(backend.close)
            opened.callback(pool.check)
            return doorless(backend)

        yield make


@pytest.mark.parametrize("bad", BAD_STORES)
def test_a_page_that_the_store_does_not_take_enters_the_pool(shared: Callable[..., Subject], bad: str) -> None:
    store, keys = shared(BAD_STORES[bad]()), make_keys(4)
    errors = list[str]()
    assert exists(store, keys, errors=errors) == 0
    assert store_chain(store, keys[:2], errors=errors) == [STORED] * 2
    assert store_chain(store, keys, errors=errors) == [PRESENT, PRESENT, STORED, STORED]
    assert exists(store, [*keys, *make_keys(1, "more")], errors=errors) == 4
    assert store.backend.batch_has([*make_keys(1, "more"), keys[3]], deadline=soon(), errors=errors) == [False, True]
    frames = empty_frames(CODEC, 5)
    asked = [*keys, *make_keys(1, "more")]
    assert store.backend.batch_get(asked, frames, deadline=soon(), errors=errors) == [HIT] * 4 + [MISS]
    assert all(holds(CODEC, key, frame) for key, frame in zip(keys, frames, strict=False))
    assert errors == [], "the guard of an engine sees errors of a store that the pool stands in for"
    assert store.backend.statistics().errors or bad == "full", "the statistics keep them"
    assert delete(store, keys[2:]) == 2
    assert load(store, keys) == [HIT, HIT, MISS, MISS]
    assert store.backend.clear(deadline=soon()) == 2
    assert load(store, keys) == [MISS] * 4


def test_without_a_pool_outcomes_and_errors_are_those_of_the_store(shared: Callable[..., Subject]) -> None:
    """The control of the tests above."""
    keys = make_keys(2)
    assert store_chain(shared(full(), 0), keys) == [REJECTED] * 2
    store = shared(down(), 0)
    errors = list[str]()
    assert store_chain(store, keys, errors=errors) == [SET_ERROR] * 2
    assert load(store, keys, errors=errors) == [GET_ERROR] * 2
    assert exists(store, keys, errors=errors) == 0
    assert errors == ["down"] * 5


@pytest.mark.parametrize("bad", [*BAD_STORES, "none"])
def test_a_full_pool_replaces_the_least_recently_used_pages_as_without_a_store(
    shared: Callable[..., Subject], bad: str
) -> None:
    store = shared(None if bad == "none" else BAD_STORES[bad](), 4)
    old, keys = make_keys(4, "old"), make_keys(8)
    assert store_chain(store, old) == [STORED] * 4
    assert load(store, old[:1]) == [HIT]
    assert store_chain(store, keys[:2]) == [STORED] * 2
    assert (exists(store, old), exists(store, keys)) == (2, 2)
    assert store_chain(store, keys[2:], keys[1]) == [STORED] * 2 + [REJECTED] * 4
    assert exists(store, keys) == 4


@pytest.mark.parametrize("room", [3, 2])
def test_a_store_without_room_for_a_chain_does_not_keep_it_out_of_the_pool(
    shared: Callable[..., Subject], room: int
) -> None:
    """A full store rejects the tail, or takes each page and soon evicts it."""
    inner = memory_store(CODEC, capacity_bytes=room * CODEC.frame_bytes)
    store, keys = shared(inner, 4), make_keys(4)
    store_chain(store, make_keys(4, "old"))
    assert set(store_chain(store, keys)) <= {STORED, PRESENT}
    inner.clear(deadline=soon())
    assert (exists(store, keys), load(store, keys)) == (4, [HIT] * 4)


@pytest.mark.parametrize("bad", BAD_STORES)
def test_a_page_that_only_the_pool_has_is_not_missing_until_it_leaves_the_pool(
    shared: Callable[..., Subject], bad: str
) -> None:
    store, keys = shared(BAD_STORES[bad](), 4), make_keys(4)
    store_chain(store, keys)
    assert store.backend.batch_touch(keys, deadline=soon()) == []
    store_chain(store, make_keys(2, "more"))
    missing = store.backend.batch_touch(keys, deadline=soon())
    assert sorted(missing) == sorted(keys[2:])
    assert store_chain(store, keys[2:], keys[1]) == [STORED] * 2


def test_a_removal_that_the_store_could_not_make_is_an_error(shared: Callable[..., Subject]) -> None:
    """The page may come back from the store."""
    driver, keys = failing(), make_keys(1)
    driver.poke(CODEC.namespace, keys[0], b"a page")
    store = shared(bare(driver, CODEC))
    errors = list[str]()
    delete(store, keys, errors=errors)
    store.backend.clear(deadline=soon(), errors=errors)
    assert errors == ["down"] * 2


def test_a_page_handed_over_is_in_the_pool_while_the_store_hangs(shared: Callable[..., Subject]) -> None:
    inner, clock = Troubled(), ManualClock()
    store, keys = shared(bare(inner, CODEC), clock=clock), make_keys(3)
    inner.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(store_chain, store, keys)
        wait_for(lambda: inner.at_gate == 1)
        assert (exists(store, keys), load(store, keys)) == (3, [HIT] * 3)
        frames = full_frames(CODEC, keys)
        again = threads.submit(store.backend.batch_set, keys, frames, parent=None, deadline=clock() + 1)
        wait_for(again.done, lambda: clock.advance(0.1))
        inner.gate.set()
        assert (again.result(), writing.result(30.0)) == ([PRESENT] * 3, [STORED] * 3)


class Late(Troubled):
    """A driver whose writes and reads fail after the deadline."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock, self.hangs = clock, False

    def _reach(self, verb: str, keys: Sequence[bytes], deadline: float, parent: bytes | None = None) -> None:
        self.clock.advance(2.0 if self.hangs else 0.0)
        self.down = self.hangs
        super()._reach(verb, keys, deadline, parent)


@pytest.mark.parametrize("pool_pages", [64, 3])
def test_a_store_that_uses_up_the_time_of_a_call_costs_no_page_and_no_error(
    shared: Callable[..., Subject], pool_pages: int
) -> None:
    clock = ManualClock()
    inner = Late(clock)
    store, keys = shared(Store(inner, CODEC, UNGUARDED, clock=clock), pool_pages, clock), make_keys(3)
    store_chain(store, make_keys(3, "old"))
    inner.hangs = True
    errors = list[str]()
    frames = full_frames(CODEC, keys)
    assert store.backend.batch_set(keys, frames, parent=None, deadline=clock() + 1, errors=errors) == [STORED] * 3
    asked = [*keys, *make_keys(1, "more")]
    read = store.backend.batch_get(asked, empty_frames(CODEC, 4), deadline=clock() + 1, errors=errors)
    assert read == [HIT] * 3 + [MISS]
    assert errors == []


@pytest.mark.parametrize("seed", seeds(2))
def test_threads_that_share_a_failing_store_read_whole_pages_or_none(shared: Callable[..., Subject], seed: int) -> None:
    inner = Troubled(capacity_bytes=6 * CODEC.frame_bytes)
    store, keys = shared(bare(inner, CODEC), 5), make_keys(8)
    ended = threading.Event()

    def use(number: int) -> None:
        dice = random.Random(seed + number)
        if number == 0:
            while not ended.is_set():
                inner.fail_calls = dice.randrange(3)
            return
        try:
            for _ in range(150):
                at = dice.randrange(8)
                some = keys[at : at + dice.randrange(1, 5)]
                if dice.randrange(2):
                    assert set(load(store, some)) <= {HIT, MISS}
                else:
                    found = store_chain(store, some, keys[at - 1] if at else None)
                    assert set(found) <= {STORED, PRESENT, REJECTED}
        finally:
            if number == 1:
                ended.set()

    in_threads(5, use)
    inner.fail_calls = 0
    delete(store, keys)
    assert load(store, keys) == [MISS] * 8
