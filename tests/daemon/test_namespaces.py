"""Namespaces of many weights epochs, and of several engines: their stores, threads and descriptors."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.backends.remote import RemoteDriver
from hicache.backends.store import Store
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.frame import FrameCodec
from hicache_lab.conformance import HIT, MISS, STORED, exists, full_frames, load, make_keys, soon, store_of
from tests.backends._subjects import doorless
from tests.daemon.process import Daemon
from tests.waiting import wait_for

PAYLOAD_BYTES = 12000
UPDATES = 100
# Threads and descriptors of the eight stores without engines that stay open, and of the daemon's own pools of threads.
# A hundred open namespaces have about 600 and 400.
SLACK = 80


@pytest.fixture
def daemon(scratch: Path) -> Iterator[Daemon]:
    """A daemon over a file store that keeps at most 16 namespaces."""
    options = {"path": str(scratch / "store"), "capacity": None, "free_space_floor": "0B"}
    with Daemon(scratch, {"type": "file", "options": options}, pool="4MiB", namespaces_max=16) as made:
        yield made


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[[int], Store]]:
    """A function that opens the backend of an engine for a weights epoch."""
    with contextlib.ExitStack() as opened:

        def make(epoch: int) -> Store:
            namespace = hashlib.sha256(f"epoch {epoch}".encode()).digest()
            codec = FrameCodec(namespace, PAYLOAD_BYTES, weights_epoch=epoch)
            return opened.enter_context(
                contextlib.closing(store_of(RemoteDriver, codec, RemoteStorageOptions(socket=daemon.socket)))
            )

        yield make


def stores(daemon: Daemon) -> list[int]:
    """Return the number of open stores of each namespace."""
    return [len(one["stores"]) for one in daemon.status()["namespaces"]]


def put(backend: Store, keys: list[bytes]) -> None:
    frames = full_frames(backend.codec, keys)
    assert backend.batch_set(keys, frames, parent=None, deadline=soon()) == [STORED] * len(keys)


@pytest.mark.long
def test_many_weight_updates_keep_storage_and_neither_threads_nor_descriptors(
    daemon: Daemon, engine: Callable[[int], Store]
) -> None:
    backend, keys = engine(0), make_keys(3)
    put(backend, keys)
    before = daemon.resources()
    for epoch in range(1, UPDATES + 1):  # an engine opens the new store, and closes the old one when its calls ended
        old, backend = backend, engine(epoch)
        assert load(doorless(backend), keys) == [MISS] * 3
        put(backend, keys)
        old.close()
    assert load(doorless(backend), keys) == [HIT] * 3
    wait_for(lambda: daemon.resources().threads <= before.threads + SLACK)
    wait_for(lambda: daemon.resources().descriptors <= before.descriptors + SLACK)
    wait_for(lambda: sum(stores(daemon)) <= 9)


@pytest.mark.long
def test_engines_that_do_not_release_their_namespaces_keep_storage(
    daemon: Daemon, engine: Callable[[int], Store]
) -> None:
    """The least recently used namespace gives way at once; its engine opens it again with its next call."""
    keys, backends = make_keys(2), [engine(epoch) for epoch in range(20)]
    for backend in backends:
        put(backend, keys)
    assert len(daemon.status()["namespaces"]) == 16
    for backend in backends:
        assert load(doorless(backend), keys) == [HIT] * 2


@pytest.mark.long
def test_the_store_of_a_namespace_without_engines_is_closed_when_others_were_used_since_and_its_pages_stay(
    daemon: Daemon, engine: Callable[[int], Store]
) -> None:
    first, second, keys = engine(0), engine(0), make_keys(3)
    put(first, keys)
    first.close()
    for epoch in range(1, 11):
        other = engine(epoch)
        put(other, keys)
        other.close()
    wait_for(lambda: sum(stores(daemon)) == 9)
    assert stores(daemon)[:3] == [1, 0, 0], "an engine still uses the first one"
    second.close()
    wait_for(lambda: sum(stores(daemon)) == 8)
    assert stores(daemon)[0] == 0, "it was used before all others"
    found = daemon.status()["namespaces"][0]
    assert found["pool_bytes"] > 0 and found["opening"] is None
    third, more = engine(0), make_keys(4)
    assert stores(daemon)[0] == 1, "the store is open when the call returns"
    assert (exists(doorless(third), more), load(doorless(third), keys)) == (3, [HIT] * 3)


def test_an_engine_without_a_name_keeps_the_store_open(daemon: Daemon, engine: Callable[[int], Store]) -> None:
    """An engine of an earlier version does not send a name, and does not release its namespace."""
    backend = engine(0)
    body = {"payload_bytes": PAYLOAD_BYTES, "weights_epoch": 0, "label": ""}
    path = f"/v1/namespaces/{backend.codec.namespace.hex()}"
    assert daemon.call("PUT", path, body)[0] == 200
    backend.close()
    assert daemon.call("DELETE", f"{path}?engine=")[0] == 200
    assert stores(daemon) == [1]
    assert daemon.call("DELETE", f"/v1/namespaces/{'00' * 32}?engine=ab")[0] == 404
