"""DNS rebinding: a web page whose own name resolves to this machine gets no answer from a daemon, an exporter of an
engine or an engine's admin surface. A browser always sends the name of the page as `Host`."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.config import HiCacheConfig
from hicache.config.addresses import is_own_host
from hicache.metrics.families import cache_collector
from hicache.metrics.server import serve_collector
from hicache_lab.devservers.ports import LOOPBACK
from tests.admin.running import RunningEngine, file_config
from tests.daemon.daemons import NAMESPACE, TOKEN, Daemon, secret
from tests.daemon.process import request
from tests.waiting import WAIT_S, wait_for

PAGES = ("/", "/statusz", "/history", "/metrics", "/openapi.json", "/livez", "/readyz")
FOREIGN = ("evil.example", "evil.example:9321", "localhost.evil.example", "127.0.0.1.evil.example", "x", "[::1", "a,b",
           "::1")
OWN = ("localhost", "LOCALHOST.:80", "127.0.0.1", "127.0.0.1:9321", "[::1]:9321", "10.4.2.1:80")


def status_of(sock: socket.socket, path: str, host: str | None, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Send one request with these bytes as `Host`, None for none. Return status and body."""
    head = f"{method} {path} HTTP/1.1\r\nconnection: close\r\n"
    head += "" if host is None else f"host: {host}\r\n"
    head += "".join(f"{name}: {text}\r\n" for name, text in headers.items())
    with sock, sock.makefile("rb") as file:
        sock.settimeout(WAIT_S)
        sock.sendall(head.encode() + b"\r\n")
        answer = file.read()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2].decode()


def tcp(port: int) -> socket.socket:
    return socket.create_connection((LOOPBACK, port))


def unix(path: Path | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return sock


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_is_not_this_host_unless_it_is_configured(host: str) -> None:
    assert not is_own_host(host, ["node17.example"])
    assert is_own_host("Node17.example.:9321", ["node17.EXAMPLE"])


@pytest.mark.parametrize("host", [*OWN, None, ""])
def test_addresses_this_machine_and_no_name_at_all_are_this_host(host: str | None) -> None:
    assert is_own_host(host, ())


def test_the_name_of_this_machine_is_this_host() -> None:
    name = socket.gethostname()
    assert is_own_host(f"{name}:9321", ()) or name.rpartition(".")[2].isdigit(), "digits alone are not a valid name"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_of_a_foreign_name_cannot_read_from_a_daemon(daemon: Daemon, path: str) -> None:
    """The controls: the daemon's own names, and a client without a name, are served."""
    doors: tuple[Callable[[], socket.socket], ...] = (lambda: tcp(daemon.port), lambda: unix(daemon.socket))
    for connect in doors:  # `ssh -L` may forward a port of the browser's host to the socket
        status, body = status_of(connect(), path, f"evil.example:{daemon.port}")
        assert (status, json.loads(body)["error"]) == (421, "access_denied")
        assert "daemon.hosts" in body and "evil" not in body
        assert [status_of(connect(), path, host)[0] for host in (*OWN, None)] == [200] * (len(OWN) + 1)
    assert daemon.status()["refused"]["host"] >= 2


def test_a_page_of_a_foreign_name_cannot_administer_or_write_through_a_forwarded_socket(daemon: Daemon) -> None:
    for method, path, refused in (
        ("GET", "/v1/admin/status", 403), ("DELETE", "/v1/admin/jobs/x", 403), ("DELETE", "/v1/memory/x", 421),
        ("POST", f"/v1/namespaces/{NAMESPACE}/clear", 421),
    ):
        assert status_of(unix(daemon.socket), path, "evil.example", method)[0] == refused
        assert status_of(unix(daemon.socket), path, "localhost", method)[0] not in (403, 421), "the control"


def test_a_page_of_another_site_cannot_post_without_the_consent_that_browsers_ask_for(daemon: Daemon) -> None:
    """A body without the type of JSON needs no preflight, and `Host` is the daemon's own address."""
    body = b'{"where": "pool"}'
    for kind, accepted in (("application/json", True), ("text/plain", False), (None, False)):
        sent = request("POST", "/v1/admin/clear", body).replace(b"application/json", (kind or "").encode())
        if kind is None:
            sent = sent.replace(b"content-type: \r\n", b"")
        with unix(daemon.socket) as sock:
            sock.settimeout(WAIT_S)
            sock.sendall(sent)
            assert (b" 202 " in sock.recv(64)) is accepted


def test_a_configured_name_is_served_and_a_reload_changes_it(start: Callable[..., Daemon]) -> None:
    """The control of the defence: `hosts` turns it off for one name."""
    daemon = start({"hosts": ["evil.example"]})
    assert status_of(tcp(daemon.port), "/statusz", "evil.example")[0] == 200
    assert status_of(tcp(daemon.port), "/statusz", "other.example")[0] == 421
    daemon.configure({"hosts": ["other.example"]})
    daemon.signal(signal.SIGHUP)
    wait_for(lambda: "changed: daemon.hosts" in daemon.log)
    assert status_of(tcp(daemon.port), "/statusz", "evil.example")[0] == 421
    assert status_of(tcp(daemon.port), "/statusz", "other.example")[0] == 200


def test_a_client_with_a_token_may_use_any_name(start: Callable[..., Daemon], scratch: Path) -> None:
    """Engines use the names of services and proxies. A page of a foreign name does not know the token."""
    daemon = Daemon(scratch)
    daemon.configure({"token_file": secret(scratch, "token", TOKEN), "listen": f"0.0.0.0:{daemon.port}"})
    with daemon:
        for given, statuses in ((TOKEN, [200, 200, 200]), ("wrong", [421, 421, 401]), (None, [421, 421, 401])):
            headers = {} if given is None else {"authorization": f"Bearer {given}"}
            found = [status_of(tcp(daemon.port), path, "service.example", **headers)[0]
                     for path in ("/", "/readyz", "/metrics")]
            assert found == statuses


def test_a_page_of_a_foreign_name_cannot_read_the_metrics_of_an_engine() -> None:
    """The controls: its own names, and a configured one, are served."""
    config = HiCacheConfig.model_validate({"metrics": {"port": 0, "hosts": ["engine.example"]}})
    server = serve_collector(config, cache_collector(lambda: None))
    assert server is not None
    with server:
        for path in ("/metrics", "/healthz", "/other"):
            status, body = status_of(tcp(server.port), path, "evil.example")
            assert status == 421 and "metrics.hosts" in body and "hicache_" not in body
        for host in (*OWN, None, "engine.example:9464"):
            assert status_of(tcp(server.port), "/metrics", host)[0] == 200
            assert status_of(tcp(server.port), "/other", host)[0] == 404


def test_a_page_of_a_foreign_name_cannot_use_the_admin_surface_of_an_engine(scratch: Path) -> None:
    """The control: its own names are served."""
    with RunningEngine(file_config(scratch)) as engine:
        path = engine.config.admin.socket
        status, body = status_of(unix(path), "/v1/admin/status", "evil.example")
        assert status == 403 and "localhost" in body and "tiers" not in body
        assert [status_of(unix(path), "/v1/admin/status", host)[0] for host in (*OWN, None)] == [200] * (len(OWN) + 1)
