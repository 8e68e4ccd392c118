"""The S3 backend with TLS, over a faulty network, and with a real server that hangs or dies."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.s3 import S3Driver
from hicache.backends.s3.access import open_access
from hicache.config.s3_storage import S3StorageOptions
from hicache.errors import BackendUnavailable, ConfigError
from hicache.frame import FrameCodec
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    GET_ERROR,
    HIT,
    NAMESPACE,
    STORED,
    empty_frames,
    full_frames,
    make_keys,
    soon,
    store_chain,
    store_of,
)
from hicache_lab.devservers import SeaweedServer
from hicache_lab.devservers.ports import LOOPBACK
from tests.backends.s3.bucket import CODEC, Bucket, errors, moves_pages, opened, options
from tests.backends.s3.stub import StubS3, reply
from tests.certificates import Certificates, make_certificates
from tests.listening import Listener
from tests.proxy import Direction, Faults, Proxy

KEYS = make_keys(6)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def test_an_untrusted_certificate_is_reported_at_start(
    bucket: Bucket, seaweed: SeaweedServer, certificates: Certificates, unique_prefix: str, tmp_path: Path
) -> None:
    """Its authority and the name in it must be right. The control: then pages move over TLS."""
    ours, context = certificates.ca_file, certificates.server_context()

    def serve(sock: socket.socket, number: int) -> None:
        context.wrap_socket(sock, server_side=True)

    with Proxy(seaweed.port, tls=context) as proxy, Listener(serve, "127.0.0.2") as elsewhere:
        for place, ca_file in (
            (f"127.0.0.1:{proxy.port}", None), (f"127.0.0.1:{proxy.port}", make_certificates(tmp_path).ca_file),
            (f"127.0.0.2:{elsewhere.port}", ours),
        ):
            with pytest.raises(BackendUnavailable, match=r"tls: .*ca_file"):
                store_of(S3Driver, CODEC, options(f"https://{place}", bucket=bucket.name, ca_file=ca_file))
        chosen = options(f"https://127.0.0.1:{proxy.port}", unique_prefix, bucket=bucket.name, ca_file=ours)
        with opened(chosen) as store:
            moves_pages(store, KEYS)


def test_a_file_without_certificates_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    empty.write_text("none")
    with pytest.raises(ConfigError, match="ca_file"):
        store_of(S3Driver, CODEC, options("https://127.0.0.1:9", bucket=bucket.name, ca_file=empty))


def test_a_page_that_arrives_slowly_ends_at_the_deadline(
    bucket: Bucket, seaweed: SeaweedServer, unique_prefix: str
) -> None:
    """Bytes keep arriving, and all would have arrived after six seconds. Control: they do at full speed."""
    codec = FrameCodec(NAMESPACE, 600_000)

    def place(proxy: Proxy) -> S3StorageOptions:
        return options(f"http://127.0.0.1:{proxy.port}", unique_prefix, bucket=bucket.name, timeout=30.0)

    key, frames = make_keys(1), empty_frames(codec, 1)
    with Proxy(seaweed.port) as proxy, opened(place(proxy), codec) as store:
        assert store_chain(store, key) == [STORED]
        proxy.set(Faults(bytes_per_s=100_000, slice_bytes=1000, direction=Direction.DOWN))
        assert store.backend.batch_get(key, frames, deadline=soon(0.5)) == [GET_ERROR]
        assert errors(store) == {"timeout": 1}
        proxy.heal()
        assert store.backend.batch_get(key, frames, deadline=soon()) == [HIT]


def test_connections_that_a_network_forgot_silently_cost_no_page(
    bucket: Bucket, seaweed: SeaweedServer, unique_prefix: str
) -> None:
    """After a gap, idle connections are not used. The same pool serves the store of a daemon."""
    clock = ManualClock()
    with Proxy(seaweed.port) as relay:
        chosen = options(f"http://127.0.0.1:{relay.port}", unique_prefix, bucket=bucket.name, timeout=30.0)
        with contextlib.closing(store_of(S3Driver, CODEC, chosen, clock)) as backend:
            frames = full_frames(CODEC, KEYS)
            assert backend.batch_set(KEYS, frames, parent=None, deadline=soon()) == [STORED] * 6
            relay.forget(silently=True)
            clock.advance(5.0)
            assert backend.batch_get(KEYS, frames, deadline=clock() + 20.0) == [HIT] * 6
            assert backend.statistics().errors == {}


# "me" with the password "pass word:@".
LOGIN, PASSWORD = "Basic bWU6cGFzcyB3b3JkOkA=", "me:pass%20word%3A%40"


@contextlib.contextmanager
def tunnels(answer: bytes, login: str | None = None) -> Iterator[tuple[int, list[bytes]]]:
    """A proxy that gives `answer` to each CONNECT, records its first line, and then forwards bytes to that port. It
    rejects those without the `login`."""
    asked: list[bytes] = []

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(near: socket.socket, number: int) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += near.recv(1)
        asked.append(head.partition(b"\r\n")[0])
        if login is not None and f"\r\nproxy-authorization: {login}\r\n".encode() not in head:
            near.sendall(b"HTTP/1.1 407 x\r\nproxy-authenticate: Basic realm=x\r\ncontent-length: 0\r\n\r\n")
            return
        near.sendall(answer)
        with socket.create_connection((LOOPBACK, int(head.split()[1].rpartition(b":")[2]))) as far:
            listener.also_end(far)
            back = threading.Thread(target=carry, args=(far, near))
            back.start()
            carry(near, far)
            back.join()

    with Listener(serve) as listener:
        yield listener.port, asked


def test_tls_passes_through_a_proxy_that_cannot_read_it(stub: StubS3, certificates: Certificates) -> None:
    with StubS3("pages", certificates.server_context()) as server, tunnels(b"HTTP/1.0 200 x\r\n\r\n") as (port, asked):
        url = f"http://127.0.0.1:{port}"
        with opened(options(server.url, proxy=url, ca_file=certificates.ca_file, connections=1)) as store:
            moves_pages(store, KEYS)
        assert asked == [f"CONNECT 127.0.0.1:{server.port} HTTP/1.1".encode()]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(b"HTTP/1.1 407 x\r\n\r\n", "unreachable"), (b"HTTP/1.1 200 x\r\n\r\nand more", "unreachable"),
     (b"HTTP/1.1 302 x\r\nlocation: http://h/\r\n\r\n", "unreachable"), (b"garbage\r\n\r\n", "protocol"),
     (b"", "timeout")],
)
def test_a_proxy_that_does_not_connect_is_reported_at_start(
    stub: StubS3, certificates: Certificates, answer: bytes, kind: str
) -> None:
    with StubS3("pages", certificates.server_context()) as server, tunnels(answer) as (port, _):
        chosen = options(
            server.url, proxy=f"http://127.0.0.1:{port}", ca_file=certificates.ca_file,
            connect_timeout=30.0 if answer else 0.3,
        )
        with pytest.raises(BackendUnavailable, match=kind):
            store_of(S3Driver, CODEC, chosen)


def test_a_proxy_resolves_the_name_of_the_store(stub: StubS3) -> None:
    """For a store without TLS, the proxy gets whole URLs. Control: the store's host name has no address here."""
    stub.origin = "http://store.invalid:9000"
    with opened(options(stub.origin, proxy=stub.url)) as store:
        moves_pages(store, KEYS)
    assert {request.headers["host"] for request in stub.requests} == {"store.invalid:9000"}
    with pytest.raises(BackendUnavailable, match="dns"):
        store_of(S3Driver, CODEC, options(stub.origin))


