"""A subset of HTTP/1.1 (RFC 9112) for clients of S3 and of a daemon, over TCP, TLS and Unix sockets, with bodies in
lists of buffers.

The buffers of a body are passed to the kernel together with the head of their request. A body is received directly into
its buffers, with one system call per mebibyte, mostly without the interpreter's lock. `http.client` does neither, and
parses heads with the parser for mail.

Every wait ends after `timeout_s` without a byte, or at the deadline of the call.

Locking design: a Connection belongs to one thread at a time. The pool's lock guards its list of idle connections and is
not held while one is opened, used or closed.
"""

from __future__ import annotations

import math
import os
import re
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from ..clock import SYSTEM_CLOCK, Clock
from ..frame import TagStream, fill, first_bytes, without_first
from .errors import ErrorKind, StoreError, kind_of_exception, words_of_exception
from .rotated import Refreshed, Rotated

Address: TypeAlias = tuple[socket.AddressFamily, tuple[str | int | bytes, ...] | str]
T = TypeVar("T")

# Far above the heads of stores; a longer one is not valid.
_HEAD_BYTES_MAX = 32 << 10
_RECEIVED_AT_ONCE = 16 << 10
# The bytes that one receive waits for: large enough for few calls, small enough to detect a stall.
PIECE_BYTES = 1 << 20
# The most buffers of one system call on Linux, IOV_MAX.
_BUFFERS_AT_ONCE = 1024
# The shortest timeout: for the kernel, zero means no timeout.
_TIMEOUT_MIN_S = 0.001
# Names are resolved again after this time: stores balance load by changing addresses.
_ADDRESSES_AGE_MAX_S = 60.0
# A connection that was idle for longer is closed instead of used. Common servers close idle ones after five seconds; a
# NAT, a firewall or a load balancer forgets them after a minute or more without a word: the next request on one would
# wait for `timeout_s` without an answer. Opening another one costs a few milliseconds.
_IDLE_S_MAX = 3.0
# The most interim replies of a server.
_INTERIM_MAX = 8
# The most headers; stores send about twenty.
_HEADERS_MAX = 200
# The grammar of RFC 9112, 4 and 5, and RFC 9110, 5.5. A tab is the only control character, so that a line cannot end
# within a line, and digits are ASCII. Some servers omit the space before an empty reason.
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t -~\x80-\xff]*)?")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")
_LENGTH = re.compile("[0-9]{1,15}")
# The longest pause accepted from a server: it may send any number.
_RETRY_AFTER_MAX_S = 60.0
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[\t -~\x80-\xff]*)?\r\n")
# Sent heads are stricter: visible ASCII, with spaces and tabs in values of headers.
_TARGET = re.compile("/[!-~]*")
_FIELD = re.compile("[0-9a-z-]+: [\t -~]*")


