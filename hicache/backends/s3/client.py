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
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar
from urllib.parse import quote, urlencode
from xml.sax.saxutils import escape

from ...frame import TagStream
from ..errors import ErrorKind, StoreError
from ..http import Connection, ConnectionPool, Head, read_small
from ..refreshed import Refreshed
from .access import S3Access
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
from .signer import Credentials
from .throttle import Throttle

T = TypeVar("T")
# Returns buffers for an object of the given size, with that many bytes in total; without buffers it is not read.
Target: TypeAlias = Callable[[int], Sequence[memoryview]]
# The keys of a session are renewed long before they expire, and never used shortly before that.
_SESSION_AGE_MAX_S = 120.0
_SESSION_USABLE_S = 270.0


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
            raise _failure(head, b"")

        return self._exchange(_Request("HEAD", name), read, deadline)

    def get(
        self, name: str, target: Target, arrived: TagStream | None = None, *, deadline: float
    ) -> ObjectInfo | None:
        """Read an object into `target(size)`; return None if it is missing. Each piece is added to `arrived`."""

        def read(connection: Connection, head: Head) -> ObjectInfo | None:
            if head.status != 200:
                _missing(connection, head, deadline)
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
            if head.status == 416:  # an empty object has no first byte
                read_small(connection, head, ERROR_BYTES_MAX, deadline)
                return b"", tag
            if head.status not in (200, 206):
                _missing(connection, head, deadline)
                return None
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
            reply = read_small(connection, head, ERROR_BYTES_MAX, deadline)
            if head.status in (200, 201, 204):
                return True
            if head.status == 412 and if_absent:
                return False
            raise _failure(head, reply)

        request = _Request("PUT", name, headers=headers, body=body, signed_body=None)
        return self._exchange(request, read, deadline)

    def remove(self, name: str, etag: str, *, deadline: float) -> bool:
        """Remove an object if it still has `etag`; with an empty `etag`, always. Return False if it was replaced or is
        missing."""

        def read(connection: Connection, head: Head) -> bool:
            reply = read_small(connection, head, ERROR_BYTES_MAX, deadline)
            # 412 and 409: the object was replaced; the new one must stay.
            if head.status not in (200, 202, 204, 404, 409, 412) or error_code(reply) == "NoSuchBucket":
                raise _failure(head, reply)
            return head.status < 300

        headers = {"if-match": etag} if etag else None
        return self._exchange(_Request("DELETE", name, headers=headers), read, deadline)

    def remove_many(self, names: Sequence[str], *, deadline: float) -> list[str]:
        """Remove up to LISTED_MAX objects. Return the error kind of each one not removed; missing ones are not errors.
        """
        objects = "".join(f"<Object><Key>{escape(name)}</Key></Object>" for name in names)
        body = f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Quiet>true</Quiet>{objects}</Delete>'.encode()
        # The API requires a checksum. All servers support the first one, and directory buckets only the second.
        if self._session is None:
            name, checksum = "content-md5", hashlib.md5(body, usedforsecurity=False).digest()
        else:
            name, checksum = "x-amz-checksum-crc32", zlib.crc32(body).to_bytes(4, "big")
        headers = {"content-type": "application/xml", name: base64.b64encode(checksum).decode()}

        def read(connection: Connection, head: Head) -> list[str]:
            return read_removals(_read_reply(connection, head, deadline, LISTING_BYTES_MAX))

        request = _Request("POST", query="delete=", headers=headers, body=[memoryview(body)], signed_body=body)
        return self._exchange(request, read, deadline)

    def list(self, prefix: str, token: str | None, keys_max: int, *, deadline: float) -> Listing:
        """Return one page of the objects whose names start with `prefix`."""
        # The signature requires this order and encoding.
        parameters = {"list-type": "2", "max-keys": str(keys_max), "prefix": prefix}
        if token is not None:
            parameters = {"continuation-token": token, **parameters}
        query = urlencode(parameters, quote_via=quote)

        def read(connection: Connection, head: Head) -> Listing:
            return read_listing(_read_reply(connection, head, deadline, LISTING_BYTES_MAX))

        return self._exchange(_Request("GET", query=query), read, deadline)

    def versioning(self, *, deadline: float) -> str:
        """Return the versioning of the bucket: `Enabled`, `Suspended`, or empty if it never had versions."""
        request = _Request("GET", query="versioning=")
        return self._exchange(request, lambda link, head: read_versioning(_read_reply(link, head, deadline)), deadline)

    def close(self) -> None:
        """Close the connections. REQUIRES: no request is in flight."""
        self._pool.close()

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

        def read(connection: Connection, head: Head) -> Credentials:
            return read_session(_read_reply(connection, head, deadline))

        with contextlib.closing(ConnectionPool(self._access.server, self._access.clock)) as pool:
            return self._access.authorized(
                lambda keys: pool.exchange(self._sign(request, keys), (), read, deadline), deadline
            )

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


def _read_reply(connection: Connection, head: Head, deadline: float, bytes_max: int = ERROR_BYTES_MAX) -> bytes:
    """Return the body of a good reply. Raises StoreError for any other."""
    reply = read_small(connection, head, bytes_max, deadline)
    if head.status != 200:
        raise _failure(head, reply)
    return reply


def _missing(connection: Connection, head: Head, deadline: float) -> None:
    """Return if the reply means that the object is missing. Raises StoreError for any other reply."""
    reply = read_small(connection, head, ERROR_BYTES_MAX, deadline)
    if head.status != 404 or error_code(reply) == "NoSuchBucket":
        raise _failure(head, reply)


def _failure(head: Head, reply: bytes) -> StoreError:
    return failed_reply(head.status, error_code(reply), head.retry_after_s)

