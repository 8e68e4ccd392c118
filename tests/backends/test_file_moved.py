"""A root that is moved, replaced or emptied while engines use it: they write and remove files only in their own
directory, and use an emptied one again."""

from __future__ import annotations

import fcntl
import shutil
import time
from pathlib import Path

import pytest

from hicache_lab.conformance import (
    HIT,
    MISS,
    PRESENT,
    SET_ERROR,
    STORED,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)

from ._files import PAGE, check, open_file


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return all paths below a directory with the bytes of files, None for directories."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("instead", ["nothing", "an empty directory", "another store", "a link", "a file"])
def test_a_store_with_a_moved_root_changes_nothing_until_it_is_back(
    tmp_path: Path, instead: str
) -> None:
    root, away, foreign = tmp_path / "s", tmp_path / "away", tmp_path / "foreign"
    store, other = open_file(root, capacity=8 * PAGE), open_file(foreign)
    keys = make_keys(5, "ours")
    store_chain(store, keys)
    store_chain(other, make_keys(5, "theirs"))
    other.backend.close()
    usage = store.backend.usage()
    root.rename(away)
    if instead == "an empty directory":
        root.mkdir(mode=0o700)
    elif instead == "another store":
        foreign.rename(root)
    elif instead == "a link":
        root.symlink_to(foreign)
    elif instead == "a file":
        root.write_bytes(b"mine")
    before, ours = contents(tmp_path), contents(away)
    assert store_chain(store, make_keys(5, "new")) == [SET_ERROR] * 5
    assert store.backend.delete(keys, deadline=soon()) == 0
    assert (store.backend.usage(), store.backend.statistics().errors) == (usage, {"ESTALE": 7})
    assert load(store, keys) == [HIT] * 5, "the opened directory can no longer be read"
    assert contents(tmp_path) == before and contents(away) == ours
    if instead != "nothing":
        root.rename(foreign if instead == "another store" else tmp_path / "replaced")
    away.rename(root)
    assert store_chain(store, make_keys(5, "new")) == [STORED] * 5
    check(store, root)
    store.backend.close()


def test_closing_a_moved_store_does_not_change_the_directory_at_its_path(tmp_path: Path) -> None:
    root, away = tmp_path / "s", tmp_path / "away"
    store = open_file(root)
    store_chain(store, make_keys(3))
    root.rename(away)
    other = open_file(root)
    before = contents(root)
    store.backend.close()
    assert contents(root) == before
    assert [path.name for path in (away / "tmp").iterdir()] == []
    check(other, root)
    other.backend.close()


def empty(root: Path, *, keep: str = "") -> None:
    """Remove everything in a directory, as `rm -rf path/*` does, except for one name."""
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != keep:
            path.unlink()


@pytest.mark.parametrize("keep", ["", "lock", "HICACHE_STORE"])
def test_an_emptied_store_goes_on_and_is_found_by_the_next_opening(
    tmp_path: Path, keep: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, keys, new = tmp_path / "s", make_keys(5), make_keys(5, "new")
    store = open_file(root)
    store_chain(store, keys)
    empty(root, keep=keep)
    assert load(store, keys) == [MISS] * 5
    assert store_chain(store, new) == [STORED] * 5
    assert ("its files were removed" in caplog.text) == (keep != "HICACHE_STORE")
    check(store, root)
    other = open_file(root)
    assert load(other, new) == [HIT] * 5
    assert store_chain(other, keys) == [STORED] * 5
    assert store_chain(store, [*keys, *make_keys(3, "newest")]) == [PRESENT] * 5 + [STORED] * 3
    check(store, root)
    store.backend.close()
    check(other, root)
    other.backend.close()
    store = open_file(root)
    assert load(store, new) == [HIT] * 5
    check(store, root)


def test_processes_that_opened_before_and_after_a_removal_exclude_each_other(root: Path) -> None:
    """The lock of a running store is that of the file at the path, not of the removed file."""
    store = open_file(root)
    store_chain(store, make_keys(3))
    empty(root)
    with (root / "lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        keys = make_keys(2, "new")
        frames, deadline = full_frames(store.backend.codec, keys), time.monotonic() + 0.1
        assert store.backend.batch_set(keys, frames, parent=None, deadline=deadline) == [SET_ERROR] * 2
    assert store_chain(store, make_keys(2, "new")) == [STORED] * 2
    check(store, root)


def test_pages_are_read_after_the_marker_alone_was_removed(tmp_path: Path) -> None:
    root, keys = tmp_path / "s", make_keys(3)
    store = open_file(root)
    store_chain(store, keys)
    (root / "HICACHE_STORE").unlink()
    store.backend.usage()
    assert (root / "HICACHE_STORE").read_text() == "hicache file store 1\n"
    assert load(store, keys) == [HIT] * 3
