"""Pages in thousands of parts to and from an S3 store: more parts than one system call takes, and calls that move fewer
bytes than requested."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.http import Connection
from hicache.backends.s3 import S3Driver
from hicache.frame import FrameCodec, first_bytes
from hicache_lab.conformance import (
    HIT,
    NAMESPACE,
    PRESENT,
    STORED,
    empty_frames,
    full_frames,
    holds,
    in_parts,
    load,
    make_keys,
    soon,
    store_of,
)
from tests.backends.s3.bucket import errors, opened, options
from tests.backends.s3.stub import Answer, Request, StubS3, reply
from tests.certificates import make_certificates

pytestmark = pytest.mark.long

PARTS = 3000
# Larger than the pieces in which a page arrives.
LARGE = FrameCodec(NAMESPACE, 3_000_000)
# More parts than one call takes after the bytes that arrive with a head.
SMALL = FrameCodec(NAMESPACE, 100_000)


class _CutSocket(socket.socket):
    """A socket whose calls end after the first `first` bytes, then after each `step`, as by a timeout or a signal."""

    first = step = 1 << 29
    _moved = 0

    def _left(self) -> int:
        return self.first - self._moved if self._moved < self.first else self.step

    def _note(self, count: int) -> int:
        self._moved += count
        return count

    def sendmsg(self, buffers: Iterable[Any], *more: Any) -> int:
        assert not more
        return self._note(super().sendmsg(first_bytes([memoryview(one) for one in buffers], self._left())))

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(min(size, self._left()), flags)
        self._note(len(data))
        return data

    def recvmsg_into(self, buffers: Iterable[Any], space: int = 0, flags: int = 0) -> tuple[int, list[Any], int, Any]:
        found = super().recvmsg_into(first_bytes(list(buffers), self._left()), space, flags)
        self._note(found[0])
        return found


def _pair(first: int, step: int = 1 << 29) -> tuple[Connection, socket.socket]:
    """Return a connection whose calls move few bytes, and the server's end of it."""
    ours, theirs = socket.socketpair()
    cut = _CutSocket(fileno=ours.detach())
    cut.first, cut.step = first, step
    return Connection(cut, 30.0), theirs


def _sent(server: socket.socket, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=server.sendall, args=(data,))
    thread.start()
    return thread


STEPS = [37, 255, 4096, 1 << 29]


@pytest.mark.parametrize("step", STEPS)
def test_a_body_in_many_parts_is_sent_whole_in_steps_of_any_size(step: int) -> None:
    parts = [memoryview(bytes([number % 251]) * (number % 7)) for number in range(PARTS)]
    expected = b"head" + b"".join(parts)
    connection, server = _pair(step, step)
    received = bytearray()

    def receive() -> None:
        while data := server.recv(1 << 16):
            received.extend(data)

    thread = threading.Thread(target=receive)
    thread.start()
    connection.send(b"head", parts, soon())
    connection.close()
    thread.join()
    server.close()
    assert bytes(received) == expected


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("in_pieces", [True, False])
def test_a_body_is_received_into_many_parts_in_steps_of_any_size(step: int, in_pieces: bool) -> None:
    (key,), (frame,) = make_keys(1), empty_frames(SMALL, 1)
    data = b"".join(SMALL.seal_buffers(key, full_frames(SMALL, [key])[0]))
    view = in_parts(SMALL, frame, PARTS)
    connection, server = _pair(step, step)
    thread = _sent(server, reply(200, data).data)
    head = connection.read_head(soon())
    arrived = SMALL.stream() if in_pieces else None
    connection.read_into(SMALL.buffers(view), soon(), arrived)
    connection.finish()
    thread.join()
    assert head.length == len(data) and connection.is_reusable
    assert SMALL.accept(key, view, len(data), arrived) is None
    assert holds(SMALL, key, view)
    connection.close()
    server.close()


def test_a_reply_may_be_split_at_every_byte() -> None:
    body = bytes(range(200))
    data = reply(200, body, etag='"x"').data
    for split in range(1, len(data) + 1):
        connection, server = _pair(split)
        memory = bytearray(len(body))
        starts = [0, 0, 1, 3, 3, 50, 199, 200, 200]
        target = [memoryview(memory)[start:end] for start, end in itertools.pairwise(starts)]
        server.sendall(data)
        head = connection.read_head(soon())
        connection.read_into(target, soon())
        connection.finish()
        assert (head.length, bytes(memory), connection.is_reusable) == (200, body, True), f"split at {split}"
        connection.close()
        server.close()


@pytest.mark.parametrize("codec", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_page_in_thousands_of_parts_is_one_object(
    stub: StubS3, tmp_path: Path, codec: FrameCodec, tls: bool
) -> None:
    """It is stored from parts, and read into parts and into frames."""
    certificates, keys = make_certificates(tmp_path), make_keys(2)
    with StubS3("pages", certificates.server_context() if tls else None) as server:
        ca_file = certificates.ca_file if tls else None
        with opened(options(server.url, ca_file=ca_file, timeout=30.0), codec) as store:
            views = [in_parts(codec, frame, PARTS) for frame in full_frames(codec, keys)]
            assert store.backend.batch_set(keys, views, parent=None, deadline=soon()) == [STORED] * 2
            read = [in_parts(codec, frame, PARTS - 1) for frame in empty_frames(codec, 2)]
            assert store.backend.batch_get(keys, read, deadline=soon()) == [HIT] * 2
            assert all(holds(codec, key, page) for key, page in zip([*keys, *keys], [*views, *read], strict=True))
            assert load(store, keys) == [HIT] * 2
            assert store.backend.batch_set(keys, read, parent=None, deadline=soon()) == [PRESENT] * 2
            assert errors(store) == {}
        assert [len(data) for data in server.objects.values()] == [codec.frame_bytes] * 2


@pytest.mark.parametrize("size", [0, SMALL.frame_bytes - 4096, SMALL.frame_bytes + 4096])
def test_an_object_of_a_different_length_is_never_read_beyond_the_parts(stub: StubS3, size: int) -> None:
    """Up to the length of a frame the object is read and counts as damage; a longer object is not read."""
    backend, (key,) = store_of(S3Driver, SMALL, options(stub.url)), make_keys(1)
    view = in_parts(SMALL, empty_frames(SMALL, 1)[0], PARTS)

    def fault(request: Request) -> Answer | None:
        return reply(200, b"x" * size, etag='"x"') if request.method == "GET" else None

    stub.fault = fault
    assert backend.batch_get([key], [view], deadline=soon()) == ["corrupt"]
    read: Sequence[memoryview] = first_bytes([view.header, *view.parts], size if size <= SMALL.frame_bytes else 0)
    assert all(bytes(part) == b"x" * part.nbytes for part in read)
    backend.close()
