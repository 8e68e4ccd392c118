"""Memory that a daemon shares with its engines: who may attach it, when it is left over, and how a process recognises
it. What members do among themselves is in `tiers/test_shared.py`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hicache.errors import CapacityError, InvalidInput, SharedMemoryError
from hicache.shared_memory import CONTROL_BYTES, Layout, Role, SharedMemory, find, path_of
from tests.leftovers import guarded

FRAME = 8192
KEPT = Layout(0, 4, FRAME, b"s" * 32)
_numbers = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other test uses; nothing may be left of it in the end."""
    chosen = f"test-memory-{os.getpid()}-{next(_numbers)}"
    yield chosen
    left = path_of(chosen).exists()
    path_of(chosen).unlink(missing_ok=True)
    assert not left


def open_it(name: str, layout: Layout = KEPT, role: Role = Role.OWNER, wait_s: float = 10.0) -> SharedMemory:
    return SharedMemory.open(name, layout, deadline=time.monotonic() + wait_s, role=role)


def attach(name: str, identity: tuple[int, int] | None = None) -> SharedMemory:
    return SharedMemory.attach(name, identity=identity, deadline=time.monotonic() + 10.0)


def test_a_daemon_maps_the_frames_of_an_engine(name: str) -> None:
    engine = open_it(name)
    daemon = attach(name, engine.identity)
    assert (daemon.identity, daemon.layout) == (engine.identity, KEPT)
    engine.frames[FRAME : FRAME + 5] = b"hello"
    assert bytes(daemon.frames[FRAME : FRAME + 5]) == b"hello"
    daemon.frames[4 * FRAME - 3 :] = b"end"
    assert bytes(engine.frames[-3:]) == b"end"
    assert engine.frames.nbytes == 4 * FRAME
    engine.unlink()


def test_memory_of_others_is_not_mapped(name: str) -> None:
    with pytest.raises(SharedMemoryError, match="does not exist"):
        attach(name)
    engine = open_it(name)
    with pytest.raises(SharedMemoryError, match="has another device or inode than requested"):
        attach(name, (engine.identity[0], engine.identity[1] + 1))
    os.truncate(engine.path, CONTROL_BYTES + FRAME)  # a read behind the end would end the daemon with SIGBUS
    with pytest.raises(SharedMemoryError, match="was cut short"):
        attach(name, engine.identity)
    engine.unlink()
    path_of(name).touch(0o600)
    path_of(name).write_bytes(b"notes" * 99)
    with pytest.raises(SharedMemoryError, match="was not created by HiCache"):
        attach(name)
    path_of(name).chmod(0o644)
    with pytest.raises(SharedMemoryError, match="mode 0644"):
        attach(name)
    path_of(name).unlink()
    with pytest.raises(InvalidInput, match="letters, digits"):
        attach("../etc/passwd")


def test_memory_that_is_not_kept_is_not_attached(name: str) -> None:
    pool = open_it(name, Layout(2, 4, FRAME, b"s" * 32))
    with pytest.raises(SharedMemoryError, match="is for 2 processes"):
        attach(name, pool.identity)
    pool.close()


def test_a_daemon_sees_whether_an_engine_is_still_attached(name: str) -> None:
    """OFD locks belong to open files, so two openings of one process are two processes to each other."""
    engine, worker = open_it(name), open_it(name)
    daemon = attach(name)
    engine.close()
    assert daemon.has_others() and not daemon.unlink_if_left() and path_of(name).exists()
    late = worker.frames
    with pytest.raises(BufferError):
        worker.close()
    assert daemon.has_others()
    late.release()
    worker.close()
    assert not daemon.has_others()
    assert daemon.unlink_if_left() and not path_of(name).exists()


def test_an_attached_daemon_is_not_an_engine(name: str) -> None:
    engine = open_it(name)
    daemon, second = attach(name), attach(name)
    assert not engine.has_others() and second.has_others()
    engine.close()
    assert daemon.unlink_if_left()


