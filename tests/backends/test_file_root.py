"""Ownership and content of the root: strange files are never followed, never block, and are removed if that is safe."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.file.root import open_root
from hicache.backends.file.system import System
from hicache.config import FileStorageOptions
from hicache.errors import BackendUnavailable, ConfigError, InvalidInput, NotOurs
from hicache.frame import FrameCodec
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    STORED,
    exists,
    load,
    make_keys,
    store_chain,
)

from ._files import (
    CODEC,
    PAGE,
    Faulty,
    changed,
    check,
    obstruct,
    open_file,
    page_path,
    purge,
)


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("obstacle", ["directory", "full directory", "fifo", "link", "link to nothing", "socket"])
def test_a_strange_file_in_place_of_a_page_is_never_followed_and_never_blocks(
    tmp_path: Path, root: Path, obstacle: str, is_read: bool
) -> None:
    """Reading or storing the page removes it if that loses nothing."""
    # Its time stands still: the page has the same bytes when it is stored again.
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, clock=ManualClock())
    store, keys, is_full = open_file(root, codec), make_keys(3), obstacle == "full directory"
    store_chain(store, keys)
    path, outside = page_path(root, CODEC, keys[1]), tmp_path / "outside"
    outside.write_bytes(path.read_bytes())
    obstruct(path, obstacle, outside)
    if is_read:
        assert exists(store, keys) == 1
        assert load(store, keys) == [HIT, MISS if is_full else CORRUPT, HIT]
        assert store.backend.statistics().corrupt == {"not_regular": 1}
        assert path.is_dir() if is_full else not os.path.lexists(path)
    stored = store_chain(store, keys)
    assert stored == [PRESENT, SetOutcome.ERROR if is_full else STORED, PRESENT]
    assert outside.read_bytes() == store.read(keys[1]) if not is_full else (path / "mine").exists()
    if not is_full:
        assert load(store, keys) == [HIT] * 3
        check(store, root)
    store.backend.close()
    open_file(root)


class LongDirectories(System):
    """A file system whose directories have the length of a page."""

    def lstat(self, path: str, *, dir_fd: int | None = None) -> os.stat_result:
        return self._lengthened(super().lstat(path, dir_fd=dir_fd))

    def lstat_listed(self, path: str, *, dir_fd: int) -> os.stat_result:
        return self._lengthened(super().lstat_listed(path, dir_fd=dir_fd))

    def _lengthened(self, found: os.stat_result) -> os.stat_result:
        return changed(found, size=PAGE) if stat.S_ISDIR(found.st_mode) else found


def test_a_directory_with_the_length_of_a_page_does_not_count_as_stored(root: Path) -> None:
    store, keys = open_file(root, system=LongDirectories()), make_keys(2)
    store_chain(store, keys)
    obstruct(page_path(root, CODEC, keys[1]), "directory", root)
    assert exists(store, keys) == 1
    assert store_chain(store, keys) == [PRESENT, STORED]
    assert load(store, keys) == [HIT, HIT]


def test_a_linked_fan_out_directory_is_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "s", tmp_path / "outside"
    store = open_file(root)
    (key,) = make_keys(1)
    store_chain(store, [key])
    store.backend.close()
    folder = page_path(root, CODEC, key).parent
    folder.rename(outside)
    folder.symlink_to(outside)
    store = open_file(root)
    assert not os.path.lexists(folder)
    assert len(list(outside.iterdir())) == 1
    assert store.backend.usage().pages == 0


@pytest.mark.parametrize("foreign", [
    "notes", "0123/x", "tmp/notes", f"{'a' * 64}/notes", f"{'a' * 64}/aa/notes", f"{'a' * 64}/aa/{'a' * 64}",
    "index-00000000.sqlite/x",
])
def test_without_a_marker_a_directory_is_accepted_if_every_file_is_of_a_store(tmp_path: Path, foreign: str) -> None:
    """The controls: another file, a file of another name among the pages, or one that is not a page."""
    root, keys = tmp_path / "s", make_keys(3)
    store = open_file(root)
    store_chain(store, keys)
    store.backend.close()
    (root / "HICACHE_STORE").unlink()
    path = root / foreign
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("all my work")
    with pytest.raises(NotOurs, match="not empty"):
        open_file(root)
    assert path.read_text() == "all my work" and not (root / "HICACHE_STORE").exists()
    path.unlink()
    for parent in [parent for parent in path.parents if root in parent.parents and parent.name != "tmp"]:
        parent.rmdir()
    store = open_file(root)
    assert load(store, keys) == [HIT] * 3
    check(store, root)


def test_an_empty_directory_of_ours_is_accepted(root: Path) -> None:
    root.mkdir(mode=0o700)
    open_file(root).backend.close()
    assert (root / "HICACHE_STORE").read_text() == "hicache file store 1\n"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_root_that_others_may_write_is_rejected(root: Path, mode: int) -> None:
    open_file(root).backend.close()
    root.chmod(mode)
    with pytest.raises(NotOurs, match="writable by others"):
        open_file(root)


def test_below_a_shared_directory_the_root_must_be_private(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    open_file(shared / "s").backend.close()
    (shared / "s").chmod(0o755)
    with pytest.raises(NotOurs, match="not private"):
        open_file(shared / "s")
    (shared / "s").chmod(0o700)
    shared.chmod(0o777)
    with pytest.raises(NotOurs, match=f"{shared} above it is writable by everyone"):
        open_file(shared / "s")


def test_each_directory_above_is_checked_and_named(tmp_path: Path) -> None:
    high = tmp_path / "high"
    root = high / "middle" / "s"
    open_file(root).backend.close()
    high.chmod(0o777)
    with pytest.raises(NotOurs, match=f": {high} above it is writable by everyone.* run chmod o-w"):
        open_file(root)
    high.chmod(0o1777)
    open_file(root).backend.close()
    high.chmod(0o2775)
    open_file(root).backend.close()


def test_the_root_of_a_mount_may_be_writable_by_everyone(small_disk: Path) -> None:
    """The control: a directory in it may not."""
    small_disk.chmod(0o777)
    open_file(small_disk / "s").backend.close()
    (small_disk / "open").mkdir()
    (small_disk / "open").chmod(0o777)
    with pytest.raises(NotOurs, match=f"{small_disk / 'open'} above it is writable by everyone.*mount a volume there"):
        open_file(small_disk / "open" / "s")


@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o770])
def test_a_volume_that_cannot_be_closed_has_the_store_in_its_own_directory(small_disk: Path, mode: int) -> None:
    small_disk.chmod(mode)
    store, keys = open_file(small_disk), make_keys(3)
    assert store_chain(store, keys) == [STORED] * 3
    store.backend.close()
    assert [path.name for path in small_disk.iterdir()] == ["hicache"]
    assert (small_disk / "hicache").stat().st_mode & 0o777 == 0o700
    assert load(open_file(small_disk), keys) == [HIT] * 3
    assert purge(small_disk).pages == 3


def test_a_store_at_the_root_of_a_mount_is_found_and_must_be_private(small_disk: Path) -> None:
    store, keys = open_file(small_disk), make_keys(3)
    store_chain(store, keys)
    store.backend.close()
    assert load(open_file(small_disk), keys) == [HIT] * 3
    small_disk.chmod(0o2770)  # as the kubelet does with an fsGroup
    with pytest.raises(NotOurs, match=r"writable by others.*OnRootMismatch"):
        open_file(small_disk)


def modes(folder: Path) -> set[tuple[bool, int]]:
    """Return for everything below a directory whether it is a directory, and its mode."""
    return {(path.is_dir(), path.lstat().st_mode & 0o7777) for path in folder.rglob("*")}


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_files_of_a_store_are_private_with_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = open_file(tmp_path / "a" / "b" / "s")
        store_chain(store, make_keys(3))
        assert modes(tmp_path) == {(True, 0o700), (False, 0o600)}
        store.backend.close()
    finally:
        os.umask(before)


@pytest.mark.parametrize("umask", [0o777, 0o100])
def test_a_umask_that_removes_owner_rights_is_rejected_and_leaves_nothing(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with pytest.raises(BackendUnavailable, match="umask"):
            open_file(tmp_path / "a" / "s")
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_a_link_above_the_root_is_resolved_once(tmp_path: Path) -> None:
    root = tmp_path / "real" / "s"
    open_file(root).backend.close()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to(tmp_path / "one" / ".." / "real")
    with pytest.raises(BackendUnavailable, match="too many"):
        open_file(tmp_path / "one" / "s")
    (tmp_path / "two").unlink()
    (tmp_path / "two").symlink_to("../" + tmp_path.name + "/./real")
    path, fd = open_root(tmp_path / "one" / "s", create=False, system=System())
    os.close(fd)
    assert path == str(root)
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(NotOurs, match=f": {tmp_path / 'real'} above it"):
        open_file(tmp_path / "one" / "s")


def test_the_root_is_made_in_the_checked_directory(tmp_path: Path) -> None:
    high, moved = tmp_path / "high", tmp_path / "moved"
    high.mkdir()

    def replace(name: str, number: int, args: tuple[object, ...]) -> None:
        if (name, number) == ("mkdir", 1):  # after the check of `high`, before the root is made in it
            high.rename(moved)
            high.mkdir()

    _, fd = open_root(high / "s", create=True, system=Faulty(replace))
    os.close(fd)
    assert (moved / "s" / "HICACHE_STORE").exists()
    assert list(high.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
@pytest.mark.parametrize(
    ("foreign", "message"),
    [("high/middle/s", "belongs to user id 12345"), ("high", "{path} above it belongs to user id 12345.* run chown"),
     ("link", "the symbolic link {path} belongs to user id 12345")],
)
def test_a_path_through_something_of_another_user_is_rejected(tmp_path: Path, foreign: str, message: str) -> None:
    root, path = tmp_path / "high" / "middle" / "s", tmp_path / foreign
    root.mkdir(parents=True, mode=0o700)
    if foreign == "link":
        path.symlink_to(tmp_path / "high")
    os.chown(path, 12345, 12345, follow_symlinks=False)
    with pytest.raises(NotOurs, match=message.format(path=path)):
        open_file(path / "middle" / "s" if foreign == "link" else root)
    assert list(root.iterdir()) == []


def test_a_link_as_root_is_rejected(tmp_path: Path) -> None:
    open_file(tmp_path / "s").backend.close()
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with pytest.raises(NotOurs, match="symbolic link"):
        open_file(tmp_path / "link")


def test_a_path_that_cannot_be_a_store_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendUnavailable):
        open_file(tmp_path / "file")
    with pytest.raises(BackendUnavailable):
        open_file(tmp_path / "file" / "below")


def test_a_store_of_another_version_is_not_changed(root: Path) -> None:
    open_file(root).backend.close()
    (root / "HICACHE_STORE").write_text("hicache file store 9\n")
    with pytest.raises(BackendUnavailable, match="version"):
        open_file(root)


@pytest.mark.parametrize(
    "options",
    [
        {"path": ""}, {"path": None}, {"capacity": 0}, {"capacity": "much"}, {"io_threads": 0}, {"io_threads": True},
        {"io_threads": 65}, {"free_space_floor": -1}, {"direct_io": 2}, {"sync": "perhaps"}, {"capcity": 1},
    ],
)
def test_invalid_options_are_rejected(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FileStorageOptions(**{"path": tmp_path / "s", **options})


def test_a_capacity_below_one_page_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="below one page"):
        open_file(tmp_path / "s", capacity=PAGE - 1)


def test_a_store_that_another_process_makes_at_the_same_time_is_accepted(root: Path) -> None:

    def overtake(name: str, number: int, args: tuple[object, ...]) -> None:
        if (name, number) == ("listdir", 1):  # after the check for the marker, before the check of the other files
            open_file(root).backend.close()

    store = open_file(root, system=Faulty(overtake))
    check(store, root)


def test_the_error_for_the_directory_above_a_store_names_the_store(tmp_path: Path) -> None:
    open_file(tmp_path / "data" / "pages").backend.close()
    (tmp_path / "data" / "notes").write_text("mine")
    with pytest.raises(NotOurs, match=f"did you mean {tmp_path / 'data' / 'pages'}\\?"):
        purge(tmp_path / "data", dry_run=True)
