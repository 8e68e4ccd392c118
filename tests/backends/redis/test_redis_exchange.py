"""Batches that the native helper moves, beside the same batches moved in Python."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.errors import ErrorKind
from hicache.backends.redis import channel as channels
from hicache.backends.redis.channel import VERIFIED, Batch, Channel
from hicache.backends.redis.errors import ErrorReply
from hicache.frame import FrameCodec, unseal
from hicache_lab.conformance import GET_ERROR, HIT, NAMESPACE, full_frames, in_parts, make_keys, soon
from hicache_lab.devservers import ValkeyServer
from tests.proxy import Direction, Faults, Proxy

from .store import CODEC, PAGE, name_of, opened
from .test_redis_wire import cut, feed, peers

pytestmark = pytest.mark.skipif(channels._exchange_pages is None, reason="needs the native helper")

LARGE = FrameCodec(NAMESPACE, 700_000)
_BORDERS = st.lists(st.integers(0, 50_000))
OTHERS = {
    "error": b"-WRONGTYPE no\r\n", "short": b"$3\r\nabc\r\n", "integer": b":1\r\n",
    "odd": b"$4097\r\n" + bytes(4097) + b"\r\n",
}


@contextlib.contextmanager
def moved_by(way: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if way == "python":
            patch.setattr(channels, "_exchange_pages", None)
        yield


def reads(keys: list[bytes], pages: list[memoryview], codec: FrameCodec = CODEC) -> Batch:
    return ([b"get"] * len(keys), [[page] for page in pages], [], keys, None, codec.fields())


def exchange(channel: Channel, batch: Batch, depth: int = 128, seconds: float = 60.0) -> tuple[Any, int, Any]:
    return channel.exchange(batch, 0, 0, depth, soon(seconds))


@given(st.lists(st.sampled_from(["page", "other key", "none"]), max_size=12), _BORDERS, st.sampled_from([CODEC, LARGE]))
def test_replies_are_received_whole_however_the_bytes_arrive(
    kinds: list[str], borders: list[int], codec: FrameCodec
) -> None:
    keys = make_keys(len(kinds))
    frames, other = full_frames(codec, keys), make_keys(1, "other")[0]
    for key, frame, kind in zip(keys, frames, kinds, strict=True):
        codec.seal(key if kind == "page" else other, frame)
    size = codec.frame_bytes
    replies = [b"$-1\r\n" if kind == "none" else b"$%d\r\n%b\r\n" % (size, bytes(frame))
               for kind, frame in zip(kinds, frames, strict=True)]
    into = [memoryview(bytearray(size)) for _ in keys]
    with peers() as (channel, theirs):
        sender = feed(theirs, cut(b"".join(replies), borders))
        found, sent, failure = exchange(channel, reads(keys, into, codec))
        outcomes = {"page": VERIFIED, "other key": size, "none": None}
        assert (found, sent, failure) == ([outcomes[kind] for kind in kinds], len(kinds), None)
        assert channel.reusable
        sender.join()
    for kind, frame, page in zip(kinds, frames, into, strict=True):
        assert page == (bytes(size) if kind == "none" else frame)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("before", [0, 3])
def test_it_stops_before_another_reply_and_python_goes_on_there(kind: str, before: int) -> None:
    keys = make_keys(before + 3)
    frames = full_frames(CODEC, keys)
    for key, frame in zip(keys, frames, strict=True):
        CODEC.seal(key, frame)
    values = [b"$%d\r\n%b\r\n" % (PAGE, bytes(frame)) for frame in frames]
    values[before] = OTHERS[kind]
    into = [memoryview(bytearray(PAGE)) for _ in keys]
    with peers() as (channel, theirs):
        sender = feed(theirs, [b"".join(values)])
        found, sent, failure = exchange(channel, reads(keys, into))
        assert (found, sent, failure) == ([VERIFIED] * before, len(keys), None)
        reply = channel.read_reply(soon())
        assert {"error": isinstance(reply, ErrorReply), "short": reply == b"abc", "integer": reply == 1,
                "odd": reply == bytes(4097)}[kind]
        rest: Batch = ([], [[page] for page in into[before + 1 :]], [], keys[before + 1 :], None, CODEC.fields())
        assert channel.exchange(rest, 2, 0, 128, soon()) == ([VERIFIED] * 2, 0, None)
        assert channel.reusable
        sender.join()


def test_at_most_the_depth_is_in_flight() -> None:
    """The server counts the requests that have come before it replies to the first of them."""
    keys, most = make_keys(20), 0
    with peers() as (channel, theirs):

        def serve() -> None:
            nonlocal most
            waiting = replied = 0
            while replied < len(keys):
                waiting += len(theirs.recv(4096))
                most = max(most, waiting // len(b"get"))
                theirs.sendall(b"$-1\r\n")
                replied += 1
                waiting -= len(b"get")
                while replied < len(keys) and waiting:
                    theirs.sendall(b"$-1\r\n")
                    replied += 1
                    waiting -= len(b"get")

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        pages = [memoryview(bytearray(PAGE)) for _ in keys]
        assert exchange(channel, reads(keys, pages), depth=4) == ([None] * 20, 20, None)
        server.join()
    assert most <= 4


@pytest.mark.parametrize(
    ("timeout_s", "seconds", "kind"), [(0.05, 60.0, ErrorKind.TIMEOUT), (60.0, 0.05, ErrorKind.DEADLINE)]
)
@pytest.mark.parametrize(
    "start", [b"", b"$", b"$4096", b"$4096\r\n", b"$4096\r\nabc", b"$-1\r\n", b"$-1\r\n$4096\r\nabc"]
)
def test_a_hanging_peer_ends_the_batch_in_time(timeout_s: float, seconds: float, kind: ErrorKind, start: bytes) -> None:
    keys = make_keys(3)
    codec = FrameCodec(NAMESPACE, 3000)
    with peers(timeout_s) as (channel, theirs):
        theirs.sendall(start)
        pages = [memoryview(bytearray(codec.frame_bytes)) for _ in keys]
        found, sent, failure = exchange(channel, reads(keys, pages, codec), seconds=seconds)
        assert (found, sent) == ([None] * start.startswith(b"$-1"), 3)
        assert failure.kind is kind and not channel.reusable


def test_a_batch_to_a_peer_that_does_not_read_ends_in_time() -> None:
    keys = make_keys(20)
    codec = FrameCodec(NAMESPACE, 4 << 20)
    pages = [[frame] for frame in full_frames(codec, keys)]
    batch: Batch = ([b"h"] * 20, pages, [b"t"] * 20, keys, [None, *keys[:-1]], codec.fields())
    with peers(0.05) as (channel, _):
        found, sent, failure = exchange(channel, batch)
        assert (found, sent) == ([], 1)
        assert failure.kind is ErrorKind.TIMEOUT and not channel.reusable


@pytest.mark.parametrize(("end", "kind"), [(b"", ErrorKind.CONNECTION_LOST), (b"xx", ErrorKind.PROTOCOL)])
def test_a_value_that_ends_wrongly_is_a_failure(end: bytes, kind: ErrorKind) -> None:
    keys = make_keys(2)
    with peers() as (channel, theirs):
        theirs.sendall(b"$-1\r\n" + b"$%d\r\n%b" % (PAGE, bytes(PAGE)) + end)
        theirs.shutdown(socket.SHUT_WR)
        found, _, failure = exchange(channel, reads(keys, [memoryview(bytearray(PAGE)) for _ in keys]))
        assert found == [None] and failure.kind is kind and not channel.reusable


def test_the_error_that_a_server_sends_before_it_closes_is_the_failure_of_a_write() -> None:
    keys = make_keys(8)
    codec = FrameCodec(NAMESPACE, 4 << 20)
    pages = [[one] for one in full_frames(codec, keys)]
    batch: Batch = ([b"h"] * 8, pages, [b"t"] * 8, keys, [None] * 8, codec.fields())
    with peers() as (channel, theirs):

        def refuse() -> None:
            theirs.recv(1000)
            theirs.sendall(b"-ERR Protocol error: invalid bulk length\r\n")
            theirs.close()

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        found, _, failure = exchange(channel, batch, depth=2)
        thread.join()
        assert found == [] and failure.kind is ErrorKind.TOO_LARGE


@pytest.mark.parametrize("codec", [CODEC, LARGE, FrameCodec(NAMESPACE, 5000, mac_keys=[b"k" * 32])])
@pytest.mark.parametrize("parts", [0, 3])
def test_both_ways_store_the_same_bytes_and_find_the_same(valkey: ValkeyServer, codec: FrameCodec, parts: int) -> None:
    """Pages are written by one way and read by the other, some damaged, missing, of another length or type."""
    keys = make_keys(40)
    seen = []
    for write, read in (("native", "python"), ("python", "native")):
        with opened(valkey, codec) as (backend, _), valkey.client() as client:
            frames = full_frames(codec, keys)
            pages = [in_parts(codec, frame, parts) if parts else frame for frame in frames]
            with moved_by(write):
                stored = backend.batch_set(keys[:30], pages[:30], parent=None, deadline=soon())
                stored += backend.batch_set(keys, pages, parent=None, deadline=soon())
            value = bytearray(client.get(name_of(backend, keys[0])))
            for place in (0, 8, 30, 60, 100, 150, 155, 300, len(value) // 2, codec.payload_bytes + 255):
                damaged = bytearray(value)
                damaged[place] ^= 1
                client.set(name_of(backend, keys[place % 11 + 1]), bytes(damaged))
            for number, wrong in enumerate((b"", b"x", bytes(4096), bytes(value) + bytes(4096), bytes(5 << 20))):
                client.set(name_of(backend, keys[15 + number]), wrong)
            client.delete(name_of(backend, keys[22]), name_of(backend, keys[23]))
            client.delete(name_of(backend, keys[25]))
            client.lpush(name_of(backend, keys[25]), b"x")
            empty = [memoryview(bytearray(codec.frame_bytes)) for _ in keys]
            with moved_by(read):
                found = backend.batch_get(keys, empty, deadline=soon())
            for outcome, frame, full in zip(found, empty, frames, strict=True):
                size = codec.payload_bytes
                assert outcome != HIT or frame[256 : 256 + size] == full[256 : 256 + size]
            seen.append((stored, found, dict(backend.statistics().errors), dict(backend.statistics().corrupt)))
    assert seen[0] == seen[1]
    assert HIT in seen[0][1]


def test_a_page_that_is_sealed_again_keeps_its_time(valkey: ValkeyServer) -> None:
    keys = make_keys(2)
    with opened(valkey) as (backend, _), valkey.client() as client:
        frames = full_frames(CODEC, keys)
        for key, frame in zip(keys, frames, strict=True):
            CODEC.seal(key, frame)
            frame[200:208] = (1234).to_bytes(8, "little")
        unseal(frames[1])
        assert backend.batch_set(keys, frames, parent=b"p" * 32, deadline=soon()) == ["stored"] * 2
        times = [int.from_bytes(client.get(name_of(backend, key))[200:208], "little") for key in keys]
        assert times[0] == 1234 < times[1]


@pytest.mark.parametrize("way", ["native", "python"])
@pytest.mark.parametrize("after", [1, 7, 300, 5 * PAGE])
def test_pages_before_a_cut_are_hits(valkey: ValkeyServer, way: str, after: int) -> None:
    keys = make_keys(12)
    with (
        moved_by(way), Proxy(valkey.port) as proxy,
        opened(valkey, url=f"redis://127.0.0.1:{proxy.port}", timeout=20.0, connections=1) as (backend, _),
    ):
        frames = full_frames(CODEC, keys)
        backend.batch_set(keys, frames, parent=None, deadline=soon())
        proxy.set(Faults(cut_after_bytes=after, direction=Direction.DOWN))
        found = backend.batch_get(keys, frames, deadline=soon())
        proxy.heal()
        assert found == [HIT] * (after // (PAGE + len(b"$4096\r\n\r\n"))) + [GET_ERROR] * found.count(GET_ERROR)
