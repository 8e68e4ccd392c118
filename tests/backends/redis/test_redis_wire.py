"""Reading replies and sending requests on one connection; the tests play the server."""

from __future__ import annotations

import contextlib
import itertools
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import UnixDomainSocketConnection

from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.redis.channel import Channel, Oversize, Reply, command
from hicache.backends.redis.errors import ErrorReply, failure_of
from hicache.frame import HEADER_BYTES, FrameCodec, PageView
from hicache_lab.conformance import NAMESPACE, full_frames, in_parts, make_keys, soon

PAGE = 600


@contextlib.contextmanager
def peers(timeout_s: float = 5.0) -> Iterator[tuple[Channel, socket.socket]]:
    """The channel of a connection of redis-py, and the server's end of the connection."""
    channel = Channel(timeout_s)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        kind: Any = UnixDomainSocketConnection
        connection = kind(
            path=f"{folder}/socket", parser_class=lambda socket_read_size: channel, protocol=2, driver_info=None
        )
        connection.connect()
        theirs, _ = listener.accept()
    with theirs, contextlib.closing(channel):
        yield channel, theirs


def feed(theirs: socket.socket, pieces: list[bytes]) -> threading.Thread:
    """Send the pieces from another thread, one packet each."""

    def send() -> None:
        for piece in pieces:
            theirs.sendall(piece)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def cut(data: bytes, borders: list[int]) -> list[bytes]:
    places = [0, *sorted(border % (len(data) + 1) for border in borders), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places) if a < b]


def fits(length: int) -> bool:
    return length == PAGE


def page(fill: bytes) -> bytes:
    return b"$%d\r\n" % PAGE + fill * PAGE + b"\r\n"


_BORDERS = st.lists(st.integers(0, 5000))


@given(st.lists(st.sampled_from(["page", "short", "long", "none", "error"]), max_size=8), _BORDERS)
def test_pages_are_read_whole_however_the_bytes_arrive(kinds: list[str], borders: list[int]) -> None:
    written = {
        "page": page(b"\r"), "short": b"$3\r\nabc\r\n", "long": b"$1000\r\n" + b"x" * 1000 + b"\r\n",
        "none": b"$-1\r\n", "error": b"-WRONGTYPE no\r\n",
    }
    expected = {"page": PAGE, "short": 3, "long": 1000, "none": None, "error": b"WRONGTYPE no"}
    with peers() as (channel, theirs):
        channel.send([b"x"], len(kinds), soon())
        sender = feed(theirs, cut(b"".join(written[kind] for kind in kinds), borders))
        for kind in kinds:
            frame = memoryview(bytearray(PAGE))
            found = channel.read_page([frame], fits, None, soon())
            assert (found.text if isinstance(found, ErrorReply) else found) == expected[kind]
            assert bytes(frame) == (b"\r" * PAGE if kind == "page" else bytes(PAGE))
        assert channel.reusable
        sender.join()


@given(st.lists(st.sampled_from([b":0", b":1", b"+OK", b"$-1", b"-ERR no"]), max_size=40), _BORDERS, st.integers(1, 50))
def test_lines_are_read_whole_however_the_bytes_arrive(lines: list[bytes], borders: list[int], step: int) -> None:
    with peers() as (channel, theirs):
        channel.send([b"x"], len(lines), soon())
        sender = feed(theirs, cut(b"".join(line + b"\r\n" for line in lines), borders))
        found: list[bytes] = []
        while len(found) < len(lines):
            found += channel.read_lines(min(step, len(lines) - len(found)), soon())
        assert found == lines
        assert channel.reusable
        sender.join()


@pytest.mark.parametrize("parts", [2, 5])
def test_a_page_in_parts_is_read_and_proved_wherever_its_bytes_are_cut(parts: int) -> None:
    """Cut at each single byte around the borders of length, header, parts, padding and end, and at all of them."""
    codec = FrameCodec(NAMESPACE, PAGE)
    (key,) = make_keys(1)
    (frame,) = full_frames(codec, [key])
    size = codec.frame_bytes
    whole = in_parts(codec, frame, parts)
    stored = b"".join(codec.seal_buffers(key, whole))
    reply = b"$%d\r\n%b\r\n" % (size, stored)
    begin = len(reply) - 2 - size
    ends = itertools.accumulate([begin, HEADER_BYTES, *(part.nbytes for part in whole.parts)])
    near = sorted({place for end in (*ends, begin + size) for place in range(end - 3, end + 4) if place < len(reply)})
    for borders in (*([place] for place in near), near):
        page = PageView(memoryview(bytearray(HEADER_BYTES)), [memoryview(bytearray(p.nbytes)) for p in whole.parts])
        tag = codec.stream()
        with peers() as (channel, theirs):
            channel.send([b"x"], 1, soon())
            sender = feed(theirs, cut(reply, borders))
            assert channel.read_page(codec.buffers(page), codec.fits, tag, soon()) == size
            assert channel.reusable
            sender.join()
        assert codec.accept(key, page, size, tag) is None
        assert b"".join(page.parts) == b"".join(whole.parts)


_VALUES: st.SearchStrategy[Reply] = st.recursive(
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.none(), st.binary(max_size=50)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)


def encode(value: Reply) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    assert isinstance(value, list)
    return b"*%d\r\n" % len(value) + b"".join(map(encode, value))


