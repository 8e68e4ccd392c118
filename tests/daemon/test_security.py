"""Access rights: peers of the Unix socket, tokens, TLS, and addresses at which a daemon refuses to listen."""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.config import HiCacheConfig, load_config
from hicache.daemon.security import read_tokens
from hicache.errors import ConfigError
from tests.certificates import Certificates, make_certificates
from tests.daemon.daemons import NAMESPACE, TOKEN, Client, Daemon, EngineMemory, keys_of, read, secret, write

PROBES = ("/livez", "/readyz")
PAGES = ("/", "/statusz", "/openapi.json", "/history")
OPEN = {"payload_bytes": 12000}
NAMESPACE_PATH = f"/v1/namespaces/{NAMESPACE}"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def _statuses(client: Client, paths: tuple[str, ...], token: str | None = None) -> list[int]:
    return [client.call("GET", path, token=token)[0] for path in paths]


def test_without_a_token_tcp_serves_only_probes_and_status_pages(daemon: Daemon) -> None:
    with contextlib.closing(daemon.tcp()) as client:
        assert _statuses(client, PROBES + PAGES) == [200] * 6
        assert client.call("PUT", NAMESPACE_PATH, OPEN)[0] == 401
        assert client.call("DELETE", "/v1/memory/x")[0] == 401
        assert client.call("GET", "/nothing")[0] == 401
        assert client.call("GET", "/v1/admin/status")[0] == 403
    assert daemon.ask("PUT", NAMESPACE_PATH, OPEN)[0] == 200  # the Unix socket needs no token


