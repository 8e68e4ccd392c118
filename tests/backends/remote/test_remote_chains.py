"""What the daemon's store learns from requests: the parent of each page, and pages without room. And replies of a read
that do not have the requested pages."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.remote import RemoteDriver
from hicache.backends.storage import Storage
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.frame import FrameCodec
from hicache_lab.conformance import GET_ERROR, HIT, MISS, STORED, full_frames, load, make_keys, soon, store_of
from hicache_lab.devservers.ports import LOOPBACK
from tests.backends.remote.daemon import CODEC, Daemon, Frames, ThroughFrames
from tests.listening import Listener
from tests.waiting import wait_for

PAGE = CODEC.frame_bytes
WAYS = ["frames", "bodies", "bodies over several connections"]


# The least capacity of a store in a configuration.
ROOM = (1 << 20) // PAGE


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose store has room for few pages."""
    options = {"path": str(tmp_path / "store"), "capacity": "1MiB", "free_space_floor": 0}
    with Daemon(tmp_path, storage={"type": "file", "options": options}) as made:
        yield made


@pytest.fixture
def frames() -> Iterator[Frames]:
    made = Frames(ROOM + 2)
    yield made
    made.close()


@contextlib.contextmanager
def opened(daemon: Daemon, frames: Frames, way: str) -> Iterator[Storage]:
    options = daemon.options(connections=3 if way.endswith("connections") else 1)
    driver = (ThroughFrames, frames) if way == "frames" else (RemoteDriver,)
    with contextlib.closing(store_of(driver[0], CODEC, options, *driver[1:])) as backend:
        yield backend


def parents(daemon: Daemon, backend: Storage, keys: list[bytes]) -> dict[bytes, bytes | None]:
    """Return the parent of each of these pages in the index of the daemon's store."""
    (path,) = daemon.store.glob("index-*.sqlite")
    found: dict[bytes, bytes | None] = {}

    def has_rows() -> bool:
        backend.usage()  # a transaction of the store, which adds the rows
        with contextlib.closing(sqlite3.connect(path)) as db:
            found.update(db.execute("SELECT key, parent FROM pages"))
        return found.keys() >= set(keys)

    wait_for(has_rows)
    return {key: found[key] for key in keys}


@pytest.mark.parametrize("way", WAYS)
def test_the_store_of_a_daemon_knows_the_parent_of_each_page(daemon: Daemon, frames: Frames, way: str) -> None:
    """Otherwise it would evict heads before tails. The second batch follows the first one, and has a branch."""
    one, two, three, four, five, six = keys = make_keys(6, way)
    with opened(daemon, frames, way) as backend:
        for part, parent in (([one, two], None), ([three, four, three, five, six], two)):
            pages = full_frames(CODEC, part)
            assert not {*backend.batch_set(part, pages, parent=parent, deadline=soon())} - {STORED, SetOutcome.PRESENT}
        assert dict(backend.statistics().errors) == {}
        assert parents(daemon, backend, keys) == {one: None, two: one, three: two, four: three, five: three, six: five}
        assert backend.batch_exists(keys, deadline=soon()) == 6


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_page_without_room_at_the_daemon_is_rejected_and_is_not_an_error(
    small: Daemon, frames: Frames, way: str
) -> None:
    keys = make_keys(ROOM + 2, way)
    with opened(small, frames, way) as backend:
        outcomes = backend.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=soon())
        assert outcomes == [STORED] * ROOM + [SetOutcome.REJECTED] * 2
        assert dict(backend.statistics().errors) == {}
        assert load(small.door(backend), keys) == [HIT] * ROOM + [MISS] * 2


class LyingDaemon(Listener):
    """A daemon that answers each read with the bytes `body`."""

    def __init__(self) -> None:
        self.body = b""
        super().__init__(self._answer)

    def _answer(self, client: socket.socket, number: int) -> None:
        with client.makefile("rb") as stream:
            while first := stream.readline():
                length = 0
                while (line := stream.readline().lower()) != b"\r\n":
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                stream.read(length)
                fields = {"frame_bytes": PAGE, "body_pages_max": 8}
                body = self.body if b"/read" in first else json.dumps(fields).encode()
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


def sealed(codec: FrameCodec, keys: list[bytes]) -> bytes:
    pages = zip(keys, full_frames(codec, keys), [None, *keys], strict=False)
    return b"".join(bytes(codec.seal(key, page, parent=parent)) for key, page, parent in pages)


def test_a_reply_with_other_pages_than_requested_is_an_error() -> None:
    keys = make_keys(2)
    pages = sealed(CODEC, keys)
    with LyingDaemon() as daemon:
        options = RemoteStorageOptions(url=f"http://{LOOPBACK}:{daemon.port}", connections=1)
        with contextlib.closing(store_of(RemoteDriver, CODEC, options)) as backend:
            for wrong in (
                b"HH" + pages[:PAGE], b"HH" + pages + b"x", b"HH" + pages + pages, b"HM" + pages, b"MM" + pages,
                b"H?" + pages[:PAGE], b"H", b"",
            ):
                daemon.body = wrong
                frames = full_frames(CODEC, keys)
                assert backend.batch_get(keys, frames, deadline=soon()) == [GET_ERROR] * 2, wrong[:3]
            assert set(backend.statistics().errors) == {"protocol"}
            for right, outcomes in ((b"HH" + pages, [HIT, HIT]), (b"HM" + pages[:PAGE], [HIT, MISS])):
                daemon.body = right
                assert backend.batch_get(keys, full_frames(CODEC, keys), deadline=soon()) == outcomes
