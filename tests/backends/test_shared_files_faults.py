"""Any system call of shared files may fail, at any page: only that page is lost, nothing is left, no wrong page is
served."""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.errors import StoreError
from hicache.backends.file.system import System
from hicache.backends.shared_files.listing import LEFTOVER_AGE_S
from hicache.frame import FrameCodec
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    SET_ERROR,
    STORED,
    Subject,
    delete,
    empty_frames,
    exists,
    load,
    make_keys,
    soon,
    store_chain,
)
from tests.waiting import wait_for

from ._files import CODEC, PAGE, Faulty, Leftovers, obstruct, page_files, page_path
from ._shared import OnPage, open_shared, shared_driver, temporaries

T = TypeVar("T")
REJECTED = SetOutcome.REJECTED
FULL = [errno.ENOSPC, errno.EDQUOT, errno.EROFS]
OTHER = [errno.EIO, errno.EACCES]
KEYS = make_keys(5)
PAGES = range(len(KEYS))


def named(code: int) -> str:
    return errno.errorcode[code]


def has(store: Subject) -> list[bool]:
    return store.backend.batch_has(KEYS, deadline=soon())


def errors(store: Subject) -> dict[str, int]:
    return dict(store.backend.statistics().errors)


def listed(store: Subject) -> list[bytes]:
    return sorted(page.key for page in shared_driver(store).pages("", 0.0))


def prepared(root: Path, system: System | None = None, **options: Any) -> Subject:
    """Open a store in which the directories of all KEYS exist, and no page."""
    first = open_shared(root)
    store_chain(first, KEYS)
    assert delete(first, KEYS) == len(KEYS)
    first.backend.close()
    return open_shared(root, system=system, **options)


# A server that has forgotten the handles


