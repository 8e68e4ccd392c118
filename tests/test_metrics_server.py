"""The server that a scraper asks: clients that are slow, silent or hostile do not keep a real scrape out."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from hicache.metrics.families import cache_collector
from hicache.metrics.server import CONNECTIONS_MAX, HEAD_BYTES_MAX, MetricsServer, read_head

pytestmark = pytest.mark.long

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer("127.0.0.1", 0, cache_collector(lambda: None)) as server:
        yield server


@contextlib.contextmanager
def connections(port: int, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    """Clients that have sent `first`."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]
        for one in made:
            with contextlib.suppress(OSError):  # the server closes the oldest while the last ones arrive
                one.sendall(first)
        yield made


def scrape(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        response.read()
        return int(response.status)


@pytest.mark.parametrize("first", [b"", b"G", REQUEST], ids=["silent", "one byte", "half a head"])
@pytest.mark.parametrize("count", [CONNECTIONS_MAX, 100])
def test_a_scrape_succeeds_while_others_hold_all_connections(server: MetricsServer, count: int, first: bytes) -> None:
    with connections(server.port, count, first):
        assert [scrape(server.port) for _ in range(3)] == [200] * 3


def test_a_scrape_succeeds_while_others_send_a_byte_now_and_then(server: MetricsServer) -> None:
    ended = threading.Event()

    def drip(clients: list[socket.socket]) -> None:
        while not ended.wait(0.01):
            for client in clients:
                with contextlib.suppress(OSError):
                    client.send(b"x")

    with connections(server.port, 2 * CONNECTIONS_MAX, REQUEST) as clients:
        dripping = threading.Thread(target=drip, args=(clients,))
        dripping.start()
        try:
            assert [scrape(server.port) for _ in range(3)] == [200] * 3
        finally:
            ended.set()
            dripping.join()


def test_without_closing_connections_the_scrape_is_blocked() -> None:
    """The control."""

    class Stubborn(MetricsServer):
        def _close_one(self) -> None:
            pass

    server = Stubborn("127.0.0.1", 0, cache_collector(lambda: None))
    with server, connections(server.port, CONNECTIONS_MAX, b""), pytest.raises(OSError):
        scrape(server.port)


def test_clients_that_do_not_read_answers_do_not_block_a_scrape(server: MetricsServer) -> None:
    with connections(server.port, 2 * CONNECTIONS_MAX, REQUEST + b"\r\n\r\n"):
        assert scrape(server.port) == 200


def test_a_head_has_one_deadline_however_steadily_its_bytes_come() -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.01):
            theirs.send(b"x")

    dripping = threading.Thread(target=drip)
    with ours, theirs:
        dripping.start()
        try:
            assert read_head(ours, 0.2) is None
        finally:
            ended.set()
            dripping.join()


def test_a_head_is_bounded_and_a_whole_one_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(REQUEST + b"\r\n\r\n")
        assert read_head(ours, 10) == REQUEST + b"\r\n\r\n"
        theirs.sendall(b"x" * (HEAD_BYTES_MAX + 1))
        assert read_head(ours, 10) is None
