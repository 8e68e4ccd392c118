"""The proxy of the tests: what it lets through, and what each fault does."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.certificates import make_certificates
from tests.proxy import Direction, Faults, Proxy
from tests.waiting import wait_for

# Long enough that what has not come by then is not coming.
NOTHING_S = 0.2


class Echo:
    """A server that sends everything back."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    @staticmethod
    def _serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                pass  # the tests reset connections

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    echo = Echo()
    with Proxy(echo.port) as proxy:
        yield proxy
    echo.close()


@contextmanager
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as connection:
        yield connection


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes, or fewer if the connection ends before."""
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


def comes_back(connection: socket.socket, data: bytes) -> bool:
    connection.sendall(data)
    return receive(connection, len(data)) == data


def nothing_comes(connection: socket.socket) -> bool:
    connection.settimeout(NOTHING_S)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(10)


def test_without_faults_bytes_pass_unchanged_and_are_counted(proxy: Proxy) -> None:
    data = bytes(range(256)) * 4000
    with client(proxy) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        assert receive(connection, len(data)) == data
        sender.join()
    # A byte is counted once it has been sent, so the client may have it a moment before.
    wait_for(lambda: (proxy.connections, proxy.bytes_up, proxy.bytes_down) == (1, len(data), len(data)))


def test_an_end_of_stream_passes(proxy: Proxy) -> None:
    with client(proxy) as connection:
        connection.sendall(b"x")
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection, 2) == b"x"
    wait_for(lambda: proxy.open_connections == 0)


def test_slices_are_not_larger_than_requested(proxy: Proxy) -> None:
    # The second follows after three seconds, so that the first is read alone.
    proxy.set(Faults(slice_bytes=3, bytes_per_s=1, direction=Direction.DOWN))
    with client(proxy) as connection:
        connection.sendall(b"123456789")
        assert len(connection.recv(100)) <= 3


def test_latency_delays(proxy: Proxy) -> None:
    proxy.set(Faults(latency_s=10 * NOTHING_S))
    with client(proxy) as connection:
        connection.sendall(b"x")
        assert nothing_comes(connection)


@pytest.mark.parametrize("direction", [Direction.UP, Direction.DOWN, Direction.BOTH])
def test_a_stall_holds_bytes_back_until_it_is_healed(proxy: Proxy, direction: Direction) -> None:
    with client(proxy) as connection:
        assert comes_back(connection, b"before")
        proxy.set(Faults(stall=direction))
        connection.sendall(b"during")
        sent = 6 if direction & Direction.UP else 12
        wait_for(lambda: proxy.bytes_up == sent)
        assert nothing_comes(connection)
        assert proxy.bytes_up == sent
        proxy.heal()
        assert receive(connection, 6) == b"during"


@pytest.mark.parametrize("count", [0, 5, 99_999])
@pytest.mark.parametrize("direction", [Direction.UP, Direction.DOWN])
def test_a_cut_lets_exactly_so_many_bytes_through(proxy: Proxy, count: int, direction: Direction) -> None:
    with client(proxy) as connection:
        assert comes_back(connection, b"before")  # does not count
        proxy.set(Faults(cut_after_bytes=count, direction=direction))
        if count:
            sender = threading.Thread(target=send_what_goes, args=(connection, b"x" * 100_000))
            sender.start()
            back = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            sender.join()
            assert len(back) <= count
            assert len(back) == count or direction is Direction.UP
    passed = proxy.bytes_up if direction is Direction.UP else proxy.bytes_down
    assert passed == 6 + count


def send_what_goes(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        pass  # the cut ends it


def test_a_cut_with_reset_is_seen_as_one(proxy: Proxy) -> None:
    proxy.set(Faults(cut_after_bytes=3, reset=True, direction=Direction.UP))
    with client(proxy) as connection:
        connection.sendall(b"12345")
        with pytest.raises(ConnectionResetError):
            receive(connection, 5)


def test_dropped_connections_end_and_new_ones_work(proxy: Proxy) -> None:
    with client(proxy) as connection:
        assert comes_back(connection, b"x")
        proxy.drop()
        assert connection.recv(1) == b""
    with client(proxy) as connection:
        assert comes_back(connection, b"x")
        proxy.drop(reset=True)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_refused_until_it_is_healed(proxy: Proxy) -> None:
    with client(proxy) as connection:
        assert comes_back(connection, b"x")
        proxy.set(Faults(refuse=True))
        assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError), client(proxy):
        pass
    proxy.heal()
    with client(proxy) as connection:
        assert comes_back(connection, b"x")


def test_closing_ends_a_stalled_connection_and_the_thread() -> None:
    echo = Echo()
    before = threading.active_count()
    with Proxy(echo.port) as proxy, client(proxy) as connection:
        proxy.set(Faults(stall=Direction.BOTH))
        connection.sendall(b"x")
        wait_for(lambda: proxy.open_connections == 1)
        proxy.drop()
        assert connection.recv(1) == b""
    wait_for(lambda: threading.active_count() <= before)
    echo.close()


def test_it_terminates_tls_for_a_server_without_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    echo = Echo()
    with Proxy(echo.port, tls=made.server_context()) as proxy, client(proxy) as plain:
        trusting = ssl.create_default_context(cafile=made.ca_file)
        with trusting.wrap_socket(plain, server_hostname="localhost") as connection:
            assert comes_back(connection, b"secret")
    distrusting = pytest.raises(ssl.SSLCertVerificationError)
    with Proxy(echo.port, tls=made.server_context()) as proxy, client(proxy) as plain, distrusting:
        ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
    echo.close()


def is_served(connection: socket.socket) -> bool:
    try:
        return comes_back(connection, b"x")
    except (ssl.SSLError, ConnectionError):
        return False


def test_it_requests_a_certificate_if_configured(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    echo = Echo()
    with Proxy(echo.port, tls=made.server_context(ask_client=True)) as proxy:
        context = ssl.create_default_context(cafile=made.ca_file)
        with client(proxy) as plain, context.wrap_socket(plain, server_hostname="localhost") as connection:
            assert not is_served(connection)
        context.load_cert_chain(made.client_cert_file, made.client_key_file)
        with client(proxy) as plain, context.wrap_socket(plain, server_hostname="localhost") as connection:
            assert comes_back(connection, b"x")
    echo.close()