@dataclass(frozen=True, slots=True)
class Server:
    """The peer of connections: the store, or a proxy, which passes TLS connections on to `tunnel`. `tls` None means
    plain HTTP; `name` is the name in the store's certificate. With `socket`, the path of a Unix socket, host and port
    are ignored; unless root says `of_any_user`, the process that listens on it must be this user's or root's. A proxy
    gets `proxy_login` in its Proxy-Authorization header, unless that is empty. Times are seconds.
    """

    host: str
    port: int
    tls: Rotated[ssl.SSLContext] | None
    name: str
    tunnel: str
    connect_timeout_s: float
    timeout_s: float
    socket: str = ""
    proxy_login: str = field(default="", repr=False)
    of_any_user: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of a reply; names are lower-case."""

    status: int
    headers: dict[str, str]

    @property
    def is_chunked(self) -> bool:
        """True if the body comes in chunks, so that its length is not known in advance."""
        return "transfer-encoding" in self.headers

    @property
    def length(self) -> int | None:
        """Bytes of the body, None if the head does not say. Raises StoreError for an invalid length."""
        text = self.headers.get("content-length")
        if text is not None and not _LENGTH.fullmatch(text):
            raise StoreError(ErrorKind.PROTOCOL, "content-length is not a number")
        return None if text is None else int(text)

    @property
    def retry_after_s(self) -> float:
        """The pause that the server requests, at most a minute; 0 for none, and for a date."""
        text = self.headers.get("retry-after", "")
        return min(float(text), _RETRY_AFTER_MAX_S) if text.isascii() and text.isdigit() else 0.0


class StaleConnection(Exception):
    """The server has closed an idle connection; no byte of a reply has arrived."""


def parse_head(data: bytes) -> Head:
    """Parse the head in `data`, which ends with its empty line. Raises StoreError if it is not valid."""
    first, *lines = data[:-4].split(b"\r\n")
    status = _STATUS_LINE.fullmatch(first)
    if status is None:
        raise StoreError(ErrorKind.PROTOCOL, "the reply is not HTTP/1.1")
    if len(lines) > _HEADERS_MAX:
        raise StoreError(ErrorKind.PROTOCOL, f"the reply has more than {_HEADERS_MAX} headers")
    headers = {} if status[1] == b"1" else {"connection": "close"}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise StoreError(ErrorKind.PROTOCOL, "a line of the reply's head is not a header")
        name, value = found[1].decode().lower(), found[2].decode("latin-1").strip(" \t")
        if name == "content-length" and headers.get(name, value) != value:
            raise StoreError(ErrorKind.PROTOCOL, "the reply has two lengths")
        headers[name] = value
    return Head(int(status[2]), headers)


def request_head(method: str, target: str, headers: Mapping[str, str], origin: str = "") -> bytes:
    """Return the head of a request. Names of headers are lower-case; a proxy needs the `origin` of the target.

    Raises StoreError for a target or header with a character that HTTP does not allow, such as a line end, which could
    inject another header or request.
    """
    fields = [f"{name}: {value}" for name, value in headers.items()]
    if not _TARGET.fullmatch(target) or not all(map(_FIELD.fullmatch, fields)):
        wrong = next((name for name, field in zip(headers, fields, strict=True) if not _FIELD.fullmatch(field)), "path")
        raise StoreError(ErrorKind.BAD_REQUEST, f"not sent: {wrong!r} contains a character that HTTP forbids")
    return "\r\n".join([f"{method} {origin}{target} HTTP/1.1", *fields, "", ""]).encode("ascii")


class Connection:
    """One connection to the store. Not thread-safe. `is_reusable` is True after a reply was read to its end."""

    def __init__(self, sock: socket.socket, timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._sock = sock
        self._clock = clock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._timeout_s = timeout_s
        self._set_s = -1.0
        self._ahead = bytearray()  # received after a head and not consumed yet
        self._has_closing_reply = False
        self.idle_since_s = -math.inf  # of its pool
        self.is_reusable = False
        if not self._is_tls:
            # The socket's own timeouts limit waits, so that one call can transfer a whole piece.
            sock.settimeout(None)

    def _limit(self, deadline: float) -> None:
        """Set the timeout of the next operation. Raises TimeoutError after the deadline."""
        left = min(self._timeout_s, deadline - self._clock())
        if left <= 0:
            raise TimeoutError
        if left != self._set_s:
            self._set_s = left
            if self._is_tls:
                self._sock.settimeout(left)
            else:
                value = struct.pack("@ll", *divmod(int(max(left, _TIMEOUT_MIN_S) * 1e6), 1_000_000))
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def is_idle(self) -> bool:
        """Return True if the server has neither closed the connection nor sent unexpected data."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def send(self, head: bytes, body: Sequence[memoryview], deadline: float) -> None:
        """Send a request. Raises OSError; the whole request may have been sent by then."""
        self.is_reusable = False
        left = [part for part in (memoryview(head), *body) if part.nbytes]
        while left:
            self._limit(deadline)
            sent = self._sock.send(left[0]) if self._is_tls else self._sock.sendmsg(left[:_BUFFERS_AT_ONCE])
            left = without_first(left, sent)

    def read_head(self, deadline: float) -> Head:
        """Read the head of the reply, skipping interim ones.

        Raises StaleConnection if the server closed before it sent a byte, OSError, and StoreError for an invalid head.
        """
        for _ in range(_INTERIM_MAX):
            head = parse_head(self._read_to(b"\r\n\r\n", _HEAD_BYTES_MAX, deadline))
            if head.status >= 200:
                self._has_closing_reply = head.headers.get("connection", "").lower() == "close"
                return head
        raise StoreError(ErrorKind.PROTOCOL, "too many interim replies")

    def _read_to(self, mark: bytes, bytes_max: int, deadline: float) -> bytes:
        while (end := self._ahead.find(mark)) < 0:
            if len(self._ahead) > bytes_max:
                raise StoreError(ErrorKind.PROTOCOL, "a part of the reply is too long")
            self._limit(deadline)
            data = self._sock.recv(_RECEIVED_AT_ONCE)
            if not data:
                if self._ahead:
                    raise StoreError(ErrorKind.PROTOCOL, "the connection ended within a head")
                raise StaleConnection
            self._ahead += data
        found = bytes(self._ahead[: end + len(mark)])
        del self._ahead[: end + len(mark)]
        return found

    def read_into(self, target: Sequence[memoryview], deadline: float, arrived: TagStream | None = None) -> None:
        """Receive exactly the bytes of `target`; `arrived` gets them in pieces, while they are in the processor's
        cache. Raises OSError, and StoreError if the connection ends before that."""
        size = sum(buffer.nbytes for buffer in target)
        done, left = 0, [buffer for buffer in target if buffer.nbytes]
        while done < size:
            piece = first_bytes(left[: 1 if self._is_tls else _BUFFERS_AT_ONCE], PIECE_BYTES)
            if self._ahead:  # came with a head
                count = min(len(self._ahead), sum(buffer.nbytes for buffer in piece))
                fill(piece, self._ahead[:count])
                del self._ahead[:count]
            else:
                self._limit(deadline)
                count = (
                    self._sock.recv_into(piece[0]) if self._is_tls
                    else self._sock.recvmsg_into(piece, 0, socket.MSG_WAITALL)[0]
                )
            if not count:
                raise StoreError(ErrorKind.SHORT_BODY, f"{done} of {size} bytes arrived")
            if arrived is not None:
                for buffer in first_bytes(piece, count):
                    arrived.add(buffer)
            left = without_first(left, count)
            done += count

    def read_body(self, head: Head, bytes_max: int, deadline: float) -> bytes:
        """Read the body of a small reply. Raises OSError, and StoreError if it is cut off or exceeds `bytes_max`."""
        if head.is_chunked:
            return self._read_chunks(bytes_max, deadline)
        length = head.length
        if length is not None:
            if length > bytes_max:
                raise StoreError(ErrorKind.PROTOCOL, f"a reply of {length} bytes, more than the limit of {bytes_max}")
            return self.read_exactly(length, deadline)
        self._has_closing_reply = True
        while len(self._ahead) <= bytes_max:
            self._limit(deadline)
            data = self._sock.recv(_RECEIVED_AT_ONCE)
            if not data:
                body = bytes(self._ahead)
                self._ahead.clear()
                return body
            self._ahead += data
        raise StoreError(ErrorKind.PROTOCOL, f"a reply of more than {bytes_max} bytes")

    def _read_chunks(self, bytes_max: int, deadline: float) -> bytes:
        """Read a body in chunks (RFC 9112, 7.1), of at most `bytes_max` bytes plus a sixteenth of that around the
        chunks. Raises OSError and StoreError."""
        body = bytearray()
        framing_left = bytes_max // 16 + _HEAD_BYTES_MAX
        is_trailer = False
        while framing_left > 0:
            try:
                line = self._read_to(b"\r\n", _HEAD_BYTES_MAX, deadline)
            except StaleConnection as error:
                raise StoreError(ErrorKind.PROTOCOL, "the connection ended within the chunks") from error
            framing_left -= len(line)
            if is_trailer:
                if line == b"\r\n":
                    return bytes(body)
                continue
            found = _CHUNK_SIZE.fullmatch(line)
            size = int(found[1], 16) if found else -1
            if not 0 <= size <= bytes_max - len(body):
                raise StoreError(ErrorKind.PROTOCOL, "a chunk of the reply has an invalid size")
            is_trailer = not size
            if size:
                body += self.read_exactly(size, deadline)
                if self.read_exactly(2, deadline) != b"\r\n":
                    break
        raise StoreError(ErrorKind.PROTOCOL, "the chunks of the reply are not valid")

    def read_exactly(self, size: int, deadline: float) -> bytes:
        """Read the next `size` bytes. Allocates memory only for arrived bytes. Raises as `read_into`."""
        data = bytearray()
        while len(data) < size:
            piece = bytearray(min(size - len(data), PIECE_BYTES))
            self.read_into([memoryview(piece)], deadline)
            data += piece
        return bytes(data)

    def finish(self) -> None:
        """Record that the reply was read to its end."""
        self.is_reusable = not self._has_closing_reply and not self._ahead

    def close(self) -> None:
        """Close it, in any state."""
        self._sock.close()


