"""The HTTP server that a scraper asks.

A client that is slow, silent or hostile does not keep a scraper out. Each connection has one deadline for its whole
request head, and one for taking the answer. When all threads are taken, the connection that has waited longest without
completing its request is closed: a scraper completes its request within milliseconds.

Locking design: the accepting thread starts a daemon thread for each connection. `_lock` guards `_connections`, which
both change; a connection's thread removes its own entry. Only the accepting thread shuts a connection down from
outside, which makes that connection's thread end; only that thread closes the socket.
"""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector, CollectorRegistry

from ..cache.statistics import CacheStatistics
from ..config import HiCacheConfig
from ..config.addresses import check_host, check_port, is_loopback
from ..errors import ConfigError
from .families import SnapshotCollector, cache_metrics

# From the connection to the end of the request's head, and from there to the end of the answer.
HEAD_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
# A scraper sends some 300 bytes; browsers send cookies of other servers on this machine as well.
HEAD_BYTES_MAX = 16 << 10
# Threads of connections at once; one Prometheus needs one.
CONNECTIONS_MAX = 16
# How long a closed connection's thread may take to end; only a snapshot that hangs takes longer.
_ROOM_TIMEOUT_S = 0.5
_RECEIVE_BYTES = 4096

_log = logging.getLogger(__name__)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Invariant: `_slots` has lent one slot for each entry of `_connections`, which are in the order of arrival."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, bool] = {}  # whether the request is complete

    def server_bind(self) -> None:
        # HTTPServer would ask a name server for our own name here, which may take as long as it likes.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve on a thread of its own. If all are taken, close a connection for it, or hang up if that frees none."""
        if not self._slots.acquire(blocking=False):
            self._close_one()
            if not self._slots.acquire(timeout=_ROOM_TIMEOUT_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._connections[request] = False
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self._forget(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Run on the connection's thread: serve it, then give its slot back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def completed(self, request: socket.socket) -> None:
        """Note that the request of a connection is complete. Called by its thread."""
        with self._lock:
            self._connections[request] = True

    def _close_one(self) -> None:
        with self._lock:
            # The first of equals: the oldest.
            oldest = min(self._connections, key=self._connections.__getitem__, default=None)
            if oldest is not None:
                _shut_down(oldest)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            del self._connections[request]
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no traceback for a scraper that hangs up."""
        _log.debug("a scrape ended early", exc_info=True)


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the client has hung up, or the connection's thread has closed it


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    server: _Server
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

    Returns None if the client hangs up, is late or sends too much.
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


class MetricsServer:
    """An HTTP server on a thread of its own. `port` is the real one. A context manager that closes."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        self.port: int = server.server_address[1]
        self._thread = threading.Thread(target=server.serve_forever, name="hicache-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; blocks for up to a second. Scrapes in flight end by themselves. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def serve_configured(config: HiCacheConfig, statistics: Callable[[], CacheStatistics | None]) -> MetricsServer | None:
    """Serve a cache's `statistics` as the section `metrics` says; None if it names no port. Raises as `serve_metrics`.
    """
    section = config.metrics
    if section.port is None:
        return None
    collector = SnapshotCollector(statistics, cache_metrics())
    return serve_metrics(collector, section.host, section.port, allow_remote=section.allow_remote)


def serve_metrics(
    collector: Collector, host: str = "127.0.0.1", port: int = 0, *, allow_remote: bool = False
) -> MetricsServer:
    """Serve `collector` at `http://host:port/metrics`; port 0 takes a free one.

    Starts a thread. Raises ConfigError if host or port are not valid, if the address is not loopback (without
    `allow_remote`: there is no authentication), or if the server cannot listen there.
    """
    try:
        check_host(host)
        check_port(port, lowest=0)
    except ValueError as error:
        raise ConfigError(f"metrics: cannot listen on {host[:80]!r} port {port!r}: {error}") from error
    if not allow_remote and not is_loopback(host):
        raise ConfigError(f"metrics.host: {host!r} is no loopback address; set metrics.allow_remote to listen on it")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server_class = _Server6 if ":" in host else _Server
    try:
        server = make_server(host, port, make_wsgi_app(registry), server_class=server_class, handler_class=_Handler)
    except OSError as error:
        raise ConfigError(f"metrics: cannot listen on {host} port {port}: {error.strerror}") from error
    return MetricsServer(server)
