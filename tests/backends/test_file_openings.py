"""A long opening of a file store compares in the background: pages are read at once, and stored as soon as the index
counts enough. Where it is cut off, the next opening compares."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.file import store as module
from hicache.backends.file.index import Index
from hicache.backends.file.store import FileStore
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import HIT, MISS, STORED, Subject, full_frames, load, make_keys, store_chain
from tests.waiting import wait_for

from ._files import CODEC, Faulty, check, disk_usage, file_driver, open_file, page_path, temporary_files

KEYS = make_keys(20)
NEW = make_keys(3, "new")
ENDS_S = 60.0


class Gate(Faulty):
    """Holds each look at a page file in a comparison until `opens` is set; then makes `call`, which may raise."""

    def __init__(self, call: Callable[[], None] = lambda: None) -> None:
        super().__init__(self._hold)
        self.opens, self.looked = threading.Event(), 0
        self._call = call

    def _hold(self, name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "lstat_listed" and threading.current_thread().name == "hicache-file-open":
            self.looked += 1
            assert self.opens.wait(ENDS_S)
            self._call()


class Steps:
    """Holds the openings of this process before each step of a comparison until `opens` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opens, self.held, step = threading.Event(), threading.Event(), FileStore._step

        def held_step(store: FileStore) -> None:
            self.held.set()
            assert self.opens.wait(ENDS_S)
            step(store)

        monkeypatch.setattr(FileStore, "_step", held_step)


