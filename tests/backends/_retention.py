"""The contract of stores with a maximum age, and helpers for its tests."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.registry import BackendSpec, open_spec, open_stored
from hicache.backends.retention import CLOCK_SKEW_S, Retention
from hicache.backends.storage import Storage
from hicache.backends.store import Store
from hicache.clock import Clock
from hicache.frame import Compression, FrameCodec, FrameHeader, PageBuffer, header_of
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    empty_frames,
    empty_views,
    full_frames,
    holds,
    make_keys,
)
from tests.clocks import At
from tests.waiting import WAIT_S, wait_for

MAX_AGE_S = 3600.0
# The header has whole seconds, so a page expires up to a second early. Tests stay this far from the limit.
EDGE_S = 5.0
KEYS = make_keys(3)
# A deadline by clocks that tests move by hours.
FAR = math.inf


def codec_at(clock: Clock, namespace: bytes = NAMESPACE) -> FrameCodec:
    return FrameCodec(namespace, PAYLOAD_BYTES, clock=clock)


def time_in(page: PageBuffer | bytes | None) -> int:
    """Return the time in the header of a page."""
    header = None if page is None else FrameHeader.parse(page if isinstance(page, bytes) else bytes(header_of(page)))
    assert header is not None
    return header.stored_s


def put(store: Storage, keys: Sequence[bytes], parent: bytes | None = None) -> list[SetOutcome]:
    """Store the pages of `keys` as one batch."""
    return store.batch_set(keys, full_frames(store.codec, keys), parent=parent, deadline=FAR)


def get(store: Storage, keys: Sequence[bytes]) -> list[GetOutcome]:
    """Read pages, and assert that each hit is the right page."""
    frames = empty_frames(store.codec, len(keys))
    outcomes = store.batch_get(keys, frames, deadline=FAR)
    for key, frame, outcome in zip(keys, frames, outcomes, strict=True):
        assert (outcome is HIT) == store.codec.is_sealed(key, frame)
        assert outcome is not HIT or holds(store.codec, key, frame), "a wrong page was served"
    return outcomes


def retention_of(store: Store) -> Retention:
    (found,) = (one for one in store._sweepers if isinstance(one, Retention))
    return found


def settle(store: Store, clock: ManualClock) -> None:
    """Wait until the sweep in progress, and the one that is due now, have ended."""
    retention = retention_of(store)
    if retention._stored is not None:
        wait_for(lambda: clock() < retention._sweeps._next_at < math.inf)


def put_earlier(store: Store, keys: Sequence[bytes]) -> None:
    """Store pages as an earlier version does: without a time."""
    codec = codec_at(At(0.0))
    frames = full_frames(codec, keys)
    for key, frame in zip(keys, frames, strict=True):
        codec.seal(key, frame)
    assert store.batch_set(keys, frames, parent=None, deadline=FAR) == [STORED] * len(keys)
    assert [time_in(frame) for frame in frames] == [0] * len(keys)


class RetentionContract:
    """What a store with a maximum age does. A subclass provides the fixture `spec`: an empty store without one."""

    sweeps = True

    @pytest.fixture
    @abstractmethod
    def spec(self) -> BackendSpec:
        """Return the type and the options of the store."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def stores(self, spec: BackendSpec, clock: ManualClock) -> Iterator[Stores]:
        found = Stores(spec, clock)
        yield found
        found.close()

    def test_a_page_is_a_hit_up_to_its_age_and_then_a_miss_also_if_it_was_used(
        self, stores: Stores, clock: ManualClock
    ) -> None:
        aged, plain = stores.open(MAX_AGE_S), stores.open()
        assert put(aged, KEYS) == [STORED] * 3
        for _ in range(2):
            clock.advance(MAX_AGE_S / 2 - EDGE_S)
            assert get(aged, KEYS) == [HIT] * 3
            assert aged.batch_touch(KEYS, deadline=FAR) == []
        settle(aged, clock)
        clock.advance(3 * EDGE_S)
        assert get(plain, KEYS) == [HIT] * 3, "the control"
        assert get(aged, KEYS) == [MISS] * 3
        assert get(plain, KEYS) == [MISS] * 3, "an expired page is removed when it is read"
        found = aged.statistics()
        assert (found.expired_pages, found.evicted_pages, dict(found.corrupt)) == (3, 0, {})
        assert (found.gets[MISS], dict(found.errors)) == (3, {})
        assert put(aged, KEYS) == [STORED] * 3
        assert get(aged, KEYS) == [HIT] * 3

    def test_an_expired_page_in_parts_is_a_miss_and_its_buffers_do_not_count_as_the_page(
        self, stores: Stores, clock: ManualClock
    ) -> None:
        aged = stores.open(MAX_AGE_S)
        put(aged, KEYS)
        settle(aged, clock)
        clock.advance(MAX_AGE_S + EDGE_S)
        views = empty_views(aged.codec, 3)
        assert aged.batch_get(KEYS, views, deadline=FAR) == [MISS] * 3
        assert not any(aged.codec.is_sealed(key, view) for key, view in zip(KEYS, views, strict=True))

    def test_a_new_page_is_sealed_in_its_frame_without_a_copy(self, stores: Stores, clock: ManualClock) -> None:
        aged = stores.open(MAX_AGE_S)
        frames = full_frames(aged.codec, KEYS)
        assert aged.batch_set(KEYS, frames, parent=None, deadline=FAR) == [STORED] * 3
        assert [time_in(frame) for frame in frames] == [int(clock.wall_s())] * 3

    def test_pages_that_are_not_read_are_removed_in_all_namespaces(self, stores: Stores, clock: ManualClock) -> None:
        if not self.sweeps:
            pytest.skip("the server removes them")
        with contextlib.closing(stores.open(codec=codec_at(clock, OTHER_NAMESPACE))) as other:
            assert put(other, KEYS) == [STORED] * 3
        evicted: list[bytes] = []
        aged = stores.open(MAX_AGE_S)
        aged.watch_evictions(evicted.extend)
        assert put(aged, KEYS) == [STORED] * 3
        clock.advance(MAX_AGE_S - EDGE_S)
        settle(aged, clock)
        assert len(stores.listed()) == 6, "the control"
        wait_for(lambda: stores.listed() == [], lambda: clock.advance(10.0), pause_s=0.05)
        wait_for(lambda: aged.statistics().expired_pages == 6)
        assert sorted(evicted) == sorted(KEYS) and dict(aged.statistics().errors) == {}

    def test_deadlines_are_times_of_the_clock_of_the_store(self, stores: Stores, clock: ManualClock) -> None:
        clock.advance(-clock() - MAX_AGE_S)  # far behind the system's clock, and below zero
        store, deadline = stores.open(), clock() + WAIT_S
        frames, into = full_frames(store.codec, KEYS), empty_frames(store.codec, 3)
        assert store.batch_set(KEYS, frames, parent=None, deadline=deadline) == [STORED] * 3
        assert store.batch_exists(KEYS, deadline=deadline) == 3
        assert store.batch_get(KEYS, into, deadline=deadline) == [HIT] * 3
        assert store.batch_touch(KEYS, deadline=deadline) == []
        assert store.delete(KEYS, deadline=deadline) == 3
        assert dict(store.statistics().errors) == {}

    def test_a_page_of_an_earlier_version_is_a_miss_only_with_an_age(self, stores: Stores) -> None:
        plain = stores.open()
        put_earlier(plain, KEYS)
        assert get(plain, KEYS) == [HIT] * 3
        aged = stores.open(MAX_AGE_S)
        assert get(aged, KEYS) == [MISS] * 3

    @pytest.mark.parametrize("in_parts", [False, True])
    def test_an_old_page_from_host_memory_is_stored_as_a_new_one(
        self, stores: Stores, clock: ManualClock, in_parts: bool
    ) -> None:
        aged = stores.open(MAX_AGE_S)
        put(aged, KEYS)
        pages: list[PageBuffer] = [*(empty_views if in_parts else empty_frames)(aged.codec, 3)]
        assert aged.batch_get(KEYS, pages, deadline=FAR) == [HIT] * 3
        began_s = time_in(pages[0])
        clock.advance(MAX_AGE_S + EDGE_S)
        settle(aged, clock)  # a later sweep would see the real time of a new object, which is before this clock
        assert get(aged, KEYS) == [MISS] * 3
        assert aged.batch_set(KEYS, pages, parent=None, deadline=FAR) == [STORED] * 3
        assert all(holds(aged.codec, key, page) for key, page in zip(KEYS, pages, strict=True))
        assert [time_in(page) for page in pages] == [began_s] * 3, "other threads may read the pages"
        again = empty_frames(aged.codec, 3)
        assert aged.batch_get(KEYS, again, deadline=FAR) == [HIT] * 3
        assert [time_in(page) for page in again] == [int(clock.wall_s())] * 3

    def test_a_copy_of_an_old_page_is_not_stored_as_a_new_one(self, stores: Stores, clock: ManualClock) -> None:
        plain, codec = stores.open(), codec_at(At(clock.wall_s() - MAX_AGE_S - EDGE_S))
        frames = full_frames(codec, KEYS)
        for key, frame in zip(KEYS, frames, strict=True):
            codec.seal(key, frame)
        copies = [codec.copy_in(frame) for frame in frames]
        aged = stores.open(MAX_AGE_S)
        assert aged.batch_set(KEYS, copies, parent=None, deadline=FAR) == [STORED] * 3
        assert get(aged, KEYS) == [MISS] * 3
        assert get(plain, KEYS) == [MISS] * 3, "an expired page is removed when it is read"
        assert aged.batch_set(KEYS, frames, parent=None, deadline=FAR) == [STORED] * 3
        assert get(aged, KEYS) == [HIT] * 3, "the control: pages that an engine stores are new ones"

    @pytest.mark.parametrize("ahead_s", [CLOCK_SKEW_S - EDGE_S, CLOCK_SKEW_S + EDGE_S, 63e6])
    def test_a_page_that_a_clock_far_ahead_has_stored_is_expired_and_can_be_stored_again(
        self, stores: Stores, clock: ManualClock, ahead_s: float
    ) -> None:
        plain, wrong = stores.open(), At(clock.wall_s() + ahead_s)
        assert put(stores.open(codec=codec_at(wrong)), KEYS) == [STORED] * 3
        assert get(plain, KEYS) == [HIT] * 3
        aged = stores.open(MAX_AGE_S)
        if ahead_s < CLOCK_SKEW_S:
            assert get(aged, KEYS) == [HIT] * 3
            return
        assert get(aged, KEYS) == [MISS] * 3
        pages = full_frames(aged.codec, KEYS)
        for key, page in zip(KEYS, pages, strict=True):
            codec_at(wrong).seal(key, page)
        assert aged.batch_set(KEYS, pages, parent=None, deadline=FAR) == [STORED] * 3
        assert get(aged, KEYS) == [HIT] * 3, "a page in host memory that has the wrong time is stored as a new one"

    @pytest.mark.parametrize("options", [
        {"compression": Compression()}, {"encryption_keys": [b"c" * 32]}, {"mac_keys": [b"m" * 32]},
        {"compression": Compression(), "encryption_keys": [b"c" * 32]},
    ])
    def test_encoded_pages_have_an_age_too(self, stores: Stores, clock: ManualClock, options: dict[str, Any]) -> None:
        aged = stores.open(MAX_AGE_S, FrameCodec(NAMESPACE, PAYLOAD_BYTES, clock=clock, **options))
        assert put(aged, KEYS) == [STORED] * 3
        clock.advance(MAX_AGE_S - EDGE_S)
        assert get(aged, KEYS) == [HIT] * 3
        clock.advance(2 * EDGE_S)
        assert get(aged, KEYS) == [MISS] * 3


class Stores:
    """Openings of one store. `close` closes them all."""

    def __init__(self, spec: BackendSpec, clock: ManualClock) -> None:
        self.spec = spec
        self.clock = clock
        self._undo = contextlib.ExitStack()

    def open(self, max_age_s: float | None = None, codec: FrameCodec | None = None) -> Store:
        assert isinstance(self.spec.options, dict)
        options = {**self.spec.options, "max_age": max_age_s}
        store = open_spec(BackendSpec(self.spec.type, options, None), codec or codec_at(self.clock), self.clock)
        assert isinstance(store, Store)
        self._undo.callback(store.close)
        return store

    def listed(self) -> list[bytes]:
        """Return the keys of all stored pages."""
        with contextlib.closing(open_stored(self.spec)) as stored:
            return [page.key for page in stored.pages()]

    def close(self) -> None:
        self._undo.close()


