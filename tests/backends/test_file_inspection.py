"""The file store as its operator sees it: the contract of inspection, and its own behaviour."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.file.inspection import FileInspection, make_store
from hicache.backends.stored import StoredPages
from hicache.config import FileStorageOptions
from hicache.errors import BackendUnavailable, NotOurs
from hicache_lab.conformance import (
    HIT,
    NAMESPACE,
    InspectionContract,
    OpenStore,
    OpenStored,
    exists,
    load,
    make_keys,
    sealed,
    store_chain,
)

from ._files import CODEC, PAGE, Faulty, check, open_file, open_stored, page_path, reserved_bytes, temporary_files

KEYS = make_keys(6)
DATA = sealed(CODEC, KEYS)


def place(number: int, used_s: float | None = None) -> StoredPage:
    return StoredPage(NAMESPACE, KEYS[number], PAGE, used_s)


class TestFileRaw(InspectionContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: open_file(tmp_path / "store", codec)

    @pytest.fixture
    def open_stored(self, tmp_path: Path) -> OpenStored:
        return lambda: open_stored(path=tmp_path / "store")


def test_the_capacity_is_kept_by_dropping_the_oldest_tail(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = open_file(root, capacity=4 * PAGE)
    old = make_keys(3, "old")
    store_chain(store, old)
    raw = open_stored(path=root, capacity=4 * PAGE)
    later_s = time.time() + 60
    assert [raw.write(place(n, later_s), DATA[n], KEYS[n - 1] if n else None) for n in range(3)] == [True] * 3
    assert (exists(store, old), load(store, KEYS[:3])) == (1, [HIT] * 3)
    check(store, root)


def test_without_room_a_whole_page_is_rejected(tmp_path: Path) -> None:
    root = tmp_path / "store"
    make_store(root)
    raw = open_stored(path=root, capacity=PAGE)
    assert raw.write(place(0), DATA[0], None)
    assert not raw.write(place(1), DATA[1], KEYS[0])  # the only possible victim is its parent
    raw.close()
    assert (reserved_bytes(root), temporary_files(root), page_path(root, CODEC, KEYS[1]).exists()) == (0, [], False)


def test_a_page_larger_than_the_capacity_evicts_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = open_file(root, capacity=6 * PAGE)
    store_chain(store, KEYS)
    raw = open_stored(path=root, capacity=6 * PAGE)
    large = make_keys(1, "of a larger model")[0]
    assert not raw.write(StoredPage(NAMESPACE, large, 7 * PAGE, None), bytes(7 * PAGE), None)
    raw.close()
    assert load(store, KEYS) == [HIT] * 6


def test_a_written_page_keeps_the_time_of_its_last_use(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    raw = open_stored(path=tmp_path / "store")
    then_s = time.time() - 86_400
    raw.write(place(0, then_s), DATA[0], None)
    (page,) = raw.pages()
    assert page.used_s == pytest.approx(then_s, abs=1e-5)


def test_a_store_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "store"
    make_store(root)
    (root / "lock").unlink()
    (root / "lock").mkdir()
    raw = open_stored(path=root)
    assert list(raw.pages()) == []
    with pytest.raises(BackendUnavailable, match="check disk"):
        raw.remove([place(0)])


@pytest.mark.parametrize("use", [lambda raw: list(raw.pages()), lambda raw: raw.remove([place(0)])])
def test_a_closed_store_reports_that_it_is_closed(tmp_path: Path, use: Callable[[StoredPages], object]) -> None:
    make_store(tmp_path / "store")
    raw = open_stored(path=tmp_path / "store")
    raw.close()
    with pytest.raises(BackendUnavailable, match="is closed"):
        use(raw)


def test_a_directory_that_is_not_a_store_is_rejected_and_not_changed(tmp_path: Path) -> None:
    with pytest.raises(NotOurs):
        open_stored(path=tmp_path)
    with pytest.raises(BackendUnavailable):
        open_stored(path=tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("failing", "error", "said"),
    [({"pwritev"}, errno.ENOSPC, None), ({"pwritev"}, errno.EIO, "EIO"),
     ({"pwritev", "unlink"}, errno.EIO, "EIO"), ({"rename"}, errno.EIO, "EIO")],
)
def test_a_page_that_cannot_be_written_is_not_visible_and_takes_no_room(
    tmp_path: Path, failing: set[str], error: int, said: str | None
) -> None:
    root = tmp_path / "store"
    make_store(root)

    def fail(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name in failing:
            raise OSError(error, os.strerror(error))

    system = Faulty(fail)
    system.armed = False
    raw = StoredPages(FileInspection(None, FileStorageOptions(path=root), system=system), "file")
    raw.remove([place(0)])  # opens the store to write
    system.armed = True
    if said is None:
        assert not raw.write(place(0), DATA[0], None)
    else:
        with pytest.raises(BackendUnavailable, match=said):
            raw.write(place(0), DATA[0], None)
    system.armed = False
    assert reserved_bytes(root) == 0 and list(raw.pages()) == []
    raw.close()
    make_store(root)
    assert temporary_files(root) == []
    raw = open_stored(path=root)
    assert raw.write(place(0), DATA[0], None)