@pytest.fixture
def closed(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of KEYS after a clean close; the next openings do not wait for a comparison."""
    store = open_file(root)
    assert store_chain(store, KEYS) == [STORED] * len(KEYS)
    store.backend.close()
    monkeypatch.setattr(module, "SERVE_AFTER_S", 0.0)
    return root


@pytest.fixture
def killed(closed: Path) -> Path:
    """A store after a kill, with a row without a file."""
    in_a_child(lambda: ready(open_file(closed)))
    page_path(closed, CODEC, KEYS[-1]).unlink()
    return closed


@pytest.fixture
def unproven(closed: Path) -> Path:
    """A store as after a power failure, with a row without a file."""
    (closed / "checked").unlink()
    page_path(closed, CODEC, KEYS[-1]).unlink()
    return closed


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    steps = Steps(monkeypatch)
    yield steps
    steps.opens.set()


def in_a_child(work: Callable[[], object]) -> None:
    """Do this in a process that is then killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def inner(store: Subject) -> FileStore:
    return file_driver(store)._store


def ready(store: Subject) -> Subject:
    wait_for(lambda: inner(store).is_ready)
    return store


def ended(store: Subject) -> Subject:
    inner(store)._opener.join(ENDS_S)
    assert not inner(store)._opener.is_alive()
    return store


def test_after_a_kill_all_processes_read_and_store_during_the_comparison(
    killed: Path, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    store = ready(open_file(killed))
    assert load(store, KEYS) == [HIT] * (len(KEYS) - 1) + [MISS]
    assert store_chain(store, NEW) == [STORED] * 3
    beside = ended(open_file(killed))
    assert store_chain(beside, make_keys(2, "beside")) == [STORED] * 2
    assert store.backend.usage().pages == disk_usage(killed)[0] + 1, "the control: it is not compared"
    assert "compares its index with its files in the background" in caplog.text
    steps.opens.set()
    check(ended(store), killed)
    assert "has ended: they agree" in caplog.text
    store.backend.close()
    beside.backend.close()
    assert CODEC.namespace.hex() in (killed / "checked").read_text()


def test_limits_hold_during_the_comparison_after_a_kill(killed: Path, steps: Steps) -> None:
    store = ready(open_file(killed, capacity=len(KEYS) * CODEC.frame_bytes))
    for number in range(4):
        assert store_chain(store, make_keys(4, f"{number}")) == [STORED] * 4
        assert disk_usage(killed)[0] <= len(KEYS)
    steps.opens.set()
    check(ended(store), killed)


@pytest.mark.parametrize("how", ["a kill", "a close", "a close before the last process closes"])
def test_a_comparison_in_steps_that_is_cut_off_is_made_by_the_next_opening(
    killed: Path, steps: Steps, how: str
) -> None:
    if how == "a kill":
        in_a_child(lambda: (open_file(killed), steps.held.wait(ENDS_S)))
    else:
        store = ready(open_file(killed))
        last = open_file(killed) if "last" in how else store
        assert steps.held.wait(ENDS_S)
        closing = threading.Thread(target=store.backend.close)
        closing.start()
        closing.join(ENDS_S)
        ready(last).backend.close()
    assert len(temporary_files(killed)) == 1
    assert CODEC.namespace.hex() not in (killed / "checked").read_text()
    steps.opens.set()
    check(ended(open_file(killed)), killed)


def test_without_proof_pages_are_read_and_new_ones_rejected_in_words_during_the_comparison(unproven: Path) -> None:
    gate = Gate()
    store, beside = open_file(unproven, system=gate), open_file(unproven)
    try:
        wait_for(lambda: gate.looked > 0)
        for one in (store, beside):
            assert load(one, KEYS) == [HIT] * (len(KEYS) - 1) + [MISS]
            assert store_chain(one, NEW) == [SetOutcome.REJECTED] * 3
            assert file_driver(one).rejection == module.REJECTION
            assert store_chain(one, KEYS[:2]) == ["present"] * 2
    finally:
        gate.opens.set()
    for one, keys in ((store, NEW), (beside, make_keys(2, "beside"))):
        assert store_chain(ended(one), keys) == [STORED] * len(keys)
        check(one, unproven)


def test_a_close_ends_a_comparison_without_proof_and_vouches_for_nothing(unproven: Path) -> None:
    gate = Gate()
    store = open_file(unproven, system=gate)
    wait_for(lambda: gate.looked > 0)
    store.backend.close()
    gate.opens.set()
    ended(store)
    assert gate.looked < len(KEYS) - 1
    assert temporary_files(unproven) == [] and not (unproven / "checked").exists()
    (again := Gate()).opens.set()
    check(ended(open_file(unproven, system=again)), unproven)
    assert again.looked == len(KEYS) - 1


def test_an_error_in_the_background_is_logged_and_a_later_call_compares(
    unproven: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise OSError(errno.EACCES, "not now")

    gate = Gate(fails)
    store = open_file(unproven, system=gate)
    gate.opens.set()
    ended(store)
    assert "has ended: it failed" in caplog.text and "not now" in caplog.text
    assert store_chain(store, NEW) == [STORED] * 3
    check(store, unproven)


def test_a_command_that_removes_waits_for_the_comparison(unproven: Path) -> None:
    gate = Gate()
    opened = list[FileStore]()
    thread = threading.Thread(
        target=lambda: opened.append(FileStore(unproven, create=False, keep_damaged=True, system=gate))
    )
    thread.start()
    wait_for(lambda: gate.looked > 0)
    assert not opened
    gate.opens.set()
    thread.join(ENDS_S)
    assert opened[0].is_ready and not opened[0]._behind
    opened[0].close()


@pytest.mark.parametrize("is_proven", [True, False])
def test_a_child_forked_during_the_comparison_changes_nothing(closed: Path, steps: Steps, is_proven: bool) -> None:
    if is_proven:
        in_a_child(lambda: ready(open_file(closed)))
    else:
        (closed / "checked").unlink()
    gate = Gate()
    store = open_file(closed, system=gate)
    wait_for(lambda: steps.held.is_set() or gate.looked > 0)
    reader, writer = os.pipe()

    def use() -> None:
        os.write(writer, store_chain(store, NEW)[0].value.encode())
        store.backend.close()

    in_a_child(use)
    assert os.read(reader, 100) == b"error"
    for end in (reader, writer):
        os.close(end)
    gate.opens.set()
    steps.opens.set()
    check(ended(store), closed)
    assert store_chain(store, NEW) == [STORED] * 3


def test_a_full_store_compares_the_sums_in_one_percent_of_the_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, compared, real = ManualClock(), list[float](), Index.contradiction

    def slow(index: Index) -> str | None:
        compared.append(clock())
        clock.advance(2.0)
        return real(index)

    monkeypatch.setattr(Index, "contradiction", slow)
    store = open_file(root, capacity=4 * CODEC.frame_bytes, clock=clock)
    for number in range(40):
        frames = full_frames(CODEC, keys := make_keys(3, f"{number}"))
        assert store.backend.batch_set(keys, frames, parent=None, deadline=clock() + ENDS_S) == [STORED] * 3
        clock.advance(15.0)
    assert 2 <= len(compared) <= 4
    assert min(after - before for before, after in itertools.pairwise(compared)) >= 200.0
