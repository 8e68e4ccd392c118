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
from hicache.backends.testing import (
    GET_ERROR,
    HIT,
    NAMESPACE,
    STORED,
    empty_frames,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
    store_of,
)
from hicache.errors import BackendUnavailable, ConfigError
from hicache.frame import FrameCodec
from hicache.lab.devservers import SeaweedServer
from hicache.lab.devservers.ports import LOOPBACK
from tests.backends._subjects import doorless
from tests.backends.s3.bucket import CODEC, Bucket, errors, open_s3, options
from tests.backends.s3.stub import StubS3, reply
from tests.certificates import Certificates, make_certificates
from tests.listening import Listener
from tests.proxy import Direction, Faults, Proxy

KEYS = make_keys(6)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_proxy(seaweed: SeaweedServer, certificates: Certificates) -> Iterator[Proxy]:
    """TLS in front of the shared server."""
    with Proxy(seaweed.port, tls=certificates.server_context()) as proxy:
        yield proxy


def through(bucket: Bucket, url: str) -> Bucket:
    """Return the bucket with a different address for the backend; the side door does not change."""
    return Bucket(url, bucket.name, bucket.client)


def test_pages_move_over_tls(
    bucket: Bucket, unique_prefix: str, tls_proxy: Proxy, certificates: Certificates
) -> None:
    url = f"https://127.0.0.1:{tls_proxy.port}"
    store = open_s3(through(bucket, url), unique_prefix, ca_file=certificates.ca_file)
    assert store_chain(store, KEYS) == [STORED] * 6
    assert load(store, KEYS) == [HIT] * 6
    assert store.backend.batch_exists(KEYS, deadline=soon()) == 6
    assert errors(store) == {}
    store.backend.close()


@pytest.mark.parametrize("ca", ["none", "another"])
def test_an_untrusted_certificate_is_reported_at_start(
    bucket: Bucket, tls_proxy: Proxy, tmp_path: Path, ca: str
) -> None:
    """Also the control of the test above."""
    ca_file = None if ca == "none" else make_certificates(tmp_path).ca_file
    url = f"https://127.0.0.1:{tls_proxy.port}"
    with pytest.raises(BackendUnavailable, match=r"tls: .*ca_file"):
        store_of(S3Driver, CODEC, options(url, bucket=bucket.name, ca_file=ca_file))


def test_the_name_in_a_certificate_must_match(
    bucket: Bucket, tls_proxy: Proxy, certificates: Certificates
) -> None:
    url = f"https://127.0.0.2:{tls_proxy.port}"
    with pytest.raises(BackendUnavailable, match=r"tls|refused"):
        store_of(S3Driver, CODEC, options(url, bucket=bucket.name, ca_file=certificates.ca_file))


@pytest.fixture
def proxy(seaweed: SeaweedServer) -> Iterator[Proxy]:
    with Proxy(seaweed.port) as proxy:
        yield proxy


def test_a_page_that_arrives_slowly_ends_at_the_deadline(
    bucket: Bucket, proxy: Proxy, unique_prefix: str
) -> None:
    """Bytes keep arriving, and all would have arrived after six seconds. Control: they do at full speed."""
    codec = FrameCodec(NAMESPACE, 600_000)
    place = through(bucket, f"http://127.0.0.1:{proxy.port}")
    store = open_s3(place, unique_prefix, codec, timeout=30.0)
    key, frames = make_keys(1), empty_frames(codec, 1)
    assert store.backend.batch_set(key, full_frames(codec, key), parent=None, deadline=soon()) == [STORED]
    proxy.set(Faults(bytes_per_s=100_000, slice_bytes=1000, direction=Direction.DOWN))
    assert store.backend.batch_get(key, frames, deadline=soon(0.5)) == [GET_ERROR]
    assert errors(store) == {"timeout": 1}
    proxy.heal()
    assert store.backend.batch_get(key, frames, deadline=soon()) == [HIT]
    store.backend.close()


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
        chosen = options(server.url, proxy=f"http://127.0.0.1:{port}", ca_file=certificates.ca_file, connections=1)
        store = doorless(store_of(S3Driver, CODEC, chosen))
        assert store_chain(store, KEYS) == [STORED] * 6
        assert load(store, KEYS) == [HIT] * 6
        assert asked == [f"CONNECT 127.0.0.1:{server.port} HTTP/1.1".encode()]
        store.backend.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(b"HTTP/1.1 407 x\r\n\r\n", "unreachable"), (b"HTTP/1.1 200 x\r\n\r\nand more", "unreachable"),
     (b"HTTP/1.1 302 x\r\nlocation: http://h/\r\n\r\n", "unreachable"), (b"garbage\r\n\r\n", "protocol"),
     (b"", "timeout")],
)  # fmt: skip
def test_a_proxy_that_does_not_connect_is_reported_at_start(
    stub: StubS3, certificates: Certificates, answer: bytes, kind: str
) -> None:
    with StubS3("pages", certificates.server_context()) as server, tunnels(answer) as (port, _):
        chosen = options(
            server.url, proxy=f"http://127.0.0.1:{port}", ca_file=certificates.ca_file,
            connect_timeout=30.0 if answer else 0.3,
        )  # fmt: skip
        with pytest.raises(BackendUnavailable, match=kind):
            store_of(S3Driver, CODEC, chosen)


def test_a_proxy_resolves_the_name_of_the_store(stub: StubS3) -> None:
    """For a store without TLS, the proxy gets whole URLs. Control: the store's host name has no address here."""
    stub.origin = "http://store.invalid:9000"
    backend = store_of(S3Driver, CODEC, options(stub.origin, proxy=stub.url))
    store = doorless(backend)
    assert store_chain(store, KEYS) == [STORED] * 6
    assert load(store, KEYS) == [HIT] * 6
    assert {request.headers["host"] for request in stub.requests} == {"store.invalid:9000"}
    store.backend.close()
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
        store = doorless(store_of(S3Driver, CODEC, chosen))
        assert store_chain(store, KEYS) == [STORED] * 6
        assert load(store, KEYS) == [HIT] * 6
        store.backend.close()
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
    backend = store_of(S3Driver, CODEC, options(stub.origin, proxy_env="THE_PROXY"))
    store = doorless(backend)
    assert store_chain(store, KEYS) == [STORED] * 6
    assert load(store, KEYS) == [HIT] * 6
    assert errors(store) == {}
    store.backend.close()
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
