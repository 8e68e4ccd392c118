"""Any system call may fail with any error: no exception escapes, nothing leaks, no wrong page is served."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import SetOutcome
from hicache.errors import BackendError
from hicache_lab.conformance import (
    GET_ERROR,
    HIT,
    MISS,
    PRESENT,
    SET_ERROR,
    STORED,
    Subject,
    load,
    make_keys,
    soon,
    store_chain,
)
from tests.seeds import IS_SOAK

from ._files import (
    PAGE,
    SYSTEM_CALLS,
    Faulty,
    Leftovers,
    disk_usage,
    file_driver,
    open_file,
    page_files,
    reserved_bytes,
    temporary_files,
)

pytestmark = pytest.mark.long

REJECTED = SetOutcome.REJECTED
ERRNOS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES]
# One of each class; a soak has all of them in every call.
CLASSES = ERRNOS if IS_SOAK else [errno.ENOSPC, errno.EIO]
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
OPTIONS: dict[str, Any] = {"capacity": 10 * PAGE, "free_space_floor": 1, "sync": True}


class Fails:
    """Fault that fails calls of one name: only the `nth`, or all of them with `nth` 0."""

    def __init__(self, name: str, code: int, nth: int) -> None:
        self.name, self.code, self.nth, self.hits = name, code, nth, 0

    def __call__(self, name: str, number: int, args: tuple[Any, ...]) -> None:
        if name != self.name or (self.nth and number != self.nth):
            return
        self.hits += 1
        if name == "close":
            os.close(args[0])  # Linux frees the descriptor even if close fails
        raise OSError(self.code, os.strerror(self.code))


def _root(store: Subject) -> Path:
    return Path(file_driver(store).options.path)


def use_everything(store: Subject) -> None:
    """Call every verb, with hits, misses, evictions and a damaged page, while calls fail."""
    store_chain(store, make_keys(3, "one"))
    load(store, [*make_keys(3, "one"), *make_keys(1, "missing")])
    path = next(iter(page_files(_root(store))), None)
    if path is not None:
        path.write_bytes(b"torn")
    store.backend.batch_exists(make_keys(6, "old"), deadline=soon())
    load(store, make_keys(6, "old"))
    store_chain(store, make_keys(6, "two"))
    store.backend.delete(make_keys(2, "two"), deadline=soon())
    store.backend.usage()
    store.backend.statistics()


def assert_sound(store: Subject, root: Path) -> None:
    """Check, after the fault is gone, that the index is correct, no leftovers exist, and the store works."""
    backend = store.backend
    assert store_chain(store, make_keys(2, "healed")) in ([STORED] * 2, [PRESENT] * 2)
    assert load(store, make_keys(2, "healed")) == [HIT] * 2
    for chain in ("old", "one", "two"):
        load(store, make_keys(6, chain))  # finds the torn page if it could not be read before
    file_driver(store).check()
    usage = backend.usage()
    assert (usage.pages, usage.bytes) == disk_usage(root)
    assert usage.bytes <= 10 * PAGE
    assert reserved_bytes(root) == 0
    assert temporary_files(root) == [f"{file_driver(store)._store.owner}.alive"]


@pytest.mark.parametrize("code", CLASSES, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("call", SYSTEM_CALLS)
def test_a_failing_call_only_costs_pages(tmp_path: Path, call: str, code: int) -> None:
    leftovers = Leftovers()
    for nth in (1, 2, 3, 0):
        root = tmp_path / f"s{nth}"
        fault = Fails(call, code, nth)
        system = Faulty(fault)
        system.armed = False
        store = open_file(root, system=system, **OPTIONS)
        store_chain(store, make_keys(6, "old"))
        system.counts.clear()
        system.armed = True
        use_everything(store)
        system.armed = False
        assert_sound(store, root)
        if fault.hits and call not in ("close", "rmdir", "mkdir", "listdir"):
            assert store.backend.statistics().errors[errno.errorcode[code]] >= 1
        system.armed = True
        system.counts.clear()
        store.backend.close()
        assert leftovers.found() == (0, []), f"{call} {nth}"
        shutil.rmtree(root)


@pytest.mark.parametrize("call", SYSTEM_CALLS)
def test_a_failing_call_while_opening_is_a_typed_error_and_leaks_nothing(root: Path, call: str) -> None:
    leftovers = Leftovers()
    store = open_file(root, **OPTIONS)
    store_chain(store, make_keys(6, "old"))
    store.backend.close()
    for code in (errno.EIO, errno.ENOSPC):
        for nth in range(1, 12):  # the first calls are those of the way to the root
            try:
                open_file(root, system=Faulty(Fails(call, code, nth)), **OPTIONS).backend.close()
            except BackendError:
                pass
            assert leftovers.found() == (0, []), f"{call} {nth}"
    store = open_file(root, **OPTIONS)
    assert load(store, make_keys(6, "old")) == [HIT] * 6
    assert_sound(store, root)


@pytest.mark.parametrize("code", ERRNOS, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "rename"])
def test_no_room_is_a_rejection_and_anything_else_an_error(tmp_path: Path, call: str, code: int) -> None:
    system = Faulty(Fails(call, code, 0))
    system.armed = False
    store = open_file(tmp_path / "s", system=system, io_threads=1, **OPTIONS)
    system.armed = True
    expected = REJECTED if code in FULL else SET_ERROR
    assert store_chain(store, make_keys(3)) == [expected] * 3
    assert set(store.backend.statistics().errors) == {errno.errorcode[code]}
    system.armed = False
    assert store_chain(store, make_keys(3)) == [STORED] * 3


def test_no_page_is_published_behind_one_without_room(tmp_path: Path) -> None:
    """The control: without the fault all are stored. The directories of the pages exist, so each takes one rename."""
    system, keys = Faulty(Fails("rename", errno.ENOSPC, 3)), make_keys(5)
    system.armed = False
    store = open_file(tmp_path / "s", system=system, **OPTIONS)
    assert store_chain(store, keys) == [STORED] * 5
    assert store.backend.delete(keys, deadline=soon()) == 5
    system.armed = True
    assert store_chain(store, keys) == [STORED] * 2 + [REJECTED] * 3
    system.armed = False
    assert load(store, keys) == [HIT] * 2 + [MISS] * 3
    file_driver(store).check()


def test_a_page_that_cannot_be_read_is_an_error_and_stays(tmp_path: Path) -> None:
    system = Faulty(Fails("preadv", errno.EIO, 0))
    system.armed = False
    store = open_file(tmp_path / "s", system=system, **OPTIONS)
    keys = make_keys(3)
    store_chain(store, keys)
    system.armed = True
    assert load(store, keys) == [GET_ERROR] * 3
    assert store.backend.statistics().errors == {"EIO": 3}
    system.armed = False
    assert load(store, keys) == [HIT] * 3


def test_temporary_files_that_cannot_be_removed_now_are_removed_later(tmp_path: Path) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name in ("pwritev", "unlink"):
            raise OSError(errno.EIO, "broken")

    system = Faulty(fault)
    system.armed = False
    store = open_file(tmp_path / "s", system=system, **OPTIONS)
    system.armed = True
    assert store_chain(store, make_keys(3)) == [SET_ERROR] * 3
    assert len(temporary_files(tmp_path / "s")) == 4
    system.armed = False
    assert_sound(store, tmp_path / "s")


def test_a_write_that_moves_nothing_ends_as_an_error(tmp_path: Path) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> int | None:
        return 0 if name == "pwritev" else None

    system = Faulty(fault)
    system.armed = False
    store = open_file(tmp_path / "s", system=system)
    system.armed = True
    assert store_chain(store, make_keys(2)) == [SET_ERROR] * 2
    system.armed = False
    assert_sound(store, tmp_path / "s")


def test_refused_direct_io_falls_back_and_is_counted(tmp_path: Path) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "open" and args[1] & os.O_DIRECT and not args[1] & os.O_DIRECTORY:
            if args[1] & os.O_CREAT:  # as Linux does: the file is made before the flag is refused
                os.close(os.open(f"{tmp_path}/s/{args[0]}", args[1] & ~os.O_DIRECT, 0o600))
            raise OSError(errno.EINVAL, "no direct I/O here")

    store = open_file(tmp_path / "s", system=Faulty(fault), direct_io=True, io_threads=1)
    keys = make_keys(3)
    assert store_chain(store, keys) == [STORED] * 3
    assert load(store, keys) == [HIT] * 3
    assert store.backend.statistics().errors == {"direct_io_refused": 1}


def test_a_disk_smaller_than_the_floor_is_named_with_both_numbers(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_file(small_disk / "s", free_space_floor=1 << 30)
    assert store_chain(store, make_keys(3)) == [REJECTED] * 3
    why = r"free_space_floor is 1.0 GiB, and the file system has 3.* MiB free of 4.0 MiB; lower free_space_floor"
    assert re.match(why, file_driver(store).rejection or "")
    assert re.search(f"rejects pages: {why}", caplog.text)
    store.backend.close()


def test_a_batch_above_the_capacity_is_named(tmp_path: Path) -> None:
    store = open_file(tmp_path / "s", capacity=2 * PAGE)
    assert store_chain(store, make_keys(3)) == [STORED, STORED, REJECTED]
    assert re.match(r"capacity is 16\.0 KiB, 0 B are stored and", file_driver(store).rejection or "")
    assert store_chain(store, make_keys(2, "small")) == [STORED] * 2
    assert file_driver(store).rejection is None
