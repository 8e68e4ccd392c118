"""The limits of a daemon for each client: heads, bodies, connections, requests, time, threads."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache_lab.faults import spoiled
from tests.daemon.daemons import (
    FRAME_BYTES,
    NAMESPACE,
    Daemon,
    EngineMemory,
    keys_of,
    read,
    write,
    write_body,
)
from tests.waiting import wait_for

SHORT = {"client_timeout": "1s"}
SLOW = spoiled({"type": "memory"}, latency="300ms")


@pytest.fixture(scope="module")
def short_timeouts() -> Iterator[Daemon]:
    """A daemon that waits a second for a head or a body."""
    with tempfile.TemporaryDirectory(prefix="hc-") as folder:
        made = Daemon(Path(folder), SHORT).start()
        yield made
        made.kill()


@contextlib.contextmanager
def _raw(daemon: Daemon) -> Iterator[socket.socket]:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(30)
        sock.connect(str(daemon.socket))
        yield sock


def _receive_all(sock: socket.socket) -> bytes:
    """Return all bytes up to the end of the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            received += piece
    return received


def _refusals(daemon: Daemon, limit: str) -> int:
    return int(daemon.status()["refused"].get(limit, 0))


HEAD = f"POST /v1/namespaces/{NAMESPACE}/exists HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status", "limit"),
    [
        (b"GET /livez HTTP/1.1\r\nx: " + b"a" * 20000 + b"\r\n\r\n", 431, "head_bytes"),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n", 431, "head_bytes"),
        (b"GET /livez HTTP/1.1\r\n" + b"a: b\r\n" * 4000, 431, "head_bytes"),
        (f"{HEAD}content-length: 99999999\r\n\r\n".encode(), 413, "body_bytes"),
        (f"{HEAD}content-length: {10**40}\r\n\r\n".encode(), 400, ""),
        (f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode() + b"ffff\r\n" + b" " * 65535 + b"\r\n", 0, ""),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3, 400, "pipelining"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), 400, ""),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, ""),
    ],
)
def test_a_request_over_a_limit_is_rejected_and_its_connection_closed(
    daemon: Daemon, request_bytes: bytes, status: int, limit: str
) -> None:
    before = _refusals(daemon, limit)
    with _raw(daemon) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(request_bytes)
            if not status:  # send a body of unknown length until it is too long
                for _ in range(1000):
                    sock.sendall(b"ffff\r\n" + b" " * 65535 + b"\r\n")
        answer = _receive_all(sock)
    if status:
        assert f"HTTP/1.1 {status} ".encode() in answer, answer[:100]
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"] == "bad_request"
    else:
        limit, before = "body_bytes", before or _refusals(daemon, "body_bytes") - 1
    if limit:
        assert _refusals(daemon, limit) > before
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        (b"", "head_timeout"),
        (b"GET /livez HT", "head_timeout"),
        (f"{HEAD}content-length: 10\r\n\r\n123".encode(), "body_timeout"),
        (f"POST /v1/namespaces/{NAMESPACE}/write?keys=1&timeout_s=30 HTTP/1.1\r\nhost: localhost\r\n"
         f"content-length: {32 + FRAME_BYTES}\r\n\r\n123".encode(), "body_timeout"),
    ],
)
def test_a_connection_whose_request_stalls_is_closed(short_timeouts: Daemon, sent: bytes, limit: str) -> None:
    short_timeouts.ask("PUT", f"/v1/namespaces/{NAMESPACE}", {"payload_bytes": 12000})
    before = _refusals(short_timeouts, limit)
    with _raw(short_timeouts) as sock:
        sock.sendall(sent)
        _receive_all(sock)
    assert _refusals(short_timeouts, limit) > before


@pytest.mark.long
def test_an_idle_connection_is_closed_later_than_one_whose_request_stalls(
    daemon: Daemon, start: Callable[..., Daemon]
) -> None:
    """The control: with the default timeout the connection stays open."""
    with contextlib.closing(start({"client_timeout": "200ms"}).client()) as client:
        client.call("GET", "/livez")
        client.sock.settimeout(1.5)
        with pytest.raises(TimeoutError):
            client.sock.recv(1)
        client.sock.settimeout(60)
        assert _receive_all(client.sock) == b""
    with contextlib.closing(daemon.client()) as client:
        client.call("GET", "/livez")
        client.sock.settimeout(1.5)
        with pytest.raises(TimeoutError):
            client.sock.recv(1)


