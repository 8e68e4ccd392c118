"""`CapacityLimit` in stores without their own capacity."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome, StoredPage
from hicache.backends.chains import Chains
from hicache.backends.file.inspection import FileInspection, make_store
from hicache.backends.limit import CapacityLimit
from hicache.backends.memory import MemoryDriver
from hicache.backends.storage import store_statistics
from hicache.backends.store import UNGUARDED, Store
from hicache.backends.stored import StoredPages
from hicache.backends.testing import (
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
    in_threads,
    load,
    make_keys,
    memory_subject,
    soon,
    store_chain,
)
from hicache.background import BackgroundTask
from hicache.errors import BackendUnavailable, InvalidInput
from hicache.frame import FrameCodec
from tests.seeds import rng, seeds
from tests.test_supervised import no_threads
from tests.waiting import wait_for

from ._files import CODEC, OPENED, PAGE, disk_usage, file_options, open_file, open_stored, page_files

REJECTED = SetOutcome.REJECTED
LARGE = 1 << 30


def pages_of(root: Path) -> StoredPages:
    """Return the pages for the sweeps of a limit. A test need not close them."""
    make_store(root)
    OPENED.append(stored := open_stored(root))
    return stored


def limited_memory(capacity_bytes: int) -> Subject:
    driver = MemoryDriver()
    limit = CapacityLimit(CODEC, StoredPages(driver, "memory"), capacity_bytes=capacity_bytes)
    backend = Store(driver, CODEC, UNGUARDED, limit=limit)
    OPENED.append(backend)
    wait_for(lambda: limit._ledger.is_listed)
    return memory_subject(backend, driver)


def limit_of(store: Subject) -> CapacityLimit:
    """Return the limit of a store."""
    assert isinstance(store.backend, Store) and store.backend._limit is not None
    return store.backend._limit


def test_clearing_makes_room_and_clears_the_records() -> None:
    store, keys, more = limited_memory(6 * PAGE), make_keys(6), make_keys(6, "more")
    backend, limit = store.backend, limit_of(store)
    assert store_chain(store, keys) == [STORED] * 6
    assert limit._fresh and limit._uses
    assert backend.clear(deadline=soon()) == 6
    assert not limit._fresh and not limit._uses
    # The interval is a minute: this ends only if `clear` requests a listing.
    wait_for(lambda: limit._ledger.used_bytes == 0)
    assert store_chain(store, more) == [STORED] * 6
    assert load(store, more) == [HIT] * 6 and load(store, keys) == [MISS] * 6
    backend.close()


class TestLimitedFile(DriverContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: limited_file(tmp_path / "store", codec, capacity_bytes=LARGE)


def limited_file(
    root: Path, codec: FrameCodec = CODEC, *, capacity_bytes: int, interval_s: float = 0.05
) -> Subject:
    """Open a file store at `root` limited only by `CapacityLimit`. It lists much more often than usual. The first
    listing is complete: on a busy machine it may take longer than a store waits."""
    make_store(root)
    limit = CapacityLimit(
        codec, pages_of(root), capacity_bytes=capacity_bytes, list_interval_s=interval_s
    )
    store = open_file(root, codec, limit=limit)
    wait_for(lambda: limit._ledger.is_listed)
    return store


@dataclass(slots=True)
class Opened:
    """Limited stores on one directory."""

    root: Path

    def __call__(self, pages: int, codec: FrameCodec = CODEC, *, interval_s: float = 0.05) -> Subject:
        return limited_file(self.root, codec, capacity_bytes=pages * codec.frame_bytes, interval_s=interval_s)

    def pages(self) -> int:
        return len(page_files(self.root))  # files may be removed at the same time


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(tmp_path / "store")


def end_sweeps(store: Subject) -> None:
    """From now on the limit makes no room."""
    assert limit_of(store)._sweeps.close(10.0)


def evicted(store: Subject) -> int:
    return store.backend.statistics().evicted_pages


def test_pages_without_room_are_rejected_and_the_head_stays(opened: Opened) -> None:
    store, keys = opened(5), make_keys(8)
    end_sweeps(store)
    assert store_chain(store, keys) == [STORED] * 5 + [REJECTED] * 3
    assert (exists(store, keys), store.backend.usage().capacity_bytes) == (5, 5 * PAGE)
    assert store.backend.statistics().sets == {STORED: 5, REJECTED: 3}
    explained = limit_of(store).rejection or ""
    assert re.match(r"capacity_bytes is [\d.]+ KiB, and [\d.]+ KiB are stored or being", explained)
    (shown,) = store_statistics(store.backend)
    assert (shown.name, dict(shown.statistics.sets)) == ("file", {STORED: 5, REJECTED: 3})
    assert shown.usage is not None and shown.usage.capacity_bytes == 5 * PAGE


def test_a_store_with_room_for_a_few_pages_and_a_fraction_makes_room_too() -> None:
    store, more = limited_memory(6 * PAGE - 1), make_keys(1, "more")
    assert store_chain(store, make_keys(5)) == [STORED] * 5
    wait_for(lambda: store_chain(store, more) == [STORED])
    store.backend.close()


def test_without_the_limit_all_pages_are_stored(tmp_path: Path) -> None:
    """The control of the test above: the store itself has no limit."""
    store = open_file(tmp_path / "store")
    assert store_chain(store, make_keys(8)) == [STORED] * 8
    store.backend.close()


def test_stored_pages_are_present_in_a_full_store(opened: Opened) -> None:
    store, keys = opened(3), make_keys(4)
    end_sweeps(store)
    store_chain(store, keys[:3])
    assert store_chain(store, keys) == [PRESENT] * 3 + [REJECTED]


def test_the_sweep_removes_the_tail_of_the_least_recently_used_chain(opened: Opened) -> None:
    store, old, used = opened(20), make_keys(10, "old"), make_keys(10, "used")
    store_chain(store, old)
    store_chain(store, used)
    wait_for(lambda: evicted(store) == 2)
    assert (exists(store, old), exists(store, used)) == (8, 10)
    assert load(store, old[:8]) == [HIT] * 8
    wait_for(lambda: store_chain(store, make_keys(2, "more")) != [REJECTED] * 2)
    wait_for(lambda: evicted(store) == 4)
    assert (exists(store, old), exists(store, used)) == (8, 8)


def test_earlier_pages_count_and_their_chains_are_read_from_headers(tmp_path: Path, opened: Opened) -> None:
    keys = make_keys(10)
    first = open_file(tmp_path / "store")
    store_chain(first, keys)
    first.backend.close()
    store = opened(10)
    assert store_chain(store, make_keys(1, "new")) in ([REJECTED], [STORED])
    wait_for(lambda: evicted(store) > 0)
    assert opened.pages() <= 10
    assert load(store, keys[: exists(store, keys)]) == [HIT] * exists(store, keys)
    assert exists(store, keys) == 9


def test_a_page_with_a_damaged_header_can_be_removed(tmp_path: Path, opened: Opened) -> None:
    keys = make_keys(10)
    first = open_file(tmp_path / "store")
    store_chain(first, keys)
    first.write(keys[9], bytes(PAGE))
    first.backend.close()
    store = opened(10)
    wait_for(lambda: evicted(store) == 1)
    assert opened.pages() == 9 and exists(store, keys) >= 8


def test_pages_of_other_namespaces_count_and_are_swept_too(opened: Opened) -> None:
    other = opened(10, FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES))
    theirs = make_keys(9, "theirs")
    assert store_chain(other, theirs) == [STORED] * 9
    store, ours = opened(10), make_keys(4, "ours")
    outcomes = store_chain(store, ours)
    assert outcomes == [STORED] + [REJECTED] * 3
    wait_for(lambda: store_chain(store, ours)[3] is not REJECTED)
    assert exists(store, ours) == 4 and exists(other, theirs) < 9
    assert opened.pages() <= 10


def test_engines_overshoot_the_limit_by_the_writes_of_others_until_they_list(
    opened: Opened,
) -> None:
    never_s = 3600.0
    ours, theirs = opened(10, interval_s=never_s), opened(10, interval_s=never_s)
    first, second = make_keys(9, "first"), make_keys(8, "second")
    assert store_chain(theirs, first[:1]) == store_chain(ours, second[:1]) == [STORED]
    store_chain(ours, second[1:], second[0])
    store_chain(theirs, first[1:], first[0])
    assert opened.pages() == 17
    opened(10)
    wait_for(lambda: opened.pages() <= 10)
    assert opened.pages() == exists(ours, second) + exists(theirs, first) > 0


@pytest.mark.parametrize("seed", seeds(3))
def test_threads_never_exceed_the_limit(opened: Opened, seed: int) -> None:
    store, over = opened(16), []

    def work(number: int) -> None:
        dice = rng(seed * 10 + number)
        for turn in range(15):
            keys = make_keys(dice.randrange(1, 8), f"{number} {turn}")
            assert set(store_chain(store, keys)) <= {STORED, REJECTED}
            if opened.pages() > 16:
                over.append(opened.pages())

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
    root: Path, *trouble: Exception, gate: bool = True
) -> Iterator[tuple[Subject, list[Exception], threading.Event]]:
    """Return a limited store, the list of errors that its sweep raises until it is empty, and the gate of its listings.
    """
    troubles, opens = list(trouble), threading.Event()
    if gate:
        opens.set()
    make_store(root)
    limit = CapacityLimit(
        CODEC, Troubled(root, troubles, opens), capacity_bytes=5 * PAGE, list_interval_s=0.05
    )
    store = open_file(root, limit=limit)
    yield store, troubles, opens
    opens.set()
    store.backend.close()


@pytest.mark.parametrize("trouble", [BackendUnavailable("it is away"), RuntimeError("a bug")])
def test_a_store_that_cannot_be_listed_takes_no_pages_until_it_can(
    tmp_path: Path, trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    kind = "listing" if isinstance(trouble, OSError) else "internal"
    with caplog.at_level(logging.CRITICAL), troubled(tmp_path / "store", trouble) as (store, troubles, _):
        keys = make_keys(2)
        frames = [memoryview(bytearray(PAGE)) for _ in keys]
        assert store.backend.batch_set(keys, frames, parent=None, deadline=soon()) == [SET_ERROR] * 2
        assert store.backend.statistics().errors["unlisted"] == 2
        wait_for(lambda: store.backend.statistics().errors.get(kind, 0) > 0)
        assert load(store, keys) == [MISS] * 2
        troubles.clear()
        wait_for(lambda: store_chain(store, keys) == [STORED] * 2)


def test_after_a_failed_listing_verbs_do_not_cause_an_earlier_one(tmp_path: Path) -> None:
    with troubled(tmp_path / "store", BackendUnavailable("it is away")) as (store, _, _):
        limit = limit_of(store)
        limit._sweeps.close(10.0)
        assert limit._sweep_once() == limit._not_before


def test_a_sweep_without_a_thread_runs_once_a_thread_can_start(tmp_path: Path) -> None:
    limit = CapacityLimit(CODEC, pages_of(tmp_path / "store"), capacity_bytes=5 * PAGE, list_interval_s=0.05)
    with no_threads():
        store = open_file(tmp_path / "store", limit=limit)
    assert store_chain(store, make_keys(5)) == [STORED] * 5
    with no_threads():  # as if the sweep's thread died
        limit._sweeps.close(10.0)
        limit._sweeps = BackgroundTask("limit", limit._sweep_once)
        limit._sweeps.wake()
    wait_for(lambda: any(outcome is STORED for outcome in store_chain(store, make_keys(9)[5:])))
    store.backend.close()


def test_closing_does_not_wait_for_a_first_listing(tmp_path: Path) -> None:
    with troubled(tmp_path / "store", gate=False) as (store, _, gate):
        started = threading.Event()

        def close() -> None:
            started.wait(30.0)
            gate.set()
            store.backend.close()

        closer = threading.Thread(target=close)
        closer.start()
        started.set()
        assert set(store_chain(store, make_keys(2))) <= {STORED, SET_ERROR}
        closer.join(30.0)
        assert store_chain(store, make_keys(2)) == [SET_ERROR] * 2


def test_closing_ends_the_sweep(opened: Opened) -> None:
    before = threading.active_count()
    store = opened(5)
    store.backend.close()
    store.backend.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-limit")] == []
    assert threading.active_count() <= before


@pytest.mark.parametrize("capacity_bytes", [PAGE - 1, True])
def test_an_invalid_limit_is_rejected(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(InvalidInput, match="limit"):
        CapacityLimit(CODEC, pages_of(tmp_path / "store"), capacity_bytes=capacity_bytes)


def test_a_page_to_be_read_is_a_head_until_its_header_is_known(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    chains, (head, tail) = Chains(), make_keys(2)
    pages = [StoredPage(CODEC.namespace, key, PAGE, 0.0) for key in (head, tail)]
    for page in pages:
        chains.add_unread(page)
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
    assert load(store, read) == [HIT] * 6
    assert store_chain(store, again) == [PRESENT] * 6
    more = make_keys(5, "more")
    wait_for(lambda: store_chain(store, more) == [PRESENT] * 5)
    assert (exists(store, read), exists(store, again)) == (6, 6) and exists(store, idle) <= 3


class Blind(Troubled):
    """Pages whose headers cannot be read."""

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        return None


@pytest.mark.parametrize("kind", [Troubled, Blind])
def test_a_sweep_leaves_holes_only_without_headers(tmp_path: Path, kind: type[Troubled]) -> None:
    root, keys, opens = tmp_path / "store", make_keys(40), threading.Event()
    opens.set()
    first = open_file(root)
    assert store_chain(first, keys) == [STORED] * 40
    first.backend.close()
    limit = CapacityLimit(
        CODEC, kind(root, [], opens), capacity_bytes=20 * PAGE, list_interval_s=0.05
    )
    backend = open_file(root, limit=limit).backend
    wait_for(lambda: backend.statistics().evicted_pages == 22)  # down to 90 %
    found = backend.batch_exists(keys, deadline=soon())
    assert disk_usage(root)[0] == 18 and (found == 18) == (kind is Troubled)
    backend.close()
