"""The client of our own: signed requests over our own connections, no byte of a page copied in this process.

Locking design: the pool and the signer are safe for threads; everything else here is fixed. Each request has its
connection to itself.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import ssl
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

from ...errors import ConfigError
from ...frame import TagStream
from ..errors import ErrorKind, StoreError, kind_of_exception
from .access import Access, CredentialsSource
from .client import Listing, ObjectInfo, Target
from .http import Connection, ConnectionPool, Head, Server, StaleConnection, request_head
from .replies import ERROR_BYTES_MAX, LISTING_BYTES_MAX, error_code, failed_reply, read_listing, read_removals
from .signing import EMPTY_SHA256, UNSIGNED_PAYLOAD, Signer, query_string

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where objects are: the `host` of requests with its port, the path before an object's name, the region."""

    host: str
    path: str
    region: str


@dataclass(frozen=True, slots=True)
class Payload:
    """How bodies are protected on their way. `checksum` adds a CRC32 that the server compares; `sign` a SHA-256 under
    the signature. Pages carry a tag of their own, so neither is needed to notice damage."""

    checksum: bool
    sign: bool


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    name: str = ""
    query: str = ""
    headers: Mapping[str, str] | None = None
    body: Sequence[memoryview] = ()
    sha256: str = EMPTY_SHA256


def open_direct(access: Access) -> DirectClient:
    """Return a client for what `access` says. Raises ConfigError as `tls_context`."""
    options = access.options
    payload = Payload(checksum=options.checksum == "when_supported", sign=options.sign_payload)
    return DirectClient(*where(access), payload, access.credentials)


def where(access: Access) -> tuple[Server, Place]:
    """What to connect to, and what to ask for there. Raises ConfigError as `tls_context`."""
    options, url = access.options, urlsplit(access.endpoint)
    host, path, name = url.netloc, url.path.rstrip("/"), url.hostname or ""
    if access.path_style:
        path = f"{path}/{options.bucket}"
    else:
        host, name = f"{options.bucket}.{host}", f"{options.bucket}.{name}"
    ca_file = options.ca_file or access.session.get_config_variable("ca_bundle")
    tls = tls_context(ca_file) if url.scheme == "https" else None
    port = url.port or (80 if tls is None else 443)
    return Server(name, port, tls, options.connect_timeout, options.timeout), Place(host, path, access.region)


def tls_context(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Certificates are always checked, against `ca_file` or what the system trusts. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"s3 store: ca_file {os.fspath(ca_file or '')!r} holds no readable certificates") from error