def test_a_connection_that_does_not_read_its_answer_is_closed_and_its_memory_freed(
    start: Callable[..., Daemon],
) -> None:
    daemon = start({"staging": "64MiB", "pool": 0, "client_timeout": "3s"})
    keys = keys_of(900)
    with contextlib.closing(daemon.client()) as client:
        client.open()
        assert write(client, keys)[1]["outcomes"] == ["stored"] * 900
        head = HEAD.replace("exists", "read")
        body = json.dumps({"keys": [key.hex() for key in keys], "timeout_s": 30}).encode()
        request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        with contextlib.ExitStack() as open_sockets:
            for _ in range(4):  # together they need all of the staging memory
                open_sockets.enter_context(_raw(daemon)).sendall(request)
            wait_for(lambda: _refusals(daemon, "answer_timeout") == 4)
            assert read(client, keys)[1][:900] == b"H" * 900
    assert "Traceback" not in daemon.log


def test_connections_over_the_limit_are_rejected_until_others_close(start: Callable[..., Daemon]) -> None:
    daemon = start({"connections_max": 4})
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(contextlib.closing(daemon.client())) for _ in range(4)]
        for client in clients:
            assert client.call("GET", "/livez")[0] == 200
        with _raw(daemon) as sock:
            answer = _receive_all(sock)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer
        with contextlib.closing(daemon.tcp()) as other:  # TCP has a separate limit
            assert other.call("GET", "/livez")[0] == 200
        assert clients[0].call("GET", "/statusz")[1]["refused"] == {"connections": 1}
    wait_for(daemon.is_ready)


def test_requests_over_the_limit_are_rejected_with_a_retry_after_header(start: Callable[..., Daemon]) -> None:
    daemon = start({"connections_max": 8, "threads": 1}, storage=SLOW)

    def ask(_: int) -> int:
        with contextlib.closing(daemon.client()) as client:
            answer, content = client.call_with_headers(
                "POST", f"/v1/namespaces/{NAMESPACE}/exists", {"keys": ["00" * 32], "timeout_s": 30}
            )
            assert answer.status == 200 or (content and answer.headers["retry-after"] == "1")
            return answer.status

    with contextlib.closing(daemon.client()) as client:
        client.open()
    with ThreadPoolExecutor(6) as threads:
        codes = list(threads.map(ask, range(6)))
    assert set(codes) == {200, 503} and 2 <= codes.count(200) < 6
    assert daemon.status()["in_flight_requests"] == 1


def test_a_slow_namespace_does_not_delay_another_one(start: Callable[..., Daemon]) -> None:
    """Calls of the slow namespace wait for its own thread; the call of the other one ends before those that wait."""
    daemon = start({"threads": 1, "pool": 0}, storage=SLOW)
    other = "cd" * 32
    ended: list[str] = []

    def ask(namespace: str) -> None:
        with contextlib.closing(daemon.client()) as client:
            assert client.verb("exists", namespace, keys=keys_of(1))[0] == 200
            ended.append(namespace)

    with contextlib.closing(daemon.client()) as client:
        client.open()
        client.open(other)
    before = 0

    def five_are_waiting() -> bool:
        nonlocal before
        before = len(ended)  # on the thread of these calls, the other one would end after all five
        return bool(daemon.status()["in_flight_requests"] >= 6)  # with this one

    with ThreadPoolExecutor(12) as threads:
        calls = [threads.submit(ask, NAMESPACE) for _ in range(12)]
        wait_for(five_are_waiting)
        ask(other)
        for call in calls:
            call.result()
    assert ended.index(other) < before + 5


