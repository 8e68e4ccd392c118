"""One connection: uvicorn's HTTP protocol with limits, the peer's credentials, and page bodies without copies.

    head      limited by `client_timeout` and HEAD_BYTES_MAX; an idle connection by a multiple of it
    body      its size is limited by its path, its time by its length
    answer    a client that reads nothing for `client_timeout` is disconnected
    pages     a separate thread moves the bytes of a long body between the socket and their frames, so that the event
              loop neither copies them nor waits for them. With TLS they go through the event loop.

Requests come one after another; a client that sends one before the last answer (pipelining) is rejected.

Locking design: everything except `_receive` and `_send` runs on the event loop's thread. While one of them runs, the
loop neither reads from the socket nor writes to it.
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

from ..admin.access import PEER, PeerProtocol
from ..backends.errors import ErrorKind
from ..config.daemon import DaemonConfig
from ..frame import TagStream
from .protocol import KEYS_MAX, Refused
from .statistics import CallCounters

# Prometheus sends about 300 bytes; browsers also send cookies of other servers on this machine.
HEAD_BYTES_MAX = 16 << 10
# Room for keys and frame numbers of the longest batch, with white space.
JSON_BYTES_MAX = KEYS_MAX * 96 + 4096
# The bytes of a body for each further `client_timeout`.
_TIMED_BYTES = 64 << 20
# The time of an idle connection is so many times `client_timeout`: engines keep theirs between requests.
_IDLE_FACTOR = 60
# Received in one call: fits into the cache of a core, where it is hashed.
_PIECE_BYTES = 256 << 10
WRITE_SUFFIX = b"/write"


@dataclass(slots=True)
class Listener:
    """The common state of one listening socket's connections. `verifies_clients`: TLS checks client certificates."""

    is_unix: bool
    is_loopback: bool
    has_tls: bool
    verifies_clients: bool
    connections: int = 0


@dataclass(slots=True)
class Shared:
    """The common state of all connections. A reload replaces `config`."""

    config: DaemonConfig
    uvicorn: uvicorn.Config
    state: ServerState
    calls: CallCounters
    threads: Executor
    write_bytes_max: int