class DirectClient:
    """A Client (see there). `credentials` is asked before each request, so that they may change."""

    def __init__(
        self, server: Server, place: Place, payload: Payload, credentials: CredentialsSource
    ) -> None:
        self._pool = ConnectionPool(server)
        self._place = place
        self._payload = payload
        self._credentials = credentials
        self._signer = Signer(place.region)

    def head(self, name: str, *, deadline: float) -> ObjectInfo | None:
        """See Client."""

        def read(connection: Connection, head: Head) -> ObjectInfo | None:
            connection.finish()  # whatever it says of a length: replies to HEAD have no body
            if head.status == 200:
                return ObjectInfo(head.length or 0, head.headers.get("etag", ""))
            if head.status == 404:
                return None
            raise _failure(head, b"")

        return self._exchange(_Request("HEAD", name), read, deadline)

    def get(
        self, name: str, target: Target, arrived: TagStream | None = None, *, deadline: float
    ) -> ObjectInfo | None:
        """See Client."""

        def read(connection: Connection, head: Head) -> ObjectInfo | None:
            if head.status != 200:
                _missing(connection, head, deadline)
                return None
            size = head.length
            if size is None or head.is_chunked:
                raise StoreError(ErrorKind.PROTOCOL, "the reply does not say how long the object is")
            buffers = target(size)
            if buffers:
                connection.read_into(buffers, deadline, arrived)
                connection.finish()
            return ObjectInfo(size, head.headers.get("etag", ""))

        return self._exchange(_Request("GET", name), read, deadline)

    def get_start(self, name: str, bytes_max: int, *, deadline: float) -> bytes | None:
        """See Client."""

        def read(connection: Connection, head: Head) -> bytes | None:
            if head.status == 416:  # an empty object has no first byte
                _read_small(connection, head, deadline)
                return b""
            if head.status not in (200, 206):
                _missing(connection, head, deadline)
                return None
            length = head.length
            if length is None or head.is_chunked:
                raise StoreError(ErrorKind.PROTOCOL, "the reply does not say how long the object is")
            data = connection.read_exactly(min(length, bytes_max), deadline)
            if length == len(data):
                connection.finish()
            return data

        return self._exchange(_Request("GET", name, headers={"range": f"bytes=0-{bytes_max - 1}"}), read, deadline)

    def put(self, name: str, body: Sequence[memoryview], *, if_absent: bool, deadline: float) -> bool:
        """See Client."""
        headers = {"content-type": "application/octet-stream"}
        if if_absent:
            headers["if-none-match"] = "*"
        if self._payload.checksum:
            headers["x-amz-checksum-crc32"] = base64.b64encode(_crc32(body).to_bytes(4, "big")).decode()
        sha256 = _sha256(body) if self._payload.sign else UNSIGNED_PAYLOAD

        def read(connection: Connection, head: Head) -> bool:
            reply = _read_small(connection, head, deadline)
            if head.status in (200, 201, 204):
                return True
            if head.status == 412 and if_absent:
                return False
            raise _failure(head, reply)

        return self._exchange(_Request("PUT", name, headers=headers, body=body, sha256=sha256), read, deadline)

    def remove(self, name: str, etag: str, *, deadline: float) -> None:
        """See Client."""

        def read(connection: Connection, head: Head) -> None:
            reply = _read_small(connection, head, deadline)
            # 412 and 409: it is another object by now, which is not ours to remove.
            if head.status not in (200, 202, 204, 404, 409, 412) or error_code(reply) == "NoSuchBucket":
                raise _failure(head, reply)

        headers = {"if-match": etag} if etag else None
        self._exchange(_Request("DELETE", name, headers=headers), read, deadline)

    def remove_many(self, names: Sequence[str], *, deadline: float) -> list[str]:
        """See Client."""
        objects = "".join(f"<Object><Key>{escape(name)}</Key></Object>" for name in names)
        body = f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Quiet>true</Quiet>{objects}</Delete>'.encode()
        headers = {
            "content-type": "application/xml",
            # Asked for by the API as an alternative to newer checksums; every server knows this one.
            "content-md5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode(),
        }

        def read(connection: Connection, head: Head) -> list[str]:
            reply = _read_small(connection, head, deadline, LISTING_BYTES_MAX)
            if head.status != 200:
                raise _failure(head, reply)
            return read_removals(reply)

        sent = [memoryview(body)]
        request = _Request("POST", query="delete=", headers=headers, body=sent, sha256=_sha256(sent))
        return self._exchange(request, read, deadline)

    def list(self, prefix: str, token: str | None, keys_max: int, *, deadline: float) -> Listing:
        """See Client."""
        parameters = {"list-type": "2", "max-keys": str(keys_max), "prefix": prefix}
        if token is not None:
            parameters["continuation-token"] = token

        def read(connection: Connection, head: Head) -> Listing:
            reply = _read_small(connection, head, deadline, LISTING_BYTES_MAX)
            if head.status != 200:
                raise _failure(head, reply)
            return read_listing(reply)

        return self._exchange(_Request("GET", query=query_string(parameters)), read, deadline)

    def close(self) -> None:
        """See Client."""
        self._pool.close()

    def _exchange(self, request: _Request, read: Callable[[Connection, Head], T], deadline: float) -> T:
        """Send `request` and `read` its reply; on another connection if an idle one turns out to be closed."""
        head = self._sign(request, deadline)
        connection = self._pool.take_idle()
        if connection is not None:
            try:
                return self._try(connection, head, request.body, read, deadline)
            except StaleConnection:
                pass  # closed while it was idle: this was no try
        try:
            return self._try(self._pool.connect(deadline), head, request.body, read, deadline)
        except StaleConnection as error:
            raise StoreError(ErrorKind.CONNECTION_LOST, "the server closed the connection without a reply") from error

    def _try(
        self,
        connection: Connection,
        head: bytes,
        body: Sequence[memoryview],
        read: Callable[[Connection, Head], T],
        deadline: float,
    ) -> T:
        try:
            try:
                connection.send(head, body, deadline)
                reply = connection.read_head(deadline)
            except (ConnectionResetError, BrokenPipeError) as error:
                reply = _early_reply(connection, deadline, error)
            return read(connection, reply)
        except OSError as error:
            raise StoreError(kind_of_exception(error), type(error).__name__) from error
        finally:
            self._pool.give(connection)

    def _sign(self, request: _Request, deadline: float) -> bytes:
        """The head of `request` as it goes over the network."""
        place = self._place
        path = f"{place.path}/{request.name}"
        headers = self._signer.headers(
            self._credentials(deadline),
            request.method,
            path,
            request.query,
            {"host": place.host, **(request.headers or {})},
            request.sha256,
        )
        if request.method in ("PUT", "POST"):
            headers["content-length"] = str(sum(part.nbytes for part in request.body))
        target = f"{path}?{request.query}" if request.query else path
        return request_head(request.method, target, {**headers, "accept-encoding": "identity"})


def _crc32(body: Sequence[memoryview]) -> int:
    return functools.reduce(lambda crc, part: zlib.crc32(part, crc), body, 0)


def _sha256(body: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    return digest.hexdigest()


def _early_reply(connection: Connection, deadline: float, error: OSError) -> Head:
    """A server that refuses a body may answer and close before it has read it: what it said, if it can be had."""
    try:
        return connection.read_head(deadline)
    except ConnectionError:
        raise StaleConnection from error


def _read_small(connection: Connection, head: Head, deadline: float, bytes_max: int = ERROR_BYTES_MAX) -> bytes:
    if head.status == 204:
        connection.finish()
        return b""
    body = connection.read_body(head, bytes_max, deadline)
    connection.finish()
    return body


def _missing(connection: Connection, head: Head, deadline: float) -> None:
    """Return if the reply says that the object is not there. Raises StoreError for all else."""
    reply = _read_small(connection, head, deadline)
    if head.status != 404 or error_code(reply) == "NoSuchBucket":
        raise _failure(head, reply)


def _failure(head: Head, reply: bytes) -> StoreError:
    return failed_reply(head.status, error_code(reply), head.headers.get("retry-after", ""))