class Fails:
    """A fault of the calls of one name: the `nth` fails, and `times` - 1 after it."""

    def __init__(self, name: str, code: int, nth: int, times: int = 1) -> None:
        self.name, self.code, self.numbers, self.hits = name, code, range(nth, nth + times), 0

    def __call__(self, name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == self.name and number in self.numbers:
            self.hits += 1
            if name == "close":
                os.close(args[0])  # Linux frees the descriptor even if close fails
            raise OSError(self.code, os.strerror(self.code))


def find(store: Subject) -> object:
    return store.backend.batch_has([*KEYS[:3], *make_keys(1, "missing")], deadline=soon()), exists(store, KEYS)


def read(store: Subject) -> object:
    return load(store, [*KEYS[:3], *make_keys(1, "missing")])


def write(store: Subject) -> object:
    return store_chain(store, KEYS), load(store, KEYS)


def touch(store: Subject) -> object:
    for key in KEYS[:3]:
        os.utime(page_path(root_of(store), CODEC, key), (0, 0))
    missing = store.backend.batch_touch([*KEYS[:3], *make_keys(1, "missing")], deadline=soon())
    return missing


def remove(store: Subject) -> object:
    return delete(store, [*KEYS[:3], *make_keys(1, "missing")]), page_files(root_of(store))


def remove_damaged(store: Subject) -> object:
    page_path(root_of(store), CODEC, KEYS[1]).write_bytes(b"torn")
    return load(store, KEYS[:3]), len(page_files(root_of(store)))


def list_all(store: Subject) -> object:
    return listed(store), store.backend.usage()


def measure_space(store: Subject) -> object:
    return shared_driver(store).free_bytes() > 0


def read_a_start(store: Subject) -> object:
    (page, *_) = shared_driver(store).pages("", 0.0)
    found = shared_driver(store).read_start(page, 8, soon())
    return found and found[0]


def root_of(store: Subject) -> Path:
    return Path(shared_driver(store).options.path)


VERBS = [find, read, write, touch, remove, remove_damaged, list_all, measure_space, read_a_start]


def outcome(root: Path, verb: Callable[[Subject], object], fault: Callable[..., Any]) -> tuple[object, Faulty]:
    """Return the result of a verb with a fault, in a new store with three pages."""
    system = Faulty(fault)
    system.armed = False
    store = open_shared(root, system=system, io_threads=1)
    assert store_chain(store, KEYS[:3]) == [STORED] * 3
    system.armed = True
    found = verb(store)
    system.armed = False
    if verb is not touch:  # the time of a file is a hint
        assert errors(store) == {}
    assert temporaries(root) == []
    store.backend.close()
    shutil.rmtree(root)
    return found, system


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_after_one_stale_handle_at_any_system_call_each_outcome_is_as_without_it(tmp_path: Path, verb: Any) -> None:
    leftovers = Leftovers()
    expected, recorded = outcome(tmp_path / "s", verb, lambda *call: None)
    assert recorded.counts
    for name, count in recorded.counts.items():
        for nth in range(1, count + 1):
            fault = Fails(name, errno.ESTALE, nth)
            found, _ = outcome(tmp_path / "s", verb, fault)
            assert (found, fault.hits) == (expected, 1), f"{name} {nth}"
    assert leftovers.found() == (0, [])


@pytest.mark.parametrize(
    ("verb", "call", "expected"),
    [
        (has, "lstat", [True, False, True, True, True]),
        (lambda store: load(store, KEYS), "open", [HIT, MISS, HIT, HIT, HIT]),
        (lambda store: load(store, KEYS), "preadv", [HIT, MISS, HIT, HIT, HIT]),
        (lambda store: store.backend.batch_touch(KEYS, deadline=soon()), "lstat", [KEYS[1]]),
        (lambda store: delete(store, KEYS), "unlink", 4),
    ],
    ids=["find", "read", "read bytes", "touch", "remove"],
)
def test_a_page_whose_handle_stays_stale_was_removed_or_replaced_and_is_a_miss(
    tmp_path: Path, verb: Callable[[Subject], object], call: str, expected: object
) -> None:
    system = OnPage(call, KEYS[1], errno.ESTALE)
    system.armed = False
    store = open_shared(tmp_path / "s", system=system)
    assert store_chain(store, KEYS) == [STORED] * 5
    system.armed = True
    assert verb(store) == expected
    assert (errors(store), system.hits) == ({}, 2)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *itertools.product(["lstat", "open", "pwritev", "close", "rename"], OTHER),
        *itertools.product(["open", "pwritev", "close", "rename"], [errno.ESTALE]),
    ],
)
def test_a_page_that_cannot_be_written_is_an_error_leaves_no_file_and_costs_no_other_page(
    tmp_path: Path, call: str, code: int
) -> None:
    system = OnPage(call, KEYS[2], code)
    store = prepared(tmp_path / "s", system)
    assert store_chain(store, KEYS) == [STORED, STORED, SET_ERROR, STORED, STORED]
    assert errors(store) == {named(errno.ENOENT if code == errno.ESTALE else code): 1}
    assert temporaries(tmp_path / "s") == [] and len(page_files(tmp_path / "s")) == 4
    assert shared_driver(store).rejection is None
    system.armed = False
    assert store_chain(store, KEYS) == [PRESENT, PRESENT, STORED, PRESENT, PRESENT]
    assert load(store, KEYS) == [HIT] * 5


@pytest.mark.parametrize("io_threads", [1, 8])
@pytest.mark.parametrize("call", ["open", "pwritev", "close", "rename"])
@pytest.mark.parametrize("code", FULL, ids=named)
def test_without_room_for_a_page_it_and_all_after_it_are_rejected(
    tmp_path: Path, call: str, code: int, io_threads: int
) -> None:
    """No page is visible after a hole. The control: without the fault all are stored."""
    system = OnPage(call, KEYS[2], code)
    store = prepared(tmp_path / "s", system, io_threads=io_threads)
    assert store_chain(store, KEYS) == [STORED] * 2 + [REJECTED] * 3
    assert errors(store) == {named(code): 1}
    assert temporaries(tmp_path / "s") == [] and len(page_files(tmp_path / "s")) == 2
    system.armed = False
    assert load(store, KEYS) == [HIT] * 2 + [MISS] * 3
    explained = shared_driver(store).rejection or ""
    assert explained.startswith(f"the file system says {named(code)}: ") and "; make room" in explained
    assert store_chain(store, KEYS) == [PRESENT] * 2 + [STORED] * 3
    assert shared_driver(store).rejection is None
    assert load(store, KEYS) == [HIT] * 5


