"""No link below the root of a file store is followed, at any level and at any time, and no strange file blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.file.system import System
from hicache.errors import BackendError
from hicache_lab.conformance import (
    HIT,
    MISS,
    NAMESPACE,
    STORED,
    exists,
    load,
    make_keys,
    soon,
    store_chain,
)

from ._files import (
    CODEC,
    PAGE,
    check,
    file_driver,
    obstruct,
    open_file,
    open_stored,
    page_path,
    temporary_files,
    verify,
)

T = TypeVar("T")
LEVELS = {"namespace": 1, "fan": 0}
OWNER = "0123456789abcdef"
STEP_NS = 500_000_000


class Following(System):
    """A system whose walk is done by the kernel, which follows links."""

    def _walk(self, path: str, dir_fd: int | None, call: Callable[[str, int | None], T]) -> T:
        return call(path, dir_fd)


def link_away(root: Path, key: bytes, level: str, outside: Path) -> Path:
    """Move a directory above a page to `outside` and leave a link in its place."""
    folder = page_path(root, CODEC, key).parents[LEVELS[level]]
    folder.rename(outside)
    folder.symlink_to(outside)
    return folder


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return names, bytes and times of the files below a directory."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("level", LEVELS)
def test_a_directory_that_becomes_a_link_hides_its_pages_until_they_are_stored_again(
    tmp_path: Path, level: str
) -> None:
    root, outside = tmp_path / "s", tmp_path / "outside"
    store = open_file(root)
    (key,) = make_keys(1)
    store_chain(store, [key])
    folder = link_away(root, key, level, outside)
    before = contents(outside)
    assert len(before) == 1

    assert exists(store, [key]) == 0
    assert load(store, [key]) == [MISS]
    assert store.backend.delete([key], deadline=soon()) == 0
    assert store.backend.statistics().corrupt == {}
    assert folder.is_symlink() and contents(outside) == before

    assert store_chain(store, [key]) == [STORED]
    assert load(store, [key]) == [HIT]
    assert not folder.is_symlink() and contents(outside) == before
    check(store, root)


@pytest.mark.parametrize("level", LEVELS)
def test_a_system_that_follows_links_serves_and_removes_the_page_outside(tmp_path: Path, level: str) -> None:
    """The control of the test above."""
    root, outside = tmp_path / "s", tmp_path / "outside"
    store = open_file(root, system=Following())
    (key,) = make_keys(1)
    store_chain(store, [key])
    link_away(root, key, level, outside)
    assert load(store, [key]) == [HIT]
    assert store.backend.delete([key], deadline=soon()) == 1
    assert contents(outside) == {}


@pytest.mark.parametrize("level", LEVELS)
def test_an_eviction_does_not_follow_a_link(tmp_path: Path, level: str) -> None:
    root, outside = tmp_path / "s", tmp_path / "outside"
    store = open_file(root, capacity=2 * PAGE)
    old, new = make_keys(1, "old"), make_keys(2, "new")
    store_chain(store, old)
    link_away(root, old[0], level, outside)
    before = contents(outside)
    assert store_chain(store, new) == [STORED] * 2
    assert store.backend.statistics().evicted_pages == 1
    assert contents(outside) == before


@pytest.mark.parametrize("level", LEVELS)
def test_tools_do_not_follow_a_link(tmp_path: Path, level: str) -> None:
    root, outside = tmp_path / "s", tmp_path / "outside"
    store = open_file(root)
    (key,) = make_keys(1)
    store_chain(store, [key])
    store.backend.close()
    link_away(root, key, level, outside)
    before = contents(outside)
    raw = open_stored(root)
    page = StoredPage(NAMESPACE, key, PAGE, None)
    damage = ["not_regular"] * (level == "fan")
    assert [found.damage for found in raw.pages()] == damage
    assert raw.read(page, PAGE) is None
    assert raw.remove([page]) == 0
    raw.close()
    assert verify(root).removed == 0
    found = verify(root, remove=True)
    assert (found.bytes < PAGE, found.damaged, found.removed) == (True, dict.fromkeys(damage, 1), len(damage))
    assert contents(outside) == before


@pytest.mark.parametrize("kind", ["link", "file", "nothing"])
def test_a_strange_tmp_is_replaced_by_the_next_store(tmp_path: Path, kind: str) -> None:
    root, outside = tmp_path / "s", tmp_path / "outside"
    outside.mkdir()
    store = open_file(root)
    keys = make_keys(2)
    store_chain(store, keys[:1])
    (root / "tmp").rename(tmp_path / "old")
    if kind == "link":
        (root / "tmp").symlink_to(outside)
    elif kind == "file":
        (root / "tmp").write_bytes(b"mine")
    assert store_chain(store, keys[1:]) == [STORED]
    assert load(store, keys) == [HIT, HIT]
    assert len(list((root / "tmp").glob("*.alive"))) == 1, "the owner file of this opening is missing"
    check(store, root)
    store.backend.close()
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "fifo", "socket", "directory"])
@pytest.mark.parametrize("name", ["lock", "HICACHE_STORE", "index"])
def test_a_strange_file_of_the_store_neither_blocks_nor_raises_an_untyped_error(
    tmp_path: Path, name: str, kind: str
) -> None:
    root, outside = tmp_path / "s", tmp_path / "outside"
    outside.write_bytes(b"mine")
    open_file(root).backend.close()
    path = next(root.glob("index-*.sqlite")) if name == "index" else root / name
    obstruct(path, kind, outside)

    def look() -> None:
        with contextlib.closing(open_stored(root)) as raw:
            list(raw.pages())

    actions: list[Callable[[], Any]] = [look]
    if name != "index":  # `test_file_index.py` tests what may replace the index
        actions.append(lambda: open_file(root).backend.close())  # noqa: PLW0108  it opens the store, too
    for action in actions:
        try:
            action()
        except BackendError:
            pass
    assert outside.read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["link", "fifo", "socket", "directory"])
@pytest.mark.parametrize("suffix", ["alive", "7"])
def test_a_store_opens_with_strange_files_in_tmp(tmp_path: Path, kind: str, suffix: str) -> None:
    root, outside = tmp_path / "s", tmp_path / "outside"
    outside.write_bytes(b"mine")
    open_file(root).backend.close()
    obstruct(root / "tmp" / f"{OWNER}.{suffix}", kind, outside)
    store = open_file(root)
    assert len(temporary_files(root)) == 1
    check(store, root)
    store.backend.close()
    assert outside.read_bytes() == b"mine"


def test_a_reservation_below_a_file_in_place_of_a_directory_ends_with_its_owner(tmp_path: Path) -> None:
    root, (key,) = tmp_path / "s", make_keys(1)
    store = open_file(root)
    store_chain(store, [key])
    with file_driver(store)._store.transaction(soon()) as index:
        index.reserve(NAMESPACE, [key], [None], f"{OWNER}.1", PAGE, 1)
    store.backend.close()
    fan = page_path(root, CODEC, key).parent
    fan.rename(tmp_path / "away")
    fan.write_bytes(b"in the way")
    store = open_file(root)
    check(store, root)
    assert store_chain(store, [key]) == [STORED]


class ByPage(System):
    """The system as it is, but page by page."""


@pytest.mark.parametrize("system", [None, ByPage()], ids=["batches", "by page"])
def test_a_page_in_a_directory_made_by_another_process_is_found(tmp_path: Path, system: System | None) -> None:
    root, keys = tmp_path / "s", make_keys(30)
    ours, theirs = open_file(root, system=system), open_file(root)
    for number, key in enumerate(keys):
        assert exists(ours, [key]) == 0
        assert store_chain(theirs, [key]) == [STORED]
        assert exists(ours, keys) == number + 1
    link_away(root, keys[0], "fan", tmp_path / "outside")
    assert exists(ours, keys) == 0
