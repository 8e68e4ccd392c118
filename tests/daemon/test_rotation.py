"""Tokens and certificates of a daemon and of its clients, replaced in mounted Secrets while both run."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.admin.models import Status
from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.remote import RemoteDriver
from hicache.cli.ctl_client import Address, AdminClient
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.errors import AdminError, BackendUnavailable
from hicache_lab.conformance import Subject, load, make_keys, store_chain, store_of
from hicache_lab.devservers.ports import LOOPBACK
from tests.backends.remote.daemon import CODEC, Daemon
from tests.certificates import Certificates, make_certificates
from tests.daemon.daemons import Client
from tests.mounted import MountedSecret
from tests.waiting import wait_for

READ_AGAIN = "daemon: tokens: read again, because a file has changed"
OLD, NEW, OPERATORS = "old-token-of-engines", "new-token-of-engines", "token-of-operators"
HITS, ERRORS, STORED = [GetOutcome.HIT] * 3, [GetOutcome.ERROR] * 3, [SetOutcome.STORED] * 3
KEYS, MORE = make_keys(3), make_keys(3, "more")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "daemon"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Daemon]]:
    daemon = Daemon(folder)

    def start_with(**entries: Any) -> Daemon:
        daemon.configure(entries)
        return daemon.start()

    yield start_with
    daemon.kill()


@contextlib.contextmanager
def opened(daemon: Daemon, **options: Any) -> Iterator[Subject]:
    scheme = "https" if "ca_file" in options else "http"
    backend = store_of(RemoteDriver, CODEC, RemoteStorageOptions(url=f"{scheme}://{LOOPBACK}:{daemon.port}", **options))
    try:
        yield daemon.door(backend)
    finally:
        backend.close()


def test_a_token_that_both_sides_mount_is_replaced_without_a_signal(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    """The control: until the client's file changes too, the daemon rejects it; and the old token stays rejected."""
    served, mounted = (MountedSecret(tmp_path / name, {"token": OLD}) for name in ("served", "mounted"))
    daemon = start(token_file=str(served["token"]))
    with opened(daemon, token_file=mounted["token"]) as store:
        assert store_chain(store, KEYS) == STORED
        served.replace({"token": NEW})
        wait_for(lambda: READ_AGAIN in daemon.log)
        assert load(store, KEYS) == ERRORS
        assert store.backend.statistics().errors["wrong_credentials"]
        mounted.replace({"token": NEW})
        assert load(store, KEYS) == HITS
        assert store_chain(store, MORE) == STORED
    with contextlib.closing(daemon.tcp()) as client:
        statuses = [client.call("GET", f"/v1/namespaces/{CODEC.namespace.hex()}/usage", token=token)[0]
                    for token in (OLD, NEW)]
    assert statuses == [401, 200]
    assert OLD not in daemon.log and NEW not in daemon.log


