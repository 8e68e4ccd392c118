"""A file store is for one machine: another machine, or another mount of the directory, is refused in words as long as
the first one uses the store, and may have it after that."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.file import FileDriver
from hicache.backends.file.inspection import FileInspection, make_store
from hicache.backends.file.owners import BEAT_S, HEARTBEAT_S, Owner, UsedElsewhere
from hicache.backends.file.store import FileStore
from hicache.backends.file.system import System
from hicache.backends.stored import StoredPages
from hicache.errors import BackendUnavailable
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import HIT, MISS, SET_ERROR, STORED, load, make_keys, soon, store_chain
from tests.fuse import mounted
from tests.waiting import wait_for

from ._files import (
    CODEC,
    PAGE,
    check,
    file_driver,
    file_options,
    open_file,
    page_files,
    page_path,
    temporary_files,
)

OTHER = "0123456789abcdef"


class Machine(System):
    """A machine with this name. With `blind` it does not see the locks of others, as through another mount."""

    def __init__(self, name: str, *, boot: str = "", file_system: str = "ext4", blind: bool = False) -> None:
        self.name, self.boot, self.kind = name, boot or f"boot-of-{name}", file_system
        if blind:
            self.flock = lambda fd, operation: None

    def fact(self, path: str) -> str:
        return {"machine-id": f"id-of-{self.name}", "boot_id": self.boot, "hostname": self.name}[Path(path).name]

    def file_system(self, fd: int) -> str:
        return self.kind


def owner_file(root: Path, store: Any) -> Path:
    return root / "tmp" / f"{file_driver(store)._store.owner}.alive"


def age(path: Path, seconds: float) -> None:
    """Set the heartbeat of an owner file to this many seconds ago."""
    os.utime(path, (time.time() - seconds,) * 2)


def put_owner(root: Path, system: System, seconds: float = 0.0) -> Path:
    """Make the owner file and a temporary page of a process without locks that runs on a machine."""
    fd = os.open(root, os.O_RDONLY)
    line = Owner.here(system, fd).line()
    os.close(fd)
    path = root / "tmp" / f"{OTHER}.alive"
    path.write_bytes(line)
    path.with_suffix(".7").write_bytes(b"a page being written")
    age(path, seconds)
    return path


def state(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return all files below a directory with their inodes and bytes."""
    return {str(one): (one.stat().st_ino, one.read_bytes()) for one in root.rglob("*") if one.is_file()}


def errors(store: Any) -> dict[str, int]:
    return dict(store.backend.statistics().errors)


def test_the_owner_file_says_where_the_process_runs(root: Path) -> None:
    store = open_file(root)
    device = os.stat(root).st_dev
    words = owner_file(root, store).read_text().removesuffix("\n").split(" ")
    assert words[1] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert words[2:] == [f"{os.major(device)}:{os.minor(device)}", os.uname().nodename, str(os.getpid())]
    assert temporary_files(root) == [owner_file(root, store).name]


def test_a_store_that_another_machine_uses_is_refused_and_not_changed(root: Path) -> None:
    store = open_file(root, system=Machine("north"))
    store_chain(store, make_keys(3))
    (root / "tmp" / f"{file_driver(store)._store.owner}.9").write_bytes(b"a page being written")
    before = state(root)
    words = (r"host north \(machine id-of-north, process \d+\) uses it \(tmp/[0-9a-f]{16}\.alive\), last \d s ago; "
             r".* shared_files, .* wait 60 s$")
    with pytest.raises(BackendUnavailable, match=words):
        open_file(root, system=Machine("south", blind=True))
    assert state(root) == before
    assert store_chain(store, make_keys(3, "more")) == [STORED] * 3
    (root / "tmp" / f"{file_driver(store)._store.owner}.9").unlink()
    check(store, root)


def test_without_the_line_a_machine_that_does_not_see_the_lock_removes_the_files_of_a_living_owner(root: Path) -> None:
    """The control of the test above: locks alone are not enough."""
    store = open_file(root, system=Machine("north"))
    owner_file(root, store).write_bytes(b"")
    open_file(root, system=Machine("south", blind=True))
    assert not owner_file(root, store).exists()


def test_processes_of_one_boot_share_a_store_whatever_their_machine_ids(root: Path) -> None:
    """Containers of one machine have machine ids of their own, or none."""
    first = open_file(root, system=Machine("pod-a", boot="same"))
    second = open_file(root, system=Machine("pod-b", boot="same"))
    assert store_chain(first, make_keys(3)) == [STORED] * 3
    assert load(second, make_keys(3)) == [HIT] * 3
    assert owner_file(root, first).exists()
    check(second, root)


