"""The parser of a connection of redis-py, which moves the bodies of pages directly from and into their buffers.

redis-py opens the connection and logs in; it gives each connection the parser that its argument `parser_class` makes,
and reads all replies through it. The parser speaks RESP2
(https://redis.io/docs/latest/develop/reference/protocol-spec/) and does not trust the server: the total bytes and
elements of each reply are limited, so that a server cannot make it allocate more memory by announcing large lengths.

Requests for pages go to the socket directly, in one gathering send: redis-py's `send_packed_command` would make one
call per buffer, and a peer that reads a few bytes at a time would hold it beyond the deadline.

A channel belongs to one call at a time and has no lock.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...clock import SYSTEM_CLOCK, Clock
from ...frame import TagStream, first_bytes, without_first
from ...lazy import native
from ..errors import ErrorKind, StoreError
from .errors import ErrorReply, failure_of

Part: TypeAlias = bytes | memoryview
Reply: TypeAlias = "bytes | int | ErrorReply | list[Reply] | None"

# Bytes read ahead of a page: enough for the length line, and few enough that copying the excess costs nothing.
_PAGE_HEAD_BYTES = 32
# Bytes read ahead of short replies, and the longest accepted line: real lines are far shorter.
_BUFFER_BYTES = 16 << 10
# A page is received and added to the tag in pieces: small enough for the processor's cache, and large enough that the
# cost of the calls does not matter.
_PIECE_MAX_BYTES = 1 << 20
_PIECE_MIN_BYTES = 64 << 10
# Linux moves at most this many buffers in one call (IOV_MAX).
_BUFFERS_MAX = 1024
# A body that cannot be a page is read and discarded. Beyond this size, closing the connection is faster.
_DRAIN_MAX_BYTES = 4 << 20
# The limits of one reply that is not a page. The longest are CLUSTER SLOTS if no two neighbouring slots share a node
# (about 210,000 elements, 3 MiB), and one step of SCAN: about 1,000 keys, possibly of other users.
_REPLY_MAX_BYTES = 8 << 20
_ELEMENTS_MAX = 1 << 18
_NESTING_MAX = 8
# The highest accepted mean length of one-line replies; even the longest error texts of servers are shorter.
_LINE_MEAN_BYTES = 512
_LENGTH_DIGITS_MAX = 20
_ONE_LINE_KINDS = (b"+", b"-", b":")
# struct timeval: seconds and microseconds. Zero for both would mean no timeout.
_TIMEVAL = struct.Struct("@ll")

_exchange_pages = native("exchange_pages")
# The outcome of a reply of `Channel.exchange`: a page that is verified, or was stored.
VERIFIED = -1
# For `Channel.exchange`: heads, pages and tails of the requests (to read: heads, and the pages of all replies); keys of
# the pages; their parents, to write; `FrameCodec.fields`, with which they are verified or sealed there.
Batch: TypeAlias = tuple[list[bytes], list[list[memoryview]], list[bytes], list[bytes], list[bytes | None] | None, Any]


class Oversize(Exception):
    """Raised for a body far too long for a page. The channel is closed; repeat the requests in flight after it."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length


