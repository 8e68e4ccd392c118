"""A small S3 server in this process, for tests that real servers do not allow: faults, counts, TLS.

It keeps objects in a dictionary and checks no signatures. `fault` sees each request first and may answer it instead;
its answer is sent byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from hicache_lab.devservers.ports import LOOPBACK
from tests.listening import Listener


@dataclass(frozen=True, slots=True)
class Request:
    """One received request. Names of headers are lower-case."""

    method: str
    name: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    @property
    def is_list(self) -> bool:
        return "list-type" in self.query


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes to send, then those of `more`, which may be endless; `then` says what happens to the connection."""

    data: bytes
    then: str = "keep"  # keep, close, reset, hang
    more: Iterable[bytes] = ()


def reply(status: int, body: bytes = b"", **headers: str) -> Answer:
    """Return a complete reply."""
    fields = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return Answer(f"HTTP/1.1 {status} x\r\n{lines}\r\n".encode() + body)


def error(status: int, code: str, **headers: str) -> Answer:
    """Return an error reply as S3 sends it."""
    return reply(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode(), **headers)


def etag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class StubS3(Listener):
    """See the module's docstring. A context manager; ends all its threads and connections."""

    def __init__(self, bucket: str, tls: ssl.SSLContext | None = None) -> None:
        self.bucket = bucket
        self.origin = ""  # the store, if this server is its proxy
        self.objects: dict[str, bytes] = {}
        self.fault: Callable[[Request], Answer | None] = lambda request: None
        self.released = threading.Event()  # set: hanging connections continue
        self._tls = tls
        self._requests: list[Request] = []
        self.running = 0
        self._running_max = 0
        super().__init__(self._answer_all)
        self.url = f"{'http' if tls is None else 'https'}://{LOOPBACK}:{self.port}"

    def close(self) -> None:
        self.released.set()
        super().close()

    @property
    def received(self) -> list[Request]:
        """All requests."""
        with self._lock:
            return list(self._requests)

    @property
    def requests(self) -> list[Request]:
        """All requests except those made by opening a store."""
        with self._lock:
            return [request for request in self._requests if not request.is_list]

    @property
    def listings(self) -> int:
        """The number of requests for a page of a listing so far."""
        with self._lock:
            return sum(request.is_list for request in self._requests)

    def methods(self) -> list[str]:
        return [request.method for request in self.requests]

    def forget_requests(self) -> None:
        with self._lock:
            self._requests.clear()
            self._running_max = 0

    @property
    def running_max(self) -> int:
        """The maximum number of requests answered at the same time."""
        with self._lock:
            return self._running_max

    @property
    def open_connections(self) -> int:
        """The number of connections that the server has not closed yet."""
        with self._lock:
            return self.connections - self.ended

    def _answer_all(self, connection: socket.socket, number: int) -> None:
        served = connection if self._tls is None else self._tls.wrap_socket(connection, server_side=True)
        self.also_end(served)  # wrapping has moved the connection out of the accepted socket
        with served, served.makefile("rb") as stream:
            for request in self._read(stream.readline, stream.read):
                with self._running(request):
                    answer = self.fault(request) or self._answer(request)
                    served.sendall(answer.data)
                    for piece in answer.more:
                        served.sendall(piece)
                    if answer.then == "hang":
                        self.released.wait()
                if answer.then == "reset":
                    served.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if answer.then != "keep":
                    return

    @contextlib.contextmanager
    def _running(self, request: Request) -> Iterator[None]:
        with self._lock:
            self._requests.append(request)
            self.running += 1
            self._running_max = max(self._running_max, self.running)
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1

    def _read(self, readline: Callable[[], bytes], read: Callable[[int], bytes]) -> Iterator[Request]:
        while first := readline():
            method, target, _ = first.decode("latin-1").split(" ", 2)
            headers: dict[str, str] = {}
            while (line := readline().decode("latin-1").rstrip("\r\n")):
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            path, _, query = target.removeprefix(self.origin).partition("?")
            name = unquote(path).removeprefix(f"/{self.bucket}").removeprefix("/")
            yield Request(
                method, name, parse_qs(query, keep_blank_values=True), headers,
                read(int(headers.get("content-length", 0))),
            )

    def _answer(self, request: Request) -> Answer:
        if request.is_list:
            return self._list(request.query)
        if request.method == "POST":
            keys = [element.text or "" for element in ElementTree.fromstring(request.body).iterfind("{*}Object/{*}Key")]
            for key in keys:
                self.objects.pop(key, None)
            return reply(200, b"<DeleteResult/>")
        data = self.objects.get(request.name)
        if request.method == "PUT":
            if "if-none-match" in request.headers and data is not None:
                return error(412, "PreconditionFailed")
            self.objects[request.name] = request.body
            return reply(200, etag=etag_of(request.body))
        if request.method == "DELETE":
            if data is not None and request.headers.get("if-match", etag_of(data)) != etag_of(data):
                return error(412, "PreconditionFailed")
            self.objects.pop(request.name, None)
            return reply(204)
        if data is None:
            return Answer(b"HTTP/1.1 404 x\r\ncontent-length: 9\r\n\r\n") if request.method == "HEAD" else error(
                404, "NoSuchKey"
            )
        whole = reply(200, data, etag=etag_of(data))
        return Answer(whole.data[: -len(data) or None]) if request.method == "HEAD" else whole

    def _list(self, query: dict[str, list[str]]) -> Answer:
        """Return a page of a listing; the token is the last name of the previous page."""
        (prefix,), (after,) = query.get("prefix", [""]), query.get("continuation-token", [""])
        names = sorted(name for name in list(self.objects) if name.startswith(prefix) and name > after)
        listed = names[: int(query["max-keys"][0])]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size>"
            "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>" for name in listed
        )
        more = ""
        if len(names) > len(listed):
            more = f"<NextContinuationToken>{escape(listed[-1])}</NextContinuationToken>"
        truncated = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
        return reply(200, f"<ListBucketResult>{truncated}{more}{entries}</ListBucketResult>".encode())
