"""A cache is emptied by removing files: a running store notices it, its pages are misses, and new ones survive."""

from __future__ import annotations

import fcntl
import shutil
import time
from pathlib import Path

import pytest

from hicache.backends.testing import (
    HIT,
    MISS,
    PRESENT,
    SET_ERROR,
    STORED,
    Subject,
    full_frames,
    load,
    make_keys,
    store_chain,
)

from ._files import check, open_file


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


def outcomes_within(store: Subject, keys: list[bytes], seconds: float) -> list[object]:
    """Subject pages with a short deadline."""
    frames = full_frames(store.backend.codec, keys)
    return list(store.backend.batch_set(keys, frames, parent=None, deadline=time.monotonic() + seconds))


def test_processes_that_opened_before_and_after_a_removal_exclude_each_other(tmp_path: Path) -> None:
    """The lock of a running store is that of the file at the path, not of the removed file."""
    root = tmp_path / "s"
    store = open_file(root)
    store_chain(store, make_keys(3))
    empty(root)
    with (root / "lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert outcomes_within(store, make_keys(2, "new"), 0.1) == [SET_ERROR] * 2
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
