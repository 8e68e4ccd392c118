"""Backends that tell of a page before they evict it, and what becomes of its bytes."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.backends.base import EvictedPage, EvictionSource, StorageBackend, leaves
from hicache.backends.compose import LevelsBackend
from hicache.backends.faults import FaultyBackend
from hicache.backends.file import FileBackend
from hicache.backends.guard import GuardedBackend
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import NAMESPACE, OTHER_NAMESPACE, PAYLOAD_BYTES, Store, make_keys, soon, store_chain
from hicache.config.composed_storage import CopyOptions
from hicache.config.guard import InjectConfig
from hicache.frame import FrameCodec
from tests.waiting import wait_for

from .._files import open_descriptors, open_file
from ._parts import CODEC, COPIES, PAGE, Switched, named, settle

ROOM = 4


class Listener:
    """Keeps the pages it is told of open, or refuses to look at them."""

    def __init__(self, opens: bool = True) -> None:
        self.opens = opens
        self.told: list[bytes] = []
        self.pages: dict[bytes, EvictedPage] = {}

    def __call__(self, key: bytes, open_page: Callable[[], EvictedPage]) -> None:
        self.told.append(key)
        if self.opens:
            self.pages[key] = open_page()

    def read(self, key: bytes, codec: FrameCodec = CODEC) -> bytes:
        page = self.pages.pop(key)
        frame = memoryview(bytearray(codec.frame_bytes))
        page.read(frame)
        stored_bytes = page.stored_bytes
        page.close()
        assert codec.accept(key, frame, stored_bytes) is None
        return bytes(frame)


@pytest.fixture(params=["memory", "file"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of ROOM pages."""
    if request.param == "memory":
        backend = MemoryBackend(CODEC, ROOM * PAGE)
        return Store(backend, backend.peek, backend.poke)
    return open_file(tmp_path / "s", capacity=ROOM * PAGE)


def source(store: Store) -> EvictionSource:
    assert isinstance(store.backend, EvictionSource)
    return store.backend


def test_each_evicted_page_is_told_of_and_can_be_read_after_it_is_gone(small: Store) -> None:
    listener, old = Listener(), make_keys(4, "old")
    source(small).on_eviction(listener)
    store_chain(small, old)
    raw = {key: small.read(key) for key in old}
    store_chain(small, make_keys(3, "new"))
    assert listener.told == [old[3], old[2], old[1]], "tails before heads"
    assert [small.read(key) for key in listener.told] == [None] * 3
    for key in listener.told:
        assert listener.read(key) == raw[key]
    small.backend.close()


def test_what_is_deleted_or_damaged_is_no_eviction(small: Store) -> None:
    listener, keys = Listener(), make_keys(4)
    source(small).on_eviction(listener)
    store_chain(small, keys)
    small.backend.delete(keys[3:], deadline=soon())
    small.write(keys[2], b"x" * PAGE)
    small.backend.batch_get(keys[2:3], [memoryview(bytearray(PAGE))], deadline=soon())
    assert listener.told == []
    small.backend.close()


def test_a_listener_that_opens_nothing_costs_no_descriptor(tmp_path: Path) -> None:
    store, listener = open_file(tmp_path / "s", capacity=ROOM * PAGE), Listener(opens=False)
    source(store).on_eviction(listener)
    store_chain(store, make_keys(4, "old"))
    before = open_descriptors()
    store_chain(store, make_keys(4, "new"))
    assert len(listener.told) == 4 and open_descriptors() == before
    store.backend.close()


def test_a_page_of_another_namespace_is_evicted_in_silence(tmp_path: Path) -> None:
    other = FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES)
    theirs = open_file(tmp_path / "s", other, capacity=ROOM * PAGE)
    store_chain(theirs, make_keys(4, "theirs"))
    mine, listener = open_file(tmp_path / "s", capacity=ROOM * PAGE), Listener()
    source(mine).on_eviction(listener)
    store_chain(mine, make_keys(2, "mine"))
    assert listener.told == [] and theirs.backend.usage().pages == ROOM
    for store in (mine, theirs):
        store.backend.close()


