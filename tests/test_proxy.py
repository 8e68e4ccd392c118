"""The proxy of the tests: what it lets through, and what each fault does."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.certificates import make_certificates
from tests.listening import Listener
from tests.proxy import Direction, Faults, Proxy
from tests.waiting import wait_for

# Long enough that what has not come by then is not coming.
NOTHING_S = 0.2


def echo(connection: socket.socket, _: int) -> None:
    """Send everything back."""
    with contextlib.suppress(OSError):  # the tests reset connections
        while data := connection.recv(1 << 16):
            connection.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Listener(echo) as server, Proxy(server.port) as proxy:
        yield proxy


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


def test_latency_delays_and_slices_are_not_larger_than_requested(proxy: Proxy) -> None:
    proxy.set(Faults(latency_s=10 * NOTHING_S))
    with client(proxy) as connection:
        connection.sendall(b"x")
        assert nothing_comes(connection)
    # The second slice follows after three seconds, so that the first is read alone.
    proxy.set(Faults(slice_bytes=3, bytes_per_s=1, direction=Direction.DOWN))
    with client(proxy) as connection:
        connection.sendall(b"123456789")
        assert len(connection.recv(100)) <= 3


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


def test_connections_are_dropped_and_refused_until_the_proxy_is_healed(proxy: Proxy) -> None:
    for reset in (False, True):
        with client(proxy) as connection:
            assert comes_back(connection, b"x")
            proxy.drop(reset=reset)
            if reset:
                with pytest.raises(ConnectionResetError):
                    connection.recv(1)
            else:
                assert connection.recv(1) == b""
    proxy.set(Faults(refuse=True))
    with pytest.raises(ConnectionRefusedError), client(proxy):
        pass
    proxy.heal()
    with client(proxy) as connection:
        assert comes_back(connection, b"x")


def is_served(connection: socket.socket) -> bool:
    try:
        return comes_back(connection, b"x")
    except (ssl.SSLError, ConnectionError):
        return False


@pytest.mark.parametrize("asks", [False, True])
def test_it_terminates_tls_and_requests_a_certificate_if_configured(tmp_path: Path, asks: bool) -> None:
    made = make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=made.ca_file)
    with Listener(echo) as server, Proxy(server.port, tls=made.server_context(ask_client=asks)) as proxy:
        with client(proxy) as plain, context.wrap_socket(plain, server_hostname="localhost") as connection:
            assert is_served(connection) is not asks
        context.load_cert_chain(made.client_cert_file, made.client_key_file)
        with client(proxy) as plain, context.wrap_socket(plain, server_hostname="localhost") as connection:
            assert is_served(connection)
        with client(proxy) as plain, pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