@pytest.mark.parametrize(("seconds", "lives"), [(0, True), (HEARTBEAT_S - 10, True), (HEARTBEAT_S + 1, False)])
def test_another_machine_lives_while_its_heartbeat_is_young(root: Path, seconds: float, lives: bool) -> None:
    make_store(root)
    path = put_owner(root, Machine("north"), seconds)
    if lives:
        with pytest.raises(BackendUnavailable, match="host north"):
            open_file(root, system=Machine("south"))
        assert temporary_files(root) == [f"{OTHER}.7", f"{OTHER}.alive"]
        return
    store = open_file(root, system=Machine("south"))
    assert temporary_files(root) == [owner_file(root, store).name] != [path.name]


def test_a_killed_process_of_this_machine_is_reaped_at_once(root: Path) -> None:
    """The control of the test above: no heartbeat counts where locks do."""
    make_store(root)
    put_owner(root, Machine("south"))
    store = open_file(root, system=Machine("south"))
    assert temporary_files(root) == [owner_file(root, store).name]


def test_a_clean_close_frees_the_store_at_once(root: Path) -> None:
    store = open_file(root, system=Machine("north"))
    store_chain(store, make_keys(3))
    store.backend.close()
    other = open_file(root, system=Machine("south"))
    assert load(other, make_keys(3)) == [HIT] * 3
    check(other, root)


@pytest.mark.parametrize("line", [b"", b"\n", b"one two three\n", b"a b 0:1 c", b"a b 0:1 c \xff\n", b"x" * 600])
def test_an_owner_file_without_a_valid_line_counts_by_its_lock(root: Path, line: bytes) -> None:
    """Those of older versions are empty."""
    store = open_file(root, system=Machine("north"))
    owner_file(root, store).write_bytes(line)
    dead = root / "tmp" / f"{OTHER}.alive"
    dead.write_bytes(line)
    other = open_file(root, system=Machine("south"))
    assert owner_file(root, store).exists() and not dead.exists()
    assert owner_file(root, other).exists()


def test_operators_read_a_store_that_another_machine_uses_and_do_not_change_it(root: Path) -> None:
    store = open_file(root, system=Machine("north"))
    store_chain(store, keys := make_keys(3))
    tool = FileInspection(None, file_options(root), system=Machine("south"))
    with contextlib.closing(StoredPages(tool, "file")) as raw:
        assert {page.key for page in raw.pages()} == set(keys)
        with pytest.raises(BackendUnavailable, match=r"host north .* shared_files"):
            tool.remove(CODEC.namespace, keys, soon())
    put_owner(root, Machine("north"))
    with pytest.raises(BackendUnavailable, match="host north"):
        make_store(root)
    assert load(store, keys) == [HIT] * 3


# An opening that others considered dead.


@pytest.fixture
def taken(root: Path) -> Iterator[tuple[Any, Any]]:
    """A store of the machine north that was silent, and that of the machine south, which took it since."""
    north = open_file(root, system=Machine("north"), capacity=20 * PAGE)
    store_chain(north, make_keys(4))
    age(owner_file(root, north), HEARTBEAT_S + 1)
    yield north, open_file(root, system=Machine("south"))


