"""A daemon that hangs, dies or loses connections: no late byte enters or leaves a frame, and engines continue with
misses and use the daemon again as soon as it is back."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pytest

from hicache.backends.base import GetOutcome
from hicache.backends.errors import ErrorKind
from hicache.backends.remote import RemoteDriver
from hicache.backends.remote.frames import SharedFrames
from hicache.backends.store import Store
from hicache.frame import Damage, FrameCodec, stored_time
from hicache_lab.conformance import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    SET_ERROR,
    STORED,
    driver_of,
    exists,
    full_frames,
    holds,
    load,
    make_keys,
    soon,
    store_chain,
    store_of,
)
from tests.backends.remote.daemon import CODEC, Daemon, Frames
from tests.clocks import At
from tests.proxy import Proxy
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.long

OTHER_CODEC = FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES)
POISON = b"\xee" * CODEC.frame_bytes
# Long enough for a test to disturb a call in flight.
LATENCY = "700ms"


@pytest.fixture(scope="module")
def slow(folder: Path) -> Iterator[Daemon]:
    """A daemon with a slow store."""
    place = folder / "slow"
    place.mkdir()
    with Daemon(place, faults={"latency": LATENCY}) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that the test may kill."""
    with Daemon(tmp_path) as made:
        yield made


class OpenIt(Protocol):
    def __call__(self, daemon: Daemon, socket: Path | None = None) -> Store: ...


@pytest.fixture
def open_it(frames: Frames) -> Iterator[OpenIt]:
    """Open a backend on a daemon, with the memory of `frames`. Closed after the test."""
    with contextlib.ExitStack() as opened:

        def open_one(daemon: Daemon, socket: Path | None = None) -> Store:
            options = daemon.options() if socket is None else daemon.options().model_copy(update={"socket": socket})
            backend = opened.enter_context(contextlib.closing(store_of(RemoteDriver, CODEC, options)))
            backend.register_memory(frames.memory.frames)
            return backend

        yield open_one


def poison(frames: Frames, count: int) -> list[memoryview]:
    views = [frames.frame(number) for number in range(count)]
    for view in views:
        view[:] = POISON
    return views


def operations(daemon: Daemon) -> int:
    """Return the number of the daemon's operations that touch an engine's frames."""
    return sum(client["operations"] for client in daemon.status()["clients"])


def test_pages_in_shared_memory_travel_as_frame_numbers_and_others_as_bodies(
    daemon: Daemon, frames: Frames, open_it: OpenIt
) -> None:
    backend, keys = open_it(daemon), make_keys(4, "numbers")
    views = poison(frames, 2)
    for view, page in zip(views, full_frames(CODEC, keys[:2]), strict=True):
        view[:] = page
    before = daemon.requests()
    pages = [views[0], *full_frames(CODEC, keys[2:3]), views[1], *full_frames(CODEC, keys[3:])]
    assert backend.batch_set([keys[0], keys[2], keys[1], keys[3]], pages, parent=None, deadline=soon()) == [STORED] * 4
    assert backend.batch_get(keys[:2], poison(frames, 2), deadline=soon()) == [HIT] * 2
    assert holds(CODEC, keys[0], frames.frame(0)) and holds(CODEC, keys[1], frames.frame(1))
    after = daemon.requests()
    asked = {verb: after.get(verb, 0) - before.get(verb, 0) for verb in ("get", "set", "read", "write")}
    assert asked == {"get": 1, "set": 2, "read": 0, "write": 2}
    assert load(daemon.door(backend), [keys[0], keys[2], keys[1], keys[3]]) == [HIT] * 4


def test_one_frame_for_two_pages_of_a_call_is_not_shared(daemon: Daemon, frames: Frames, open_it: OpenIt) -> None:
    """Two pages of one request must not move through one frame; such a caller gets the last page."""
    backend, keys = open_it(daemon), make_keys(2, "twice")
    assert store_chain(daemon.door(backend), keys) == [STORED] * 2
    (view,) = poison(frames, 1)
    assert backend.batch_get(keys, [view, view], deadline=soon()) == [HIT] * 2
    assert holds(CODEC, keys[1], view)
    assert dict(backend.statistics().errors) == {}


