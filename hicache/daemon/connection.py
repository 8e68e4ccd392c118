"""One connection: uvicorn's HTTP protocol with bounds, the peer's credentials, and page bodies without copies.

    head      has `head_timeout` and HEAD_BYTES_MAX; an idle connection has `idle_timeout`
    body      has a bound by its path, and a deadline by its length
    answer    a client that takes nothing for `body_timeout` is hung up on
    pages     the bytes of a long body go between the socket and their frames on a thread of their own, past the event
              loop: it neither copies them nor waits for them. With TLS they go through the event loop.

Requests come one after another; a client that sends one before it has its answer (pipelining) is refused.

Locking design: everything runs on the event loop's thread but `_receive` and `_send`. While one of them runs, the loop
neither reads from the socket nor writes to it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import httptools
import uvicorn
from uvicorn.server import ServerState

from ..admin.access import PEER, Peer, PeerProtocol
from ..backends.errors import ErrorKind
from ..config.daemon import DaemonConfig
from ..frame import TagStream
from .calls import CallCounters
from .protocol import KEYS_MAX
from .refusal import Refused

# A Prometheus sends some 300 bytes; browsers send cookies of other servers on this machine as well.
HEAD_BYTES_MAX = 16 << 10
# Keys and frame numbers of the longest batch, with white space.
JSON_BYTES_MAX = KEYS_MAX * 96 + 4096
# Bytes of a body for which it gets another `body_timeout`.
_TIMED_BYTES = 64 << 20
# Received at once: what fits into the cache of a core, where it is hashed.
_PIECE_BYTES = 256 << 10
WRITE_SUFFIX = b"/write"


@dataclass(slots=True)
class Listener:
    """What the connections of one listening socket have in common. `verifies_clients`: TLS has done so."""

    is_unix: bool
    is_loopback: bool
    has_tls: bool
    verifies_clients: bool
    connections: int = 0


@dataclass(slots=True)
class Shared:
    """What all connections have in common. `config` is replaced by a reload."""

    config: DaemonConfig
    uvicorn: uvicorn.Config
    state: ServerState
    calls: CallCounters
    threads: Executor
    write_bytes_max: int


@dataclass(slots=True)
class _Body:
    """A body that goes past the event loop: `head` has come through it."""

    length: int
    head: bytearray


class Connection(PeerProtocol):
    """See the module's docstring."""

    def __init__(self, shared: Shared, listener: Listener) -> None:
        super().__init__(config=shared.uvicorn, server_state=shared.state, app_state={"listener": listener})
        self.timeout_keep_alive = shared.config.idle_timeout  # type: ignore[assignment]
        self.listener = listener
        self._shared = shared
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Refused | None = None
        self._has_request = False  # since the connection was made
        self._is_in_head = True
        self._head_bytes = 0
        self._headers_bytes = 0
        self._body_left = 0
        self._body: _Body | None = None

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a process of another user, and a connection over the limit."""
        super().connection_made(transport)
        self._count(1)
        peer: Peer | None = self.app_state[PEER]
        if peer is not None and peer.uid not in (os.geteuid(), 0):
            self._refuse("peer", Refused(403, ErrorKind.ACCESS_DENIED, "socket: is for another user's processes"))
        elif self.listener.connections > self._shared.config.connections_max:
            self._refuse("connections", Refused(503, ErrorKind.BUSY, "daemon: too many connections; try again", 1))
        else:
            self._limit_time(self._shared.config.head_timeout, "head_timeout")

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it out."""
        self._count(-1)
        self._limit_time(None)
        super().connection_lost(exc)
        # All of these refer to this object, to the head of the request or to the bytes that were received: they are
        # freed now, not when Python next looks for cycles.
        self.scope = None  # type: ignore[assignment]
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and cycle.response_complete:
            self.cycle = None  # type: ignore[assignment]
        if self._refusal is not None:
            self._refusal.__traceback__ = None

    def _count(self, change: int) -> None:
        self._shared.calls.connections["unix" if self.listener.is_unix else "tcp"] += change
        self.listener.connections += change

    def pause_writing(self) -> None:
        """A client that does not take its answer in time is hung up on."""
        super().pause_writing()
        self._limit_time(self._shared.config.body_timeout, "answer_timeout")

    def resume_writing(self) -> None:
        """It has taken some."""
        self._limit_time(None)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection, or one whose client has not even taken the last answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _limit_time(self, time_s: float | None, limit: str = "") -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if time_s is None else self.loop.call_later(time_s, self._time_is_over, limit)

    def _time_is_over(self, limit: str) -> None:
        self._shared.calls.refuse(limit)
        self.transport.abort()

    def _refuse(self, limit: str, refusal: Refused) -> None:
        """Answer without a request, and hang up."""
        self._shared.calls.refuse(limit)
        self._refusal = refusal
        self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Answer what is not a request, or one that was refused, and hang up."""
        refusal = self._refusal or Refused(400, ErrorKind.BAD_REQUEST, "the request is not valid HTTP")
        self._refusal = refusal
        body = refusal.body
        retry = b"retry-after: %d\r\n" % refusal.retry_after_s if refusal.retry_after_s else b""
        head = b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            refusal.status, len(body),
        )  # fmt: skip
        self.transport.write(head + retry + b"connection: close\r\n\r\n" + body)
        self.transport.close()
        self._limit_time(self._shared.config.head_timeout, "answer_timeout")

    # Requests

    def data_received(self, data: bytes) -> None:
        """Parse what has come. A refusal within ends the connection."""
        if self._refusal is not None:
            return
        if self._is_in_head and not self._head_bytes:
            self._limit_time(self._shared.config.head_timeout, "head_timeout")
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX and self._refusal is None:
            self._refuse("head_bytes", Refused(431, ErrorKind.BAD_REQUEST, "the head of the request is too long"))
        elif self._body is not None and len(self._body.head) < self._body.length:
            self.flow.pause_reading()

    def on_message_begin(self) -> None:
        """See the module's docstring for pipelining."""
        if self._has_request and not self.cycle.response_complete:
            self._raise("pipelining", Refused(400, ErrorKind.BAD_REQUEST, "wait for the answer to the last request"))
        self._has_request = True
        self._headers_bytes = 0
        super().on_message_begin()
        state: dict[str, Any] = self.scope["state"]
        state["connection"] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        """Bound the headers as they come: a quarter of a mebibyte may come at once, and tiny ones grow thirtyfold."""
        self._headers_bytes += len(name) + len(value)
        if self._headers_bytes > HEAD_BYTES_MAX:
            self._raise("head_bytes", Refused(431, ErrorKind.BAD_REQUEST, "the head of the request is too long"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Set the bounds of the body before the application sees the request."""
        self._is_in_head, self._head_bytes = False, 0
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > HEAD_BYTES_MAX:
            self._raise("head_bytes", Refused(431, ErrorKind.BAD_REQUEST, "the head of the request is too long"))
        headers = dict(self.headers)
        declared = headers.get(b"content-length")
        is_write = self.url.partition(b"?")[0].endswith(WRITE_SUFFIX)
        self._body_left = self._shared.write_bytes_max if is_write else JSON_BYTES_MAX
        length = int(declared) if declared is not None else 0
        if length > self._body_left:
            self._raise("body_bytes", Refused(413, ErrorKind.BAD_REQUEST, "the body is too long; send fewer pages"))
        self._limit_time(self._time_for(length), "body_timeout")
        self._body = None
        if is_write and length and not self.listener.has_tls and not self.expect_100_continue:
            self._body = _Body(length, bytearray())
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Bound a body of unknown length; keep the beginning of one that goes past the loop."""
        self._body_left -= len(body)
        if self._body_left < 0:
            self._raise("body_bytes", Refused(413, ErrorKind.BAD_REQUEST, "the body is too long; send fewer pages"))
        if self._body is None or self.cycle.response_complete:
            super().on_body(body)
        else:
            self._body.head += body

    def on_message_complete(self) -> None:
        """The next bytes are another request's."""
        self._limit_time(None)
        self._is_in_head = True
        if self.cycle.response_complete:  # the answer was a refusal, and this is the end of the body
            self._limit_time(self._shared.config.idle_timeout, "idle_timeout")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """What has not come of a body is not for anybody."""
        self._body = None
        super().on_response_complete()

    def _raise(self, limit: str, refusal: Refused) -> None:
        """Leave the parser, which lets uvicorn call `send_400_response`."""
        self._shared.calls.refuse(limit)
        self._refusal = refusal
        raise refusal

    # Pages

    async def receive_pages(
        self, receive: Any, buffers: Sequence[memoryview], tags: Sequence[TagStream | None]
    ) -> None:
        """Fill `buffers` with the body of the request, all of it; `tags` take in the bytes of each buffer.

        REQUIRES: the body has the length of all buffers. Raises Refused if it ends early.
        """
        body = self._body
        if body is None:
            await _receive_through_loop(receive, buffers, tags)
            return
        filler = _Filler(buffers, tags)
        filler.add(memoryview(body.head))
        self._body = None
        if len(body.head) == body.length:
            return
        try:
            with self._socket() as sock:
                timeout_s = self._time_for(body.length)
                await self.loop.run_in_executor(self._shared.threads, _receive, sock, filler, timeout_s)
        except OSError as error:
            self._abort("body", error)
            raise Refused(400, ErrorKind.CONNECTION_LOST, "body: did not come in time, or at all") from error
        if not self.transport.is_closing():
            # The parser has not seen the rest of the body: the next request gets a new one.
            self.parser = httptools.HttpRequestParser(self)
            self.on_message_complete()
            self.flow.resume_reading()

    async def send_pages(self, send: Any, buffers: Sequence[memoryview]) -> None:
        """Send `buffers` as the next part of an answer whose head was sent; they are free when this returns. Hangs up
        on a client that does not take them in time."""
        if self.listener.has_tls:
            for buffer in buffers:
                for start in range(0, len(buffer), _PIECE_BYTES):
                    piece = bytes(buffer[start : start + _PIECE_BYTES])
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            return
        self.flow.pause_reading()
        size_bytes = sum(map(len, buffers))
        try:
            await self._head_is_sent()
            with self._socket() as sock:
                timeout_s = self._time_for(size_bytes)
                await self.loop.run_in_executor(self._shared.threads, _send, sock, buffers, timeout_s)
        except OSError as error:
            self._abort("answer", error)
        else:
            self.cycle.expected_content_length -= size_bytes

    async def _head_is_sent(self) -> None:
        """Wait until the loop has written the head of an answer, which it does at its next turn. Raises OSError."""
        until_s, pause_s = time.monotonic() + self._shared.config.body_timeout, 0.0
        while self.transport.get_write_buffer_size():
            if time.monotonic() >= until_s:
                raise TimeoutError
            await asyncio.sleep(pause_s)
            pause_s = 0.01
        if self.transport.is_closing():
            raise ConnectionResetError

    def _abort(self, what: str, error: OSError) -> None:
        self._shared.calls.refuse(f"{what}_timeout" if isinstance(error, TimeoutError) else f"{what}_lost")
        self.cycle.disconnected = True  # the loop says so later; nothing can be answered any more
        self.transport.abort()

    def _time_for(self, size_bytes: int) -> float:
        return self._shared.config.body_timeout * (1 + size_bytes / _TIMED_BYTES)

    def _socket(self) -> socket.socket:
        """Return another descriptor of the socket, which stays valid if the loop closes its own."""
        return socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))