def test_a_machine_that_lost_the_store_changes_nothing_while_the_other_lives(
    root: Path, taken: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    north, south = taken
    before = state(root)
    assert store_chain(north, make_keys(3, "north")) == [SET_ERROR] * 3
    assert north.backend.delete(make_keys(4), deadline=soon()) == 0
    assert set(errors(north)) == {"EBUSY"}
    assert state(root) == before and load(north, make_keys(4)) == [HIT] * 4
    (line,) = [one.getMessage() for one in caplog.records if "nothing is stored here" in one.getMessage()]
    assert "host south" in line and "shared_files" in line
    assert store_chain(south, make_keys(3, "south")) == [STORED] * 3
    check(south, root)


@pytest.mark.parametrize("how", ["closes", "dies"])
def test_a_machine_that_lost_the_store_has_it_again_after_the_other(
    root: Path, taken: tuple[Any, Any], how: str
) -> None:
    north, south = taken
    store_chain(south, make_keys(3, "south"))
    if how == "closes":
        south.backend.close()
    else:
        age(owner_file(root, south), HEARTBEAT_S + 1)
    assert store_chain(north, make_keys(3, "north")) == [STORED] * 3
    assert load(north, make_keys(3, "south")) == [HIT] * 3
    check(north, root)


@pytest.mark.parametrize("lost", [True, False])
def test_a_machine_that_gets_the_store_back_compares_its_index_with_the_files(root: Path, lost: bool) -> None:
    """Not without a loss: the control, in which a removed file still has a row."""
    north = open_file(root, system=Machine("north"))
    store_chain(north, make_keys(4))
    if lost:
        age(owner_file(root, north), HEARTBEAT_S + 1)
        open_file(root, system=Machine("south")).backend.close()
    page_path(root, CODEC, make_keys(4)[3]).unlink()
    assert north.backend.usage().pages == (3 if lost else 4)


@pytest.mark.parametrize("silent", [True, False])
def test_after_a_silence_a_process_looks_for_others_before_it_changes_anything(root: Path, silent: bool) -> None:
    """The other machine has read the old heartbeat, and has not yet removed the owner file."""
    clock = ManualClock()
    north = open_file(root, system=Machine("north"), clock=clock)
    path = put_owner(root, Machine("south"))
    clock.advance(HEARTBEAT_S if silent else 1.0)
    assert store_chain(north, make_keys(2)) == [SET_ERROR if silent else STORED] * 2
    age(path, HEARTBEAT_S + 1)
    assert store_chain(north, make_keys(2, "then")) == [STORED] * 2


def test_transactions_renew_the_heartbeat_every_quarter_of_its_time(root: Path) -> None:
    clock = ManualClock()
    store = open_file(root, system=Machine("north"), clock=clock)
    age(path := owner_file(root, store), HEARTBEAT_S + 1)
    clock.advance(BEAT_S / 2)
    store_chain(store, make_keys(1))
    assert time.time() - path.stat().st_mtime > HEARTBEAT_S, "the control: not at each transaction"
    clock.advance(BEAT_S)
    store_chain(store, make_keys(1, "next"))
    assert time.time() - path.stat().st_mtime < HEARTBEAT_S / 2
    with pytest.raises(BackendUnavailable, match="host north"):
        open_file(root, system=Machine("south"))


@pytest.mark.parametrize("stopped", [True, False])
def test_a_transaction_that_stopped_while_another_machine_took_the_store_is_undone(root: Path, stopped: bool) -> None:
    clock, keys = ManualClock(), make_keys(2)
    store = FileStore(root, create=True, system=Machine("north"), clock=clock)
    path = root / "tmp" / f"{store.owner}.alive"
    with contextlib.closing(store), contextlib.ExitStack() as expected:
        if stopped:
            expected.enter_context(pytest.raises(UsedElsewhere, match="removed in a long transaction"))
        with store.transaction(clock() + 10) as index:
            index.add(CODEC.namespace, keys[0], None, PAGE, 1)
            clock.advance(HEARTBEAT_S if stopped else 1.0)
            path.unlink()
    store = FileStore(root, create=False, system=Machine("north"))
    with contextlib.closing(store), store.transaction(soon()) as index:
        assert index.totals().pages == 0, "a row without a file, which the next opening removes"


def test_a_long_opening_renews_the_heartbeat(root: Path) -> None:
    store_chain(store := open_file(root), make_keys(40))
    store.backend.close()
    (root / "checked").unlink()  # so that it compares all files
    clock, beats = ManualClock(), list[float]()

    class Slow(Machine):
        def lstat_listed(self, path: str, *, dir_fd: int) -> os.stat_result:
            clock.advance(HEARTBEAT_S / 6)
            return super().lstat_listed(path, dir_fd=dir_fd)

        def touch(self, fd: int) -> None:
            beats.append(clock())
            super().touch(fd)

    FileStore(root, create=False, system=Slow("north"), clock=clock).close()
    assert len(beats) > 10 and max(b - a for a, b in itertools.pairwise(beats)) < HEARTBEAT_S / 2


def test_a_full_disk_has_an_owner_file_without_a_line_until_there_is_room(root: Path) -> None:
    class Full(Machine):
        full = True

        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:  # type: ignore[override]
            if self.full and os.readlink(f"/proc/self/fd/{fd}").endswith((".alive", ".0")):
                raise OSError(errno.ENOSPC, "full")
            return os.pwritev(fd, buffers, offset)

    system, clock = Full("north"), ManualClock()
    store = open_file(root, system=system, clock=clock)
    assert owner_file(root, store).read_bytes() == b""
    clock.advance(BEAT_S)
    assert store_chain(store, make_keys(1)) == [STORED]
    system.full = False
    clock.advance(BEAT_S)
    assert store_chain(store, make_keys(1, "next")) == [STORED]
    assert b" boot-of-north " in owner_file(root, store).read_bytes()


# Restarts of the machine, and unknown identities.

HERE = Owner("m", "boot", "254:0", "host", "1")


@pytest.mark.parametrize(
    ("other", "near"),
    [(Owner("other", "boot", "254:0", "else", "2"), True), (Owner("m", "old", "254:0", "host", "1"), False),
     (Owner("m", "boot", "0:54", "host", "1"), False)],
)
def test_an_owner_is_near_if_boot_and_device_are_the_same(other: Owner, near: bool) -> None:
    assert other.is_near(HERE) == near and Owner.parse(other.line()) == other


@pytest.mark.parametrize(("machine", "host", "near"), [("m", "host", True), ("n", "host", False), ("m", "else", False)])
def test_without_a_boot_id_an_owner_is_near_if_machine_and_host_are_the_same(
    machine: str, host: str, near: bool
) -> None:
    assert Owner(machine, "-", "0:54", host, "2").is_near(Owner("m", "-", "0:54", "host", "1")) == near


@pytest.mark.parametrize(
    ("owner", "here", "kind", "dead"),
    [("m old 254:0 host 1", "m boot 254:0 host 1", "ext4", True),
     ("m old 254:0 host 1", "m boot 254:0 host 1", "gfs2", False),
     ("m old 0:54 host 1", "m boot 0:54 host 1", "nfs4", False),
     ("m old 0:54 host 1", "m boot 0:54 host 1", "btrfs", False),
     ("n old 254:0 host 1", "m boot 254:0 host 1", "ext4", False),
     ("m old 254:0 else 1", "m boot 254:0 host 1", "ext4", False),
     ("m old 254:1 host 1", "m boot 254:0 host 1", "ext4", False),
     ("- old 254:0 host 1", "- boot 254:0 host 1", "ext4", False)],
)
def test_an_owner_of_an_earlier_boot_is_dead_only_on_a_disk_of_this_machine(
    owner: str, here: str, kind: str, dead: bool
) -> None:
    assert Owner(*owner.split()).is_of_an_earlier_boot(Owner(*here.split()), kind) == dead


@pytest.mark.parametrize("kind", ["ext4", "ocfs2"])
def test_after_a_restart_of_the_machine_a_store_on_its_disk_opens_at_once(disk_path: Path, kind: str) -> None:
    if not os.major(os.stat(disk_path).st_dev):
        pytest.skip("the temporary directory is not on a disk")
    make_store(root := disk_path / "s")
    put_owner(root, Machine("north", boot="before"))
    now = Machine("north", boot="after", file_system=kind)
    if kind == "ext4":
        open_file(root, system=now)
        assert OTHER not in "".join(temporary_files(root))
    else:
        with pytest.raises(BackendUnavailable, match="host north"):
            open_file(root, system=now)


# Types of file systems, and real mounts.


@pytest.mark.parametrize(("kind", "warned"), [("nfs4", True), ("fuse.juicefs", True), ("ext4", False)])
def test_a_file_system_that_machines_share_is_a_warning_when_the_store_is_opened(
    root: Path, kind: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # a daemon opens it for each namespace
        FileDriver(CODEC, file_options(root), system=Machine("north", file_system=kind)).close()
    found = [one.getMessage() for one in caplog.records if "its file system is" in one.getMessage()]
    assert len(found) == warned
    assert all(f"{root}: its file system is {kind}; " in one and "shared_files" in one for one in found)


def test_a_second_mount_of_a_directory_on_this_machine_is_refused_while_the_first_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (source := tmp_path / "source").mkdir(mode=0o700)
    one, two = tmp_path / "one", tmp_path / "two"
    with mounted(source, one, two):
        first = open_file(one / "s")
        assert "its file system is fuse" in caplog.text
        assert store_chain(first, make_keys(3)) == [STORED] * 3
        for elsewhere in (two / "s", source / "s"):
            with pytest.raises(BackendUnavailable, match=r"through another mount of the directory, uses it .*shared_"):
                open_file(elsewhere)
        assert len(page_files(source / "s")) == 3
        second = open_file(one / "s")  # the control: the same mount
        assert load(second, make_keys(3)) == [HIT] * 3
        second.backend.close()
        first.backend.close()
        # FUSE keeps a file that is removed while it is open as `.fuse_hidden*` until it has handled the close.
        wait_for(lambda: temporary_files(source / "s") == [])
        other = open_file(two / "s")
        assert store_chain(other, make_keys(2, "other")) == [STORED] * 2
        assert load(other, make_keys(1, "none")) == [MISS]
        check(other, two / "s")
        other.backend.close()