@pytest.mark.parametrize("is_fenced", [True, False])
@pytest.mark.parametrize("verb", ["get", "set"])
def test_a_call_without_an_answer_returns_when_the_daemon_has_released_its_frames(
    slow: Daemon, frames: Frames, open_it: OpenIt, monkeypatch: pytest.MonkeyPatch, verb: str,
    is_fenced: bool,
) -> None:
    """Without the fence (the control) the call returns at once, while the daemon still works in reused frames."""
    if not is_fenced:
        monkeypatch.setattr(SharedFrames, "fence", lambda self, mapping: self.forget(mapping))
    with Proxy(slow.socket) as proxy:
        backend = open_it(slow, proxy.path)
        keys = make_keys(4, f"cut {verb} {is_fenced}")
        if verb == "get":
            assert store_chain(slow.door(backend), keys) == [STORED] * 4
        views = poison(frames, 4)
        call: Future[Any]
        if verb == "get":
            call = ThreadPoolExecutor(1).submit(lambda: backend.batch_get(keys, views, deadline=soon()))
        else:
            for view, page in zip(views, full_frames(CODEC, keys), strict=True):
                view[:] = page
            call = ThreadPoolExecutor(1).submit(lambda: backend.batch_set(keys, views, parent=None, deadline=soon()))
        wait_for(lambda: operations(slow) == 1)
        proxy.drop()
        answer = call.result(WAIT_S)
        assert (operations(slow) == 0) is is_fenced
        poison(frames, 4)
        wait_for(lambda: operations(slow) == 0)
        if verb == "get":
            assert answer == [GET_ERROR] * 4
            assert all(bytes(view) == POISON for view in views) is is_fenced
        else:
            assert answer == [SET_ERROR] * 4
            right = [slow.door(backend).read(key) for key in keys]
            clocks = [At(stored_time(page or POISON)) for page in right]
            codecs = [FrameCodec(CODEC.namespace, CODEC.payload_bytes, clock=clock) for clock in clocks]
            expected = [bytes(codec.seal(key, page, parent=above)) for codec, key, page, above in
                        zip(codecs, keys, full_frames(CODEC, keys), [None, *keys], strict=False)]
            assert (right == expected) is is_fenced
        assert backend.statistics().errors[ErrorKind.CONNECTION_LOST] == 4
        assert exists(slow.door(backend), keys) in (0, 4)


def test_a_call_waits_for_a_hanging_daemon(own: Daemon, frames: Frames, open_it: OpenIt) -> None:
    """The daemon reads the request when it continues, and rejects it: the memory was detached."""
    backend, keys = open_it(own), make_keys(4)
    assert store_chain(own.door(backend), keys) == [STORED] * 4
    views = poison(frames, 4)
    own.pause()
    call = ThreadPoolExecutor(1).submit(lambda: backend.batch_get(keys, views, deadline=soon(0.1)))
    with pytest.raises(TimeoutError):  # otherwise it has returned while the daemon can still read its request
        call.result(1.0)
    own.signal(signal.SIGCONT)
    assert call.result(WAIT_S) in ([GET_ERROR] * 4, [HIT] * 4)
    poison(frames, 4)
    assert load(own.door(backend), keys) == [HIT] * 4
    wait_for(lambda: operations(own) == 0)
    assert all(bytes(view) == POISON for view in views)
    assert backend.batch_get(keys, views, deadline=soon()) == [HIT] * 4, "mapped again"


def test_a_daemon_that_is_killed_costs_misses_until_it_is_back(own: Daemon, frames: Frames, open_it: OpenIt) -> None:
    backend, keys = open_it(own), make_keys(4)
    assert store_chain(own.door(backend), keys) == [STORED] * 4
    own.pause()
    views = poison(frames, 4)
    call = ThreadPoolExecutor(1).submit(lambda: backend.batch_get(keys, views, deadline=soon(0.1)))
    with pytest.raises(TimeoutError):
        call.result(0.5)
    own.kill()
    assert call.result(WAIT_S) == [GET_ERROR] * 4
    assert all(bytes(view) == POISON for view in views)
    door = own.door(backend)
    assert (load(door, keys), exists(door, keys), store_chain(door, keys)) == ([GET_ERROR] * 4, 0, [SET_ERROR] * 4)
    assert backend.batch_get(keys, views, deadline=soon()) == [GET_ERROR] * 4
    errors = backend.statistics().errors
    assert errors[ErrorKind.CONNECTION_REFUSED] + errors.get(ErrorKind.UNREACHABLE, 0) >= 13
    own.start()
    assert (load(door, keys), exists(door, keys)) == ([HIT] * 4, 4)

    def read() -> None:
        assert backend.batch_get(keys, views, deadline=soon()) == [HIT] * 4

    # After the daemon failed to map the memory, pages travel as bodies for a moment, then by frame numbers again.
    wait_for(lambda: own.requests().get("get", 0) >= 1, read)
    assert all(holds(CODEC, key, view) for key, view in zip(keys, views, strict=True))


def test_a_daemon_that_was_restarted_between_two_calls_costs_nothing(
    own: Daemon, frames: Frames, open_it: OpenIt
) -> None:
    backends, keys = [open_it(own) for _ in range(4)], make_keys(4)
    views = poison(frames, 4)
    assert store_chain(own.door(backends[0]), keys) == [STORED] * 4
    own.kill()
    own.start()
    assert backends[0].batch_get(keys, views, deadline=soon()) == [HIT] * 4
    assert load(own.door(backends[1]), keys) == [HIT] * 4
    assert exists(own.door(backends[2]), keys) == 4
    assert backends[3].usage().pages == 4
    assert [dict(backend.statistics().errors) for backend in backends] == [{}] * 4