def test_a_source_is_found_behind_a_guard_and_faults() -> None:
    inner = MemoryBackend(CODEC)
    guarded = GuardedBackend(FaultyBackend(inner, InjectConfig()))
    (found,) = leaves(guarded)
    assert found is inner and isinstance(found, EvictionSource)
    guarded.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_evicted_pages_beyond_the_bound_are_dropped_and_leave_nothing_open(kind: str, tmp_path: Path) -> None:
    first: StorageBackend = Switched(capacity_bytes=8 * PAGE)
    if kind == "file":
        first = open_file(tmp_path / "s", capacity=8 * PAGE).backend
        assert isinstance(first, FileBackend)
    below = Switched()
    levels = LevelsBackend(
        CODEC, named(first, below), CopyOptions(write="on_eviction", cascade_bytes_max=3 * PAGE)
    )
    store = Store(levels, below.peek, below.poke)
    before = open_descriptors()
    below.gate.clear()
    store_chain(store, make_keys(8, "old"))
    store_chain(store, make_keys(8, "new"))
    copies = levels.copies()["part-1"]
    assert (copies.waiting, copies.dropped) == (3, 5)
    assert open_descriptors() <= before + 3
    below.gate.set()
    settle(levels)
    assert open_descriptors() == before
    assert levels.copies()["part-1"].copied == 3
    levels.close()


@contextlib.contextmanager
def descriptors_at_most(count: int) -> Iterator[None]:
    """Lower the limit of this process for a moment."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("descriptors", "kept"), [(256, 33), (512, 40)])
def test_small_pages_that_are_evicted_leave_descriptors_for_others(descriptors: int, kept: int, tmp_path: Path) -> None:
    """An eighth of what the process may open, besides the one page that is being written and open no more: all of its
    descriptors would stop the store that evicts."""
    file, below = open_file(tmp_path / "s", capacity=40 * PAGE).backend, Switched()
    with descriptors_at_most(descriptors):
        levels = LevelsBackend(
            CODEC, named(file, below), CopyOptions(write="on_eviction", cascade_bytes_max=COPIES)
        )
    store = Store(levels, below.peek, below.poke)
    before = open_descriptors()
    below.gate.clear()
    store_chain(store, make_keys(40, "old"))
    store_chain(store, make_keys(1, "first"))
    wait_for(lambda: below.at_gate == 1)
    store_chain(store, make_keys(39, "new"))
    copies = levels.copies()["part-1"]
    assert (copies.waiting, copies.dropped) == (kept, 40 - kept)
    assert open_descriptors() <= before + kept
    below.gate.set()
    settle(levels)
    store_chain(store, make_keys(20, "more"))
    settle(levels)
    assert levels.copies()["part-1"].copied == kept + 20 and open_descriptors() == before
    levels.close()


def test_a_page_that_is_damaged_when_it_is_evicted_goes_nowhere() -> None:
    first, below = Switched(capacity_bytes=ROOM * PAGE), Switched()
    levels = LevelsBackend(
        CODEC, named(first, below), CopyOptions(write="on_eviction", cascade_bytes_max=COPIES)
    )
    store, old = Store(levels, first.peek, first.poke), make_keys(4, "old")
    store_chain(store, old)
    first.poke(old[3], b"x" * PAGE)
    first.poke(old[2], b"short")
    store_chain(store, make_keys(3, "new"))
    settle(levels)
    assert [below.peek(key) is not None for key in old] == [False, True, False, False]
    copies = levels.copies()["part-1"]
    assert (copies.copied, copies.failed) == (1, 2)
    levels.close()


def test_a_page_that_waits_to_be_read_is_let_go_when_it_is_deleted_or_the_levels_close(tmp_path: Path) -> None:
    file = open_file(tmp_path / "s", capacity=ROOM * PAGE).backend
    below = Switched()
    levels = LevelsBackend(
        CODEC, named(file, below), CopyOptions(write="on_eviction", cascade_bytes_max=COPIES)
    )
    store, old = Store(levels, below.peek, below.poke), make_keys(4, "old")
    before = open_descriptors()
    below.hanging = True
    store_chain(store, old)
    store_chain(store, make_keys(4, "new"))
    levels.delete(old[3:], deadline=soon(0.05))
    levels.close()
    assert [below.peek(key) for key in old] == [None] * 4
    assert open_descriptors() <= before
    below.released.set()


@pytest.mark.parametrize("keyed", [False, True])
def test_what_goes_down_is_proved_by_the_codec_of_the_namespace(keyed: bool) -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[b"k" * 32] if keyed else [])
    first, below = Switched(codec, ROOM * PAGE), Switched(codec)
    levels = LevelsBackend(
        codec, named(first, below), CopyOptions(write="on_eviction", cascade_bytes_max=COPIES)
    )
    store, old = Store(levels, first.peek, first.poke), make_keys(4, "old")
    store_chain(store, old)
    weak = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
    frame = memoryview(bytearray(first.peek(old[3]) or b""))
    weak.seal(old[3], frame, parent=old[2])
    first.poke(old[3], bytes(frame))
    store_chain(store, make_keys(1, "new"))
    settle(levels)
    assert (below.peek(old[3]) is None) is keyed
    levels.close()
