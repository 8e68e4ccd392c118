"""The HTTP server for scrapers: the library's, with limits on connections and on the size and time of a request.

A slow, silent or hostile client does not block a scraper. Each connection has one deadline for its whole request head,
and one for reading the answer. When all threads are in use, the oldest connection without a complete request is closed:
a scraper completes its request within milliseconds.

Locking design: the accepting thread starts a daemon thread for each connection. `_changed` guards `_connections`, which
both change; a connection's thread removes its own entry. Only the accepting thread shuts down a connection from
outside, which ends that connection's thread; only that thread closes the socket.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app
from prometheus_client.registry import Collector, CollectorRegistry

from ..cache.statistics import CacheStatistics
from ..config import HiCacheConfig
from ..config.addresses import PORT_MAX, is_own_host
from ..errors import ConfigError
from .families import cache_collector

# From the connection to the end of the request's head, and from there to the end of the answer.
HEAD_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
# A scraper sends about 300 bytes; browsers also send cookies of other servers on this machine.
HEAD_BYTES_MAX = 16 << 10
# Threads of connections at once; one Prometheus needs one.
CONNECTIONS_MAX = 16
# The time for a closed connection's thread to end; only a snapshot that hangs takes longer.
_ROOM_TIMEOUT_S = 0.5
_RECEIVE_BYTES = 4096
_FOREIGN_HOST = (
    b"the header Host does not name this exporter; use its IP address or localhost, or add the name to metrics.hosts\n"
)

_log = logging.getLogger(__name__)


class MetricsServer(ThreadingWSGIServer):
    """Serves `collector` at `http://host:port/metrics`, on its own thread; `/healthz` answers while the process can
    answer at all. `port` is the bound one. Requests to other names than `host` and `names` get 421 (`is_own_host`). A
    context manager that closes. Raises OSError if it cannot listen.

    Invariant: `_connections` are at most `CONNECTIONS_MAX`, in the order of arrival.
    """

    request_queue_size = 128

    def __init__(self, host: str, port: int, collector: Collector, names: Sequence[str] = ()) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._changed = threading.Condition()
        self._connections: dict[socket.socket, bool] = {}  # whether the request is complete
        super().__init__((host, port), _Handler)
        self.port: int = self.server_port
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self.set_app(_application(make_wsgi_app(registry), (host, *names)))
        self._thread = threading.Thread(target=self.serve_forever, name="hicache-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent. Blocks for up to a second. Scrapes in flight end by themselves."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def server_bind(self) -> None:
        """Bind without HTTPServer, which resolves the host's own name and may block without a limit."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve on a new thread. Raises OSError if all threads are in use and closing a connection frees none; the
        caller then closes the connection."""
        with self._changed:
            if not self._has_room():
                self._close_one()
                if not self._changed.wait_for(self._has_room, _ROOM_TIMEOUT_S):
                    raise OSError("all connections are in use")
            self._connections[request] = False
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # out of threads
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Run on the connection's thread: serve it, then make room."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def completed(self, request: socket.socket) -> None:
        """Record that the request of a connection is complete. Called by its thread."""
        with self._changed:
            self._connections[request] = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not log a traceback for a scraper that disconnects."""
        _log.debug("a scrape ended early", exc_info=True)

    def _has_room(self) -> bool:
        return len(self._connections) < CONNECTIONS_MAX

    def _close_one(self) -> None:
        oldest = min(self._connections, key=self._connections.__getitem__)  # the first of equal ones
        with contextlib.suppress(OSError):  # the client has disconnected, or the connection's thread has closed it
            oldest.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: socket.socket) -> None:
        with self._changed:
            del self._connections[request]
            self._changed.notify()


def _application(metrics: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return the WSGI application: `/metrics`, and `/healthz`, which does not take a snapshot."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"]
        is_own = is_own_host(environ.get("HTTP_HOST"), names)
        if is_own and path == "/metrics":
            return metrics(environ, start_response)
        status, said = ("200 OK", b"ok\n") if path == "/healthz" else ("404 Not Found", b"see /metrics\n")
        if not is_own:
            status, said = "421 Misdirected Request", _FOREIGN_HOST
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [said]

    return answer


class _Handler(WSGIRequestHandler):
    server: MetricsServer
    connection: socket.socket

    def handle(self) -> None:
        """Read the head within its deadline, then answer. A head that is late or too long gets no answer."""
        head = read_head(self.connection, HEAD_TIMEOUT_S)
        if head is None:
            return
        self.server.completed(self.connection)
        self.connection.settimeout(ANSWER_TIMEOUT_S)
        self.rfile = io.BufferedReader(io.BytesIO(head))
        super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a scrape comes every few seconds."""


def read_head(connection: socket.socket, timeout_s: float) -> bytes | None:
    """Read a request up to the empty line after its head. Blocks for up to `timeout_s` in all.

    Return None if the client disconnects, is late or sends too much.
    """
    deadline_s = time.monotonic() + timeout_s
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        connection.settimeout(left_s)
        try:
            received = connection.recv(_RECEIVE_BYTES)
        except TimeoutError:
            return None
        head += received
        if not received or len(head) > HEAD_BYTES_MAX:
            return None
    return head


def serve_configured(config: HiCacheConfig, statistics: Callable[[], CacheStatistics | None]) -> MetricsServer | None:
    """Serve a cache's `statistics`; see `serve_collector`."""
    return serve_collector(config, cache_collector(statistics))


def serve_collector(config: HiCacheConfig, collector: Collector, *, ports: int = 1) -> MetricsServer | None:
    """Serve `collector` as the section `metrics` configures it. Return None without a port. Starts a thread.

    Listens on the first free one of `ports` ports, from the configured one on, for engines with several processes and
    one configuration. Raises ConfigError if it cannot listen.
    """
    section = config.metrics
    if section.port is None:
        return None
    port, last = section.port, min(section.port + ports - 1, PORT_MAX) if section.port else 0
    while True:
        try:
            return MetricsServer(section.host, port, collector, section.hosts)
        except OSError as error:
            if port >= last or error.errno != errno.EADDRINUSE:
                where = str(port) if ports == 1 else f"{section.port} to {last}"
                raise ConfigError(f"metrics: cannot listen on {section.host} port {where}: {error.strerror}") from error
        port += 1
