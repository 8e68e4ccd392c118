"""An engine and `hicache ctl` that cannot use a daemon say why, and what to change: the true cause, not a guess."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.admin.models import Status
from hicache.backends.errors import ErrorKind
from hicache.backends.remote import RemoteDriver
from hicache.backends.remote.client import kinds_of
from hicache.cli.ctl_client import Address, AdminClient
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.errors import AdminError, BackendError, BackendUnavailable, HiCacheError
from hicache.frame import FrameCodec
from hicache_lab.conformance import store_of
from hicache_lab.devservers.ports import LOOPBACK
from tests.certificates import Certificates, make_certificates
from tests.daemon.daemons import CODEC, ROOT, TOKEN, Daemon
from tests.listening import Listener

NOT_STARTED = "start the daemon with: hicache serve"
NO_DAEMON = "it is not a HiCache daemon"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hc-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of another authority."""
    return make_certificates(tmp_path_factory.mktemp("others"))


@contextlib.contextmanager
def started(folder: Path, name: str, **entries: Any) -> Iterator[Daemon]:
    (folder / name).mkdir()
    daemon = Daemon(folder / name, entries).start()
    yield daemon
    daemon.kill()


def tls_of(certificates: Certificates) -> dict[str, str]:
    return {"certificate": str(certificates.cert_file), "key": str(certificates.key_file)}


@pytest.fixture(scope="module")
def guarded(folder: Path, certificates: Certificates) -> Iterator[Daemon]:
    """A daemon with TLS and a token."""
    token_file = secret(folder, "token", TOKEN)
    with started(folder, "guarded", tls=tls_of(certificates), token_file=token_file) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def mutual(folder: Path, certificates: Certificates) -> Iterator[Daemon]:
    """A daemon that requires client certificates."""
    tls = {**tls_of(certificates), "client_ca": str(certificates.ca_file)}
    with started(folder, "mutual", tls=tls) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Daemon]:
    """A daemon with neither TLS nor a token, for one connection at a time."""
    with started(folder, "plain", connections_max=1) as daemon:
        yield daemon