def read_small(connection: Connection, head: Head, bytes_max: int, deadline: float) -> bytes:
    """Return the whole body of a small reply, and `finish` it. Raises as `Connection.read_body`."""
    body = b"" if head.status == 204 else connection.read_body(head, bytes_max, deadline)
    connection.finish()
    return body


# struct ucred of Linux: process, user, group.
_PEER = struct.Struct("3i")


def user_of_peer(sock: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket, as it was when it connected or listened."""
    return int(_PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def resolve(server: Server) -> Sequence[Address]:
    """Return the addresses of the server's name. Blocks without a limit in the resolver. Raises StoreError."""
    if server.socket:
        return [(socket.AF_UNIX, server.socket)]
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StoreError(ErrorKind.DNS, f"{server.host} has no address") from error
    return [(socket.AddressFamily(family), address) for family, _, _, _, address in found]


class ConnectionPool:
    """Connections to one server: the idle ones, latest first, and any number of new ones."""

    def __init__(self, server: Server, clock: Clock = SYSTEM_CLOCK) -> None:
        self._server = server
        self._clock = clock
        self._addresses = Refreshed("resolver", lambda: resolve(server), _ADDRESSES_AGE_MAX_S, clock=clock)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []

    def exchange(
        self, head: bytes, body: Sequence[memoryview], read: Callable[[Connection, Head], T], deadline: float, *,
        may_repeat: bool = True,
    ) -> T:
        """Send a request and return the result of `read` for its reply. If an idle connection was closed, use another
        one; without `may_repeat` that is an error instead, because the server may have begun the request. Raises
        StoreError, and the errors of `read`."""

        def attempt(connection: Connection) -> T:
            try:
                try:
                    connection.send(head, body, deadline)
                    reply = connection.read_head(deadline)
                except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                    try:
                        reply = connection.read_head(deadline)  # of a server that stopped reading the body
                    except (ConnectionError, ssl.SSLError):
                        raise StaleConnection from error
                return read(connection, reply)
            except OSError as error:
                raise StoreError(kind_of_exception(error), words_of_exception(error)) from error
            finally:
                self.give(connection)

        idle = self.take_idle()
        if idle is not None:
            try:
                return attempt(idle)
            except StaleConnection as error:
                if not may_repeat:
                    raise StoreError(ErrorKind.CONNECTION_LOST, "the server closed an idle connection") from error
                # closed while it was idle: replacing it does not count as a retry
        try:
            return attempt(self.connect(deadline))
        except StaleConnection as error:
            raise StoreError(ErrorKind.CONNECTION_LOST, "the server closed the connection without a reply") from error

    def take_idle(self) -> Connection | None:
        """Return a connection that was used a moment ago and still seems good, or None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if self._clock() - connection.idle_since_s <= _IDLE_S_MAX and connection.is_idle():
                return connection
            connection.close()

    def connect(self, deadline: float) -> Connection:
        """Return a new connection. Raises StoreError."""
        failure: StoreError | None = None
        for family, address in self._addresses.get(deadline=deadline):
            try:
                return self._open(family, address, deadline)
            except OSError as error:
                failure = StoreError(kind_of_exception(error), words_of_exception(error))
                failure.__cause__ = error
        self._addresses.expire()
        raise failure or StoreError(ErrorKind.DNS, f"{self._server.host} has no address")

    def _open(
        self, family: socket.AddressFamily, address: tuple[str | int | bytes, ...] | str, deadline: float
    ) -> Connection:
        server = self._server
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(self._time_left(deadline))
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.connect(address)
            if family == socket.AF_UNIX:
                user, own = user_of_peer(sock), os.geteuid()
                if user not in (own, 0) and not (server.of_any_user and own == 0):
                    words = f"the socket belongs to a process of user {user}, not of this user"
                    raise StoreError(ErrorKind.ACCESS_DENIED, words)
            if server.tunnel:
                self._ask_proxy(sock, deadline)
            if server.tls is not None:
                sock.settimeout(self._time_left(deadline))
                sock = server.tls.get().wrap_socket(sock, server_hostname=server.name)
            return Connection(sock, server.timeout_s, self._clock)
        except BaseException:
            sock.close()
            raise

    def _time_left(self, deadline: float) -> float:
        """Return the seconds for the next step of connecting. Raises TimeoutError after the deadline."""
        left = min(self._server.connect_timeout_s, deadline - self._clock())
        if left <= 0:
            raise TimeoutError
        return left

    def _ask_proxy(self, sock: socket.socket, deadline: float) -> None:
        """Request a tunnel to the store from the proxy (RFC 9110, 9.3.6). Raises OSError and StoreError."""
        tunnel, connection = self._server.tunnel, Connection(sock, self._server.connect_timeout_s, self._clock)
        login = f"proxy-authorization: {self._server.proxy_login}\r\n" if self._server.proxy_login else ""
        connection.send(f"CONNECT {tunnel} HTTP/1.1\r\nhost: {tunnel}\r\n{login}\r\n".encode("ascii"), (), deadline)
        try:
            status = connection.read_head(deadline).status
        except StaleConnection as error:
            raise StoreError(ErrorKind.UNREACHABLE, "the proxy closed the connection") from error
        if status != 200 or connection._ahead:
            raise StoreError(ErrorKind.UNREACHABLE, f"the proxy answered with status {status}")

    def give(self, connection: Connection) -> None:
        """Return a connection to the pool. It is closed unless its reply was read to the end."""
        if connection.is_reusable:
            connection.idle_since_s = self._clock()
            with self._lock:
                self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections. REQUIRES: none is in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
