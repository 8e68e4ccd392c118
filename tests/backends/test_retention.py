"""Pages with a maximum age in files and shared files: read, swept, promoted, copied and replaced."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.compose import Levels, Part
from hicache.backends.compose.copier import CopyStatistics
from hicache.backends.driver import Inspects
from hicache.backends.file import FileDriver
from hicache.backends.file.inspection import make_store
from hicache.backends.limit import CapacityLimit
from hicache.backends.memory import MemoryDriver
from hicache.backends.registry import BackendSpec, open_stored
from hicache.backends.retention import INTERVAL_S_MAX, INTERVAL_S_MIN, LOOK_S, Retention
from hicache.backends.shared_files import SharedFilesDriver
from hicache.backends.shared_files.root import make_store as make_shared
from hicache.backends.stored import StoredPages
from hicache.backends.tools.copying import copy_stored
from hicache.backends.tools.verify import NO_KEYS
from hicache.errors import BackendUnavailable, ConfigError
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PRESENT,
    STORED,
    bare,
    empty_frames,
)
from tests.clocks import At
from tests.waiting import wait_for

from ._files import CODEC, file_options, open_file, page_files, page_path
from ._retention import (
    EDGE_S,
    FAR,
    KEYS,
    MAX_AGE_S,
    RetentionContract,
    Stores,
    codec_at,
    get,
    put,
    retention_of,
    settle,
    time_in,
)
from ._shared import open_shared, shared_driver

NO_COPIES = CopyStatistics(copied=0, present=0, failed=0, dropped=0, waiting=0)


class TestFileRetention(RetentionContract):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> BackendSpec:
        return BackendSpec("file", {"path": str(tmp_path / "s"), "free_space_floor": 0})


class TestSharedFilesRetention(RetentionContract):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> BackendSpec:
        return BackendSpec("shared_files", {"path": str(tmp_path / "s"), "free_space_floor": 0})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["file", "shared_files"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Stores]:
    """A store that is a directory, `s`."""
    found = Stores(BackendSpec(request.param, {"path": str(tmp_path / "s"), "free_space_floor": 0}), clock)
    yield found
    found.close()


class Listed(StoredPages):
    """Pages that are listed once, at the start."""

    def __init__(self, driver: FileDriver | SharedFilesDriver, clock: ManualClock) -> None:
        super().__init__(cast(Inspects, driver), "listed", clock)  # the sweep of files reads no headers
        self.found = list(super().pages())

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        yield from self.found


def swept_once(stored: StoredPages, clock: ManualClock) -> Retention:
    """Make one sweep on this thread."""
    retention = Retention(NAMESPACE, stored, max_age_s=MAX_AGE_S, clock=clock)
    retention._sweep_once()
    return retention


@pytest.mark.parametrize("kind", ["file", "shared_files"])
def test_a_page_that_was_stored_again_since_the_listing_stays(tmp_path: Path, clock: ManualClock, kind: str) -> None:
    """The control: the page that was not stored again is removed."""
    store = (open_file if kind == "file" else open_shared)(tmp_path / "s", codec_at(clock), clock=clock)
    put(store.backend, KEYS)
    driver = store.backend.stores[0].driver
    assert isinstance(driver, FileDriver | SharedFilesDriver)
    if isinstance(driver, SharedFilesDriver):
        assert driver.begin_sweep(needs_room=False)
    stored = Listed(driver, clock)
    clock.advance(MAX_AGE_S + EDGE_S)
    assert store.backend.delete(KEYS[:2], deadline=FAR) == 2
    assert put(store.backend, KEYS[:2]) == [STORED] * 2
    assert swept_once(stored, clock).incidents().expired_pages == 1
    assert {path.name for path in page_files(tmp_path / "s")} == {key.hex() for key in KEYS[:2]}


def test_only_the_engine_that_sweeps_a_shared_store_removes_its_expired_pages(
    tmp_path: Path, clock: ManualClock
) -> None:
    first, second = open_shared(tmp_path / "s", codec_at(clock)), open_shared(tmp_path / "s", codec_at(clock))
    put(first.backend, KEYS)
    ours, theirs = shared_driver(first), shared_driver(second)
    assert sweepers(ours, theirs) == (False, False)
    assert ours.begin_sweep(needs_room=False) and not theirs.begin_sweep(needs_room=False)
    assert sweepers(ours, theirs) == (True, False)
    clock.advance(MAX_AGE_S + EDGE_S)
    waiting = Retention(NAMESPACE, StoredPages(theirs, "theirs"), max_age_s=MAX_AGE_S, clock=clock)
    assert waiting._sweep_once() == clock() + LOOK_S
    assert waiting.incidents().expired_pages == 0 and len(page_files(tmp_path / "s")) == 3
    assert swept_once(StoredPages(ours, "ours"), clock).incidents().expired_pages == 3
    assert page_files(tmp_path / "s") == []
    ours.end_sweep(0, 0)
    first.backend.close()
    assert theirs.begin_sweep(needs_room=False) and sweepers(ours, theirs) == (False, True)


def sweepers(*drivers: SharedFilesDriver) -> tuple[bool, ...]:
    """Return which engine sweeps for all."""
    return tuple(driver.sweeps for driver in drivers)


class Reading(StoredPages):
    """Pages of a store; counts the headers that are read."""

    reads = 0

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        self.reads += 1
        return super().read(page, bytes_max)


def touched(root: Path, keys: Sequence[bytes], used_s: float) -> None:
    for key in keys:
        os.utime(page_path(root, CODEC, key), (used_s, used_s))


def test_a_shared_page_that_is_used_expires_by_its_header_which_is_read_once(
    tmp_path: Path, clock: ManualClock
) -> None:
    root = tmp_path / "s"
    store = open_shared(root, codec_at(clock), clock=clock)
    put(store.backend, KEYS)
    driver = shared_driver(store)
    assert driver.begin_sweep(needs_room=False)
    stored = Reading(driver, "shared", clock)
    retention = Retention(NAMESPACE, stored, max_age_s=MAX_AGE_S, clock=clock)
    for _ in range(3):
        clock.advance(MAX_AGE_S / 3 - EDGE_S)
        touched(root, KEYS[:2], clock.wall_s())
        retention._sweep_once()
        assert (retention.incidents().expired_pages, stored.reads) == (0, 3)
    clock.advance(4 * EDGE_S)
    touched(root, KEYS[:1], clock.wall_s())
    retention._sweep_once()
    assert page_files(root) == [] and retention.incidents().expired_pages == 3
    # Two headers are read again, because an old time may be that of a replaced page. The unused page needs none.
    assert stored.reads == 5


def test_the_known_time_of_a_page_is_not_that_of_the_page_that_replaced_it(tmp_path: Path, clock: ManualClock) -> None:
    root = tmp_path / "s"
    store = open_shared(root, codec_at(clock), clock=clock)
    put(store.backend, KEYS)
    driver = shared_driver(store)
    assert driver.begin_sweep(needs_room=False)
    retention = Retention(NAMESPACE, StoredPages(driver, "shared", clock), max_age_s=MAX_AGE_S, clock=clock)
    retention._sweep_once()
    clock.advance(MAX_AGE_S + EDGE_S)
    store.backend.delete(KEYS[:1], deadline=FAR)
    assert put(store.backend, KEYS[:1]) == [STORED]
    touched(root, KEYS, clock.wall_s())
    retention._sweep_once()
    assert [path.name for path in page_files(root)] == [KEYS[0].hex()]


# Promotion and copies


def test_a_promoted_page_keeps_its_age(tmp_path: Path, clock: ManualClock) -> None:
    upper = Stores(BackendSpec("file", {"path": str(tmp_path / "s"), "free_space_floor": 0}), clock)
    with contextlib.closing(upper):
        fast, codec = upper.open(MAX_AGE_S), codec_at(clock)
        driver = MemoryDriver()
        slow = bare(driver, codec)
        levels = Levels(codec, [Part("fast", fast), Part("slow", slow)], clock=clock)
        began_s = int(clock.wall_s())
        assert put(slow, KEYS) == [STORED] * 3
        clock.advance(MAX_AGE_S - 600.0)
        assert get(levels, KEYS) == [HIT] * 3
        wait_for(lambda: levels.copies()["fast"].copied == 3)
        assert [time_in(page_path(tmp_path / "s", codec, key).read_bytes()) for key in KEYS] == [began_s] * 3
        assert [page_path(tmp_path / "s", codec, key).stat().st_mtime for key in KEYS] == [began_s] * 3
        slow.delete(KEYS, deadline=FAR)
        clock.advance(600.0 - EDGE_S)
        assert get(levels, KEYS) == [HIT] * 3
        settle(fast, clock)
        clock.advance(2 * EDGE_S)
        assert get(levels, KEYS) == [MISS] * 3
        assert levels.statistics().expired_pages == 3
        levels.close()


def test_a_page_is_not_promoted_to_a_level_for_which_it_is_too_old_and_expires_on_all(
    tmp_path: Path, clock: ManualClock
) -> None:
    upper, lower = (Stores(BackendSpec("file", {"path": str(tmp_path / name), "free_space_floor": 0}), clock)
                    for name in "ab")
    with contextlib.closing(upper), contextlib.closing(lower):
        codec, slow = codec_at(clock), lower.open(10 * MAX_AGE_S)
        levels = Levels(codec, [Part("fast", upper.open(MAX_AGE_S)), Part("slow", slow)], clock=clock)
        assert put(slow, KEYS) == [STORED] * 3
        clock.advance(10 * MAX_AGE_S - EDGE_S)
        assert get(levels, KEYS) == [HIT] * 3
        clock.advance(2 * EDGE_S)
        assert get(levels, KEYS) == [MISS] * 3
        levels.close()
        assert dict(levels.copies()) == {"fast": NO_COPIES, "slow": NO_COPIES}
        assert page_files(tmp_path / "a") == []


def test_a_cascaded_page_keeps_its_age(tmp_path: Path, clock: ManualClock) -> None:
    lower = Stores(BackendSpec("shared_files", {"path": str(tmp_path / "s"), "free_space_floor": 0}), clock)
    with contextlib.closing(lower):
        codec = codec_at(clock)
        slow = lower.open(MAX_AGE_S)
        levels = Levels(codec, [Part("fast", bare(MemoryDriver(), codec)), Part("slow", slow)], clock=clock)
        began_s = int(clock.wall_s())
        assert put(levels, KEYS) == [STORED] * 3
        wait_for(lambda: levels.copies()["slow"].copied == 3)
        frames = empty_frames(codec, 3)
        assert slow.batch_get(KEYS, frames, deadline=FAR) == [HIT] * 3
        assert [time_in(frame) for frame in frames] == [began_s] * 3
        levels.close()


@pytest.mark.parametrize("kind", ["file", "shared_files"])
def test_a_sweep_removes_the_pages_that_a_clock_far_ahead_has_stored(
    tmp_path: Path, clock: ManualClock, kind: str
) -> None:
    root, wrong_s = tmp_path / "s", clock.wall_s() + 63e6
    store = (open_file if kind == "file" else open_shared)(root, codec_at(At(wrong_s)), clock=clock)
    put(store.backend, KEYS[:2])
    touched(root, KEYS[:2], wrong_s)
    driver = store.backend.stores[0].driver
    put(bare(driver, codec_at(clock)), KEYS[2:])
    assert isinstance(driver, FileDriver | SharedFilesDriver)
    if isinstance(driver, SharedFilesDriver):
        assert driver.begin_sweep(needs_room=False)
    retention = swept_once(StoredPages(cast(Inspects, driver), kind, clock), clock)
    assert retention.incidents().expired_pages == 2
    assert [path.name for path in page_files(root)] == [KEYS[2].hex()]


@pytest.mark.parametrize("kind", ["file", "shared_files"])
def test_a_copied_page_keeps_its_age(tmp_path: Path, clock: ManualClock, kind: str) -> None:
    began_s = int(clock.wall_s()) - 1000
    source = open_file(tmp_path / "source", codec_at(At(began_s)))
    assert put(source.backend, KEYS) == [STORED] * 3
    source.backend.close()
    (make_store if kind == "file" else make_shared)(tmp_path / "s")
    target = Stores(BackendSpec(kind, {"path": str(tmp_path / "s"), "free_space_floor": 0}), clock)
    with contextlib.closing(target):
        where = BackendSpec("file", file_options(tmp_path / "source"))
        with (
            contextlib.closing(open_stored(where)) as old,
            contextlib.closing(open_stored(target.spec)) as new,
        ):
            *_, last = copy_stored(old, new, keys=NO_KEYS)
        assert len(page_files(tmp_path / "s")) == 3, last
        aged = target.open(MAX_AGE_S)
        clock.advance(MAX_AGE_S - 1000.0 - EDGE_S)
        assert get(aged, KEYS) == [HIT] * 3
        settle(aged, clock)
        clock.advance(2 * EDGE_S)
        assert get(aged, KEYS) == [MISS] * 3


def test_the_file_of_a_copied_page_has_the_time_at_which_it_was_stored_and_of_a_new_page_the_present(
    tmp_path: Path, clock: ManualClock
) -> None:
    began_s = int(clock.wall_s()) - 1000
    store, old = open_file(tmp_path / "s"), codec_at(At(began_s))
    frames = empty_frames(old, 1)
    assert put(memory := bare(MemoryDriver(), old), KEYS[:1]) == [STORED]
    assert memory.batch_get(KEYS[:1], frames, deadline=FAR) == [HIT]
    assert store.backend.batch_set(KEYS[:1], frames, parent=None, deadline=FAR) == [STORED]
    assert put(store.backend, KEYS[1:], parent=KEYS[0]) == [STORED] * 2
    times = [page_path(tmp_path / "s", CODEC, key).stat().st_mtime for key in KEYS]
    assert times[0] == began_s and min(times[1:]) > began_s + 900.0
    (copied, *_) = [page for page in open_stored(BackendSpec("file", file_options(tmp_path / "s"))).pages()
                    if page.key == KEYS[0]]
    assert copied.stored_s == began_s
    assert copied.used_s is not None and copied.used_s > began_s + 900.0, "the time of a copy is not its last use"


# The task


class Failing(StoredPages):
    """Pages of a store that cannot be listed, or whose pages of `stuck` cannot be removed."""

    is_down = False
    stuck: bytes | None = None

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        if self.is_down:
            raise BackendUnavailable("the store is down; try again")
        yield from super().pages(namespace)

    def remove(self, pages: Sequence[StoredPage]) -> int:
        if self.stuck in {page.namespace for page in pages}:
            raise BackendUnavailable("pages cannot be removed; try again")
        return super().remove(pages)


def aged_memory(clock: ManualClock) -> tuple[Failing, MemoryDriver]:
    """Return the pages of a store in memory, which has two namespaces and lists the times of storing."""
    driver = MemoryDriver()
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        put(bare(driver, codec_at(clock, namespace)), KEYS)
    return Failing(driver, "memory", clock), driver


def test_a_store_that_cannot_be_listed_is_tried_again_with_growing_pauses(clock: ManualClock) -> None:
    stored, _ = aged_memory(clock)
    retention = Retention(NAMESPACE, stored, max_age_s=50 * 200.0, clock=clock)
    stored.is_down = True
    assert [retention._sweep_once() - clock() for _ in range(3)] == pytest.approx([60.0, 120.0, 200.0])
    assert retention.incidents().errors == {"retention": 3}
    stored.is_down = False
    assert 150.0 <= retention._sweep_once() - clock() <= 250.0
    assert retention.incidents().errors == {"retention": 3}


def test_pages_that_cannot_be_removed_do_not_protect_others(clock: ManualClock) -> None:
    stored, driver = aged_memory(clock)
    retention = Retention(NAMESPACE, stored, max_age_s=MAX_AGE_S, clock=clock)
    clock.advance(MAX_AGE_S + EDGE_S)
    stored.stuck = min(NAMESPACE, OTHER_NAMESPACE)
    assert retention._sweep_once() == clock() + INTERVAL_S_MIN
    left = {page.namespace for page in driver.pages("", math.inf)}
    assert (left, retention.incidents().expired_pages) == ({stored.stuck}, 3)
    stored.stuck = None
    retention._sweep_once()
    assert (list(driver.pages("", math.inf)), retention.incidents().expired_pages) == ([], 6)


@pytest.mark.parametrize(("max_age_s", "interval_s"), [
    (60.0, INTERVAL_S_MIN), (86_400.0, 1728.0), (30 * 86_400.0, INTERVAL_S_MAX),
])
def test_sweeps_of_a_long_age_are_rarer_within_limits(clock: ManualClock, max_age_s: float, interval_s: float) -> None:
    assert Retention(NAMESPACE, None, max_age_s=max_age_s, clock=clock).interval_s == pytest.approx(interval_s)


def test_the_limit_of_a_store_lists_again_after_a_sweep_that_removed_pages(tmp_path: Path, clock: ManualClock) -> None:
    spec = BackendSpec("shared_files", {"path": str(tmp_path / "s"), "free_space_floor": 0})
    with contextlib.closing(Stores(spec, clock)) as opened:
        store = opened.open(MAX_AGE_S)
        (limit,) = (one for one in store._sweepers if isinstance(one, CapacityLimit))
        assert retention_of(store).on_removed == limit.sweep_soon
    stored, _ = aged_memory(clock)
    retention, calls = Retention(NAMESPACE, stored, max_age_s=MAX_AGE_S, clock=clock), list[float]()
    retention.on_removed = lambda: calls.append(clock())
    retention._sweep_once()
    assert calls == []
    clock.advance(MAX_AGE_S + EDGE_S)
    for _ in range(2):
        retention._sweep_once()
        assert calls == [clock()]


def test_without_an_age_nothing_is_swept(stores: Stores, clock: ManualClock) -> None:
    store = stores.open()
    put(store, KEYS)
    clock.advance(1e9)
    assert not any(isinstance(one, Retention) for one in store._sweepers)
    assert get(store, KEYS) == [HIT] * 3 and put(store, KEYS) == [PRESENT] * 3


def test_a_closed_store_sweeps_no_more(stores: Stores, clock: ManualClock) -> None:
    store = stores.open(MAX_AGE_S)
    put(store, KEYS)
    settle(store, clock)
    retention = retention_of(store)
    store.close()
    clock.advance(2 * MAX_AGE_S)
    retention._sweeps.wake()
    assert len(stores.listed()) == 3 and retention.incidents().expired_pages == 0


@pytest.mark.parametrize("type_name", ["file", "shared_files"])
def test_an_age_below_a_minute_is_refused(tmp_path: Path, clock: ManualClock, type_name: str) -> None:
    with pytest.raises(ConfigError, match="max_age"):
        Stores(BackendSpec(type_name, {"path": str(tmp_path / "s")}), clock).open(59.0)
