"""`CapacityLimit` in stores without their own capacity."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome, StoredPage
from hicache.backends.chains import Chains
from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.file.inspection import FileInspection, make_store
from hicache.backends.limit import FIRST_LISTING_WAIT_S, LIST_INTERVAL_S, PAUSE_S, CapacityLimit
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import PageWrites
from hicache.backends.storage import store_statistics
from hicache.backends.store import UNGUARDED, Store
from hicache.backends.stored import StoredPages
from hicache.background import BackgroundTask
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.errors import BackendUnavailable, InvalidInput
from hicache.frame import FrameCodec, FrameHeader
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    HIT,
    MISS,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    SET_ERROR,
    STORED,
    DriverContract,
    OpenStore,
    Subject,
    exists,
    full_frames,
    in_threads,
    load,
    make_keys,
    memory_subject,
    soon,
    store_chain,
)
from tests.seeds import rng, seeds
from tests.test_supervised import no_threads
from tests.waiting import WAIT_S, wait_for

from ._files import CODEC, OPENED, PAGE, disk_usage, file_options, open_file, open_stored, page_files

REJECTED = SetOutcome.REJECTED
LARGE = 1 << 30


def pages_of(root: Path) -> StoredPages:
    """Return the pages for the sweeps of a limit. A test need not close them."""
    make_store(root)
    OPENED.append(stored := open_stored(root))
    return stored


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def limited_memory(
    capacity_bytes: int, clock: Clock, driver: MemoryDriver | None = None, stored: StoredPages | None = None
) -> Subject:
    driver = driver or MemoryDriver()
    stored = stored or StoredPages(driver, "memory")
    limit = CapacityLimit(CODEC, stored, capacity_bytes=capacity_bytes, clock=clock)
    backend = Store(driver, CODEC, UNGUARDED, limit=limit, clock=clock)
    OPENED.append(backend)
    wait_for(lambda: limit._ledger.is_listed)
    return memory_subject(backend, driver)


def limit_of(store: Subject) -> CapacityLimit:
    """Return the limit of a store."""
    assert isinstance(store.backend, Store) and store.backend._limit is not None
    return store.backend._limit


def settle(store: Subject, clock: ManualClock) -> None:
    """Wait until the sweep in progress, and the one that is due now, have ended."""
    sweeps = limit_of(store)._sweeps
    wait_for(lambda: clock() < sweeps._next_at < math.inf)


def sweep(store: Subject, clock: ManualClock) -> None:
    """Move to the sweep that the store has requested, and wait until it has ended."""
    clock.advance(PAUSE_S)
    settle(store, clock)


def test_clearing_makes_room_and_clears_the_records(clock: ManualClock) -> None:
    store, keys, more = limited_memory(6 * PAGE, clock), make_keys(6), make_keys(6, "more")
    backend, limit = store.backend, limit_of(store)
    assert store_chain(store, keys) == [STORED] * 6
    assert limit._fresh and limit._uses
    assert backend.clear(deadline=soon()) == 6
    assert not limit._fresh and not limit._uses
    sweep(store, clock)
    assert limit._ledger.used_bytes == 0
    assert store_chain(store, more) == [STORED] * 6
    assert load(store, more) == [HIT] * 6 and load(store, keys) == [MISS] * 6
    backend.close()


class TestLimitedFile(DriverContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: limited_file(tmp_path / "store", codec, capacity_bytes=LARGE)


def limited_file(
    root: Path, codec: FrameCodec = CODEC, *, capacity_bytes: int, interval_s: float = 0.05,
    clock: Clock = SYSTEM_CLOCK,
) -> Subject:
    """Open a file store at `root` limited only by `CapacityLimit`. It lists much more often than usual. The first
    listing is complete: on a busy machine it may take longer than a store waits."""
    make_store(root)
    limit = CapacityLimit(
        codec, pages_of(root), capacity_bytes=capacity_bytes, list_interval_s=interval_s, clock=clock
    )
    store = open_file(root, codec, limit=limit, clock=clock)
    wait_for(lambda: limit._ledger.is_listed)
    return store


@dataclass(slots=True)
class Opened:
    """Limited stores on one directory."""

    root: Path
    clock: ManualClock

    def __call__(self, pages: int, codec: FrameCodec = CODEC) -> Subject:
        return limited_file(
            self.root, codec, capacity_bytes=pages * codec.frame_bytes, interval_s=LIST_INTERVAL_S, clock=self.clock
        )

    def pages(self) -> int:
        return len(page_files(self.root))  # files may be removed at the same time


@pytest.fixture
def opened(tmp_path: Path, clock: ManualClock) -> Opened:
    return Opened(tmp_path / "store", clock)


def evicted(store: Subject) -> int:
    return store.backend.statistics().evicted_pages


def test_pages_without_room_are_rejected_and_the_head_stays(opened: Opened, tmp_path: Path) -> None:
    """The control: without the limit all are stored."""
    assert store_chain(open_file(tmp_path / "unlimited"), make_keys(8)) == [STORED] * 8
    store, keys = opened(5), make_keys(8)
    assert store_chain(store, keys) == [STORED] * 5 + [REJECTED] * 3
    assert store_chain(store, keys[:6]) == [PRESENT] * 5 + [REJECTED]
    assert (exists(store, keys), store.backend.usage().capacity_bytes) == (5, 5 * PAGE)
    assert store.backend.statistics().sets == {STORED: 5, PRESENT: 5, REJECTED: 4}
    explained = limit_of(store).rejection or ""
    assert re.match(r"capacity is [\d.]+ KiB, and [\d.]+ KiB are stored or being", explained)
    (shown,) = store_statistics(store.backend)
    assert (shown.name, dict(shown.statistics.sets)) == ("file", {STORED: 5, PRESENT: 5, REJECTED: 4})
    assert shown.usage is not None and shown.usage.capacity_bytes == 5 * PAGE


def test_a_store_with_room_for_a_few_pages_and_a_fraction_makes_room_too(clock: ManualClock) -> None:
    store, more = limited_memory(6 * PAGE - 1, clock), make_keys(1, "more")
    assert store_chain(store, make_keys(5)) == [STORED] * 5
    assert store_chain(store, more) == [REJECTED]
    sweep(store, clock)
    assert store_chain(store, more) == [STORED]
    store.backend.close()


def test_pages_that_are_stored_again_take_no_room(clock: ManualClock) -> None:
    store, keys = limited_memory(6 * PAGE, clock), make_keys(6)
    for _ in range(4):
        store_chain(store, keys[:2])
    assert store_chain(store, keys) == [PRESENT] * 2 + [STORED] * 4
    store.backend.close()


def test_the_rest_of_a_batch_follows_the_stored_head_of_it(clock: ManualClock) -> None:
    store, keys = limited_memory(6 * PAGE, clock), make_keys(6)
    store_chain(store, keys[:3])
    assert store_chain(store, keys) == [PRESENT] * 3 + [STORED] * 3
    headers = [FrameHeader.parse(store.read(key) or b"") for key in keys[1:]]
    assert [header and header.parent_key for header in headers] == keys[:5]
    store.backend.close()


class Failing(MemoryDriver):
    """Stores nothing while `fails` is True."""

    fails = True

    def write(self, pages: PageWrites) -> None:
        if self.fails:
            raise StoreError(ErrorKind.CONNECTION_LOST)
        super().write(pages)


def test_pages_that_failed_take_room_until_the_next_listing(clock: ManualClock) -> None:
    """They may be stored: only the reply was lost."""
    driver = Failing()
    store = limited_memory(5 * PAGE, clock, driver)
    assert store_chain(store, make_keys(3, "failed")) == [SET_ERROR] * 3
    driver.fails = False
    assert store_chain(store, make_keys(3, "next")) == [STORED] * 2 + [REJECTED]
    sweep(store, clock)
    assert store_chain(store, make_keys(3, "last")) == [STORED] * 3
    store.backend.close()


class SlowEnd(StoredPages):
    """Pages whose listing, once it has all of them, waits until `go` is set."""

    def __init__(self, driver: MemoryDriver) -> None:
        super().__init__(driver, "memory")
        self.go, self.has_all = threading.Event(), threading.Event()
        self.go.set()

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        yield from super().pages(namespace)
        self.has_all.set()
        self.go.wait(WAIT_S)


def test_pages_stored_during_a_listing_count_although_it_does_not_have_them(clock: ManualClock) -> None:
    driver = MemoryDriver()
    stored = SlowEnd(driver)
    store = limited_memory(5 * PAGE, clock, driver, stored)
    settle(store, clock)
    stored.go.clear()
    stored.has_all.clear()
    limit_of(store).sweep_soon()
    clock.advance(PAUSE_S)
    assert stored.has_all.wait(WAIT_S)
    assert store_chain(store, make_keys(4, "during")) == [STORED] * 4
    stored.go.set()
    settle(store, clock)
    assert store_chain(store, make_keys(4, "after")) == [STORED] + [REJECTED] * 3
    store.backend.close()


def test_the_sweep_removes_the_tail_of_the_least_recently_used_chain(opened: Opened, clock: ManualClock) -> None:
    store, old, used = opened(20), make_keys(10, "old"), make_keys(10, "used")
    store_chain(store, old)
    clock.advance(1.0)
    store_chain(store, used)
    sweep(store, clock)
    assert evicted(store) == 2
    assert (exists(store, old), exists(store, used)) == (8, 10)
    assert load(store, old[:8]) == [HIT] * 8
    assert store_chain(store, make_keys(2, "more")) == [STORED] * 2
    sweep(store, clock)
    assert evicted(store) == 4
    assert (exists(store, old), exists(store, used)) == (8, 8)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_earlier_pages_count_and_their_chains_are_read_from_headers(
    tmp_path: Path, opened: Opened, is_damaged: bool
) -> None:
    """A page with a damaged header is removed like others."""
    keys = make_keys(10)
    first = open_file(tmp_path / "store")
    store_chain(first, keys)
    if is_damaged:
        first.write(keys[9], bytes(PAGE))
    first.backend.close()
    store = opened(10)
    settle(store, opened.clock)
    found = exists(store, keys)
    assert (evicted(store), opened.pages()) == (1, 9) and found >= 8 + (not is_damaged)
    assert is_damaged or load(store, keys[:found]) == [HIT] * found


def test_pages_of_other_namespaces_count_and_are_swept_too(opened: Opened) -> None:
    other = opened(10, FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES))
    theirs = make_keys(9, "theirs")
    assert store_chain(other, theirs) == [STORED] * 9
    store, ours, named = opened(10), make_keys(4, "ours"), list[bytes]()
    store.backend.watch_evictions(named.extend)
    outcomes = store_chain(store, ours)
    assert outcomes == [STORED] + [REJECTED] * 3
    for _ in range(3):  # each makes room for a page
        sweep(store, opened.clock)
        outcomes = store_chain(store, ours)
    assert outcomes == [PRESENT] * 3 + [STORED]
    assert exists(store, ours) == 4 and exists(other, theirs) < 9
    assert evicted(store) > 0 and named == [], "a notice is only about the store's own namespace"
    assert opened.pages() <= 10


def test_engines_overshoot_the_limit_by_the_writes_of_others_until_they_list(opened: Opened) -> None:
    ours, theirs = opened(10), opened(10)
    first, second = make_keys(9, "first"), make_keys(8, "second")
    assert store_chain(theirs, first[:1]) == store_chain(ours, second[:1]) == [STORED]
    store_chain(ours, second[1:], second[0])
    store_chain(theirs, first[1:], first[0])
    assert opened.pages() == 17
    settle(opened(10), opened.clock)
    assert opened.pages() <= 10
    assert opened.pages() == exists(ours, second) + exists(theirs, first) > 0


@pytest.mark.parametrize("seed", seeds(3))
def test_threads_never_exceed_the_limit(tmp_path: Path, seed: int) -> None:
    root, over = tmp_path / "store", []
    store = limited_file(root, capacity_bytes=16 * PAGE)

    def work(number: int) -> None:
        dice = rng(seed * 10 + number)
        for turn in range(15):
            keys = make_keys(dice.randrange(1, 8), f"{number} {turn}")
            assert set(store_chain(store, keys)) <= {STORED, REJECTED}
            if (found := len(page_files(root))) > 16:
                over.append(found)

    in_threads(4, work)
    assert over == [] and store.backend.statistics().errors == {}


class Troubled(StoredPages):
    """Pages that cannot be listed while there is `trouble`, and whose listings wait while `gate` is not set."""

    def __init__(self, root: Path, trouble: list[Exception], gate: threading.Event) -> None:
        make_store(root)
        super().__init__(FileInspection(None, file_options(root)), "file")
        self._trouble = trouble
        self._gate = gate
        OPENED.append(self)

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        self._gate.wait(30.0)
        if self._trouble:
            raise self._trouble[-1]
        return super().pages(namespace)


@contextlib.contextmanager
def troubled(
    root: Path, *trouble: Exception, clock: Clock, gate: bool = True
) -> Iterator[tuple[Subject, list[Exception], threading.Event]]:
    """Return a limited store, the list of errors that its sweep raises until it is empty, and the gate of its listings.
    """
    troubles, opens = list(trouble), threading.Event()
    if gate:
        opens.set()
    make_store(root)
    limit = CapacityLimit(CODEC, Troubled(root, troubles, opens), capacity_bytes=5 * PAGE, clock=clock)
    store = open_file(root, limit=limit, clock=clock)
    yield store, troubles, opens
    opens.set()
    store.backend.close()


@pytest.mark.parametrize("trouble", [BackendUnavailable("it is away"), RuntimeError("a bug")])
def test_a_store_that_cannot_be_listed_takes_no_pages_until_it_can(
    tmp_path: Path, trouble: Exception, caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    kind = "listing" if isinstance(trouble, OSError) else "internal"
    with (
        caplog.at_level(logging.CRITICAL),
        troubled(tmp_path / "store", trouble, clock=clock) as (store, troubles, _),
        ThreadPoolExecutor(1) as threads,
    ):
        keys = make_keys(2)
        put = partial(store.backend.batch_set, keys, full_frames(CODEC, keys), parent=None, deadline=math.inf)
        waiting = threads.submit(put)
        wait_for(waiting.done, lambda: clock.advance(FIRST_LISTING_WAIT_S))
        assert waiting.result() == [SET_ERROR] * 2
        assert store.backend.statistics().errors["unlisted"] == 2
        wait_for(lambda: store.backend.statistics().errors.get(kind, 0) > 0)
        assert store.backend.batch_exists(keys, deadline=math.inf) == 0
        troubles.clear()
        wait_for(lambda: limit_of(store)._ledger.is_listed, lambda: clock.advance(PAUSE_S))
        assert put() == [STORED] * 2


def test_after_a_failed_listing_verbs_do_not_cause_an_earlier_one(tmp_path: Path, clock: ManualClock) -> None:
    with troubled(tmp_path / "store", BackendUnavailable("it is away"), clock=clock) as (store, _, _):
        limit = limit_of(store)
        limit._sweeps.close(10.0)
        assert limit._sweep_once() == limit._not_before


def test_a_failed_listing_leaves_the_uses_to_the_next_one(tmp_path: Path, clock: ManualClock) -> None:
    with troubled(tmp_path / "store", BackendUnavailable("it is away"), clock=clock) as (store, _, _):
        limit, (key,) = limit_of(store), make_keys(1)
        limit._sweeps.close(10.0)
        limit.note_uses([key])
        limit._sweep_once()
        assert key in limit._uses


def test_a_sweep_without_a_thread_runs_once_a_thread_can_start(tmp_path: Path, clock: ManualClock) -> None:
    limit = CapacityLimit(CODEC, pages_of(tmp_path / "store"), capacity_bytes=5 * PAGE, clock=clock)
    with no_threads():
        store = open_file(tmp_path / "store", limit=limit, clock=clock)
    assert store_chain(store, make_keys(5)) == [STORED] * 5
    with no_threads():  # as if the sweep's thread died
        limit._sweeps.close(10.0)
        limit._sweeps = BackgroundTask("limit", limit._sweep_once, clock=clock)
        limit._sweeps.wake()
    assert store_chain(store, make_keys(9)[5:]) == [REJECTED] * 4
    sweep(store, clock)
    assert STORED in store_chain(store, make_keys(9)[5:])
    store.backend.close()


def test_closing_does_not_wait_for_a_first_listing(tmp_path: Path, clock: ManualClock) -> None:
    with troubled(tmp_path / "store", clock=clock, gate=False) as (store, _, gate), ThreadPoolExecutor(1) as threads:
        storing = threads.submit(store_chain, store, make_keys(2))
        gate.set()
        store.backend.close()
        assert set(storing.result(30.0)) <= {STORED, SET_ERROR}
        assert store_chain(store, make_keys(2)) == [SET_ERROR] * 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hicache-limit")]


@pytest.mark.parametrize("capacity_bytes", [PAGE - 1, True])
def test_an_invalid_limit_is_rejected(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(InvalidInput, match="limit"):
        CapacityLimit(CODEC, pages_of(tmp_path / "store"), capacity_bytes=capacity_bytes)


def test_a_page_to_be_read_is_a_head_until_its_header_is_known(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    chains, (head, tail) = Chains(), make_keys(2)
    pages = [StoredPage(CODEC.namespace, key, PAGE, 0.0) for key in (head, tail)]
    for page in pages:
        chains.add(page, None, is_unread=True)
    assert (chains.heads(), sorted(page.key for page in chains.unread())) == (2, sorted([head, tail]))
    chains.add(pages[1], head)
    assert (chains.heads(), [page.key for page in chains.unread()]) == (1, [head])
    chains.discard((CODEC.namespace, head))
    assert chains.unread() == []
    chains.check()


def test_recently_read_or_stored_pages_stay_longer(opened: Opened) -> None:
    """The file store itself knows uses; S3 knows only when a page was stored."""
    store, read, again, idle = opened(20), make_keys(6, "read"), make_keys(6, "again"), make_keys(6, "idle")
    for keys in (read, again, idle):
        assert store_chain(store, keys) == [STORED] * 6
    opened.clock.advance(1.0)
    assert load(store, read) == [HIT] * 6
    assert store_chain(store, again) == [PRESENT] * 6
    more = make_keys(5, "more")
    for _ in range(3):
        store_chain(store, more)
        sweep(store, opened.clock)
    assert store_chain(store, more) == [PRESENT] * 5
    assert (exists(store, read), exists(store, again)) == (6, 6) and exists(store, idle) <= 3


class Blind(Troubled):
    """Pages whose headers cannot be read."""

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        return None


@pytest.mark.parametrize("kind", [Troubled, Blind])
def test_a_sweep_leaves_holes_only_without_headers(
    tmp_path: Path, clock: ManualClock, kind: type[Troubled]
) -> None:
    root, keys, opens = tmp_path / "store", make_keys(40), threading.Event()
    opens.set()
    first = open_file(root)
    assert store_chain(first, keys) == [STORED] * 40
    first.backend.close()
    limit = CapacityLimit(CODEC, kind(root, [], opens), capacity_bytes=20 * PAGE, clock=clock)
    store = open_file(root, limit=limit, clock=clock)
    backend = store.backend
    settle(store, clock)
    assert evicted(store) == 22  # down to 90 %
    found = backend.batch_exists(keys, deadline=soon())
    assert disk_usage(root)[0] == 18 and (found == 18) == (kind is Troubled)
    backend.close()