class _Filler:
    """Fills buffers one after another."""

    def __init__(self, buffers: Sequence[memoryview], tags: Sequence[TagStream | None]) -> None:
        self._buffers = buffers
        self._tags = tags
        self._index = 0
        self._start = 0

    def target(self) -> memoryview | None:
        """Return where the next bytes go; None once all buffers are full."""
        while self._index < len(self._buffers) and self._start == len(self._buffers[self._index]):
            self._index, self._start = self._index + 1, 0
        return None if self._index == len(self._buffers) else self._buffers[self._index][self._start :]

    def filled(self, size_bytes: int) -> None:
        """Take note that the first bytes of `target` are filled."""
        tag = self._tags[self._index]
        if tag is not None:
            tag.add(self._buffers[self._index][self._start : self._start + size_bytes])
        self._start += size_bytes

    def add(self, data: memoryview) -> None:
        """Copy `data`. Raises Refused if it does not fit."""
        while data:
            target = self.target()
            if target is None:
                raise Refused(422, ErrorKind.BAD_REQUEST, "body: is longer than its keys and frames")
            size_bytes = min(len(target), len(data))
            target[:size_bytes] = data[:size_bytes]
            self.filled(size_bytes)
            data = data[size_bytes:]


async def _receive_through_loop(
    receive: Any, buffers: Sequence[memoryview], tags: Sequence[TagStream | None]
) -> None:
    filler = _Filler(buffers, tags)
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, ErrorKind.CONNECTION_LOST, "body: the connection was lost")
        filler.add(memoryview(message.get("body", b"")))
        more = message.get("more_body", False)
    if filler.target() is not None:
        raise Refused(422, ErrorKind.SHORT_BODY, "body: is shorter than its keys and frames")


def _receive(sock: socket.socket, filler: _Filler, timeout_s: float) -> None:
    """Receive until all buffers are full. Runs on a thread of its own. Raises OSError."""
    until_s = time.monotonic() + timeout_s
    while (target := filler.target()) is not None:
        sock.settimeout(_left(until_s))
        received = sock.recv_into(target, min(len(target), _PIECE_BYTES))
        if not received:
            raise ConnectionResetError("the client has hung up")
        filler.filled(received)


def _send(sock: socket.socket, buffers: Sequence[memoryview], timeout_s: float) -> None:
    """Send all buffers. Runs on a thread of its own. Raises OSError."""
    until_s = time.monotonic() + timeout_s
    for buffer in buffers:
        sock.settimeout(_left(until_s))
        sock.sendall(buffer)


def _left(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
