"""The requests that a store of pages makes to S3, signed, without copying pages.

Each request is tried once and ends by its deadline. A failed request raises StoreError. A missing object, or one that
exists already, is a normal answer. Bodies are lists of buffers of any number and sizes; no buffer is touched after a
call has returned.

A directory bucket (S3 Express) accepts only keys of a session, which are valid for five minutes. A background thread
requests them with the identity's keys.

Locking design: the pool, the throttle and the session are thread-safe; everything else is constant. A connection has
one request at a time.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar
from urllib.parse import quote, urlencode
from xml.sax.saxutils import escape

from ...clock import SYSTEM_CLOCK, Clock
from ...frame import TagStream
from ..errors import ErrorKind, StoreError
from ..http import Connection, ConnectionPool, Head, read_small
from ..rotated import Refreshed
from .access import Credentials, S3Access
from .replies import (
    ERROR_BYTES_MAX,
    LISTING_BYTES_MAX,
    Listing,
    error_code,
    failed_reply,
    read_listing,
    read_removals,
    read_session,
    read_versioning,
)

T = TypeVar("T")
# Returns buffers for an object of the given size, with that many bytes in total; without buffers it is not read.
Target: TypeAlias = Callable[[int], Sequence[memoryview]]
# The keys of a session are renewed long before they expire, and never used shortly before that.
_SESSION_AGE_MAX_S = 120.0
_SESSION_USABLE_S = 270.0
# After a cut, replies to requests already in flight must not cut the limit again.
_CUT_INTERVAL_S = 0.5


class Throttle:
    """A limit on requests in flight, which is lower after a "slow down" reply of the server.

    Additive increase, multiplicative decrease (Chiu and Jain, 1989): a "slow down" reply halves the limit; each round
    of answered requests adds one to it. Invariant: 1 <= limit <= `requests_max`, and `running` <= `requests_max`.

    Locking design: one condition guards all fields, held for a few instructions.
    """

    def __init__(self, requests_max: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._requests_max = requests_max
        self._state = threading.Condition()
        self._limit = float(requests_max)
        self._running = 0
        self._cut_s = -math.inf
        self._closed_until_s = -math.inf

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """A context for one request: waits until it may be sent, and learns from the StoreError that leaves the
        context. Raises StoreError at `deadline`, or if the server has requested a pause."""
        with self._state:
            while True:
                now = self._clock()
                if now >= deadline:
                    raise StoreError(ErrorKind.DEADLINE)
                if now < self._closed_until_s:
                    raise StoreError(ErrorKind.THROTTLED, "the server requested a pause")
                if self._running < int(self._limit):
                    break
                self._clock.wait(self._state, deadline - now)
            self._running += 1
        failure = None
        try:
            yield
        except StoreError as error:
            failure = error
            raise
        finally:
            with self._state:
                self._running -= 1
                now = self._clock()
                if failure is None:
                    self._limit = min(self._limit + 1 / self._limit, float(self._requests_max))
                elif failure.kind in (ErrorKind.THROTTLED, ErrorKind.UNAVAILABLE):
                    self._closed_until_s = max(self._closed_until_s, now + failure.retry_after_s)
                    if now - self._cut_s >= _CUT_INTERVAL_S:
                        self._limit = max(1.0, self._limit / 2)
                        self._cut_s = now
                self._state.notify_all()


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object. `etag` is the server's tag of its content, empty if there is none: then the reply may be from a
    gateway instead of the store."""

    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    name: str = ""
    query: str = ""
    headers: Mapping[str, str] | None = None
    body: Sequence[memoryview] = ()
    signed_body: bytes | None = b""  # None: the signature does not cover the body