def secret(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def of_engine(codec: FrameCodec = CODEC, **options: Any) -> HiCacheError:
    """Return the error of an engine that opens this storage."""
    with pytest.raises(BackendError) as caught:
        store_of(RemoteDriver, codec, RemoteStorageOptions(timeout="5s", **options))
    return caught.value


def of_ctl(token: str | None = None, **address: Any) -> HiCacheError:
    """Return the error of `hicache ctl status` at this address."""
    client = AdminClient(Address(**address), lambda: token)
    with contextlib.closing(client), pytest.raises((BackendUnavailable, AdminError)) as caught:
        client.get("/status", Status)
    return caught.value


def url_of(daemon: Daemon, scheme: str = "https") -> str:
    return f"{scheme}://localhost:{daemon.port}"


def test_only_a_daemon_that_does_not_run_is_to_be_started(folder: Path) -> None:
    places: tuple[dict[str, Any], ...] = ({"socket": folder / "none.sock"}, {"url": "http://127.0.0.1:1"})
    for place in places:
        for error in (of_engine(**place), of_ctl(**place)):
            assert isinstance(error, BackendUnavailable) and NOT_STARTED in str(error) and "Errno" not in str(error)
    for error in (of_engine(url="http://none.invalid:1"), of_ctl(url="http://none.invalid:1")):
        assert "has no address; correct the host" in str(error) and NOT_STARTED not in str(error)


def test_a_missing_or_wrong_token_is_named(guarded: Daemon, folder: Path, certificates: Certificates) -> None:
    wrong = secret(folder, "wrong", "not-the-token-of-engines")
    for token_file in (None, wrong):
        error = of_engine(url=url_of(guarded), ca_file=certificates.ca_file, token_file=token_file)
        assert not isinstance(error, BackendUnavailable), "another try does not help"
        assert "token: is missing or wrong" in str(error) and "token_file" in str(error)
        assert NOT_STARTED not in str(error) and "not-the-token" not in str(error) and TOKEN not in str(error)
    assert "configure an admin token" in str(of_ctl("x", url=url_of(guarded), ca_file=certificates.ca_file))


def test_a_daemon_without_a_token_says_that_tcp_gives_no_access(plain: Daemon) -> None:
    assert "pages need its Unix socket" in str(of_engine(url=url_of(plain, "http")))


def test_a_certificate_that_this_client_does_not_trust_is_named(guarded: Daemon, others: Certificates) -> None:
    for ca_file in (None, others.ca_file):
        place: dict[str, Any] = {"url": url_of(guarded), "ca_file": ca_file}
        for error, entry in ((of_engine(**place), "check ca_file"), (of_ctl(**place), "check --ca-file")):
            assert "certificate verify failed: " in str(error) and entry in str(error)
            assert NOT_STARTED not in str(error) and ".c:" not in str(error)


def test_a_client_certificate_that_is_missing_or_not_accepted_is_named(
    mutual: Daemon, certificates: Certificates, others: Certificates
) -> None:
    """The daemon sends the reason before it closes. The control: the right certificate is accepted."""
    place: dict[str, Any] = {"url": url_of(mutual), "ca_file": certificates.ca_file}
    wrong: dict[str, Any] = {"certificate": others.client_cert_file, "key": others.client_key_file}
    for error, entries in ((of_engine(**place), "set certificate and key"),
                           (of_ctl(**place), "set --certificate and --key")):
        assert f"the daemon requires a client certificate; {entries}" in str(error) and NOT_STARTED not in str(error)
    for error in (of_engine(**place, **wrong), of_ctl(**place, **wrong)):
        assert "does not accept this client's certificate" in str(error) and "daemon.tls.client_ca" in str(error)
        assert NOT_STARTED not in str(error)
    right: dict[str, Any] = {"certificate": certificates.client_cert_file, "key": certificates.client_key_file}
    store_of(RemoteDriver, CODEC, RemoteStorageOptions(**place, **right)).close()


def test_http_at_a_port_with_tls_and_tls_at_one_without_are_named(guarded: Daemon, plain: Daemon) -> None:
    for url in (url_of(guarded, "http"), url_of(plain, "https")):
        for error, entry in ((of_engine(url=url), "url"), (of_ctl(url=url), "--url")):
            wanted = f"{entry} must begin with https://" if url.startswith("http:") else "does not use TLS"
            assert wanted in str(error) and entry in str(error) and NOT_STARTED not in str(error)


def test_the_reason_of_a_daemon_that_rejects_an_engine_is_passed_on(
    plain: Daemon, guarded: Daemon, folder: Path, certificates: Certificates
) -> None:
    with contextlib.closing(plain.client()) as first:
        assert first.call("GET", "/livez")[0] == 200
        for error in (of_engine(socket=plain.socket), of_ctl(socket=plain.socket)):
            assert "daemon: too many connections; try again" in str(error) and NOT_STARTED not in str(error)
    with contextlib.closing(guarded.client()) as client:
        assert client.open()[0] == 200
    other = FrameCodec(CODEC.namespace, 4096)
    error = of_engine(other, url=url_of(guarded), ca_file=certificates.ca_file, token_file=folder / "token")
    assert "conflict: namespace: is open with pages of 12000 bytes" in str(error)


@contextlib.contextmanager
def impostor(answer: bytes) -> Iterator[str]:
    """A server that sends these bytes to each client and closes the connection; its URL."""

    def serve(client: socket.socket, number: int) -> None:
        client.recv(65536)
        client.sendall(answer)

    with Listener(serve) as listener:
        yield f"http://{LOOPBACK}:{listener.port}"


def http_answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (http_answer(404, b"<html>nothing here</html>"), f"status 404; {NO_DAEMON}"),
        (http_answer(404, b'{"detail": "Not Found"}'), f"status 404; {NO_DAEMON}"),
        (http_answer(404, b'{"error": "bad_request", "detail": "Not Found; see /openapi.json"}'), NO_DAEMON),
        (http_answer(405, b""), f"status 405; {NO_DAEMON}"),
        (http_answer(200, b"<html>hello</html>"), f"the answer is not JSON; {NO_DAEMON}"),
        (http_answer(200, b"{}"), f"frames of another size; {NO_DAEMON}"),
        (http_answer(503, b"<html>no upstream</html>"), "status 503; it, or a proxy before it, does not work"),
        (http_answer(502, b"<html>no upstream</html>"), "status 502; it, or a proxy before it, does not work"),
        (b"-ERR unknown command\r\n", NO_DAEMON),
        (b"", "url must begin with https://"),
    ],
)
def test_a_server_that_is_not_a_daemon_is_recognised(answer: bytes, cause: str) -> None:
    with impostor(answer) as url:
        assert cause in str(of_engine(url=url)) and NOT_STARTED not in str(of_engine(url=url))
        said = str(of_ctl(url=url))
        assert ("is not an admin surface" in said or cause in said or "another version" in said
                or "Not Found; see" in said) and NOT_STARTED not in said


@pytest.mark.parametrize("detail", ["\x1b[31mred\r\nline " + "x" * 100_000, f"you sent {TOKEN}", 5, None])
def test_the_words_of_a_server_are_limited_and_never_contain_the_token(folder: Path, detail: object) -> None:
    body = json.dumps({"error": "busy", "detail": detail}).encode()
    with impostor(http_answer(403, body)) as url:
        said = str(of_engine(url=url, token_file=secret(folder, "token", TOKEN)))
    assert len(said) < 600 and said.isprintable() and TOKEN not in said


# Asks for the status as another user, with an open directory for imports.
_AS_OTHER = """
import os, sys
from pathlib import Path
from hicache.admin.models import Status
from hicache.cli.ctl_client import Address, AdminClient
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    AdminClient(Address(Path(sys.argv[1])), lambda: None).get("/status", Status)
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_socket_that_this_user_may_not_open_is_named(plain: Daemon) -> None:
    command = [sys.executable, "-c", _AS_OTHER, str(plain.socket)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "run this process as the user of the daemon" in said and NOT_STARTED not in said


def test_the_cause_for_which_the_daemon_s_store_keeps_nothing_has_the_same_words_at_the_engine() -> None:
    assert kinds_of({"errors": ["EROFS", "SQLITE_FULL", "guard_busy", "never heard of"]}, 9) == [
        "EROFS", "SQLITE_FULL", ErrorKind.BUSY, ErrorKind.SERVER_ERROR,
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_ctl_as_root_operates_the_daemon_of_another_user_and_an_engine_as_root_does_not_use_it(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(folder / "other.sock"))
        os.seteuid(65534)  # the kernel reports the user of this call as the one who listens
        try:
            listener.listen()
        finally:
            os.seteuid(0)

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(http_answer(404, b"Not Found"))

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        assert "answers 404, so it is not an admin surface" in str(of_ctl(socket=folder / "other.sock"))
        answering.join()
        assert "belongs to a process of user 65534" in str(of_engine(socket=folder / "other.sock"))
