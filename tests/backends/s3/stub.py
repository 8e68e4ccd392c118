"""A small S3 server in this process, for what no real server does on demand: faults, counts, TLS.

It keeps objects in a dictionary and checks no signature. `fault` sees each request first and may answer in its place;
what it answers goes to the network byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came. Names of headers are lower-case."""

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
    """Bytes to send, and those of `more`, which may be endless; then `then` says what happens to the connection."""

    data: bytes
    then: str = "keep"  # keep, close, reset, hang
    more: Iterable[bytes] = ()


def reply(status: int, body: bytes = b"", **headers: str) -> Answer:
    """A whole reply."""
    fields = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return Answer(f"HTTP/1.1 {status} x\r\n{lines}\r\n".encode() + body)


def error(status: int, code: str, **headers: str) -> Answer:
    """An error reply as S3 sends it."""
    return reply(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode(), **headers)


def etag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


@dataclass(slots=True)
class _Counts:
    requests: list[Request] = field(default_factory=list)
    running: int = 0
    running_max: int = 0
    connections: int = 0
    closed: int = 0


class StubS3:
    """See the module's docstring. A context manager; ends all its threads and connections."""

    def __init__(self, bucket: str, tls: ssl.SSLContext | None = None) -> None:
        self.bucket = bucket
        self.origin = ""  # of the store that it is a proxy for
        self.objects: dict[str, bytes] = {}
        self.fault: Callable[[Request], Answer | None] = lambda request: None
        self.released = threading.Event()  # those who hang go on
        self._tls = tls
        self._lock = threading.Lock()
        self._counts = _Counts()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.port = int(self._listener.getsockname()[1])
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"

    def __enter__(self) -> StubS3:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self._shut(self._listener)
        self._threads[0].join()
        with self._lock:
            for connection in self._open:
                self._shut(connection)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    @staticmethod
    def _shut(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    @property
    def requests(self) -> list[Request]:
        """All requests but the ones that opening a store makes."""
        with self._lock:
            return [request for request in self._counts.requests if not request.is_list]

    @property
    def listings(self) -> int:
        """Requests for a page of a listing so far."""
        with self._lock:
            return sum(request.is_list for request in self._counts.requests)

    def methods(self) -> list[str]:
        return [request.method for request in self.requests]

    def forget_requests(self) -> None:
        with self._lock:
            self._counts.requests.clear()
            self._counts.running_max = 0

    @property
    def running(self) -> int:
        return self._counts.running

    @property
    def running_max(self) -> int:
        """The most requests that were being answered at once."""
        with self._lock:
            return self._counts.running_max

    @property
    def connections(self) -> int:
        """Connections that were made so far."""
        with self._lock:
            return self._counts.connections

    @property
    def open_connections(self) -> int:
        """Connections that the server has not closed yet."""
        with self._lock:
            return self._counts.connections - self._counts.closed

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                self._counts.connections += 1
                self._open.add(connection)
                self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            served = connection if self._tls is None else self._tls.wrap_socket(connection, server_side=True)
            with self._lock:
                self._open.add(served)  # wrapping took the connection out of the socket that was accepted
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
        except OSError:
            pass  # the client has gone, which is its right
        finally:
            connection.close()
            with self._lock:
                self._counts.closed += 1

    @contextlib.contextmanager
    def _running(self, request: Request) -> Iterator[None]:
        with self._lock:
            self._counts.requests.append(request)
            self._counts.running += 1
            self._counts.running_max = max(self._counts.running_max, self._counts.running)
        try:
            yield
        finally:
            with self._lock:
                self._counts.running -= 1

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
            )  # fmt: skip

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
        """A page of a listing, whose token is the last name of the page before it."""
        (prefix,), (after,) = query.get("prefix", [""]), query.get("continuation-token", [""])
        names = sorted(name for name in list(self.objects) if name.startswith(prefix) and name > after)
        listed = names[: int(query["max-keys"][0])]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size>"
            "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>" for name in listed
        )  # fmt: skip
        more = ""
        if len(names) > len(listed):
            more = f"<NextContinuationToken>{escape(listed[-1])}</NextContinuationToken>"
        truncated = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
        return reply(200, f"<ListBucketResult>{truncated}{more}{entries}</ListBucketResult>".encode())