def test_the_token_gives_access_to_pages_and_a_wrong_one_does_not(start: Callable[..., Daemon], scratch: Path) -> None:
    daemon = start({"token_file": secret(scratch, "token", TOKEN)})
    keys = keys_of(2)
    with contextlib.closing(daemon.tcp()) as client:
        for wrong in (None, "", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\xe9"):
            answer, _ = client.call_with_headers("PUT", NAMESPACE_PATH, OPEN, wrong)
            assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
            for verb in ("exists", "has", "get", "set", "read", "write", "delete", "clear", "touch"):
                assert client.call("POST", f"{NAMESPACE_PATH}/{verb}", {}, wrong)[0] == 401
            assert client.call("GET", f"{NAMESPACE_PATH}/usage", token=wrong)[0] == 401
        assert client.call("PUT", NAMESPACE_PATH, OPEN, TOKEN)[0] == 200
        assert write(client, keys, TOKEN)[1]["outcomes"] == ["stored"] * 2
        assert write(client, keys)[0] == 401
        assert read(client, keys, TOKEN)[1][:2] == b"HH"
        assert client.call("GET", "/v1/admin/status", token=TOKEN)[0] == 403
        assert daemon.status()["refused"]["token"] == 6 * 11 + 1
    assert TOKEN not in daemon.log


def test_the_token_does_not_give_access_to_the_memory_of_engines(
    start: Callable[..., Daemon], scratch: Path, memory: EngineMemory
) -> None:
    """The token is for other hosts, which must not read or write the frames of engines."""
    daemon = start({"token_file": secret(scratch, "token", TOKEN)})
    keys = keys_of(1)
    with contextlib.closing(daemon.tcp()) as client, contextlib.closing(daemon.client()) as engine:
        assert engine.open()[0] == 200 and memory.attach(engine)[0] == 200
        memory.frame(0)[:] = b"s" * memory.frame_bytes
        fields = {"keys": [keys[0].hex()], "memory": memory.name, "frames": [0], "timeout_s": 5}
        created = {"frame_bytes": 4096, "pages": 1, "shape": "00" * 32}
        for method, target, body in (
            ("POST", f"{NAMESPACE_PATH}/set", fields), ("POST", f"{NAMESPACE_PATH}/get", fields),
            ("PUT", "/v1/memory/made", created), ("DELETE", f"/v1/memory/{memory.name}", None),
        ):
            assert client.call(method, target, body, TOKEN)[0] == 403
        assert read(client, keys, TOKEN)[1] == b"M"
        assert engine.call("POST", f"{NAMESPACE_PATH}/set", fields)[1]["outcomes"] == ["stored"], "the control"
        assert read(client, keys, TOKEN)[1][:1] == b"H"


def test_beyond_loopback_only_probes_and_the_empty_page_need_no_token(scratch: Path) -> None:
    daemon = Daemon(scratch)
    daemon.configure({"token_file": secret(scratch, "token", TOKEN), "listen": f"0.0.0.0:{daemon.port}"})
    try:
        daemon.start()
        with contextlib.closing(daemon.tcp()) as client:
            assert _statuses(client, PROBES + PAGES) == [200, 200, 200, 401, 401, 401]  # the page needs no token
            assert _statuses(client, PAGES, TOKEN) == [200] * 4
    finally:
        daemon.kill()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.com:80", "10.1.2.3:80"])
def test_beyond_loopback_a_configuration_needs_a_token_or_tls(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"daemon: .*listen: beyond loopback"):
        load_config(None, environ={}, overrides={"daemon.listen": listen})
    load_config(None, environ={}, overrides={"daemon.listen": listen, "daemon.token_env": "TOKEN"})
    load_config(None, environ={}, overrides={"daemon.listen": "127.0.0.1:0"})


@pytest.mark.parametrize(
    ("section", "environ", "message"),
    [
        ({"token_env": "T"}, {}, "not set"),
        ({"token_env": "T"}, {"T": "with\ttab"}, "printable ASCII"),
        ({"token_env": "T", "admin_token_env": "A"}, {"T": "one", "A": "one"}, "use a different one"),
    ],
)
def test_unusable_tokens_are_rejected_without_quoting_them(
    section: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    config = HiCacheConfig(daemon=section).daemon
    with pytest.raises(ConfigError, match=message) as caught:
        read_tokens(config, environ)
    assert not any(secret in str(caught.value) for secret in environ.values() if secret != "one")


def _client_context(certificates: Certificates, *, own: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates.ca_file)
    if own:
        context.load_cert_chain(certificates.client_cert_file, certificates.client_key_file)
    return context


def test_tls_protects_the_token_and_the_pages(
    start: Callable[..., Daemon], scratch: Path, certificates: Certificates
) -> None:
    tls = {"certificate": str(certificates.cert_file), "key": str(certificates.key_file)}
    daemon = start({"tls": tls, "token_file": secret(scratch, "token", TOKEN), "pool": 0})
    keys = keys_of(8)
    with contextlib.closing(daemon.tcp(_client_context(certificates, own=False))) as client:
        assert client.call("PUT", NAMESPACE_PATH, OPEN)[0] == 401
        assert client.call("PUT", NAMESPACE_PATH, {**OPEN, "label": "tests", "weights_epoch": 3}, TOKEN)[0] == 200
        assert write(client, keys, TOKEN)[1]["outcomes"] == ["stored"] * 8
        assert read(client, keys, TOKEN)[1][:8] == b"H" * 8
    with contextlib.closing(daemon.tcp()) as plain, pytest.raises((OSError, http.client.HTTPException)):
        plain.call("GET", "/livez")


def test_a_client_certificate_replaces_the_token(start: Callable[..., Daemon], certificates: Certificates) -> None:
    """The control: a client without a certificate gets no answer."""
    tls = {
        "certificate": str(certificates.cert_file), "key": str(certificates.key_file),
        "client_ca": str(certificates.ca_file),
    }
    daemon = start({"tls": tls})
    with contextlib.closing(daemon.tcp(_client_context(certificates, own=True))) as client:
        assert client.call("PUT", NAMESPACE_PATH, {**OPEN, "label": "tests", "weights_epoch": 3})[0] == 200
        assert write(client, keys_of(3))[1]["outcomes"] == ["stored"] * 3
    stranger = daemon.tcp(_client_context(certificates, own=False))
    with contextlib.closing(stranger), pytest.raises((OSError, http.client.HTTPException)):
        stranger.call("GET", "/livez")


# Connects as another user and prints the answer.
_AS_OTHER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
print(sock.recv(65536).decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_rejected_even_with_access_to_the_directory(daemon: Daemon) -> None:
    """The control: the owner of the socket is served over it."""
    command = [sys.executable, "-c", _AS_OTHER, str(daemon.socket)]
    shut = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "PermissionError" in shut.stderr
    for path, mode in ((daemon.folder, 0o755), (daemon.socket.parent, 0o711), (daemon.socket, 0o666)):
        path.chmod(mode)
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "HTTP/1.1 403" in answer.stdout and "access_denied" in answer.stdout
        assert daemon.status()["refused"]["peer"] == 1
    finally:
        for path, mode in ((daemon.socket, 0o600), (daemon.socket.parent, 0o700), (daemon.folder, 0o700)):
            path.chmod(mode)