def test_tokens_that_cannot_be_used_keep_the_last_ones(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """The clients' token must not become the admin token: it would give engines access to the admin surface."""
    served = MountedSecret(tmp_path / "served", {"token": OLD, "admin": OPERATORS})
    daemon = start(token_file=str(served["token"]), admin_token_file=str(served["admin"]))
    with contextlib.closing(daemon.tcp()) as client:
        served.replace({"token": NEW, "admin": NEW})
        wait_for(lambda: "daemon: tokens: a changed file cannot be used, so the last value stays in use" in daemon.log)
        assert client.call("GET", "/v1/admin/status", token=NEW)[0] == 403
        assert client.call("GET", "/v1/admin/status", token=OPERATORS)[0] == 200
        assert "use a different one" in daemon.log
        served.replace({"token": OPERATORS, "admin": NEW})
        wait_for(lambda: READ_AGAIN in daemon.log)
        assert client.call("GET", "/v1/admin/status", token=OPERATORS)[0] == 403
        assert client.call("GET", "/v1/admin/status", token=NEW)[0] == 200


def test_a_client_of_the_admin_surface_uses_a_replaced_token(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """A command that follows a job for hours is one such client. The control: with the old token it is rejected."""
    served, mounted = (MountedSecret(tmp_path / name, {"admin": OPERATORS}) for name in ("served", "mounted"))
    daemon = start(admin_token_file=str(served["admin"]))
    url = f"http://{LOOPBACK}:{daemon.port}"
    address = Address(url=url, token_file=mounted["admin"])
    with contextlib.closing(AdminClient(address, address.token().get)) as client:
        assert client.get("/status", Status).kind == "daemon"
        served.replace({"admin": NEW})
        wait_for(lambda: READ_AGAIN in daemon.log)
        with pytest.raises(AdminError):
            client.get("/status", Status)
        mounted.replace({"admin": NEW})
        assert client.get("/status", Status).kind == "daemon"


def files_of(made: Certificates) -> dict[str, str | bytes]:
    return {
        "ca": made.ca_file.read_bytes(), "cert": made.cert_file.read_bytes(), "key": made.key_file.read_bytes(),
        "client": made.client_cert_file.read_bytes(), "client-key": made.client_key_file.read_bytes(),
    }


def client_of(daemon: Daemon, made: Certificates) -> Client:
    context = ssl.create_default_context(cafile=made.ca_file)
    context.load_cert_chain(made.client_cert_file, made.client_key_file)
    return daemon.tcp(context)


def serves(daemon: Daemon, made: Certificates) -> bool:
    """True if a client with the certificates of `made` gets an answer over a new connection."""
    with contextlib.closing(client_of(daemon, made)) as client, contextlib.suppress(OSError):
        return client.call("GET", "/livez")[0] == 200
    return False


def test_certificates_of_both_sides_and_the_authority_of_clients_are_replaced_without_a_signal(
    start: Callable[..., Daemon], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The controls: half of a new pair changes nothing; a client with the old certificates is rejected afterwards; open
    connections stay."""
    old, new = (make_certificates(tmp_path_factory.mktemp(name)) for name in ("old", "new"))
    served, mounted = (MountedSecret(tmp_path / name, files_of(old)) for name in ("served", "mounted"))
    daemon = start(token_file=None, tls={
        "certificate": str(served["cert"]), "key": str(served["key"]), "client_ca": str(served["ca"]),
    })
    options = {"ca_file": mounted["ca"], "certificate": mounted["client"], "key": mounted["client-key"]}
    with opened(daemon, **options) as store, contextlib.closing(client_of(daemon, old)) as standing:
        assert store_chain(store, KEYS) == STORED
        assert standing.call("GET", "/livez")[0] == 200
        served.replace({**files_of(old), "cert": files_of(new)["cert"]})
        wait_for(lambda: "daemon.tls: a changed file cannot be used" in daemon.log)
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: "reload refused, nothing was changed" in daemon.log)
        assert serves(daemon, old)
        served.replace(files_of(new))
        wait_for(lambda: serves(daemon, new))
        assert not serves(daemon, old)
        assert standing.call("GET", "/livez")[0] == 200
        mounted.replace(files_of(new))
        wait_for(lambda: load(store, KEYS) == HITS)
    with opened(daemon, **options) as store:
        assert store_chain(store, MORE) == STORED
    with pytest.raises(BackendUnavailable), opened(daemon, ca_file=old.ca_file, certificate=old.client_cert_file,
                                                   key=old.client_key_file):
        pass


def test_a_client_cannot_resume_a_session_that_an_earlier_authority_allowed(
    start: Callable[..., Daemon], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A resumed session does not show its certificate again. The control: before the change it is resumed."""
    old, new = (make_certificates(tmp_path_factory.mktemp(name)) for name in ("old", "new"))
    served = MountedSecret(tmp_path / "served", files_of(old))
    daemon = start(token_file=None, tls={
        "certificate": str(served["cert"]), "key": str(served["key"]), "client_ca": str(served["ca"]),
    })
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # a hostile client does not check the daemon
    context.load_cert_chain(old.client_cert_file, old.client_key_file)

    def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool]:
        """Return the session of an answered request, and whether it is `session` resumed. Raises OSError."""
        with (
            socket.create_connection((LOOPBACK, daemon.port)) as plain,
            context.wrap_socket(plain, session=session) as sock,
        ):
            sock.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            if not sock.recv(100):
                raise ConnectionResetError
            return sock.session, bool(sock.session_reused)

    session, was_resumed = connect(None)
    assert not was_resumed
    session, was_resumed = connect(session)
    assert was_resumed
    served.replace(files_of(new))
    wait_for(lambda: serves(daemon, new))
    with pytest.raises(OSError):
        connect(session)