@pytest.mark.parametrize("code", FULL, ids=named)
def test_a_batch_without_room_for_its_directories_is_rejected(tmp_path: Path, code: int) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "mkdir" and args[0] == folder_of(KEYS[0]):
            raise OSError(code, os.strerror(code))

    store = open_shared(tmp_path / "s", system=Faulty(fault), io_threads=1)
    assert store_chain(store, KEYS) == [REJECTED] * 5
    assert page_files(tmp_path / "s") == [] and temporaries(tmp_path / "s") == []


def test_a_full_file_system_rejects_pages_and_stores_them_once_it_has_room(small_disk: Path) -> None:
    root, blocker = small_disk / "s", small_disk / "others"
    store = open_shared(root)
    blocker.write_bytes(bytes(4 << 20 >> 1))
    stored: list[list[SetOutcome]] = []
    for number in range(100):
        stored.append(store_chain(store, make_keys(5, f"chain {number}")))
        if REJECTED in stored[-1]:
            break
    assert len(stored) > 10 and set(stored[-1]) <= {STORED, REJECTED}
    assert stored[-1] == sorted(stored[-1], key=[STORED, REJECTED].index), "a page after a hole is visible"
    assert temporaries(root) == [] and errors(store)["ENOSPC"] >= 1
    blocker.unlink()
    assert store_chain(store, make_keys(5, "more")) == [STORED] * 5


@pytest.mark.parametrize("call", ["open", "fstat", "preadv", "close"])
@pytest.mark.parametrize("code", OTHER, ids=named)
def test_a_page_that_cannot_be_read_is_an_error_and_stays(tmp_path: Path, call: str, code: int) -> None:
    system = OnPage(call, KEYS[3], code)
    system.armed = False
    store = open_shared(tmp_path / "s", system=system)
    assert store_chain(store, KEYS) == [STORED] * 5
    system.armed = True
    assert load(store, KEYS) == [HIT, HIT, HIT, GET_ERROR, HIT]
    assert errors(store) == {named(code): 1}
    system.armed = False
    assert load(store, KEYS) == [HIT] * 5


def test_a_temporary_file_whose_removal_fails_too_is_not_visible(tmp_path: Path) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name in ("pwritev", "unlink"):
            raise OSError(errno.EIO, "broken")

    system = Faulty(fault)
    system.armed = False
    store = open_shared(tmp_path / "s", system=system)
    system.armed = True
    assert store_chain(store, KEYS) == [SET_ERROR] * 5
    assert len(temporaries(tmp_path / "s")) == 5, "the control"
    assert (exists(store, KEYS), load(store, KEYS), listed(store)) == (0, [MISS] * 5, [])
    system.armed = False
    assert store_chain(store, KEYS) == [STORED] * 5


def test_a_store_that_is_no_longer_at_its_path_is_an_error_and_not_empty(tmp_path: Path) -> None:
    """The server has forgotten the root, and its mount point is an empty directory."""
    root, system = tmp_path / "s", Faulty(lambda name, number, args: stale(name))
    system.armed = False
    store = open_shared(root, system=system)
    assert store_chain(store, KEYS) == [STORED] * 5
    root.rename(tmp_path / "away")
    root.mkdir()

    def stale(name: str) -> None:
        if name in ("step", "listdir"):
            raise OSError(errno.ESTALE, "stale")

    system.armed = True
    assert load(store, KEYS) == [GET_ERROR] * 5
    assert (exists(store, KEYS), delete(store, KEYS)) == (0, 0)
    assert store_chain(store, KEYS) == [SET_ERROR] * 5
    with pytest.raises(StoreError, match="ENOENT"):
        listed(store)
    assert list(root.iterdir()) == [] and len(page_files(tmp_path / "away")) == 5
    system.armed = False
    assert load(store, KEYS) == [HIT] * 5, "the control"


