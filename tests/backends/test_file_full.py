"""On a full or read-only disk, pages are rejected, but stored pages can be read, and removed to make room."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.file.system import why_no_room
from hicache.backends.tools.removal import trim_stored
from hicache_lab.conformance import CORRUPT, HIT, STORED, Subject, load, make_keys, soon, store_chain
from tests.waiting import wait_for

from ._files import PAGE, Faulty, check, disk_usage, file_driver, open_file, open_stored, page_files, purge, verify

REJECTED = SetOutcome.REJECTED
PAGES = 60


def fill_up(folder: Path) -> None:
    """Fill the rest of the disk with other files."""
    with contextlib.suppress(OSError), (folder / "others").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize(("free_inodes", "named"), [(32, "32 free inodes of 2,000"), (1500, "488.3 MiB free of")])
def test_a_file_system_without_inodes_is_named_as_such(free_inodes: int, named: str) -> None:
    """The numbers are those of a small volume after a write that failed with ENOSPC."""
    block = 4096
    space = os.statvfs_result((block, block, 131_072, 125_000, 125_000, 2000, free_inodes, free_inodes, 0, 255))
    assert named in why_no_room(space)


def test_a_store_that_filled_the_disk_stores_again_after_pages_are_removed(small_disk: Path) -> None:
    root = small_disk / "s"
    store = open_file(root)
    chains = []
    for number in range(1000):
        chains.append(make_keys(3, f"chain {number}"))
        if REJECTED in store_chain(store, chains[-1]):
            break
    assert len(chains) > 50
    # Each use and each removal is written into the index.
    for keys in chains:
        load(store, keys)
        store.backend.usage()
    for keys in chains:
        store.backend.delete(keys, deadline=soon())
    assert disk_usage(root) == (0, 0)
    assert store_chain(store, make_keys(20, "new")) == [STORED] * 20
    check(store, root)
    store.backend.close()
    store = open_file(root)
    assert store_chain(store, make_keys(20, "newer")) == [STORED] * 20
    check(store, root)
    store.backend.close()


def test_without_a_floor_a_full_disk_evicts_as_at_the_capacity(small_disk: Path) -> None:
    """Only the batch that finds the disk full loses pages; the ones after it are stored."""
    root = small_disk / "s"
    store = open_file(root)
    rejected = [number for number in range(300) if REJECTED in store_chain(store, make_keys(10, f"chain {number}"))]
    assert len(rejected) == 1 and rejected[0] > 10
    assert load(store, make_keys(10, "chain 299")) == [HIT] * 10
    assert store.backend.statistics().evicted_pages > 1000
    assert file_driver(store).rejection is None
    check(store, root)
    store.backend.close()


def test_a_store_is_not_emptied_by_programs_that_take_all_its_room(small_disk: Path) -> None:
    def take_all(name: str, number: int, args: tuple[object, ...]) -> None:
        if name == "pwritev":
            fill_up(small_disk)

    root, system = small_disk / "s", Faulty(take_all)
    system.armed = False
    store = open_file(root, system=system, io_threads=1)
    assert store_chain(store, make_keys(PAGES)) == [STORED] * PAGES
    system.armed = True
    for number in range(20):
        assert set(store_chain(store, make_keys(5, f"chain {number}"))) == {REJECTED}
    assert disk_usage(root)[0] >= PAGES - 5 - (256 << 10) // PAGE
    assert (file_driver(store).rejection or "").startswith("ENOSPC: the file system has ")
    store.backend.close()


def clear(root: Path) -> None:
    store = open_file(root)
    assert store.backend.clear(deadline=soon()) == PAGES
    store.backend.close()


def trim(root: Path) -> None:
    raw = open_stored(path=root)
    *_, last = trim_stored(raw, 0)
    assert last.pages == PAGES
    raw.close()


def purge_all(root: Path) -> None:
    assert purge(root, dry_run=True).pages == PAGES
    assert purge(root).pages == PAGES


def delete(root: Path) -> None:
    store = open_file(root)
    assert store.backend.delete(make_keys(PAGES), deadline=soon()) == PAGES
    store.backend.close()


def break_index(root: Path) -> None:
    (path,) = root.glob("index-*.sqlite")
    path.write_bytes(b"nonsense" * 1000)


def lose_index(root: Path) -> None:
    for path in root.glob("index-*"):
        path.unlink()


@pytest.mark.parametrize("spoil", [lambda root: None, break_index, lose_index], ids=["sound", "damaged", "lost"])
@pytest.mark.parametrize("make_room", [purge_all, trim, delete, clear], ids=lambda value: value.__name__)
def test_on_a_disk_that_others_filled_pages_are_read_and_removed(
    small_disk: Path, make_room: Callable[[Path], None], spoil: Callable[[Path], None]
) -> None:
    root = small_disk / "s"
    store = open_file(root)
    keys = make_keys(PAGES)
    assert store_chain(store, keys) == [STORED] * PAGES
    store.backend.close()
    spoil(root)
    fill_up(small_disk)
    engine = open_file(root)
    fill_up(small_disk)  # the room of the damaged index is free again
    assert load(engine, keys) == [HIT] * PAGES
    assert set(store_chain(engine, make_keys(3, "no room"))) == {REJECTED}
    assert sum(engine.backend.statistics().errors.values()) >= 1
    last = verify(root)
    assert (last.pages, dict(last.damaged)) == (PAGES, {})
    make_room(root)
    assert disk_usage(root) == (0, 0)
    wait_for(lambda: store_chain(engine, make_keys(3, "room again")) != [REJECTED] * 3)
    check(engine, root)
    engine.backend.close()


def test_without_room_for_a_copy_of_the_index_last_uses_are_unknown_and_the_rest_works(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_file(tmp_path / "s")
    store_chain(store, make_keys(PAGES))
    store.backend.close()
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    fill_up(small_disk)
    raw = open_stored(tmp_path / "s")
    assert [page.used_s for page in raw.pages()] == [None] * PAGES
    assert "the last use of its pages is not known" in caplog.text
    raw.close()
    assert verify(tmp_path / "s").pages == PAGES
    assert purge(tmp_path / "s", older_than_s=0.0).pages == 0, "a page of unknown age was purged"
    assert purge(tmp_path / "s").pages == PAGES


def test_damaged_pages_are_removed_from_a_full_disk(small_disk: Path) -> None:
    root = small_disk / "s"
    store = open_file(root)
    keys = make_keys(PAGES)
    store_chain(store, keys)
    store.backend.close()
    lose_index(root)
    fill_up(small_disk)
    engine = open_file(root)
    fill_up(small_disk)
    for path in page_files(root)[:3]:
        path.write_bytes(bytes(PAGE))
    assert sorted(load(engine, keys)) == [CORRUPT] * 3 + [HIT] * (PAGES - 3)
    assert disk_usage(root)[0] == PAGES - 3
    (small_disk / "others").unlink()
    wait_for(lambda: engine.backend.usage().pages == PAGES - 3)
    check(engine, root)
    engine.backend.close()


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def test_a_store_on_a_read_only_disk_is_read_until_it_can_be_written_again(small_disk: Path) -> None:
    root = small_disk / "s"
    store = open_file(root)
    keys = make_keys(5)
    store_chain(store, keys)
    store.backend.close()
    remount(small_disk, "ro")
    try:
        engine = open_file(root)
        assert load(engine, keys) == [HIT] * 5
        assert store_chain(engine, make_keys(3, "new")) == [REJECTED] * 3
        assert engine.backend.delete(keys, deadline=soon()) == 0
        assert engine.backend.statistics().errors["EROFS"] >= 2
    finally:
        remount(small_disk, "rw")
    wait_for(lambda: store_chain(engine, make_keys(3, "new")) == [STORED] * 3)
    check(engine, root)
    engine.backend.close()


def test_a_transaction_without_room_does_not_reconcile_the_store(small_disk: Path) -> None:
    """A comparison takes as long as an opening; a full disk must not cause one per batch."""
    root = small_disk / "s"
    store = open_file(root)
    store_chain(store, make_keys(PAGES))
    fill_up(small_disk)
    keys = make_keys(5000, "many")
    outcomes = store.backend.batch_set(
        keys, [frame_of(store)] * len(keys), parent=None, deadline=soon()
    )
    assert set(outcomes) == {REJECTED} and store.backend.statistics().errors == {"SQLITE_FULL": 1}
    assert not file_driver(store)._store._doubtful
    assert store.backend.delete(make_keys(PAGES), deadline=soon()) == PAGES
    assert store_chain(store, make_keys(5, "new")) == [STORED] * 5
    check(store, root)
    store.backend.close()


def frame_of(store: Subject) -> memoryview:
    return memoryview(bytearray(store.backend.codec.frame_bytes))


def test_the_disk_of_these_tests_becomes_full(small_disk: Path) -> None:
    """The control: writes fail after `fill_up`, though there is room in the directory."""
    fill_up(small_disk)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "more").write_bytes(bytes(4096))
    assert shutil.disk_usage(small_disk).free < 4096 and os.access(small_disk, os.W_OK)