class S3Client:
    """See the module's docstring. It gets the credentials before each request, because they may change. `throttle`
    limits the requests in flight."""

    def __init__(self, access: S3Access) -> None:
        self._access = access
        self._session = None
        if access.is_directory:
            self._session = Refreshed(
                "s3-session", self._create_session, _SESSION_AGE_MAX_S, _SESSION_USABLE_S, access.clock
            )
        self._pool = ConnectionPool(access.server, access.clock)
        self.throttle = Throttle(access.options.connections, access.clock)

    def head(self, name: str, *, deadline: float) -> ObjectInfo | None:
        """Return an object's size and tag, None if it is missing. A missing bucket looks like a missing object, because
        the reply to HEAD has no body."""

        def read(connection: Connection, head: Head) -> ObjectInfo | None:
            connection.finish()  # ignore the length: a reply to HEAD has no body
            if head.status == 200:
                return ObjectInfo(head.length or 0, head.headers.get("etag", ""))
            if head.status == 404:
                return None
            raise failed_reply(head.status, "", head.retry_after_s)

        return self._exchange(_Request("HEAD", name), read, deadline)

    def get(self, name: str, target: Target, arrived: TagStream | None = None, *, deadline: float) -> ObjectInfo | None:
        """Read an object into `target(size)`; return None if it is missing. Each piece is added to `arrived`."""

        def read(connection: Connection, head: Head) -> ObjectInfo | None:
            if head.status != 200:
                _checked(connection, head, deadline, (404,))
                return None
            size = _object_length(head)
            buffers = target(size)
            if buffers:
                connection.read_into(buffers, deadline, arrived)
                connection.finish()
            return ObjectInfo(size, head.headers.get("etag", ""))

        return self._exchange(_Request("GET", name), read, deadline)

    def get_start(self, name: str, bytes_max: int, *, is_whole: bool, deadline: float) -> tuple[bytes, str] | None:
        """Return the first `bytes_max` bytes of an object and its tag, None if it is missing. The whole object is asked
        for without a range, because the answer to a range of an empty object has no tag."""

        def read(connection: Connection, head: Head) -> tuple[bytes, str] | None:
            tag = head.headers.get("etag", "")
            if head.status not in (200, 206):
                _checked(connection, head, deadline, (404, 416))
                return None if head.status == 404 else (b"", tag)  # an empty object has no first byte
            length = _object_length(head)
            data = connection.read_exactly(min(length, bytes_max), deadline)
            if length == len(data):
                connection.finish()
            return data, tag

        headers = None if is_whole else {"range": f"bytes=0-{bytes_max - 1}"}
        return self._exchange(_Request("GET", name, headers=headers), read, deadline)

    def put(self, name: str, body: Sequence[memoryview], *, if_absent: bool, deadline: float) -> bool:
        """Store an object. Return False if `if_absent` and it exists already."""
        # Without a type, SeaweedFS stores an empty object when the connection ends before the body's first byte.
        headers = {"content-type": "application/octet-stream"}
        if if_absent:
            headers["if-none-match"] = "*"

        def read(connection: Connection, head: Head) -> bool:
            _checked(connection, head, deadline, (200, 201, 204, 412) if if_absent else (200, 201, 204))
            return head.status != 412

        request = _Request("PUT", name, headers=headers, body=body, signed_body=None)
        return self._exchange(request, read, deadline)

    def remove(self, name: str, etag: str, *, deadline: float) -> bool:
        """Remove an object if it still has `etag`; with an empty `etag`, always. Return False if it was replaced or is
        missing."""

        def read(connection: Connection, head: Head) -> bool:
            # 412 and 409: the object was replaced; the new one must stay.
            _checked(connection, head, deadline, (200, 202, 204, 404, 409, 412))
            return head.status < 300

        headers = {"if-match": etag} if etag else None
        return self._exchange(_Request("DELETE", name, headers=headers), read, deadline)

    def remove_many(self, names: Sequence[str], *, deadline: float) -> list[str]:
        """Remove up to LISTED_MAX objects. Return the error kind of each one that is still there."""
        objects = "".join(f"<Object><Key>{escape(name)}</Key></Object>" for name in names)
        body = f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Quiet>true</Quiet>{objects}</Delete>'.encode()
        # The API requires a checksum. All servers support the first one, and directory buckets only the second.
        if self._session is None:
            name, checksum = "content-md5", hashlib.md5(body, usedforsecurity=False).digest()
        else:
            name, checksum = "x-amz-checksum-crc32", zlib.crc32(body).to_bytes(4, "big")
        headers = {"content-type": "application/xml", name: base64.b64encode(checksum).decode()}
        request = _Request("POST", query="delete=", headers=headers, body=[memoryview(body)], signed_body=body)
        return self._ask(request, read_removals, deadline)

    def list(self, prefix: str, token: str | None, keys_max: int, *, deadline: float) -> Listing:
        """Return one page of the objects whose names start with `prefix`."""
        # The signature requires this order and encoding.
        parameters = {"list-type": "2", "max-keys": str(keys_max), "prefix": prefix}
        if token is not None:
            parameters = {"continuation-token": token, **parameters}
        return self._ask(_Request("GET", query=urlencode(parameters, quote_via=quote)), read_listing, deadline)

    def versioning(self, *, deadline: float) -> str:
        """Return the versioning of the bucket: `Enabled`, `Suspended`, or empty if it never had versions."""
        return self._ask(_Request("GET", query="versioning="), read_versioning, deadline)

    def close(self) -> None:
        """Close the connections. REQUIRES: no request is in flight."""
        self._pool.close()

    def _ask(self, request: _Request, parse: Callable[[bytes], T], deadline: float) -> T:
        """Return the parsed document in the reply."""

        def read(connection: Connection, head: Head) -> T:
            return parse(_checked(connection, head, deadline, bytes_max=LISTING_BYTES_MAX))

        return self._exchange(request, read, deadline)

    def _exchange(self, request: _Request, read: Callable[[Connection, Head], T], deadline: float) -> T:
        """Send `request` when the throttle permits it, and `read` its reply."""

        def send(keys: Credentials) -> T:
            return self._pool.exchange(self._sign(request, keys), request.body, read, deadline)

        with self.throttle.turn(deadline):
            if self._session is not None:
                return send(self._session.get(deadline=deadline))
            return self._access.authorized(send, deadline)

    def _create_session(self) -> Credentials:
        """Return the keys of a new session (CreateSession). Uses its own connection, because the client may be closed
        while the request is in flight."""
        request, deadline = _Request("GET", query="session="), self._access.clock() + self._access.options.open_timeout
        with contextlib.closing(ConnectionPool(self._access.server, self._access.clock)) as pool:
            reply = self._access.authorized(
                lambda keys: pool.exchange(
                    self._sign(request, keys), (), lambda link, head: _checked(link, head, deadline), deadline
                ),
                deadline,
            )
        return read_session(reply)

    def _sign(self, request: _Request, keys: Credentials) -> bytes:
        """Return the signed head of `request`, as it is sent."""
        access = self._access
        target = f"{access.path}/{request.name}" if request.name else access.path or "/"
        if request.query:
            target += f"?{request.query}"
        url, headers = f"https://{access.host}{target}", {"host": access.host, **(request.headers or {})}
        headers = access.signer.sign(keys, request.method, url, headers, request.signed_body)
        if request.method in ("PUT", "POST"):
            headers["content-length"] = str(sum(part.nbytes for part in request.body))
        return access.request_head(request.method, target, {**headers, "accept-encoding": "identity"})


def _object_length(head: Head) -> int:
    """Return the length of the object in a reply. Raises StoreError if the reply has no length."""
    if head.length is None or head.is_chunked:
        raise StoreError(ErrorKind.PROTOCOL, "the reply has no length of the object")
    return head.length


def _checked(
    connection: Connection, head: Head, deadline: float, statuses: Sequence[int] = (200,),
    bytes_max: int = ERROR_BYTES_MAX,
) -> bytes:
    """Return the body of a reply with one of `statuses`. Raises StoreError for any other, and for a missing bucket."""
    reply = read_small(connection, head, bytes_max, deadline)
    code = error_code(reply) if head.status == 404 or head.status not in statuses else ""
    if head.status not in statuses or code == "NoSuchBucket":
        raise failed_reply(head.status, code, head.retry_after_s)
    return reply