class Connection(PeerProtocol):
    """See the module's docstring."""

    def __init__(self, shared: Shared, listener: Listener) -> None:
        super().__init__(config=shared.uvicorn, server_state=shared.state, app_state={"listener": listener})
        self.timeout_keep_alive = _IDLE_FACTOR * shared.config.client_timeout  # type: ignore[assignment]
        self.listener = listener
        self._shared = shared
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Refused | None = None
        self._has_request = False  # since the connection was made
        self._is_in_head = True
        self._head_bytes = 0
        self._headers_bytes = 0
        self._body_left = 0
        self._body: bytearray | None = None  # the beginning of a body that otherwise bypasses the event loop
        self._body_bytes = 0

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Reject a process of another user, and a connection over the limit."""
        super().connection_made(transport)
        self._count(1)
        if self.app_state[PEER] not in (None, os.geteuid(), 0):
            reason = "socket: this daemon belongs to another user; use a daemon of your own"
            self._refuse("peer", Refused(403, ErrorKind.ACCESS_DENIED, reason))
        elif self.listener.connections > self._shared.config.connections_max:
            self._refuse("connections", Refused(503, ErrorKind.BUSY, "daemon: too many connections; try again", 1))
        else:
            self._limit_time(self._shared.config.client_timeout, "head_timeout")

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the end of the connection."""
        self._count(-1)
        self._limit_time(None)
        super().connection_lost(exc)
        # These refer to this object, to the request's head or to received bytes: free them now instead of at Python's
        # next search for cycles.
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
        """Start the timeout of a client that does not read its answer."""
        super().pause_writing()
        self._limit_time(self._shared.config.client_timeout, "answer_timeout")

    def resume_writing(self) -> None:
        """Stop the timeout: the client has read a part."""
        self._limit_time(None)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, or one whose client has not read the last answer."""
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
        """Send an answer without a request, and disconnect."""
        self._shared.calls.refuse(limit)
        self._refusal = refusal
        self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid or rejected request, and disconnect."""
        refusal = self._refusal or Refused(400, ErrorKind.BAD_REQUEST, "the request is not valid HTTP")
        self._refusal = refusal
        body = refusal.body
        retry = b"retry-after: %d\r\n" % refusal.retry_after_s if refusal.retry_after_s else b""
        head = b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            refusal.status, len(body),
        )
        self.transport.write(head + retry + b"connection: close\r\n\r\n" + body)
        self.transport.close()
        self._limit_time(self._shared.config.client_timeout, "answer_timeout")

    # Requests

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. A rejection ends the connection."""
        if self._refusal is not None:
            return
        if self._is_in_head and not self._head_bytes:
            self._limit_time(self._shared.config.client_timeout, "head_timeout")
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX and self._refusal is None:
            self._refuse("head_bytes", Refused(431, ErrorKind.BAD_REQUEST, "the head of the request is too long"))
        elif self._body is not None and len(self._body) < self._body_bytes:
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
        """Limit the headers as they arrive: 256 KiB may arrive at once, and tiny ones grow thirtyfold in memory."""
        self._headers_bytes += len(name) + len(value)
        if self._headers_bytes > HEAD_BYTES_MAX:
            self._raise("head_bytes", Refused(431, ErrorKind.BAD_REQUEST, "the head of the request is too long"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Set the limits of the body before the application gets the request."""
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
            self._body, self._body_bytes = bytearray(), length
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Limit a body of unknown length; keep the beginning of a body that bypasses the loop."""
        self._body_left -= len(body)
        if self._body_left < 0:
            self._raise("body_bytes", Refused(413, ErrorKind.BAD_REQUEST, "the body is too long; send fewer pages"))
        if self._body is None or self.cycle.response_complete:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        """Handle the end of a request; the next bytes belong to another one."""
        self._limit_time(None)
        self._is_in_head = True
        if self.cycle.response_complete:  # the request was rejected, and this is the end of its body
            self._limit_time(_IDLE_FACTOR * self._shared.config.client_timeout, "idle_timeout")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Handle the end of an answer; the rest of the request's body is ignored."""
        self._body = None
        super().on_response_complete()

    def _raise(self, limit: str, refusal: Refused) -> None:
        """Leave the parser; uvicorn then calls `send_400_response`."""
        self._shared.calls.refuse(limit)
        self._refusal = refusal
        raise refusal

    # Pages

    async def receive_pages(
        self, receive: Any, buffers: Sequence[memoryview], tags: Sequence[TagStream | None]
    ) -> None:
        """Fill `buffers` with the whole body of the request; `tags` hash the bytes of each buffer.

        REQUIRES: the body has the length of all buffers. Raises Refused if it ends early.
        """
        body = self._body
        if body is None:
            await _receive_through_loop(receive, buffers, tags)
            return
        filler = _Filler(buffers, tags)
        filler.add(memoryview(body))
        self._body = None
        if len(body) == self._body_bytes:
            return
        try:
            with self._socket() as sock:
                timeout_s = self._time_for(self._body_bytes)
                await self.loop.run_in_executor(self._shared.threads, _receive, sock, filler, timeout_s)
        except OSError as error:
            self._abort("body", error)
            reason = "body: did not arrive completely in time; send it again"
            raise Refused(400, ErrorKind.CONNECTION_LOST, reason) from error
        if not self.transport.is_closing():
            # The parser has not seen the rest of the body, so the next request gets a new parser.
            self.parser = httptools.HttpRequestParser(self)
            self.on_message_complete()
            self.flow.resume_reading()

    async def send_pages(self, send: Any, buffers: Sequence[memoryview]) -> None:
        """Send `buffers` as the next part of an answer whose head was sent; they are free when this returns.
        Disconnects a client that does not read them in time."""
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
        """Wait until the loop has written the head of an answer, in its next iteration. Raises OSError."""
        until_s, pause_s = time.monotonic() + self._shared.config.client_timeout, 0.0
        while self.transport.get_write_buffer_size():
            if time.monotonic() >= until_s:
                raise TimeoutError
            await asyncio.sleep(pause_s)
            pause_s = 0.01
        if self.transport.is_closing():
            raise ConnectionResetError

    def _abort(self, what: str, error: OSError) -> None:
        self._shared.calls.refuse(f"{what}_timeout" if isinstance(error, TimeoutError) else f"{what}_lost")
        self.cycle.disconnected = True  # the loop sets it later; answering is impossible now
        self.transport.abort()

    def _time_for(self, size_bytes: int) -> float:
        return self._shared.config.client_timeout * (1 + size_bytes / _TIMED_BYTES)

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
        """Return the buffer for the next bytes; None once all buffers are full."""
        while self._index < len(self._buffers) and self._start == len(self._buffers[self._index]):
            self._index, self._start = self._index + 1, 0
        return None if self._index == len(self._buffers) else self._buffers[self._index][self._start :]

    def filled(self, size_bytes: int) -> None:
        """Record that the first bytes of `target` are filled."""
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


async def _receive_through_loop(receive: Any, buffers: Sequence[memoryview], tags: Sequence[TagStream | None]) -> None:
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
    """Receive until all buffers are full. Runs on a separate thread. Raises OSError."""
    until_s = time.monotonic() + timeout_s
    while (target := filler.target()) is not None:
        sock.settimeout(_left(until_s))
        received = sock.recv_into(target, min(len(target), _PIECE_BYTES))
        if not received:
            raise ConnectionResetError("the client has hung up")
        filler.filled(received)


def _send(sock: socket.socket, buffers: Sequence[memoryview], timeout_s: float) -> None:
    """Send all buffers. Runs on a separate thread. Raises OSError."""
    until_s = time.monotonic() + timeout_s
    for buffer in buffers:
        sock.settimeout(_left(until_s))
        sock.sendall(buffer)


def _left(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
