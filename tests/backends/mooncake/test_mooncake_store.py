"""The Mooncake backend beyond the contract: registered memory, full stores, leases, namespaces, and its parts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.errors import StoreError
from hicache.backends.mooncake import MooncakeDriver, codes
from hicache.backends.mooncake.admin import admin_address
from hicache.backends.mooncake.client import Client
from hicache.backends.mooncake.session import RENEW_EVERY_S, ClientSession, SessionManager
from hicache.backends.store import Store
from hicache.config import MooncakeStorageOptions, load_config
from hicache.config.mooncake_storage import MooncakeStorage
from hicache.errors import BackendError, ConfigError, InvalidInput
from hicache.frame import HEADER_BYTES, FrameCodec, PageView
from hicache.mapping import address_of
from hicache.units import MIB
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    driver_of,
    empty_frames,
    holds,
    make_keys,
    payload_of,
    soon,
)
from hicache_lab.devservers import MooncakeMaster
from tests.waiting import wait_for

from .store import CODEC, LEASE_MS, Memory, SideDoor, open_backend, options_for, store

REJECTED = SetOutcome.REJECTED
LARGE = FrameCodec(NAMESPACE, MIB - HEADER_BYTES)


@pytest.fixture
def backend(
    master: MooncakeMaster, here: Store, door: SideDoor
) -> Iterator[Store]:
    backend = open_backend(master)
    yield backend
    backend.close()
    backend.check()
    door.clear()


@contextlib.contextmanager
def session_on(master: MooncakeMaster, **changes: Any) -> Iterator[ClientSession]:
    """A session of a client with pages of `CODEC`."""
    session = ClientSession(CODEC.frame_bytes, MooncakeStorageOptions(**options_for(master, **changes)))
    try:
        yield session
    finally:
        session.leave()


def client_of(backend: Store) -> Client:
    return driver_of(backend, MooncakeDriver)._sessions.current.client


def test_registered_frames_are_filled_without_a_copy(backend: Store) -> None:
    keys, memory = make_keys(6), Memory(CODEC, 6)
    backend.register_memory(memory.whole)
    for key, frame in zip(keys, memory.frames, strict=True):
        frame[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload_of(key)
    assert backend.batch_set(keys, memory.frames, parent=None, deadline=soon()) == [STORED] * 6
    memory.poison()
    assert backend.batch_get(keys, memory.frames, deadline=soon()) == [HIT] * 6
    assert all(holds(CODEC, key, frame) for key, frame in zip(keys, memory.frames, strict=True))
    assert [memory.guard[0], memory.guard[-1]] == [0xEE, 0xEE]


def views_of(memory: Memory, codec: FrameCodec) -> list[PageView]:
    """Return the frames of `memory` as pages in parts: payloads in `memory`, headers elsewhere."""
    views = []
    for frame in memory.frames:
        payload = frame[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes]
        views.append(PageView(memoryview(bytearray(HEADER_BYTES)), [payload[:1], payload[1:70_000], payload[70_000:]]))
    return views


@pytest.mark.parametrize("codec", [LARGE, FrameCodec(NAMESPACE, MIB - 5)], ids=["full", "padded"])
def test_parts_in_registered_memory_are_moved_without_a_copy(
    master: MooncakeMaster, here: Store, codec: FrameCodec
) -> None:
    backend, keys, memory = open_backend(master, codec, staging=8 * MIB), make_keys(3), Memory(codec, 3)
    backend.register_memory(memory.whole)
    views = views_of(memory, codec)
    paths = driver_of(backend, MooncakeDriver)._sessions.current.paths
    with paths.path([codec.buffers(view) for view in views], soon()) as path:
        assert not path.is_staged
        for view, addresses in zip(views, path.addresses, strict=True):
            assert set(map(address_of, view.parts)) < set(addresses), "parts are copied"
    for key, view in zip(keys, views, strict=True):
        view.parts[0][:], view.parts[1][:] = payload_of(key, MIB)[:1], payload_of(key, MIB)[1:70_000]
        view.parts[2][:] = payload_of(key, codec.payload_bytes)[70_000:]
    right = [b"".join(view.parts) for view in views]
    assert backend.batch_set(keys, views, parent=None, deadline=soon()) == [STORED] * 3
    memory.poison()
    assert backend.batch_get(keys, views, deadline=soon()) == [HIT] * 3
    assert [b"".join(view.parts) for view in views] == right
    assert [memory.guard[0], memory.guard[-1]] == [0xEE, 0xEE]
    frames = empty_frames(codec, 3)
    assert backend.batch_get(keys, frames, deadline=soon()) == [HIT] * 3
    backend.delete(keys, deadline=soon())
    backend.close()
    backend.check()


@pytest.mark.parametrize("extra", [1, CODEC.frame_bytes, 5 * MIB])
def test_a_longer_object_is_corrupt_and_is_not_written_past_the_frame(
    backend: Store, door: SideDoor, extra: int
) -> None:
    keys, memory = make_keys(2), Memory(CODEC, 2)
    backend.register_memory(memory.whole)
    store(backend, keys)
    door.store(backend).write(keys[1], bytes(CODEC.frame_bytes + extra))
    memory.poison()
    assert backend.batch_get(keys, memory.frames, deadline=soon()) == [HIT, CORRUPT]
    assert set(memory.frames[1]) == set(memory.guard) == {0xEE}
    assert backend.statistics().corrupt == {"size": 1}
    assert backend.batch_get(keys, memory.frames, deadline=soon()) == [HIT, MISS]


def test_a_page_whose_checksum_the_library_finds_wrong_is_corrupt(
    backend: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, client = make_keys(3), client_of(backend)
    store(backend, keys)
    get = client.get

    def wrong(names: list[str], *memory: list[list[int]]) -> list[int]:
        codes_found = zip(names, get(names, *memory), strict=True)
        return [codes.CHECKSUM if name.endswith(keys[1].hex()) else code for name, code in codes_found]

    monkeypatch.setattr(client, "get", wrong)
    assert backend.batch_get(keys, empty_frames(CODEC, 3), deadline=soon()) == [HIT, CORRUPT, HIT]
    assert dict(backend.statistics().corrupt) == {"checksum": 1}


def test_memory_may_be_registered_twice_and_is_checked(backend: Store) -> None:
    memory = Memory(CODEC, 2)
    backend.register_memory(memory.whole)
    backend.register_memory(memory.whole)
    for bad in (memoryview(b"read only"), memoryview(bytearray()), memory.whole[::2]):
        with pytest.raises(InvalidInput, match="contiguous, writable"):
            backend.register_memory(bad)
    with pytest.raises(BackendError, match="could not be registered"):  # a part of registered memory
        driver_of(backend, MooncakeDriver).register_memory(memory.whole[: CODEC.frame_bytes])
    assert dict(backend.statistics().errors) == {}
    backend.register_memory(memory.whole[: CODEC.frame_bytes])
    assert dict(backend.statistics().errors) == {"raised_registration": 1}


def test_two_backends_register_the_same_memory(master: MooncakeMaster, backend: Store) -> None:
    """As when new weights reopen a store: closing the old backend must not unregister memory of the new one."""
    keys, memory = make_keys(2), Memory(CODEC, 2)
    old = open_backend(master, FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES))
    assert isinstance(old, Store)
    old.register_memory(memory.whole)
    backend.register_memory(memory.whole)
    old.close()
    store(backend, keys)
    assert backend.batch_get(keys, memory.frames, deadline=soon()) == [HIT] * 2


def test_a_closed_backend_registers_no_memory(master: MooncakeMaster, here: Store) -> None:
    """The library ends a process that calls a closed client."""
    backend, memory = open_backend(master), Memory(CODEC, 1)
    backend.close()
    backend.register_memory(memory.whole)


def test_frames_take_the_direct_path_only_if_they_are_registered_and_nothing_hangs(master: MooncakeMaster) -> None:
    memory = Memory(CODEC, 5)
    pages = [[frame] for frame in memory.frames]
    with session_on(master, staging=3 * CODEC.frame_bytes) as session:
        paths = session.paths
        with paths.path(pages, soon()) as path:
            assert path.is_staged and len(path) == 3
            with pytest.raises(StoreError, match="no_buffer"), paths.path(pages, time.monotonic() + 0.05):
                pass
        session.paths.check()
        session.register(address_of(memory.whole), 4 * CODEC.frame_bytes)
        with paths.path(pages[:4], soon()) as path:
            assert not path.is_staged and len(path) == 4
        with paths.path(pages, soon()) as path:
            assert len(path) == 5
            assert [sizes == [CODEC.frame_bytes] for sizes in path.sizes] == [True] * 5
            assert path.addresses[:4] == [[address_of(frame)] for frame in memory.frames[:4]]
            assert path.addresses[4] != [address_of(memory.frames[4])]  # not registered: uses a bounce buffer
        paths.slow = True
        with paths.path(pages[:3], soon()) as path:
            assert path.is_staged


def test_after_a_slow_failure_frames_are_copied_until_pages_have_moved(master: MooncakeMaster) -> None:
    with session_on(master) as session:
        for result, is_slow in (
            ([0], False), ([-704], False), ([4096, -800], True), ([-704], True), ([4096], False), (None, True),
            ([0], False), ([-901], True),
        ):
            with contextlib.suppress(StoreError):
                session.noted(result)
            assert session.paths.slow is is_slow, result
        assert session.ask(lambda: [1], soon()) == [1]
        assert session.paths.slow  # an answer of the master proves nothing about the owners of pages
        session.noted([0])
        assert session.ask(lambda: [-901], soon()) == [-901]
        assert session.paths.slow


def test_a_bounce_buffer_is_waited_for_until_the_deadline(master: MooncakeMaster) -> None:
    with session_on(master, staging=1) as session:
        paths = session.paths
        assert paths.take(9, soon()) == [0]
        waiting = threading.Thread(target=lambda: paths.give_back(paths.take(1, soon())))
        waiting.start()
        assert paths.take(1, time.monotonic() + 0.01) == []
        paths.give_back([0])
        waiting.join()
        paths.check()


@pytest.fixture
def small() -> Iterator[Store]:
    """A backend with pages of 1 MiB, alone on a store of 16 MiB."""
    # The lease is longer than the backend waits for room, as is the server's default of 10 s.
    with MooncakeMaster(lease_ms=2000) as master:
        backend = open_backend(master, LARGE, segment=16 * MIB, staging=8 * MIB)
        assert isinstance(backend, Store)
        yield backend
        backend.close()


def test_a_batch_larger_than_the_store_keeps_its_head_and_has_no_holes(small: Store) -> None:
    keys = make_keys(24)
    outcomes = store(small, keys)
    stored = outcomes.count(STORED)
    assert 8 <= stored < 24
    assert outcomes == [STORED] * stored + [REJECTED] * (24 - stored)
    assert small.batch_exists(keys, deadline=soon()) == stored
    assert small.usage().pages == stored
    assert small.statistics().errors == {}


def test_a_full_store_makes_room_for_new_chains(small: Store) -> None:
    """When it lacks room, the server evicts the pages that were not used recently."""
    for number in range(6):
        keys = make_keys(6, f"chain {number}")
        wait_for(lambda keys=keys: all(o.is_stored for o in store(small, keys)))  # type: ignore[misc]
    assert small.batch_exists(make_keys(6, "chain 5"), deadline=soon()) == 6
    assert small.usage().bytes <= 16 * MIB
    assert small.usage().capacity_bytes == 16 * MIB


def test_a_growing_chain_is_not_evicted_for_its_own_tail(small: Store) -> None:
    keys = make_keys(24)
    head, tail = keys[:4], keys[4:]
    assert store(small, head) == [STORED] * 4
    assert small.batch_exists(head, deadline=soon()) == 4  # grants a lease, as a lookup of a prompt does
    outcomes = store(small, tail, parent=head[-1])
    stored = outcomes.count(STORED)
    assert outcomes == [STORED] * stored + [REJECTED] * (20 - stored)
    assert small.batch_exists(keys, deadline=soon()) == 4 + stored


def test_pages_behind_one_that_was_evicted_while_the_store_was_full_are_removed(
    backend: Store, door: SideDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, client = make_keys(4), client_of(backend)
    put = client.put

    def full_at_first(names: list[str], *memory: list[list[int]]) -> list[int]:
        monkeypatch.setattr(client, "put", put)
        found = put(names[:-1], *(part[:-1] for part in memory))
        assert door.client.remove(names[1], True) == 0
        return [*found, codes.NO_ROOM]

    monkeypatch.setattr(client, "put", full_at_first)
    assert store(backend, keys) == [STORED, REJECTED, REJECTED, REJECTED]
    assert backend.batch_has(keys, deadline=soon()) == [True, False, False, False]


def test_a_deletion_waits_for_the_lease_of_a_page_that_was_read(small: Store) -> None:
    """The lease is long enough for a busy machine to look up and delete within it."""
    backend, keys = small, make_keys(3)
    store(backend, keys)
    assert backend.batch_exists(keys[:2], deadline=soon()) == 2
    # Control: with less time than the lease, pages without a lease are removed and the others stay.
    assert backend.delete(keys, deadline=soon(0.5)) == 1
    assert backend.statistics().errors == {"leased": 2}
    assert backend.batch_get(keys, empty_frames(backend.codec, 3), deadline=soon()) == [HIT, HIT, MISS]
    assert backend.delete(keys, deadline=soon()) == 2


def test_a_damaged_page_is_removed_despite_its_lease(backend: Store, door: SideDoor) -> None:
    (key,), side = make_keys(1), door.store(backend)
    store(backend, [key])
    side.write(key, bytes(CODEC.frame_bytes))
    assert backend.batch_exists([key], deadline=soon()) == 1
    assert backend.batch_get([key], empty_frames(CODEC, 1), deadline=soon()) == [CORRUPT]
    assert side.read(key) is None
    assert backend.statistics().errors == {}


def test_the_last_backend_to_leave_removes_its_segment() -> None:
    with MooncakeMaster(lease_ms=LEASE_MS) as master:
        first, second = open_backend(master), open_backend(master)
        keys = make_keys(2)
        store(first, keys)
        first.close()
        assert second.batch_get(keys, empty_frames(CODEC, 2), deadline=soon()) == [HIT] * 2
        second.close()
        third = open_backend(master)
        assert third.batch_get(keys, empty_frames(CODEC, 2), deadline=soon()) == [MISS] * 2
        third.close()


def test_a_new_session_takes_over_and_the_unused_old_one_is_closed(
    master: MooncakeMaster, here: Store
) -> None:
    made: list[ClientSession] = []

    def make() -> ClientSession:
        made.append(ClientSession(CODEC.frame_bytes, driver_of(here, MooncakeDriver).options))
        return made[-1]

    sessions = SessionManager(make)
    with sessions.use() as old:
        sessions.renew(old)
        wait_for(lambda: sessions.current is not old)
        assert old.retired and sessions.current is made[1]
        sessions.renew(old)  # done already
        assert old.client.exist(["nothing"]) == [0]  # still in use
    with sessions.use() as new:
        assert new is made[1] and new.client is not old.client
    assert sessions.close(timeout_s=30.0)
    assert len(made) == 2
    name = "hicache-mooncake-session"
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith(name)])


class Leavable:
    """A session that counts calls of `leave`."""

    def __init__(self) -> None:
        self.users = self.left = 0
        self.retired = False
        self.client = self

    def forget(self) -> None:
        pass

    def leave(self) -> None:
        self.left += 1


def test_a_bug_while_a_new_session_is_made_does_not_end_the_attempts() -> None:
    clock = ManualClock()
    first: Any = Leavable()
    second: Any = Leavable()
    to_make = [second, None, first]

    def make() -> Any:
        session = to_make.pop()
        if session is None:
            raise RuntimeError("a bug")
        return session

    sessions = SessionManager(make, clock)
    sessions.renew(first)
    wait_for(lambda: sessions._workers.errors == {"RuntimeError": 1})
    sessions.renew(first)
    assert to_make == [second], "the next attempt is not due yet"
    clock.advance(RENEW_EVERY_S)
    sessions.renew(first)
    wait_for(lambda: sessions.current is second)
    wait_for(lambda: first.left == 1)
    sessions._replace(first)  # requested twice while the first replacement was in progress
    assert sessions.close(timeout_s=30.0) and first.left == second.left == 1


@pytest.mark.parametrize(
    ("code", "name", "is_slow"),
    [(-800, "transfer", True), (-900, "connection_lost", True), (-901, "timeout", True), (-706, "leased", False),
     (-200, "no_space", False), (-99999, "server_error", False)],
)
def test_codes_have_error_kinds(code: int, name: str, is_slow: bool) -> None:
    assert (codes.kind_of(code), codes.is_slow(code)) == (name, is_slow)


@pytest.mark.parametrize("answer", [None, 3, "ab", [], [0], [0, 0, 0], [0, None], [0, "1"], [0, True], [0, 1.5]])
def test_an_answer_that_is_not_a_number_for_each_key_is_an_error_of_each(answer: object) -> None:
    found = codes.checked(answer, 2)
    assert [codes.kind_of(code) for code in found] == ["protocol"] * 2
    assert codes.checked([0, -704], 2) == [0, -704], "the control"


@pytest.mark.parametrize(
    ("option", "value"),
    [("master", "nowhere"), ("master", "host:0"), ("master", "host:99999"), ("daemon", ":1"), ("admin", "host:x"),
     ("host", ""), ("protocol", 3), ("devices", None), ("prefix", "a b"), ("prefix", "a,b"), ("prefix", "x" * 129),
     ("segment", -1), ("segment", "much"), ("staging", 0), ("timeout", 0), ("timeout", True),
     ("timeout", 61), ("timeout", "soon")],
)
def test_invalid_options_are_rejected(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        MooncakeStorageOptions(**{option: value})


def test_the_configuration_passes_its_options_to_the_backend() -> None:
    chosen = {"master": "kv-master:50051", "segment": "2GiB", "timeout": "500ms"}
    overrides = {"storage.type": "mooncake", **{f"storage.options.{name}": value for name, value in chosen.items()}}
    config = load_config(None, environ={}, overrides=overrides)
    assert isinstance(config.storage, MooncakeStorage)
    options = config.storage.options
    assert (options.master, options.segment, options.timeout) == ("kv-master:50051", 2048 * MIB, 0.5)
    assert admin_address(options) == ("kv-master", 9003)