def depth(value: Reply) -> int:
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(_VALUES, _BORDERS)
def test_any_valid_reply_is_parsed_correctly(value: Reply, borders: list[int]) -> None:
    if depth(value) > 8:
        return
    with peers() as (channel, theirs):
        channel.send([b"x"], 1, soon())
        sender = feed(theirs, cut(encode(value), borders))
        assert channel.read_reply(soon()) == value
        assert channel.reusable
        sender.join()


@given(st.binary(min_size=1, max_size=200))
def test_garbage_gives_a_store_error_or_a_reply_and_nothing_else(data: bytes) -> None:
    for read in ("page", "lines", "reply"):
        with peers() as (channel, theirs):
            channel.send([b"x"], 1, soon())
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(StoreError, Oversize):
                if read == "page":
                    channel.read_page([memoryview(bytearray(PAGE))], fits, None, soon())
                elif read == "lines":
                    channel.read_lines(1, soon())
                else:
                    channel.read_reply(soon())


@pytest.mark.parametrize(
    "data",
    [b"$x\r\n", b"$99999999999999999999999\r\n", b"\r\n", b"?\r\n", b"*1\r\n" * 20, b"*99999999999\r\n", b"y" * 20_000,
     b"$3\r\nabcde\r\n", b"$\r\n"],
)
def test_an_invalid_reply_breaks_the_channel(data: bytes) -> None:
    with peers() as (channel, theirs):
        channel.send([b"x"], 1, soon())
        theirs.sendall(data)
        with pytest.raises(StoreError) as raised:
            channel.read_reply(soon())
        assert raised.value.kind is ErrorKind.PROTOCOL
        assert not channel.reusable


def test_a_length_is_checked_before_the_value_is_read() -> None:
    """A length alone, without a byte after it, is enough to reject the value; nothing is allocated for it."""
    with peers() as (channel, theirs):
        channel.send([b"x"], 1, soon())
        theirs.sendall(b"$9000000000000\r\n")
        with pytest.raises(Oversize) as raised:
            channel.read_page([memoryview(bytearray(PAGE))], fits, None, soon())
        assert raised.value.length == 9000000000000
        assert not channel.reusable


def test_a_channel_with_an_unread_reply_is_not_reused() -> None:
    with peers() as (channel, theirs):
        channel.send([command(b"PING"), command(b"PING")], 2, soon())
        theirs.sendall(b"+PONG\r\n")
        assert channel.read_reply(soon()) == b"PONG"
        assert not channel.reusable
        theirs.sendall(b"+PONG\r\n")
        assert channel.read_lines(1, soon()) == [b"+PONG"]
        assert (channel.reusable, channel.is_quiet) == (True, True)
        theirs.sendall(b"+unasked\r\n")
        assert (channel.reusable, channel.is_quiet) == (True, False)


@pytest.mark.parametrize(
    ("timeout_s", "seconds", "kind"), [(0.01, 60.0, ErrorKind.TIMEOUT), (60.0, 0.01, ErrorKind.DEADLINE)]
)
def test_a_read_ends_at_the_timeout_or_the_deadline(timeout_s: float, seconds: float, kind: ErrorKind) -> None:
    for start in (b"", b"$600", b"$600\r\nxyz"):
        with peers(timeout_s) as (channel, theirs):
            channel.send([b"x"], 1, soon())
            theirs.sendall(start)
            with pytest.raises(StoreError) as raised:
                channel.read_page([memoryview(bytearray(PAGE))], fits, None, soon(seconds))
            assert raised.value.kind is kind and not channel.reusable


def test_a_send_to_a_peer_that_does_not_read_ends_in_time() -> None:
    body = memoryview(bytearray(32 << 20))
    with peers(0.01) as (channel, _), pytest.raises(StoreError) as raised:
        channel.send([b"head", body, b"tail"], 1, soon())
    assert raised.value.kind is ErrorKind.TIMEOUT and not channel.reusable
    assert raised.value.__context__ is None  # the TLS library's texts quote host names


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (socket.gaierror(-2, "x"), ErrorKind.DNS), (ConnectionRefusedError(), ErrorKind.CONNECTION_REFUSED),
        (ConnectionResetError(), ErrorKind.CONNECTION_LOST), (BrokenPipeError(), ErrorKind.CONNECTION_LOST),
        (TimeoutError(), ErrorKind.TIMEOUT), (OSError(113, "no route"), ErrorKind.UNREACHABLE),
        (b"OOM command not allowed", ErrorKind.NO_SPACE), (b"MISCONF x", ErrorKind.CANNOT_PERSIST),
        (b"LOADING x", ErrorKind.LOADING), (b"NOAUTH x", ErrorKind.WRONG_CREDENTIALS),
        (b"WRONGPASS x", ErrorKind.WRONG_CREDENTIALS), (b"BUSY x", ErrorKind.BUSY),
        (b"MASTERDOWN x", ErrorKind.PRIMARY_DOWN), (b"CLUSTERDOWN x", ErrorKind.CLUSTER_DOWN),
        (b"TRYAGAIN x", ErrorKind.CLUSTER_DOWN), (b"ERR whatever", ErrorKind.SERVER_ERROR),
        (b"", ErrorKind.SERVER_ERROR),
    ],
)
def test_exceptions_and_error_replies_have_an_error_kind(failure: OSError | bytes, kind: ErrorKind) -> None:
    assert (ErrorReply(failure) if isinstance(failure, bytes) else failure_of(failure)).kind is kind