def test_a_listing_does_not_end_early_because_the_store_is_no_longer_at_its_path(tmp_path: Path) -> None:
    """A listing without these pages would allow more pages than the limit."""
    root = tmp_path / "s"

    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "open" and args[0].count("/") == 1 and number > 4:
            if root.exists():
                root.rename(tmp_path / "away")
            raise OSError(errno.ESTALE, "stale")

    system = Faulty(fault)
    system.armed = False
    store = open_shared(root, system=system)
    assert store_chain(store, KEYS) == [STORED] * 5
    system.armed = True
    with pytest.raises(StoreError):
        listed(store)


@pytest.mark.parametrize("io_threads", [1, 8])
def test_an_unexpected_exception_costs_one_page(
    tmp_path: Path, io_threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "open" and KEYS[0].hex() in args[0]:
            raise ValueError("a bug")

    system = Faulty(fault)
    system.armed = False
    store = open_shared(tmp_path / "s", system=system, io_threads=io_threads)
    assert store_chain(store, KEYS) == [STORED] * 5
    system.armed = True
    assert store.backend.batch_get(KEYS, empty_frames(CODEC, 5), deadline=math.inf) == [GET_ERROR] + [HIT] * 4
    assert errors(store) == {"internal": 1}
    wait_for(lambda: "a bug" in caplog.text)


# Files that change during a read


def change_during_read(change: Callable[[], object]) -> Faulty:
    """Return a system that makes a change when the first page is about to be read, while it is armed. REQUIRES: a store
    with one thread."""

    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "preadv":
            system.armed = False
            change()

    system = Faulty(fault)
    system.armed = False
    return system


def test_a_page_whose_file_shrinks_during_the_read_is_not_a_hit(tmp_path: Path) -> None:
    path = page_path(tmp_path / "s", CODEC, KEYS[0])
    system = change_during_read(lambda: os.truncate(path, PAGE // 2))
    store = open_shared(tmp_path / "s", system=system, io_threads=1)
    store_chain(store, KEYS)
    assert load(store, KEYS) == [HIT] * 5, "the control"
    system.armed = True
    assert load(store, KEYS) == [GET_ERROR, HIT, HIT, HIT, HIT], "the length of the file was another one"
    assert errors(store) == {"EIO": 1}
    assert load(store, KEYS[:1]) == [CORRUPT]
    assert load(store, KEYS[:1]) == [MISS] and not path.exists()
    assert store_chain(store, KEYS[:1]) == [STORED]


@pytest.mark.parametrize("of_all", [True, False])
def test_pages_stay_if_the_mount_shows_other_bytes_for_the_stores_marker_too(tmp_path: Path, of_all: bool) -> None:
    """The control: other bytes of the pages alone are damage, and removed."""

    def zeros(name: str, number: int, args: tuple[Any, ...]) -> int | None:
        (count,) = [sum(map(len, args[1]))] if name == "preadv" else [0]
        if not count or (count < PAGE and not of_all):
            return None
        for buffer in args[1]:
            buffer[:] = bytes(len(buffer))
        return count

    system = Faulty(zeros)
    system.armed = False
    store = open_shared(tmp_path / "s", system=system)
    store_chain(store, KEYS)
    system.armed = True
    assert load(store, KEYS) == [CORRUPT] * 5
    system.armed = False
    assert load(store, KEYS) == [HIT if of_all else MISS] * 5
    assert errors(store) == ({"EIO": 5} if of_all else {})


def test_a_page_whose_bytes_change_during_the_read_is_not_a_hit(tmp_path: Path) -> None:
    path = page_path(tmp_path / "s", CODEC, KEYS[0])

    def scribble() -> None:
        with path.open("r+b") as file:
            file.seek(PAGE // 2)
            file.write(b"scribble")

    system = change_during_read(scribble)
    store = open_shared(tmp_path / "s", system=system, io_threads=1)
    store_chain(store, KEYS)
    system.armed = True
    assert load(store, KEYS) == [CORRUPT, HIT, HIT, HIT, HIT]


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_page_whose_file_is_replaced_during_the_read_is_the_old_one_and_the_new_one_stays(
    tmp_path: Path, is_sound: bool
) -> None:
    root = tmp_path / "s"
    path = page_path(root, CODEC, KEYS[0])

    def replace() -> None:
        (tmp_path / "new").write_bytes(sound)
        os.replace(tmp_path / "new", path)

    system = change_during_read(replace)
    store = open_shared(root, system=system, io_threads=1)
    store_chain(store, KEYS[:1])
    sound = path.read_bytes()
    if not is_sound:
        path.write_bytes(bytes(PAGE))
    system.armed = True
    assert load(store, KEYS[:1]) == [HIT if is_sound else CORRUPT]
    assert load(store, KEYS[:1]) == [HIT], "a page stored again was removed as the damaged one"


def test_a_page_that_is_removed_during_the_read_is_still_whole(tmp_path: Path) -> None:
    path = page_path(tmp_path / "s", CODEC, KEYS[0])
    system = change_during_read(path.unlink)
    store = open_shared(tmp_path / "s", system=system, io_threads=1)
    store_chain(store, KEYS)
    system.armed = True
    assert load(store, KEYS) == [HIT] * 5
    assert load(store, KEYS) == [MISS, HIT, HIT, HIT, HIT]


# Strange files


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("obstacle", ["directory", "full directory", "fifo", "link", "link to nothing", "socket"])
def test_a_strange_file_in_place_of_a_page_is_never_followed_and_never_blocks(
    tmp_path: Path, obstacle: str, is_read: bool
) -> None:
    """Reading or storing the page removes it if that loses nothing."""
    root, keys, is_full = tmp_path / "s", KEYS[:3], obstacle == "full directory"
    # Its time stands still: the page has the same bytes when it is stored again.
    store = open_shared(root, FrameCodec(NAMESPACE, PAYLOAD_BYTES, clock=ManualClock()))
    store_chain(store, keys)
    path, outside = page_path(root, CODEC, keys[1]), tmp_path / "outside"
    outside.write_bytes(path.read_bytes())
    obstruct(path, obstacle, outside)
    assert [page.damage for page in shared_driver(store).pages("", 0.0) if page.key == keys[1]] == ["not_regular"]
    if is_read:
        assert exists(store, keys) == 1
        assert load(store, keys) == [HIT, MISS if is_full else CORRUPT, HIT]
        assert store.backend.statistics().corrupt == {"not_regular": 1}
        assert path.is_dir() if is_full else not os.path.lexists(path)
    assert store_chain(store, keys) == [PRESENT, SET_ERROR if is_full else STORED, PRESENT]
    assert temporaries(root) == []
    assert outside.read_bytes() == store.read(keys[1]) if not is_full else (path / "mine").exists()
    assert load(store, keys) == [HIT, MISS if is_full else HIT, HIT]


class Following(System):
    """A system whose walk is done by the kernel, which follows links."""

    def _walk(self, path: str, dir_fd: int | None, call: Callable[[str, int | None], T]) -> T:
        return call(path, dir_fd)


def link_away(root: Path, key: bytes, level: int, outside: Path) -> Path:
    """Move a directory above a page to `outside` and leave a link in its place."""
    folder = page_path(root, CODEC, key).parents[level]
    folder.rename(outside)
    folder.symlink_to(outside)
    return folder


@pytest.mark.parametrize("level", [0, 1], ids=["fan", "namespace"])
def test_a_directory_that_becomes_a_link_hides_its_pages_until_they_are_stored_again(
    tmp_path: Path, level: int
) -> None:
    root, outside, (key, *_) = tmp_path / "s", tmp_path / "outside", KEYS
    store = open_shared(root)
    store_chain(store, [key])
    folder = link_away(root, key, level, outside)
    assert (exists(store, [key]), load(store, [key]), delete(store, [key])) == (0, [MISS], 0)
    assert listed(store) == [] and store.backend.batch_touch([key], deadline=soon()) == [key]
    assert store.backend.statistics().corrupt == {} and folder.is_symlink()
    (before,) = [path for path in outside.rglob("*") if path.is_file()]
    stored = before.read_bytes(), before.stat().st_mtime_ns
    assert store_chain(store, [key]) == [STORED]
    assert load(store, [key]) == [HIT]
    assert not folder.is_symlink() and (before.read_bytes(), before.stat().st_mtime_ns) == stored
    assert errors(store) == {}


@pytest.mark.parametrize("level", [0, 1], ids=["fan", "namespace"])
def test_a_system_that_follows_links_serves_and_removes_the_page_outside(tmp_path: Path, level: int) -> None:
    """The control of the test above."""
    root, outside, (key, *_) = tmp_path / "s", tmp_path / "outside", KEYS
    store = open_shared(root, system=Following())
    store_chain(store, [key])
    link_away(root, key, level, outside)
    assert load(store, [key]) == [HIT]
    assert delete(store, [key]) == 1
    assert not [path for path in outside.rglob("*") if path.is_file()]


@pytest.mark.parametrize("obstacle", ["fifo", "file", "socket"])
@pytest.mark.parametrize("level", [0, 1], ids=["fan", "namespace"])
def test_a_file_in_place_of_a_directory_is_replaced_by_the_next_write(
    tmp_path: Path, level: int, obstacle: str
) -> None:
    root, (key, *_) = tmp_path / "s", KEYS
    store = open_shared(root)
    store_chain(store, [key])
    folder = page_path(root, CODEC, key).parents[level]
    shutil.rmtree(folder)
    if obstacle == "file":
        folder.write_text("mine")
    else:
        obstruct(folder, obstacle, tmp_path)
    assert (exists(store, [key]), load(store, [key]), delete(store, [key]), listed(store)) == (0, [MISS], 0, [])
    assert store_chain(store, [key]) == [STORED] and load(store, [key]) == [HIT]


# Listings


def folder_of(key: bytes) -> str:
    return f"{NAMESPACE.hex()}/{key.hex()[:2]}"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE], ids=named)
@pytest.mark.parametrize("call", ["open", "listdir"])
def test_a_directory_that_vanishes_during_a_listing_is_left_out(tmp_path: Path, call: str, code: int) -> None:
    """The control: with an error of the whole store, the listing fails."""
    folders: dict[int, str] = {}

    class Vanishing(System):
        code = 0

        def open(self, path: str, *args: Any, **kwargs: Any) -> int:
            if call == "open" and path == folder_of(KEYS[0]):
                self._fail()
            fd = super().open(path, *args, **kwargs)
            folders[fd] = path
            return fd

        def listdir(self, fd: int) -> list[str]:
            if call == "listdir" and folders.get(fd) == folder_of(KEYS[0]):
                self._fail()
            return super().listdir(fd)

        def _fail(self) -> None:
            if self.code:
                raise OSError(self.code, os.strerror(self.code))

    system = Vanishing()
    store = open_shared(tmp_path / "s", system=system)
    keys = [key for key in make_keys(20) if key[0] != KEYS[0][0]]
    store_chain(store, [KEYS[0], *keys])
    system.code = code
    assert listed(store) == sorted(keys)
    system.code = errno.EMFILE
    with pytest.raises(StoreError, match="EMFILE"):
        listed(store)


def test_pages_and_directories_that_are_removed_during_a_listing_are_left_out(tmp_path: Path) -> None:
    store, keys = open_shared(tmp_path / "s"), make_keys(20)
    store_chain(store, keys)
    pages = shared_driver(store).pages("", 0.0)
    seen = [next(pages).key]
    shutil.rmtree(tmp_path / "s" / NAMESPACE.hex())
    seen += [page.key for page in pages]
    assert 1 <= len(seen) < 20
    assert listed(store) == []


def test_a_page_whose_state_cannot_be_read_does_not_end_the_listing(tmp_path: Path) -> None:
    system = OnPage("lstat", KEYS[0], errno.EIO)
    system.armed = False
    store = open_shared(tmp_path / "s", system=system)
    store_chain(store, KEYS)
    system.armed = True
    assert listed(store) == sorted(KEYS[1:])


# Leftovers

_CHILD = """
import os, signal, sys
from pathlib import Path
from hicache_lab.conformance import make_keys, store_chain
from tests.backends._files import Faulty
from tests.backends._shared import open_shared

def fault(name, number, args):
    if name == "rename":
        os.kill(os.getpid(), signal.SIGKILL)

store_chain(open_shared(Path(sys.argv[1]), system=Faulty(fault)), make_keys(5))
"""


def sweep(store: Subject) -> None:
    """List the store and remove leftovers, as the sweep of a limit does."""
    driver = shared_driver(store)
    assert driver.begin_sweep(True)
    driver.end_sweep(len(list(driver.pages("", 0.0))), 0)


def test_a_writer_killed_before_its_rename_leaves_no_page_and_its_files_are_removed_after_an_hour(
    tmp_path: Path, repository: Path
) -> None:
    root, clock = tmp_path / "s", ManualClock()
    killed = subprocess.run([sys.executable, "-c", _CHILD, str(root)], cwd=repository, check=False, timeout=300)
    assert killed.returncode < 0
    assert len(temporaries(root)) == 5 and page_files(root) == []
    store = open_shared(root, clock=clock)
    assert (exists(store, KEYS), load(store, KEYS), listed(store)) == (0, [MISS] * 5, [])
    assert store_chain(store, KEYS) == [STORED] * 5
    clock.advance(LEFTOVER_AGE_S - 600)
    sweep(store)
    assert len(temporaries(root)) == 5, "the control: a live writer may still need them"
    clock.advance(1200)
    sweep(store)
    assert temporaries(root) == []
    assert load(open_shared(root), KEYS) == [HIT] * 5


def test_the_directories_of_a_namespace_without_pages_are_removed_after_an_hour(tmp_path: Path) -> None:
    root, clock = tmp_path / "s", ManualClock()
    store = open_shared(root, clock=clock)
    other = open_shared(root, FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES))
    store_chain(store, KEYS)
    store_chain(other, KEYS)
    assert delete(other, KEYS) == 5
    clock.advance(LEFTOVER_AGE_S - 600)
    sweep(store)
    assert (root / OTHER_NAMESPACE.hex()).is_dir(), "the control"
    clock.advance(1200)
    sweep(store)
    assert not (root / OTHER_NAMESPACE.hex()).exists()
    assert load(open_shared(root), KEYS) == [HIT] * 5
    assert store_chain(other, KEYS) == [STORED] * 5


def test_a_sweep_removes_no_file_of_others(tmp_path: Path) -> None:
    """Only temporary files, by their names: also a file of another program below the store stays."""
    root, clock = tmp_path / "s", ManualClock()
    store = open_shared(root, clock=clock)
    store_chain(store, KEYS)
    folder = page_path(root, CODEC, KEYS[0]).parent
    foreign = [folder / ".notes", folder / f".{KEYS[0].hex()}", folder / "notes", root / ".snapshot", root / "notes"]
    for path in foreign:
        path.write_text("mine")
    clock.advance(2 * LEFTOVER_AGE_S)
    sweep(store)
    assert [path.read_text() for path in foreign] == ["mine"] * 5
