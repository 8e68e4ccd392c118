"""Touches: a touched page outlives others, and a store reports which pages it no longer has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hicache.backends.base import Direction
from hicache.backends.compose import Levels, Shards
from hicache.backends.compose.sharded import ShardCodec
from hicache.backends.guard import Override, Verb
from hicache.backends.limit import LIST_INTERVAL_S
from hicache.backends.memory import MemoryDriver
from hicache.backends.storage import Storage
from hicache.backends.store import UNGUARDED, Store
from hicache.daemon.pool import DaemonPool
from hicache.daemon.sharing import SharedStore
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    HIT,
    MISS,
    STORED,
    Subject,
    bare,
    exists,
    load,
    make_keys,
    memory_store,
    soon,
    store_chain,
)
from hicache_lab.faults import FaultyDriver
from tests.backends._files import CODEC, PAGE, open_file
from tests.backends._subjects import doorless
from tests.backends._troubled import Troubled
from tests.backends.compose._parts import COPIES, named, settle
from tests.backends.guard.stores import guard_of
from tests.backends.test_limit import limited_file
from tests.waiting import wait_for

OLD, HOT, MORE = make_keys(4, "old"), make_keys(4, "hot"), make_keys(4, "more")
# Longer: the sweeps of a limit, in the background, may evict more than needed.
LATER = make_keys(12, "later")
FULL = len(HOT + LATER) * PAGE


class OnlyMoves(MemoryDriver):
    """A driver without Touches."""

    touch = None  # type: ignore[assignment]


def file_store(path: Path) -> Storage:
    return open_file(path / "store", capacity=FULL).backend


def limited_store(path: Path) -> Storage:
    # A sweep begins only when more pages come (`crowd`): one that runs during a touch would not know of it.
    return limited_file(path / "limited", capacity_bytes=FULL + PAGE, interval_s=LIST_INTERVAL_S).backend


STORES: dict[str, Callable[[Path], Storage]] = {
    "memory": lambda path: memory_store(CODEC, FULL),
    "file": file_store,
    "limit": limited_store,
    "guard": lambda path: Store(MemoryDriver(FULL), CODEC),
    "faulty": lambda path: Store(FaultyDriver(MemoryDriver(FULL)), CODEC, UNGUARDED),
    "shared": lambda path: SharedStore(CODEC, DaemonPool(0), memory_store(CODEC, FULL)),
}


@pytest.fixture(params=sorted(STORES))
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    """A full store that holds the chain HOT and, used later, the chain LATER."""
    with contextlib.closing(STORES[request.param](tmp_path)) as backend:
        store = doorless(backend)
        assert store_chain(store, HOT) == [STORED] * 4
        assert store_chain(store, LATER) == [STORED] * 12
        yield store


def crowd(store: Subject) -> None:
    """Store four more pages, so that others are evicted."""
    wait_for(lambda: all(outcome.is_stored for outcome in store_chain(store, MORE)))


@pytest.mark.parametrize("is_touched", [True, False])
def test_a_touched_chain_outlives_a_chain_stored_later_and_a_looked_up_one_does_not(
    full: Subject, is_touched: bool
) -> None:
    if is_touched:
        assert full.backend.batch_touch(HOT, deadline=soon()) == []
    else:
        assert exists(full, HOT) == 4
    crowd(full)
    assert (exists(full, HOT) == 4) is is_touched and (exists(full, LATER) < 12 or not is_touched)


def test_an_evicted_page_is_reported_by_the_notice_and_by_the_next_touch(full: Subject) -> None:
    told: list[bytes] = []
    full.backend.watch_evictions(told.extend)
    crowd(full)

    def gone() -> set[bytes]:
        return {key for key in HOT + LATER if not full.backend.batch_has([key], deadline=soon())[0]}

    before = gone()
    assert before
    missing = set(full.backend.batch_touch(HOT + LATER, deadline=soon()))
    lost = gone()
    assert before <= missing <= lost, "a sweep may evict one more page meanwhile"
    if not isinstance(full.backend, SharedStore):  # its engines are in other processes
        wait_for(lambda: lost <= set(told))
    assert not set(told) & set(MORE)


def test_eviction_notices_do_not_name_other_namespaces(tmp_path: Path) -> None:
    other = FrameCodec(bytes(31) + b"\7", CODEC.payload_bytes)
    with (
        contextlib.closing(open_file(tmp_path / "s", other, capacity=4 * PAGE).backend) as theirs,
        contextlib.closing(open_file(tmp_path / "s", capacity=4 * PAGE).backend) as ours,
    ):
        told: list[bytes] = []
        ours.watch_evictions(told.extend)
        store_chain(doorless(theirs), OLD)
        assert store_chain(doorless(ours), HOT) == [STORED] * 4
        assert told == []
        assert store_chain(doorless(ours), MORE) == [STORED] * 4
        assert sorted(told) == sorted(HOT)


def test_a_store_without_recency_is_not_touched() -> None:
    guard = guard_of(OnlyMoves())
    assert guard.batch_touch(HOT, deadline=soon()) == []
    assert guard.statistics().errors == {}


# Guards


class Failing(Troubled):
    """A store whose touches raise; it counts them."""

    touches = 0

    def touch(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self.touches += 1
        raise ValueError("a bug")


def test_a_failed_touch_is_not_retried_and_returns_no_key() -> None:
    store = Failing()
    guard = guard_of(store)
    assert guard.batch_touch(HOT, deadline=soon()) == []
    assert (store.touches, guard.may_pass(Direction.WRITE)) == (1, True)
    assert guard.statistics().errors == {"raised_ValueError": 1}
    assert sum(guard.guard_statistics().latency[Verb.TOUCH].counts) == 1
    guard.check()


def test_an_open_breaker_drops_touches_without_an_error() -> None:
    store = Failing()
    guard = guard_of(store)
    guard.override(Direction.WRITE, Override.OFF)
    assert guard.batch_touch(HOT, deadline=soon()) == []
    assert (store.touches, guard.statistics().errors) == (0, {})
    guard.override(Direction.WRITE, Override.AUTO)
    guard.batch_touch(HOT, deadline=soon())
    assert store.touches == 1


# Compositions


def test_a_touch_reaches_all_levels_and_a_page_on_any_of_them_is_not_missing() -> None:
    upper, lower = memory_store(CODEC, 4 * PAGE), memory_store(CODEC, 8 * PAGE)
    with contextlib.closing(Levels(CODEC, named(upper, lower), cascade_bytes_max=COPIES)) as levels:
        store = doorless(levels)
        for chain in (HOT, OLD):
            store_chain(store, chain)
            settle(levels)
        assert exists(doorless(upper), HOT) == 0
        assert levels.batch_touch(HOT, deadline=soon()) == []
        store_chain(store, MORE)
        settle(levels)
        assert exists(doorless(lower), HOT) == 4
        assert sorted(levels.batch_touch(OLD, deadline=soon())) == sorted(OLD)
        assert Levels(CODEC, named(bare(OnlyMoves(), CODEC), upper)).batch_touch(OLD, deadline=soon()) == []


def test_a_level_above_the_last_does_not_report_the_eviction_of_a_page_that_was_copied() -> None:
    upper, lower = memory_store(CODEC, 4 * PAGE), memory_store(CODEC, 8 * PAGE)
    with contextlib.closing(Levels(CODEC, named(upper, lower), cascade_bytes_max=COPIES)) as levels:
        told: list[bytes] = []
        levels.watch_evictions(told.extend)
        for chain in (HOT, OLD):
            store_chain(doorless(levels), chain)
            settle(levels)
        assert (upper.statistics().evicted_pages, told) == (4, [])
        store_chain(doorless(levels), MORE)
        settle(levels)
        assert sorted(told) == sorted(HOT)


def test_each_shard_is_touched_with_its_own_pages() -> None:
    codec = ShardCodec(CODEC)
    parts = [memory_store(codec), memory_store(codec, 40 * PAGE)]
    keys = make_keys(30)
    with contextlib.closing(Shards(codec, named(*parts))) as sharded:
        told: list[bytes] = []
        sharded.watch_evictions(told.extend)
        store_chain(doorless(sharded), keys[:20])
        assert sorted(sharded.batch_touch(keys, deadline=soon())) == sorted(keys[20:])
        store_chain(doorless(sharded), make_keys(200, "more"))
        assert told and set(told) <= {*keys, *make_keys(200, "more")}
        assert not any(parts[1].batch_has(told, deadline=soon()))


# The daemon's store


def test_a_page_of_the_pool_does_not_age_in_the_store_behind_it() -> None:
    inner = memory_store(CODEC, 8 * PAGE)
    with contextlib.closing(SharedStore(CODEC, DaemonPool(64 * PAGE), inner)) as shared:
        store = doorless(shared)
        for chain in (HOT, OLD):
            store_chain(store, chain)
        assert load(store, HOT) == [HIT] * 4  # from the pool, so the store does not see these reads
        assert shared.batch_touch(HOT, deadline=soon()) == []
        store_chain(store, MORE)
        assert exists(doorless(inner), HOT) == 4
        inner.delete(HOT, deadline=soon())
        assert shared.batch_touch(HOT, deadline=soon()) == [], "pages in the pool were reported as missing"
        assert sorted(shared.batch_touch(make_keys(2, "none"), deadline=soon())) == sorted(make_keys(2, "none"))
        assert load(doorless(inner), HOT) == [MISS] * 4


def test_without_a_store_the_pool_reports_missing_pages() -> None:
    with contextlib.closing(SharedStore(CODEC, DaemonPool(64 * PAGE), None)) as shared:
        store_chain(doorless(shared), HOT)
        assert shared.batch_touch(HOT + OLD[:1], deadline=soon()) == OLD[:1]