def test_stores_that_hang_while_opening_do_not_block_memory_calls_and_probes(
    start: Callable[..., Daemon], memory: EngineMemory
) -> None:
    """An engine must be able to detach its memory, and an operator to see which calls hang."""
    namespaces = [f"{number:064x}" for number in range(40)]
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        options = {"url": f"redis://127.0.0.1:{silent.getsockname()[1]}", "timeout": "60s"}
        daemon = start(storage={"type": "redis", "options": options})
        opening = b'{"payload_bytes": 12000, "timeout_s": 60}'
        head = f"HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(opening)}\r\n\r\n".encode()
        with contextlib.ExitStack() as undo:
            for namespace in namespaces:
                undo.enter_context(_raw(daemon)).sendall(f"PUT /v1/namespaces/{namespace} ".encode() + head + opening)
            client = undo.enter_context(contextlib.closing(daemon.client()))
            assert client.call("GET", "/livez")[0] == 200
            wait_for(lambda: client.call("GET", "/statusz")[1]["in_flight_requests"] == 41)
            assert memory.attach(client)[0] == 200
            assert client.call("DELETE", f"/v1/memory/{memory.name}")[0] == 200
        daemon.kill()


def test_page_bodies_wait_for_staging_memory_and_return_it(start: Callable[..., Daemon]) -> None:
    daemon = start({"staging": "1MiB", "pool": 0})
    with contextlib.closing(daemon.client()) as client:
        client.open()
        write(client, keys_of(16))

    def work(_: int) -> bool:
        with contextlib.closing(daemon.client()) as client:
            return all(read(client, keys_of(16))[1][:16] == b"H" * 16 for _ in range(20))

    with ThreadPoolExecutor(12) as threads:
        assert all(threads.map(work, range(12)))


def test_slow_bodies_do_not_block_other_requests(start: Callable[..., Daemon]) -> None:
    daemon = start({"pool": 0})
    keys = keys_of(2)
    body = write_body(keys)
    head = HEAD.replace("exists", "write?keys=2&timeout_s=30") + f"content-length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as held, contextlib.closing(daemon.client()) as client:
        client.open()
        for _ in range(40):  # more than there are threads for a namespace
            held.enter_context(_raw(daemon)).sendall(head.encode() + body[:100])
        wait_for(lambda: daemon.status()["in_flight_requests"] == 41)
        assert write(client, keys)[1]["outcomes"] == ["stored"] * 2
        assert client.verb("exists", keys=keys)[1]["pages"] == 2


def test_a_client_that_dies_during_a_request_leaves_no_connection_and_no_request(start: Callable[..., Daemon]) -> None:
    daemon = start({"token_file": None})
    keys = keys_of(2)
    body = write_body(keys)
    requests = [
        (HEAD.replace("exists", "write?keys=2&timeout_s=5") + f"content-length: {len(body)}\r\n\r\n").encode() + body,
        (f"{HEAD}content-type: application/json\r\ncontent-length: 100\r\n\r\n").encode() + b"{" * 100,
        b"GET /statusz HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ]
    with contextlib.closing(daemon.client()) as client:
        client.open()
    for request in requests:
        step = max(1, len(request) // 25)
        for cut in range(0, len(request) + step, step):
            with _raw(daemon) as sock:
                sock.sendall(request[:cut])
    wait_for(lambda: daemon.status()["connections"] == {"unix": 1, "tcp": 0})
    wait_for(lambda: daemon.status()["in_flight_requests"] == 1)
    with contextlib.closing(daemon.client()) as client:
        assert set(write(client, keys)[1]["outcomes"]) <= {"stored", "present"}
    assert "Traceback" not in daemon.log


def test_a_new_namespace_over_the_limit_replaces_the_least_recently_used_one(start: Callable[..., Daemon]) -> None:
    daemon = start({"namespaces_max": 2})
    names = [f"{number:064x}" for number in range(3)]
    with contextlib.closing(daemon.client()) as client:
        assert [client.open(name)[0] for name in names[:2]] == [200, 200]
        assert client.verb("exists", names[0], keys=keys_of(1))[0] == 200
        assert client.open(names[2])[0] == 200
        assert [client.verb("exists", name, keys=keys_of(1))[0] for name in names] == [200, 404, 200]
