"""A mount that hangs costs its callers no more than their deadline: no thread of an engine, no frame, no page."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hicache.backends.base import Direction
from hicache.backends.errors import ErrorKind
from hicache.backends.shared_files import SharedFilesDriver
from hicache.backends.shared_files.threads import Lent
from hicache.clock import Clock
from hicache.errors import BackendUnavailable
from hicache_lab.conformance import (
    GET_ERROR,
    HIT,
    MISS,
    PRESENT,
    SET_ERROR,
    STORED,
    Subject,
    delete,
    empty_frames,
    empty_views,
    exists,
    full_frames,
    full_views,
    load,
    make_keys,
    soon,
    store_chain,
)
from tests.clocks import PassingClock
from tests.test_supervised import no_threads
from tests.waiting import WAIT_S, wait_for

from ._files import CODEC, Faulty, Leftovers, page_files, page_path
from ._shared import open_shared, shared_driver, shared_options, temporaries
from .guard.stores import guard_of, patient, probe, until_passing

T = TypeVar("T")
KEYS = make_keys(3)


class Hang:
    """A fault: while it `is_on`, the calls of one name for which `is_chosen` is true hang until `release`."""

    def __init__(self, name: str, is_chosen: Callable[[tuple[Any, ...]], bool] = lambda args: True) -> None:
        self.name = name
        self.is_on = False
        self.begun = self.ended = 0
        self._is_chosen = is_chosen
        self._lock = threading.Lock()
        self._go = threading.Event()

    def __call__(self, name: str, number: int, args: tuple[Any, ...]) -> None:
        if not (self.is_on and name == self.name and self._is_chosen(args)):
            return
        with self._lock:
            self.begun += 1
        self._go.wait(WAIT_S)
        with self._lock:
            self.ended += 1

    @property
    def hanging(self) -> int:
        """The number of calls that hang now."""
        return self.begun - self.ended

    def release(self) -> None:
        """Let all calls go on; later ones do not hang."""
        self.is_on = False
        self._go.set()


def opened(root: Path, hang: Hang, io_threads: int = 1) -> Subject:
    """Open a store with KEYS in it, whose calls hang once the fault is on."""
    store = open_shared(root, system=Faulty(hang), io_threads=io_threads)
    assert store_chain(store, KEYS) == [STORED] * 3
    return store


def settled(store: Subject) -> None:
    """Wait until the calls that were left have returned."""
    pool = shared_driver(store)._calls._pool
    wait_for(lambda: pool.abandoned == 0 and pool._queue.empty())
    shared_driver(store)._calls.one(lambda: True, math.inf, lambda result: None)  # the threads are free


def leave(hang: Hang, call: Callable[[float], T], seconds: float = 0.02) -> T:
    """Make a call that hangs, and return its result. On a busy machine its deadline may pass before it begins: then
    make it again with a later one."""
    hang.is_on = True
    while True:
        result = call(soon(seconds))
        if hang.hanging:
            return result
        seconds *= 2


def errors(store: Subject) -> dict[str, int]:
    return dict(store.backend.statistics().errors)


def put(store: Subject, keys: list[bytes], deadline: float) -> object:
    return store.backend.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=deadline)


def get(store: Subject, keys: list[bytes], deadline: float) -> object:
    return store.backend.batch_get(keys, empty_frames(CODEC, len(keys)), deadline=deadline)


VERBS: dict[str, tuple[str, Callable[[Subject, float], object], object]] = {
    "exists": ("lstat", lambda store, deadline: store.backend.batch_exists(KEYS, deadline=deadline), 0),
    "has": ("lstat", lambda store, deadline: store.backend.batch_has(KEYS, deadline=deadline), [False] * 3),
    "get at open": ("open", lambda store, deadline: get(store, KEYS, deadline), [GET_ERROR] * 3),
    "get at read": ("preadv", lambda store, deadline: get(store, KEYS, deadline), [GET_ERROR] * 3),
    "get at close": ("close", lambda store, deadline: get(store, KEYS, deadline), [GET_ERROR] * 3),
    "set at lookup": ("lstat", lambda store, deadline: put(store, make_keys(3, "new"), deadline), [SET_ERROR] * 3),
    "set at open": ("open", lambda store, deadline: put(store, make_keys(3, "new"), deadline), [SET_ERROR] * 3),
    "set at write": ("pwritev", lambda store, deadline: put(store, make_keys(3, "new"), deadline), [SET_ERROR] * 3),
    "set at close": ("close", lambda store, deadline: put(store, make_keys(3, "new"), deadline), [SET_ERROR] * 3),
    "set at rename": ("rename", lambda store, deadline: put(store, make_keys(3, "new"), deadline), [SET_ERROR] * 3),
    "delete": ("unlink", lambda store, deadline: store.backend.delete(KEYS, deadline=deadline), 0),
    "touch": ("lstat", lambda store, deadline: store.backend.batch_touch(KEYS, deadline=deadline), []),
}


@pytest.mark.parametrize("name", VERBS)
def test_a_call_ends_at_its_deadline_while_the_system_hangs_and_the_store_works_after_it(
    tmp_path: Path, name: str
) -> None:
    system_call, verb, failed = VERBS[name]
    hang = Hang(system_call)
    store = opened(tmp_path / "s", hang)
    assert leave(hang, lambda deadline: verb(store, deadline)) == failed
    assert hang.hanging == 1 and errors(store)
    hang.release()
    settled(store)
    assert temporaries(tmp_path / "s") == []
    assert set(store_chain(store, KEYS)) <= {STORED, PRESENT}
    assert (load(store, KEYS), delete(store, KEYS)) == ([HIT] * 3, 3)
    assert store_chain(store, make_keys(3, "new"))[1:] == [STORED] * 2  # the first may have been renamed late


@pytest.mark.parametrize("name", VERBS)
def test_without_a_hanging_call_the_same_verb_succeeds(tmp_path: Path, name: str) -> None:
    """The control of the test above."""
    system_call, verb, failed = VERBS[name]
    store = opened(tmp_path / "s", Hang(system_call))
    if name == "touch":
        assert delete(store, KEYS) == 3
    assert verb(store, soon()) != failed
    assert errors(store) == {}


# Buffers


@pytest.mark.parametrize("empty", [empty_frames, empty_views])
@pytest.mark.parametrize("system_call", ["open", "fstat", "preadv", "close"])
def test_a_late_read_does_not_touch_the_pages_of_its_caller(
    tmp_path: Path, system_call: str, empty: Callable[..., list[Any]]
) -> None:
    hang = Hang(system_call)
    store, pages = opened(tmp_path / "s", hang, io_threads=3), empty(CODEC, 3)

    def read(deadline: float) -> object:
        return store.backend.batch_get(KEYS, pages, deadline=deadline)

    assert leave(hang, read) == [GET_ERROR] * 3
    buffers = [buffer for page in pages for buffer in CODEC.buffers(page)]
    for buffer in buffers:
        buffer[:] = b"\xa5" * buffer.nbytes
    late = hang.hanging
    hang.release()
    settled(store)
    assert all(bytes(buffer) == b"\xa5" * buffer.nbytes for buffer in buffers)
    assert late and hang.ended == late, "the control: the reads went on"
    assert read(soon()) == [HIT] * 3, "the control: a read in time fills them"
    assert all(bytes(buffer) != b"\xa5" * buffer.nbytes for buffer in buffers)


@pytest.mark.parametrize("full", [full_frames, full_views])
@pytest.mark.parametrize("system_call", ["lstat", "open", "pwritev", "close", "rename"])
def test_a_late_write_uses_none_of_the_pages_of_its_caller(
    tmp_path: Path, system_call: str, full: Callable[..., list[Any]]
) -> None:
    """Also if the page appears, it has the bytes from before the call returned."""
    root, keys, hang = tmp_path / "s", make_keys(3, "new"), Hang(system_call)
    store, pages = opened(root, hang), full(CODEC, keys)
    buffers = [buffer for page in pages for buffer in CODEC.buffers(page)]

    def write(deadline: float) -> object:
        return store.backend.batch_set(keys, pages, parent=None, deadline=deadline)

    assert leave(hang, write) == [SET_ERROR] * 3
    for buffer in buffers:
        buffer[:] = b"\xa5" * buffer.nbytes
    hang.release()
    settled(store)
    assert all(bytes(buffer) == b"\xa5" * buffer.nbytes for buffer in buffers)
    assert temporaries(root) == []
    found = load(store, keys)
    assert found == [HIT, MISS, MISS] if system_call == "rename" else found == [MISS] * 3
    assert store.backend.statistics().corrupt == {}


def test_a_lent_value_is_taken_back_after_its_blocks_and_lent_to_none_after_that() -> None:
    """The control: a value that was not taken back is lent."""
    lent, entered, go, taken = Lent("value"), threading.Event(), threading.Event(), threading.Event()
    seen: list[str | None] = []

    def hold(mine: str) -> None:
        entered.set()
        go.wait(WAIT_S)
        seen.append(mine)
        assert not taken.is_set()

    def take_back() -> None:
        lent.take_back()
        seen.append("taken")
        taken.set()

    user, owner = threading.Thread(target=lent.use, args=(hold,)), threading.Thread(target=take_back)
    user.start()
    assert entered.wait(WAIT_S)
    assert lent.use(str.upper) == "VALUE"
    owner.start()
    wait_for(lambda: lent._value is None)
    assert lent.use(str.upper) is None
    assert not taken.is_set()
    go.set()
    owner.join(WAIT_S)
    user.join(WAIT_S)
    assert seen == ["value", "taken"]


# All threads hang


def test_while_all_threads_hang_calls_fail_at_once_whatever_their_deadline_is(tmp_path: Path) -> None:
    """With an infinite deadline, a call that waited would never return. The control: with a free thread it succeeds."""
    hang = Hang("lstat", lambda args: KEYS[0].hex() in args[0])
    store = opened(tmp_path / "s", hang, io_threads=2)
    assert leave(hang, lambda deadline: store.backend.batch_exists(KEYS, deadline=deadline)) == 0
    assert store.backend.batch_has(KEYS[1:], deadline=math.inf) == [True] * 2
    assert store.backend.statistics().errors.get(ErrorKind.HANGS) is None
    leave(hang, lambda deadline: store.backend.batch_exists(KEYS, deadline=deadline))
    wait_for(lambda: hang.hanging == 2, lambda: store.backend.batch_exists(KEYS, deadline=soon(0.02)))
    before = errors(store).get(ErrorKind.HANGS, 0)
    assert store.backend.batch_exists(KEYS, deadline=math.inf) == 0
    assert get(store, KEYS, math.inf) == [GET_ERROR] * 3
    assert put(store, KEYS, math.inf) == [SET_ERROR] * 3
    assert store.backend.delete(KEYS, deadline=math.inf) == 0
    assert store.backend.batch_touch(KEYS, deadline=math.inf) == []
    assert errors(store)[ErrorKind.HANGS] == before + 1 + 3 + 3 + 1 + 1
    hang.release()
    settled(store)
    assert load(store, KEYS) == [HIT] * 3


def test_without_a_thread_calls_fail_at_once_and_a_store_does_not_open(tmp_path: Path) -> None:
    with no_threads():
        with pytest.raises(BackendUnavailable, match="cannot start a thread"):
            open_shared(tmp_path / "s")
        assert not (tmp_path / "s").exists()
    store = open_shared(tmp_path / "s")
    assert store_chain(store, KEYS) == [STORED] * 3


# Late files


@pytest.mark.parametrize("system_call", ["open", "pwritev", "close"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_page_of_a_batch_that_was_left_while_it_was_written_appears_and_no_file_stays(
    tmp_path: Path, at: int, system_call: str
) -> None:
    """The pages before the hanging one are on temporary files then, which no thread is free to rename."""
    root, keys, calls = tmp_path / "s", make_keys(3, "new"), list[int]()

    def is_the_one(args: tuple[Any, ...]) -> bool:
        calls.append(1)
        return len(calls) > at

    hang = Hang(system_call, is_the_one)
    store = opened(root, hang)
    for key in keys:  # so that each page is opened once
        page_path(root, CODEC, key).parent.mkdir(exist_ok=True, parents=True)

    def write(deadline: float) -> object:
        delete(store, keys)  # on a busy machine, an attempt before may have stored the first ones
        calls.clear()
        return put(store, keys, deadline)

    outcomes = leave(hang, write, 1.0)
    assert outcomes == [SET_ERROR] * 3
    hang.release()
    settled(store)
    assert temporaries(root) == []
    assert (exists(store, keys), len(page_files(root))) == (0, 3)
    assert store_chain(store, keys) == [STORED] * 3


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_late_rename_shows_the_page_after_those_before_it_and_none_behind_it(tmp_path: Path, at: int) -> None:
    root, keys = tmp_path / "s", make_keys(3, "new")
    hang = Hang("rename", lambda args: keys[at].hex() in args[0])
    store = opened(root, hang, io_threads=3)
    outcomes = leave(hang, lambda deadline: put(store, keys, deadline))
    assert isinstance(outcomes, list)
    assert set(outcomes[:at]) <= {STORED, PRESENT} and outcomes[at:] == [SET_ERROR] * (3 - at)
    assert load(store, keys) == [HIT] * at + [MISS] * (3 - at)
    hang.release()
    settled(store)
    assert load(store, keys) == [HIT] * (at + 1) + [MISS] * (2 - at)
    assert temporaries(root) == []


def test_written_files_that_no_thread_could_rename_in_time_are_removed_later(tmp_path: Path) -> None:
    """Another call takes the only thread between the write of a batch and its renames, and that call is not left."""
    root, keys = tmp_path / "s", make_keys(1, "new")
    hang = Hang("lstat", lambda args: KEYS[0].hex() in args[0])
    others: list[threading.Thread] = []

    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        hang(name, number, args)
        if name == "pwritev" and hang.is_on and not others:
            others.append(threading.Thread(target=store.backend.batch_has, args=(KEYS,), kwargs={"deadline": soon()}))
            others[0].start()
            wait_for(lambda: not shared_driver(store)._calls._pool._queue.empty())

    store = open_shared(root, system=Faulty(fault), io_threads=1)
    assert store_chain(store, KEYS) == [STORED] * 3
    assert leave(hang, lambda deadline: put(store, keys, deadline), 1.0) == [SET_ERROR]
    hang.release()
    others[0].join(WAIT_S)
    settled(store)
    assert (temporaries(root), exists(store, keys)) == ([], 0)
    assert store_chain(store, keys) == [STORED]


# Opening and closing


class Behind(Clock):
    """A clock that is a minute behind: a deadline of a few seconds has passed for the system."""

    def __call__(self) -> float:
        return time.monotonic() - 60.0


@pytest.mark.parametrize("system_call", ["mkdir", "open", "fstat", "listdir", "pwritev"])
def test_opening_on_a_mount_that_hangs_fails_and_leaves_nothing_once_it_works(
    tmp_path: Path, system_call: str
) -> None:
    """The control: the same opening succeeds if the mount works."""
    leftovers, hang = Leftovers(), Hang(system_call)
    hang.is_on = True
    with pytest.raises(BackendUnavailable, match="did not answer for 10 s; check the mount"):
        open_shared(tmp_path / "s", system=Faulty(hang), clock=Behind())
    hang.release()
    wait_for(lambda: leftovers.found() == (0, []))
    store = open_shared(tmp_path / "s", system=Faulty(hang))
    assert store_chain(store, KEYS) == [STORED] * 3


@pytest.mark.long
def test_closing_leaves_the_root_to_a_thread_that_hangs_which_closes_it(tmp_path: Path) -> None:
    """Otherwise its call could go to another file with the same number. The control: without a hanging thread the
    descriptor is closed."""
    root, hang = tmp_path / "s", Hang("lstat")
    store, idle = opened(root, hang), opened(tmp_path / "other", Hang("lstat"))
    closed = shared_driver(idle)._root.fd
    idle.backend.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(closed)
    assert leave(hang, lambda deadline: store.backend.batch_exists(KEYS, deadline=deadline)) == 0
    driver = shared_driver(store)
    store.backend.close()
    assert hang.hanging == 1
    assert os.path.samestat(os.fstat(driver._root.fd), os.stat(root))
    assert store.backend.batch_exists(KEYS, deadline=soon()) == 0
    hang.release()
    wait_for(lambda: driver._calls._pool.alive == 0)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(driver._root.fd)


def test_closing_a_store_whose_file_system_fails_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        raise OSError(errno.EIO, "broken")

    system = Faulty(fault)
    system.armed = False
    leftovers = Leftovers()
    store = open_shared(tmp_path / "s", system=system)
    driver = shared_driver(store)
    caplog.clear()
    assert driver.begin_sweep(False)
    system.before = lambda name, number, args: fault(name, number, args) if name != "close" else None
    system.armed = True
    store.backend.close()
    assert caplog.text == ""
    wait_for(lambda: leftovers.found() == (0, []))


# With a guard


def test_the_breaker_opens_while_the_mount_hangs_and_closes_after_a_good_probe(tmp_path: Path) -> None:
    hang, clock = Hang("lstat"), PassingClock()
    driver = SharedFilesDriver(
        CODEC, shared_options(tmp_path / "s", io_threads=1), system=Faulty(hang), clock=clock
    )
    guard = guard_of(driver, patient(), clock=clock)
    pages = full_frames(CODEC, KEYS)

    def deadline(seconds: float = 30.0) -> float:
        return clock() + seconds

    assert guard.batch_set(KEYS, pages, parent=None, deadline=deadline()) == [STORED] * 3
    assert guard.may_pass(Direction.READ) and guard.batch_exists(KEYS, deadline=deadline()) == 3, "the control"
    leave(hang, lambda until: guard.batch_exists(KEYS, deadline=until), 0.15)
    for _ in range(3):
        guard.batch_exists(KEYS, deadline=deadline())
        guard.batch_set(KEYS, pages, parent=None, deadline=deadline())
    wait_for(lambda: not guard.may_pass(Direction.READ) and not guard.may_pass(Direction.WRITE))
    assert guard.statistics().errors[ErrorKind.HANGS] > 0
    assert guard.batch_exists(KEYS, deadline=deadline()) == 0
    probe(guard, Direction.READ, clock)
    assert not guard.may_pass(Direction.READ), "the control: the mount still hangs"
    hang.release()
    wait_for(lambda: driver._calls._pool.abandoned == 0)

    def works() -> bool:
        """A probe may move the clock past the deadline of a call, or of the other direction's probe."""
        until_passing(guard, Direction.READ, clock)
        until_passing(guard, Direction.WRITE, clock)
        return guard.batch_exists(KEYS, deadline=deadline()) == 3

    wait_for(works)