class Channel:
    """A connection. Its methods block at most until the deadline of the call, or for `timeout_s` without a byte.

    redis-py calls `on_connect`, `on_disconnect` and, while it logs in, `read_response`, which ends by `deadline`.

    Invariant: a channel is reused only while it is `reusable`, that is, while no request is unanswered and nothing has
    failed on it. So a reply is never matched with the wrong request.
    Every method that moves bytes raises StoreError, after which the channel is broken.
    """

    def __init__(
        self, timeout_s: float, deadline: float = math.inf, tls: ssl.SSLContext | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._tls = tls
        self._armed_s = -1.0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._owed = 0
        self._left_bytes = self._left_elements = 0  # remaining limits of the current reply
        self._broken = False
        self._poll = select.poll()
        # Of the pool: True once a reply came since the channel was last leased, the time for that reply beside
        # `timeout_s`, and when the channel was returned.
        self.answered = False
        self.first_reply_s = math.inf
        self.idle_since_s = -math.inf

    def on_connect(self, connection: Any) -> None:
        """Take over the socket of a new connection of redis-py. Blocks for the TLS handshake. Raises OSError.

        `_sock` is the only private name of redis-py that HiCache uses; its own parsers read it too. redis-py would make
        the TLS context itself: from the system's authorities besides `tls_ca_file`, and from the files as they are,
        which may be half replaced.
        """
        sock = connection._sock
        if self._tls is None:
            sock.setblocking(True)
        else:
            sock = connection._sock = self._tls.wrap_socket(sock, server_hostname=connection.host)
        self._connection = connection
        self._sock: socket.socket = sock
        self._poll.register(sock, select.POLLIN)
        self._arm(self._deadline)  # also for what redis-py sends

    def on_disconnect(self) -> None:
        """Called when redis-py closes the connection, which never opens again."""
        self._broken = True

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Reply:
        """Return the reply to a command that redis-py has sent: not decoded, and within this channel's limits."""
        self._owed += 1
        return self.read_reply(self._deadline)

    @property
    def reusable(self) -> bool:
        """True if another call may use the channel."""
        return not self._broken and not self._owed and self._start == self._end

    @property
    def is_quiet(self) -> bool:
        """True if no byte waits, on the socket or decrypted. Bytes on an idle connection mean that the server closed it
        or misbehaves."""
        deciphered = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()
        return not deciphered and not self._poll.poll(0)

    def close(self) -> None:
        """Close the connection. May be called twice. REQUIRES: it was opened."""
        self._connection.disconnect()

    def send(self, parts: Sequence[Part], replies: int, deadline: float) -> None:
        """Send requests that will have `replies` replies. Copies no bytes."""
        self._owed += replies
        try:
            left = [memoryview(part) for part in parts]
            while left:
                self._arm(deadline)
                count = self._sock.sendmsg(left[:_BUFFERS_MAX]) if self._tls is None else self._sock.send(left[0])
                left = without_first(left, count)
            return
        except OSError as error:
            failure = self._last_words(error, deadline) or self._broken_by(error, deadline)
        # Outside the handler: the chain of exceptions must not hold the TLS library's text, which quotes host names.
        raise failure

    def _arm(self, deadline: float) -> None:
        """Set the timeout of the next socket operation from the deadline. Raises TimeoutError after the deadline."""
        wait_s = deadline - self._clock()
        if wait_s <= 0:
            raise TimeoutError
        wait_s = min(wait_s, self._timeout_s if self.answered else min(self._timeout_s, self.first_reply_s))
        if wait_s == self._armed_s:
            return
        self._armed_s = wait_s
        if self._tls is not None:
            self._sock.settimeout(wait_s)
        else:
            # Timeouts of the kernel: with Python's, each call would poll first, and a body would arrive in many pieces.
            limit = _TIMEVAL.pack(int(wait_s), max(1, int(wait_s % 1 * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _last_words(self, error: OSError, deadline: float) -> StoreError | None:
        """Return the error reply that the server sent before it closed the connection, None without: it may have closed
        because a value is too large. Closes the connection."""
        found = None
        if isinstance(error, ConnectionError | ssl.SSLError):
            with contextlib.suppress(StoreError):
                for _ in range(self._owed):
                    line = self._line(_BUFFER_BYTES, deadline)
                    if line.startswith(b"-"):
                        found = ErrorReply(line[1:]).failure
        self.close()
        return found

    def _broken_by(self, error: OSError, deadline: float) -> StoreError:
        self.close()
        if isinstance(error, (TimeoutError, BlockingIOError)):
            if self._clock() >= deadline:
                return StoreError(ErrorKind.DEADLINE)
            if not self.answered and self.first_reply_s < self._timeout_s:
                return StoreError(ErrorKind.CONNECTION_LOST, "no reply on a connection that was idle")
        return failure_of(error)

    def _not_redis(self, what: str) -> StoreError:
        self.close()
        return StoreError(ErrorKind.PROTOCOL, what)

    def _receive(self, buffers: Sequence[memoryview], deadline: float) -> int:
        """Receive at least one byte into the buffers, in order; return the count. With TLS only into the first."""
        try:
            self._arm(deadline)
            if len(buffers) == 1 or self._tls is not None:
                count = self._sock.recv_into(buffers[0])
            else:
                count = self._sock.recvmsg_into(buffers)[0]
        except OSError as error:
            failure = self._broken_by(error, deadline)
        else:
            if count:
                return count
            self.close()
            failure = StoreError(ErrorKind.CONNECTION_LOST, "closed by the server")
        raise failure  # outside the handler, as in `send`

    def _fill(self, ahead_bytes: int, deadline: float) -> None:
        """Append up to `ahead_bytes` received bytes to the buffer."""
        if self._start:
            self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        if self._end == _BUFFER_BYTES:
            raise self._not_redis("a line that is too long")
        self._end += self._receive([self._view[self._end : self._end + ahead_bytes]], deadline)

    def _line(self, ahead_bytes: int, deadline: float) -> bytes:
        """Return the next line without its end."""
        seen = self._start
        while (end := self._buffer.find(b"\r\n", seen, self._end)) < 0:
            # Only the first of the two bytes of the line's end may have arrived.
            waiting = max(self._end - self._start - 1, 0)
            self._fill(ahead_bytes, deadline)
            seen = self._start + waiting
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        self.answered = True
        if not line:
            raise self._not_redis("an empty line")
        return line

    def _length(self, line: bytes) -> int:
        digits = line[1:]
        if len(digits) > _LENGTH_DIGITS_MAX or not digits.removeprefix(b"-").isdigit():
            raise self._not_redis("a length that is not a number")
        return int(digits)

    def read_lines(self, count: int, deadline: float) -> list[bytes]:
        """Return `count` replies of one line each: `+OK`, `:1`, `$-1`, `-ERR ...`. Any other line breaks the channel:
        it may begin a longer reply, whose rest would be read as replies to other requests."""
        lines: list[bytes] = []
        left_bytes = _BUFFER_BYTES + count * _LINE_MEAN_BYTES
        while len(lines) < count:
            end = self._buffer.rfind(b"\r\n", self._start, self._end)
            if end < 0:
                self._fill(_BUFFER_BYTES, deadline)
                continue
            wanted = count - len(lines)
            found = bytes(self._view[self._start : end]).split(b"\r\n", wanted)[:wanted]
            lines += found
            found_bytes = sum(map(len, found)) + 2 * len(found)
            self._start += found_bytes
            left_bytes -= found_bytes
            self.answered = True
            if left_bytes < 0:
                raise self._not_redis("lines that are too long")
        if not all(line.startswith(_ONE_LINE_KINDS) or line == b"$-1" for line in lines):
            raise self._not_redis("a reply that is not one line")
        self._owed -= count
        return lines

    def read_page(
        self, buffers: Sequence[memoryview], fits: Callable[[int], bool], tag: TagStream | None, deadline: float,
    ) -> int | ErrorReply | None:
        """Read the reply to one GET. Return the length of the value in bytes, None for a missing value, or an error
        reply. If `fits` accepts the length, the value is read into the first bytes of `buffers` and added to `tag`.

        The length is checked before the value is read; a value that does not fit is read and discarded. Raises Oversize
        if that would take too long.
        REQUIRES: the buffers have room for each length that `fits` accepts.
        """
        line = self._line(_PAGE_HEAD_BYTES, deadline)
        if line.startswith(b"-"):
            self._owed -= 1
            return ErrorReply(line[1:])
        if not line.startswith(b"$"):
            raise self._not_redis("a reply that is not a value")
        length = self._length(line)
        if length < 0:
            self._owed -= 1
            return None
        if fits(length):
            self._read_body([one for one in first_bytes(buffers, length) if one.nbytes], tag, deadline)
        elif length > _DRAIN_MAX_BYTES:
            self.close()
            raise Oversize(length)
        elif length:
            self._read_body([memoryview(bytearray(length))], None, deadline)
        self._end_of_body(deadline)
        self._owed -= 1
        return length

    def _read_body(self, buffers: Sequence[memoryview], tag: TagStream | None, deadline: float) -> None:
        """Fill all buffers, in order, and add them to `tag`. Takes the bytes that were read ahead first."""
        left = untagged = buffers
        fresh = 0  # the received bytes of `untagged`
        while left:
            if self._end > self._start:
                count = min(self._end - self._start, left[0].nbytes)
                left[0][:count] = self._view[self._start : self._start + count]
                self._start += count
            else:
                count = self._receive(first_bytes(left[:_BUFFERS_MAX], _PIECE_MAX_BYTES), deadline)
            left, fresh = without_first(left, count), fresh + count
            if tag is not None and (fresh >= _PIECE_MIN_BYTES or not left):
                for part in first_bytes(untagged, fresh):
                    tag.add(part)
                untagged, fresh = without_first(untagged, fresh), 0

    def _end_of_body(self, deadline: float) -> None:
        while self._end - self._start < 2:
            self._fill(_PAGE_HEAD_BYTES, deadline)
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise self._not_redis("a value longer than announced")
        self._start += 2

    @property
    def exchanges(self) -> bool:
        """True if `exchange` works: with the native helper and without TLS."""
        return _exchange_pages is not None and self._tls is None

    def exchange(
        self, batch: Batch, earlier: int, left: int, depth: int, deadline: float
    ) -> tuple[list[int | None], int, StoreError | None]:
        """Send the requests of a batch, at most `depth` in flight, and receive the replies to the `earlier` requests in
        flight and to these, natively and in one call, until at most `left` are in flight.

        Return the complete replies, in order: None for a missing value, VERIFIED, or the length of a value that Python
        has to verify; the number of requests that were sent; and the failure that ended it. Without a failure it ends
        early before a reply of another kind or length, which the other methods can read.
        REQUIRES: `exchanges`.
        """
        self._owed += (count := len(batch[0]))
        first_s = self._timeout_s if self.answered else min(self._timeout_s, self.first_reply_s)
        code, replies, sent, self._start, self._end, answered = _exchange_pages(
            self._sock.fileno(), earlier, left, *batch, self._buffer, (self._start, self._end), depth,
            (deadline - self._clock(), self._timeout_s, first_s),
        )
        self._armed_s = -1.0  # it has set its own timeout
        self.answered = self.answered or bool(answered)
        self._owed -= count - sent + len(replies)
        if code == errno.EBADMSG:
            return replies, sent, self._not_redis("a value longer than announced")
        error = OSError(code, os.strerror(code))
        return replies, sent, (self._last_words(error, deadline) or self._broken_by(error, deadline)) if code else None

    def call(self, *arguments: bytes, deadline: float, bytes_max: int = _REPLY_MAX_BYTES) -> Reply:
        """Send one command and return its reply, as `read_reply` does."""
        self.send([command(*arguments)], 1, deadline)
        return self.read_reply(deadline, bytes_max)

    def read_reply(self, deadline: float, bytes_max: int = _REPLY_MAX_BYTES) -> Reply:
        """Return the next reply of any kind; values are copied. An error reply is returned, not raised. A reply of more
        than `bytes_max` bytes or _ELEMENTS_MAX elements in total breaks the channel."""
        self._left_bytes, self._left_elements = bytes_max + _BUFFER_BYTES, _ELEMENTS_MAX
        reply = self._reply(deadline, 0)
        self._owed -= 1
        return reply

    def _reply(self, deadline: float, depth: int) -> Reply:
        line = self._line(_BUFFER_BYTES, deadline)
        kind = line[:1]
        self._left_elements -= 1
        self._left_bytes -= len(line)
        if self._left_elements < 0 or self._left_bytes < 0:
            raise self._not_redis("a reply that is too long")
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return ErrorReply(line[1:])
        if kind not in (b":", b"$", b"*"):
            raise self._not_redis("a reply of unknown type")
        number = self._length(line)
        if kind == b":":
            return number
        if number < 0:
            return None
        is_list = kind == b"*"
        if depth > _NESTING_MAX or number > (self._left_elements if is_list else self._left_bytes):
            raise self._not_redis("a reply that is too long")
        if is_list:
            return [self._reply(deadline, depth + 1) for _ in range(number)]
        self._left_bytes -= number
        value = bytearray(number)
        if number:
            self._read_body([memoryview(value)], None, deadline)
        self._end_of_body(deadline)
        return bytes(value)


def command(*arguments: bytes) -> bytes:
    """Return the bytes of one request."""
    return b"*%d\r\n" % len(arguments) + b"".join([b"$%d\r\n%b\r\n" % (len(a), a) for a in arguments])