def test_a_frame_with_another_page_than_the_requested_one_is_an_error_and_the_page_stays(
    daemon: Daemon, frames: Frames, open_it: OpenIt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame does not hold the requested page, though the daemon reports a hit."""
    backend, keys = open_it(daemon), make_keys(2, "damaged")
    assert store_chain(daemon.door(backend), keys) == [STORED] * 2
    client = driver_of(backend, RemoteDriver)._client
    call = client.call

    def answer(method: str, path: str, *body: Any, **options: Any) -> Mapping[str, Any]:
        found = call(method, path, *body, **options)
        if path.endswith("/get"):
            frames.frame(1)[60] ^= 1
        return found

    monkeypatch.setattr(client, "call", answer)
    views = poison(frames, 2)
    assert backend.batch_get(keys, views, deadline=soon()) == [HIT, GetOutcome.ERROR]
    found = backend.statistics()
    assert (dict(found.corrupt), dict(found.errors)) == ({}, {"protocol": 1})
    assert load(daemon.door(backend), keys) == [HIT, HIT]


class Distrustful(FrameCodec):
    """Finds every page damaged whose header is the page's."""

    def accept(self, key: bytes, page: Any, stored_bytes: int, arrived: Any = None) -> Damage:
        return super().accept(key, page, stored_bytes, arrived) or Damage.TAG


def test_a_daemon_that_answers_for_another_namespace_loses_no_page(
    daemon: Daemon, frames: Frames, open_it: OpenIt
) -> None:
    """In frames and in bodies. The control: a page with its own header and wrong bytes is removed."""
    backend, keys = open_it(daemon), make_keys(2, "another")
    with contextlib.closing(store_of(RemoteDriver, OTHER_CODEC, daemon.options())) as other:
        for store, codec in (backend, CODEC), (other, OTHER_CODEC):
            assert store.batch_set(keys, full_frames(codec, keys), parent=None, deadline=soon()) == [STORED] * 2
        driver, path = driver_of(backend, RemoteDriver), driver_of(other, RemoteDriver)._path
        own, driver._path = driver._path, path
        assert backend.batch_get(keys, poison(frames, 2), deadline=soon()) == [GET_ERROR] * 2
        assert load(daemon.door(backend), keys) == [GET_ERROR] * 2
        driver._path = own
        assert load(daemon.door(backend), keys) == [HIT] * 2
        assert dict(backend.statistics().errors) == {"protocol": 4}
    with contextlib.closing(store_of(RemoteDriver, Distrustful(NAMESPACE, PAYLOAD_BYTES), daemon.options())) as third:
        assert load(daemon.door(third), keys) == [CORRUPT] * 2
        assert load(daemon.door(backend), keys) == [MISS] * 2


@pytest.mark.parametrize("wrong", ["stored", "", None, 1, ["hit"], {"hit": 1}], ids=repr)
def test_an_outcome_that_does_not_exist_is_an_error_of_the_protocol(
    daemon: Daemon, frames: Frames, open_it: OpenIt, monkeypatch: pytest.MonkeyPatch, wrong: object
) -> None:
    backend, keys = open_it(daemon), make_keys(2, f"outcome {wrong}")
    assert store_chain(daemon.door(backend), keys) == [STORED] * 2
    client = driver_of(backend, RemoteDriver)._client
    call = client.call

    def answer(method: str, path: str, *body: Any, **options: Any) -> Mapping[str, Any]:
        found = call(method, path, *body, **options)
        return {**found, "outcomes": ["hit", wrong]} if path.endswith("/get") else found

    monkeypatch.setattr(client, "call", answer)
    assert backend.batch_get(keys, poison(frames, 2), deadline=soon()) == [GET_ERROR] * 2
    assert dict(backend.statistics().errors) == {"protocol": 2}


def test_a_child_of_a_fork_uses_no_connection_of_its_parent(daemon: Daemon, frames: Frames, open_it: OpenIt) -> None:
    backend, keys = open_it(daemon), make_keys(2, "fork")
    store_chain(daemon.door(backend), keys)
    child = os.fork()
    if not child:
        is_refused = exists(daemon.door(backend), keys) == 0 and dict(backend.statistics().errors) == {"forked": 1}
        os._exit(0 if is_refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert exists(daemon.door(backend), keys) == 2


def test_the_outcomes_of_a_late_call_are_errors(slow: Daemon, frames: Frames, open_it: OpenIt) -> None:
    backend, keys = open_it(slow), make_keys(2, "late")
    views = poison(frames, 2)
    assert backend.batch_get(keys, views, deadline=soon(0.1)) == [GET_ERROR] * 2
    assert backend.batch_set(keys, views, parent=None, deadline=soon(0.1)) == [SET_ERROR] * 2
    assert sum(backend.statistics().errors.values()) >= 4
