"""The root of shared files: its permissions, its marker, and which directories are accepted."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.shared_files import SharedFilesDriver
from hicache.backends.shared_files.root import MARKER, Root, RootLost, is_shared_store, open_root
from hicache.errors import BackendError, BackendUnavailable, ConfigError, NotOurs
from hicache_lab.conformance import HIT, SET_ERROR, STORED, load, make_keys, store_chain
from tests.waiting import wait_for

from ._files import Faulty, Leftovers, obstruct, open_file, page_files
from ._shared import open_shared, shared_driver, shared_options, temporaries

KEYS = make_keys(3)
TEXT = b"hicache shared files 1\n"


def root_with(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def modes(root: Path) -> set[tuple[bool, int]]:
    """Return for everything below a directory whether it is a directory, and its mode."""
    return {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in root.rglob("*")}


# Permissions


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
@pytest.mark.parametrize(
    ("mode", "folder", "file"),
    [
        (0o700, 0o700, 0o600), (0o755, 0o700, 0o600), (0o750, 0o700, 0o600), (0o775, 0o770, 0o660),
        (0o770, 0o770, 0o660), (0o2775, 0o2770, 0o660), (0o777, 0o777, 0o666), (0o1777, 0o777, 0o666),
        (0o707, 0o707, 0o606),
    ],
    ids=lambda value: f"{value:o}",
)
def test_files_get_the_permissions_of_those_who_can_write_to_the_root_whatever_the_umask_is(
    tmp_path: Path, mode: int, folder: int, file: int, umask: int
) -> None:
    root = root_with(tmp_path / "s", mode)
    before = os.umask(umask)
    try:
        store = open_shared(root)
        assert store_chain(store, KEYS) == [STORED] * 3
        driver = shared_driver(store)
        assert driver.begin_sweep(False)
        driver.end_sweep(3, 0)
    finally:
        os.umask(before)
    assert modes(root) == {(True, folder), (False, file)}
    assert (root / "sweeper").exists() and stat.S_IMODE(root.stat().st_mode) == mode


def test_a_missing_root_is_made_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store_chain(open_shared(tmp_path / "s"), KEYS)
    finally:
        os.umask(before)
    assert modes(tmp_path) == {(True, 0o700), (False, 0o600)}


def test_new_directories_belong_to_the_group_of_a_root_with_the_group_bit(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to give a directory away")
    root = root_with(tmp_path / "s", 0o700)
    os.chown(root, 0, 12345)
    root.chmod(0o2770)
    store_chain(open_shared(root), KEYS)
    assert {path.stat().st_gid for path in root.rglob("*")} == {12345}


def refuses_permissions(code: int) -> Faulty:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "fchmod":
            raise OSError(code, os.strerror(code))

    return Faulty(fault)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_that_decides_permissions_itself_keeps_pages(tmp_path: Path, code: int) -> None:
    root = root_with(tmp_path / "s", 0o770)
    store = open_shared(root, system=refuses_permissions(code))
    assert store_chain(store, KEYS) == [STORED] * 3 and load(store, KEYS) == [HIT] * 3
    assert {path.stat().st_mode & 0o777 for path in page_files(root)} == {0o600}, "the control: it was refused"


def test_a_failing_change_of_permissions_costs_pages_and_leaves_no_file_and_no_descriptor(tmp_path: Path) -> None:
    root, leftovers = root_with(tmp_path / "s", 0o770), Leftovers()
    system = refuses_permissions(errno.EIO)
    system.armed = False
    store = open_shared(root, system=system)
    system.armed = True
    assert store_chain(store, KEYS) == [SET_ERROR] * 3
    assert (page_files(root), temporaries(root)) == ([], [])
    assert store.backend.statistics().errors == {"EIO": 3}
    system.armed = False
    assert store_chain(store, KEYS) == [STORED] * 3, "the control"
    store.backend.close()
    assert leftovers.found() == (0, [])


# Which directories are accepted


@pytest.mark.parametrize("content", [[], [".snapshot"], ["lost+found"], [".nfs0001", ".hidden/file", "lost+found"]])
def test_an_empty_directory_becomes_a_store_also_with_what_servers_keep_there(
    tmp_path: Path, content: list[str]
) -> None:
    root = root_with(tmp_path / "s", 0o755)
    for name in content:
        (root / name).mkdir(parents=True)
    store = open_shared(root)
    assert (root / MARKER).read_bytes() == TEXT and is_shared_store(root)
    assert store_chain(store, KEYS) == [STORED] * 3
    assert load(open_shared(root), KEYS) == [HIT] * 3
    assert all((root / name).is_dir() for name in content)


@pytest.mark.parametrize("name", ["notes", "tmp", "a" * 64, "sweeper", "hicache"])
def test_a_directory_with_other_files_is_refused_with_advice_and_not_changed(tmp_path: Path, name: str) -> None:
    root = root_with(tmp_path / "s", 0o755)
    (root / name).write_text("mine")
    with pytest.raises(NotOurs, match=f"{root} is not empty and not a HiCache store.*; use a new sub-directory"):
        open_shared(root)
    assert os.listdir(root) == [name] and not is_shared_store(root)


def test_a_store_of_the_other_backend_is_refused_in_both_directions(tmp_path: Path) -> None:
    open_file(tmp_path / "file").backend.close()
    with pytest.raises(NotOurs, match="store of the backend `file`, which is for one machine; use another directory"):
        open_shared(tmp_path / "file")
    open_shared(tmp_path / "shared").backend.close()
    with pytest.raises(NotOurs):
        open_file(tmp_path / "shared")
    assert sorted(os.listdir(tmp_path / "shared")) == [MARKER]
    open_file(tmp_path / "file")
    open_shared(tmp_path / "shared")


def test_a_missing_directory_above_is_not_made(tmp_path: Path) -> None:
    """It may be a mount point. The control: in an existing one the store is made."""
    with pytest.raises(BackendUnavailable, match="No such file or directory; check that the file system is mounted"):
        open_shared(tmp_path / "mount" / "s")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mount").mkdir()
    open_shared(tmp_path / "mount" / "s")


@pytest.mark.parametrize("kind", ["fifo", "link", "link to nothing", "socket", "directory"])
def test_a_strange_marker_neither_blocks_nor_is_followed(tmp_path: Path, kind: str) -> None:
    root, outside = root_with(tmp_path / "s", 0o755), tmp_path / "outside"
    outside.write_bytes(TEXT)
    obstruct(root / MARKER, kind, outside)
    if kind == "fifo":
        open_shared(root)  # its text is empty
    else:
        with pytest.raises(BackendUnavailable):
            open_shared(root)
    assert outside.read_bytes() == TEXT


@pytest.mark.parametrize("text", [b"hicache shared files 2\n", b"hicache shared files 10\n", TEXT + b"more", b"x"])
def test_a_store_of_another_version_is_refused_and_not_changed(tmp_path: Path, text: bytes) -> None:
    root = root_with(tmp_path / "s", 0o755)
    (root / MARKER).write_bytes(text)
    with pytest.raises(BackendUnavailable, match="another version of the store; use another directory"):
        open_shared(root)
    assert (root / MARKER).read_bytes() == text


def test_an_empty_marker_is_that_of_another_node_that_is_creating_the_store(tmp_path: Path) -> None:
    root = root_with(tmp_path / "s", 0o755)
    (root / MARKER).touch()
    assert store_chain(open_shared(root), KEYS) == [STORED] * 3
    assert load(open_shared(root), KEYS) == [HIT] * 3


def overtaken(root: Path, number: int, calls: list[str]) -> Faulty:
    """A system that notes its calls. Before the call `number`, another node creates the store `root` and fills it."""

    def note(name: str, _: int, args: tuple[Any, ...]) -> None:
        calls.append(name)
        if len(calls) == number:
            assert store_chain(open_shared(root), KEYS) == [STORED] * 3

    return Faulty(note)


def test_a_store_that_another_node_creates_and_fills_while_it_is_opened_is_one_store(tmp_path: Path) -> None:
    calls: list[str] = []
    for number in itertools.count(1):
        calls.clear()
        root = tmp_path / str(number)
        system = overtaken(root, number, calls)
        ours = open_shared(root, system=system)
        system.armed = False
        if len(calls) < number:
            break
        assert (root / MARKER).read_bytes() == TEXT
        assert load(ours, KEYS) == [HIT] * 3, calls
    assert {"mkdir", "listdir", "pwritev"} <= set(calls), "the control: these calls were overtaken too"


def test_a_marker_that_another_node_has_just_created_is_accepted(tmp_path: Path) -> None:
    """After the check that there is none, and before it is created."""
    root = tmp_path / "s"

    def overtake(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "open" and args[0] == MARKER and args[1] & os.O_CREAT:
            (root / MARKER).write_bytes(TEXT)

    assert store_chain(open_shared(root, system=Faulty(overtake)), KEYS) == [STORED] * 3


def test_a_tool_opens_an_existing_store_and_creates_none(tmp_path: Path) -> None:
    empty = root_with(tmp_path / "empty", 0o755)
    for path, error in ((empty, NotOurs), (tmp_path / "missing", BackendUnavailable)):
        with pytest.raises(error):
            SharedFilesDriver(None, shared_options(path))
    assert list(empty.iterdir()) == [] and not (tmp_path / "missing").exists()
    store_chain(open_shared(tmp_path / "s"), KEYS)
    tool = SharedFilesDriver(None, shared_options(tmp_path / "s"))
    assert sorted(page.key for page in tool.pages("", 0.0)) == sorted(KEYS)
    tool.close()


def test_a_tool_that_closes_leaves_the_lease_to_its_engine(tmp_path: Path) -> None:
    driver = shared_driver(open_shared(tmp_path / "s"))
    assert driver.begin_sweep(False)
    driver.end_sweep(3, 300)
    before = (tmp_path / "s" / "sweeper").read_bytes()
    SharedFilesDriver(None, shared_options(tmp_path / "s")).close()
    assert (tmp_path / "s" / "sweeper").read_bytes() == before


@pytest.mark.parametrize("call", ["mkdir", "open", "fstat", "listdir", "pwritev", "preadv", "close"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.ESTALE])
def test_a_failing_call_while_opening_is_a_typed_error_and_leaks_nothing(
    tmp_path: Path, call: str, code: int
) -> None:
    leftovers = Leftovers()
    for nth in range(1, 5):
        def fault(name: str, number: int, args: tuple[Any, ...], nth: int = nth) -> None:
            if (name, number) == (call, nth):
                if name == "close":
                    os.close(args[0])
                raise OSError(code, os.strerror(code))

        try:
            open_shared(tmp_path / f"s{nth}", system=Faulty(fault)).backend.close()
        except BackendError as error:
            assert "; check" in str(error)
    wait_for(lambda: leftovers.found() == (0, []))  # a failed opening does not wait for its threads


@pytest.mark.parametrize(
    "options",
    [{"path": ""}, {"path": None}, {"capacity": 0}, {"capacity": None}, {"io_threads": 0}, {"io_threads": 257},
     {"free_space_floor": -1}, {"direct_io": True}],
)
def test_invalid_options_are_rejected(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        shared_options(**{"path": tmp_path / "s", **options})  # type: ignore[arg-type]


# A root that is opened again


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    root = open_root(tmp_path / "s", create=True, system=Faulty(lambda *call: None))
    yield root
    os.close(root.fd)


def test_a_root_is_opened_again_behind_the_same_descriptor(opened: Root, tmp_path: Path) -> None:
    (tmp_path / "s").rename(tmp_path / "old")
    other = open_root(tmp_path / "s", create=True, system=Faulty(lambda *call: None))
    os.close(other.fd)
    assert os.path.samestat(os.fstat(opened.fd), os.stat(tmp_path / "old")), "the control"
    opened._reopen()
    assert os.path.samestat(os.fstat(opened.fd), os.stat(tmp_path / "s"))
    assert not os.get_inheritable(opened.fd)


def missing(path: Path) -> None:
    path.rename(path.with_name("away"))


def unmounted(path: Path) -> None:
    missing(path)
    path.mkdir()


def a_file(path: Path) -> None:
    missing(path)
    path.write_text("mine")


@pytest.mark.parametrize("change", [missing, unmounted, a_file], ids=lambda change: change.__name__)
def test_a_root_that_is_not_there_is_lost_and_its_descriptor_stays_as_it_was(
    opened: Root, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    leftovers = Leftovers()
    change(tmp_path / "s")
    with pytest.raises(RootLost):
        opened._reopen()
    assert os.path.samestat(os.fstat(opened.fd), os.stat(tmp_path / "away"))
    assert leftovers.found() == (0, [])
