"""The backend of shared files passes the contract without a lock, an index or a service."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.errors import StoreError
from hicache.backends.shared_files import SharedFilesDriver
from hicache.backends.stored import StoredPages
from hicache.errors import BackendUnavailable
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    PRESENT,
    STORED,
    DriverContract,
    InspectionContract,
    OpenStore,
    load,
    make_keys,
    soon,
    store_chain,
)
from hicache_lab.conformance.inspection import OpenStored
from tests.clocks import PassingClock
from tests.waiting import WAIT_S

from ._files import CODEC, PAGE, Faulty, page_path
from ._shared import open_shared, shared_driver, shared_options


class TestSharedFiles(DriverContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: open_shared(tmp_path / "pages", codec)


class TestSharedFilesInspection(InspectionContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: open_shared(tmp_path / "pages", codec)

    @pytest.fixture
    def open_stored(self, tmp_path: Path) -> OpenStored:
        return lambda: StoredPages(SharedFilesDriver(None, shared_options(tmp_path / "pages")), "shared_files")


def stale(name: str) -> Faulty:
    """Return a system on which the handle of each file or directory with this name is stale."""

    def before(call: str, number: int, args: tuple[Any, ...]) -> None:
        if call in ("open", "lstat") and str(args[0]).endswith(name):
            raise OSError(errno.ESTALE, "stale")

    return Faulty(before)


def test_a_page_that_another_machine_has_just_replaced_is_a_miss(tmp_path: Path) -> None:
    keys = make_keys(3)
    store_chain(open_shared(tmp_path / "pages"), keys)
    store = open_shared(tmp_path / "pages", system=stale(keys[1].hex()))
    assert load(store, keys) == [HIT, MISS, HIT]
    assert store.backend.batch_has(keys, deadline=soon()) == [True, False, True]
    assert store_chain(store, keys) == [PRESENT, STORED, PRESENT]
    assert not store.backend.statistics().errors


def test_a_root_whose_handle_stays_stale_is_an_error(tmp_path: Path) -> None:
    """The control: such a store does not look empty."""
    system = stale("")
    system.armed = False
    store = open_shared(tmp_path / "pages", system=system)
    keys = make_keys(2)
    store_chain(store, keys)
    system.armed = True
    assert load(store, keys) == [GET_ERROR] * 2
    assert store.backend.statistics().errors == {"ESTALE": 2}


def test_a_lease_that_another_engine_has_just_replaced_is_not_free(tmp_path: Path) -> None:
    first = SharedFilesDriver(CODEC, shared_options(tmp_path / "pages"))
    assert first.begin_sweep(needs_room=False)
    first.end_sweep(5, 500)
    system = stale("sweeper")
    second = SharedFilesDriver(CODEC, shared_options(tmp_path / "pages"), system=system)
    assert not second.begin_sweep(needs_room=True)
    system.armed = False
    assert not second.begin_sweep(needs_room=True)
    assert (second.swept.pages, second.swept.bytes) == (5, 500)
    first.close()
    assert second.begin_sweep(needs_room=True)
    second.close()


def hanging(root: Path, returns: threading.Event, clock: ManualClock) -> SharedFilesDriver:
    """Open a driver of two threads whose lookups return after an event."""

    def wait(call: str, number: int, args: tuple[Any, ...]) -> None:
        if call == "lstat":
            assert returns.wait(WAIT_S)

    return SharedFilesDriver(CODEC, shared_options(root, io_threads=2), system=Faulty(wait), clock=clock)


def test_after_calls_that_were_only_late_the_next_one_waits_for_a_thread(tmp_path: Path) -> None:
    returns, clock = threading.Event(), ManualClock()
    driver = hanging(tmp_path / "pages", returns, clock)
    keys = make_keys(3)
    assert driver.find(NAMESPACE, keys, clock() + 0.01) == ["deadline"] * 3
    clock.advance(-WAIT_S)  # the wait for a thread ends at a time of this clock, which is now far away
    late = threading.Timer(0.02, returns.set)
    late.start()
    assert driver.find(NAMESPACE, keys, clock() + 2 * WAIT_S) == [False] * 3
    late.join()
    driver.close()


def test_after_calls_that_hang_the_next_one_fails_at_once(tmp_path: Path) -> None:
    """The control."""
    returns, clock = threading.Event(), ManualClock()
    driver = hanging(tmp_path / "pages", returns, clock)
    assert driver.find(NAMESPACE, make_keys(3), clock() + 0.01) == ["deadline"] * 3
    clock.advance(1.0)
    with pytest.raises(StoreError, match="hangs"):
        driver.find(NAMESPACE, make_keys(3), clock() + WAIT_S)
    returns.set()
    driver.close()


def test_a_sweep_removes_the_old_files_of_dead_writers_and_no_new_ones(tmp_path: Path) -> None:
    root, (key,) = tmp_path / "pages", make_keys(1)
    store = open_shared(root)
    store_chain(store, [key])
    folder = page_path(root, CODEC, key).parent
    names = [folder / f".{key.hex()}.0123456789ab7", root / ".sweeper.0123456789abcdef"]
    others = [folder / ".nfs0000000000000001", root / ".snapshot"]
    for age_s in (0, 7200):
        for path in (*names, *others):
            path.touch()
            os.utime(path, (time.time() - age_s,) * 2)
        driver = shared_driver(store)
        assert driver.begin_sweep(needs_room=False)
        assert [page.key for page in driver.pages("", soon())] == [key]
        driver.end_sweep(1, PAGE)
        assert [path.exists() for path in names] == [not age_s] * 2
        assert all(path.exists() for path in others)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_directory_that_another_machine_creates_at_the_same_time_may_be_missing_or_stale_for_a_moment(
    tmp_path: Path, number: int
) -> None:
    failures = {"root": 2, "page": 5}

    def before(call: str, count: int, args: tuple[Any, ...]) -> None:
        name = os.path.basename(str(args[0]))
        kind = "root" if name == "pages" else "page" if name.startswith(".") else ""
        if call == "open" and failures.get(kind):
            failures[kind] -= 1
            raise OSError(number, "not there yet")

    store = open_shared(tmp_path / "pages", system=Faulty(before), clock=PassingClock())
    assert store_chain(store, make_keys(1)) == [STORED]
    assert failures == {"root": 0, "page": 0}
    assert not store.backend.statistics().errors


def test_a_missing_directory_above_the_store_is_an_error(tmp_path: Path) -> None:
    """The control: a mount point that is missing is not waited for."""
    with pytest.raises(BackendUnavailable, match="check that the file system is mounted"):
        open_shared(tmp_path / "missing" / "pages", clock=ManualClock())