def test_a_leftover_is_joined_only_once_its_daemon_has_let_go(name: str) -> None:
    """The daemon may still read a page into a frame for the engine that died."""
    engine = open_it(name)
    before, daemon = engine.identity, attach(name)
    engine.close()
    found: list[SharedMemory] = []
    opening = threading.Thread(target=lambda: found.append(open_it(name, wait_s=60.0)))
    opening.start()
    while not daemon.unlink_if_left():  # held by the opening now and then
        pass
    opening.join(30.0)
    assert found and found[0].identity != before
    daemon.close()
    found[0].close()
    after = open_it(name)
    assert path_of(name).stat().st_ino == after.identity[1], "the control: without a daemon it is joined"
    after.unlink()


def test_a_daemon_leaves_memory_that_outlives_its_engine(name: str) -> None:
    keeping = dataclasses.replace(KEPT, keep=True)
    open_it(name).close()  # another engine has left it, without that wish
    engine = open_it(name, keeping)
    daemon, identity = attach(name), engine.identity
    assert daemon.layout == keeping
    engine.frames[:4] = b"kept"
    engine.close()
    assert daemon.unlink_if_left() and path_of(name).exists()
    daemon.close()
    again = open_it(name, keeping)
    assert again.identity == identity and bytes(again.frames[:4]) == b"kept"
    again.close()
    last = open_it(name)  # nor does the wish outlive the engine that had it
    assert attach(name).layout == KEPT
    last.unlink()


def test_a_leftover_whose_daemon_hangs_is_replaced_at_the_deadline(name: str) -> None:
    engine = open_it(name)
    daemon, before = attach(name), engine.identity
    engine.close()
    again = open_it(name, wait_s=0.05)
    assert again.identity != before
    daemon.frames[:4] = b"late"
    assert bytes(again.frames[:4]) == bytes(4)
    assert daemon.unlink_if_left() and path_of(name).exists(), "the name is the new engine's"
    again.unlink()


def test_an_engine_joins_the_file_that_a_daemon_created_for_it(name: str) -> None:
    daemon = open_it(name, role=Role.DAEMON)
    assert not daemon.has_others()
    engine = open_it(name, role=Role.GUEST)
    assert engine.identity == daemon.identity and daemon.has_others()
    engine.close()
    other = Layout(0, 5, FRAME, b"s" * 32)
    daemon.close()
    daemon = open_it(name, other, role=Role.DAEMON)
    assert daemon.layout == other, "a leftover that differs is replaced"
    daemon.unlink()


@pytest.mark.parametrize("role", [Role.ALONE, Role.GUEST])
def test_memory_of_a_running_engine_is_not_given_to_another_one(name: str, role: Role) -> None:
    """Two engines of one configuration would write their pages into the same frames."""
    engine = open_it(name, role=Role.ALONE)
    engine.frames[:4] = b"mine"
    with pytest.raises(SharedMemoryError, match="belongs to another engine; end that engine"):
        open_it(name, wait_s=0.02, role=role)
    found: list[SharedMemory] = []
    opening = threading.Thread(target=lambda: found.append(open_it(name, wait_s=60.0, role=role)))
    opening.start()
    with guarded(name):
        engine.close()
        opening.join(30.0)
    assert found[0].identity == engine.identity and bytes(found[0].frames[:4]) == b"mine", "what it left is taken over"
    assert open_it(name).identity == engine.identity, "the control: its workers join"
    found[0].unlink()


def test_available_memory_is_checked_before_it_is_allocated(name: str) -> None:
    def refuse(pages: int) -> None:
        assert pages == KEPT.pages
        raise CapacityError("too little")

    with pytest.raises(CapacityError, match="too little"):
        SharedMemory.open(name, KEPT, deadline=math.inf, require_memory=refuse)
    assert not path_of(name).exists()


def test_views_of_shared_memory_are_recognised(name: str) -> None:
    memory = open_it(name)
    frames = memory.frames
    array = np.frombuffer(memory.mapping, dtype=np.uint8).reshape(4, FRAME)
    assert find(frames) == (memory, 0)
    assert find(frames[FRAME : 2 * FRAME]) == (memory, FRAME)
    assert find(memoryview(array[3])) == (memory, 3 * FRAME), "also by way of an array or a tensor"
    assert find(memoryview(bytearray(FRAME))) is None
    other = attach(name)
    assert find(other.frames[FRAME:]) == (other, FRAME), "each mapping is its own"
    other.close()
    del frames, array
    memory.unlink()
    memory.close()
    assert find(memoryview(bytearray(FRAME))) is None