def test_a_tunnel_is_requested_with_the_password_of_the_proxy(
    stub: StubS3, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without the password the proxy refuses. The store never gets the password."""
    connected = b"HTTP/1.1 200 x\r\n\r\n"
    with StubS3("pages", certificates.server_context()) as server, tunnels(connected, LOGIN) as (port, asked):
        monkeypatch.setenv("THE_PROXY", f"http://{PASSWORD}@127.0.0.1:{port}")
        chosen = options(server.url, proxy_env="THE_PROXY", ca_file=certificates.ca_file, connections=1)
        with opened(chosen) as store:
            moves_pages(store, KEYS)
        assert len(asked) == server.connections
        assert not any("proxy-authorization" in request.headers for request in server.received)
        with pytest.raises(BackendUnavailable, match="status 407; check endpoint_url, proxy"):
            proxied = options(server.url, proxy=f"http://127.0.0.1:{port}", ca_file=certificates.ca_file)
            store_of(S3Driver, CODEC, proxied)


def test_a_proxy_without_tls_gets_its_password_in_each_request(stub: StubS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the password the proxy refuses."""
    stub.origin = "http://store.invalid:9000"
    refused = reply(407, proxy_authenticate="Basic realm=x")
    stub.fault = lambda request: None if request.headers.get("proxy-authorization") == LOGIN else refused
    monkeypatch.setenv("THE_PROXY", f"http://{PASSWORD}@127.0.0.1:{stub.port}/")
    with opened(options(stub.origin, proxy_env="THE_PROXY")) as store:
        moves_pages(store, KEYS)
    monkeypatch.setenv("THE_PROXY", f"http://me:wrong@127.0.0.1:{stub.port}")
    with pytest.raises(BackendUnavailable, match="status 407; check endpoint_url, proxy"):
        store_of(S3Driver, CODEC, options(stub.origin, proxy_env="THE_PROXY"))


@pytest.mark.parametrize(
    "url", ["", "proxy:3128", "https://me:s3cr3t@p:1", "socks5://p:1", "http://me:s3cr3t@p:0", "http://me:s3cr3t%ff@p:1"]
)
def test_a_variable_without_the_url_of_a_proxy_is_refused_without_showing_it(
    stub: StubS3, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("THE_PROXY", url)
    with pytest.raises(ConfigError, match="THE_PROXY") as caught:
        store_of(S3Driver, CODEC, options(stub.url, proxy_env="THE_PROXY"))
    assert "s3cr3t" not in str(caught.value)


def test_the_password_of_a_proxy_is_not_shown(stub: StubS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_PROXY", f"http://{PASSWORD}@127.0.0.1:{stub.port}")
    server = open_access(options(stub.url, proxy_env="THE_PROXY"), soon()).server
    assert server.proxy_login == LOGIN and LOGIN not in repr(server)
