"""Opening an S3 store reports errors with advice; and the sources of credentials."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hicache.backends.s3 import S3Driver
from hicache.backends.s3.access import open_access
from hicache.config.s3_storage import S3StorageOptions
from hicache.errors import BackendUnavailable, ConfigError
from hicache_lab.conformance import driver_of, store_of
from hicache_lab.devservers.ports import free_ports
from tests.backends.s3.bucket import CODEC, Bucket, open_s3, options
from tests.backends.s3.stub import Answer, Request, StubS3
from tests.certificates import make_certificates
from tests.waiting import WAIT_S

SECRETS = ("a-secret-key", "another-secret")


def refused(kind: type[Exception], chosen: S3StorageOptions, *words: str) -> None:
    """Fail unless opening fails with a message that has these words and no secret."""
    with pytest.raises(kind) as caught:
        store_of(S3Driver, CODEC, chosen)
    message = str(caught.value)
    assert all(word in message for word in words) and not any(secret in message for secret in SECRETS), message


def test_a_missing_bucket_and_wrong_credentials_are_reported_at_start(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(BackendUnavailable, options(bucket.url, bucket="no-such-bucket"), "no_bucket", "create the bucket")
    for variable in ("S3_ACCESS_KEY", "S3_SECRET_KEY"):
        with monkeypatch.context() as wrong:
            wrong.setenv(variable, "another-secret")
            refused(BackendUnavailable, options(bucket.url, bucket=bucket.name), "credentials")


def test_a_server_that_is_not_reached_or_of_another_protocol_is_reported_at_start(stub: StubS3) -> None:
    refused(BackendUnavailable, options("http://no-such-host.invalid:9"), "dns", "endpoint_url")
    (port,) = free_ports(1)
    refused(BackendUnavailable, options(f"http://127.0.0.1:{port}"), "connection_refused", "nothing listens")
    stub.fault = lambda request: Answer(b"SSH-2.0-x\r\n\r\n", "close")
    refused(BackendUnavailable, options(stub.url), "not from an S3 store")
    stub.fault = lambda request: Answer(b"", "hang")
    refused(BackendUnavailable, options(stub.url, timeout=0.1, connect_timeout=0.1), "timeout")


def test_a_wrong_scheme_certificate_or_path_is_named(stub: StubS3, tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    with StubS3("pages", tls=made.server_context()) as server:
        plain = options(server.url.replace("https", "http"))
        refused(BackendUnavailable, plain, "connection_lost", "https:// against http://")
        refused(BackendUnavailable, options(server.url), "certificate verify failed: ", "ca_file")
    stub.fault = lambda request: Answer(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n", "close")
    refused(BackendUnavailable, options(stub.url), "status 404", "check endpoint_url")


def test_an_unset_variable_is_named(stub: StubS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("S3_SECRET_KEY")
    refused(ConfigError, options(stub.url), "S3_SECRET_KEY is not set")


def _file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "credentials"
    path.write_text(text)
    path.chmod(mode)
    return path


def _file_options(stub: StubS3, path: Path, **changes: Any) -> S3StorageOptions:
    return options(stub.url, access_key_env=None, secret_key_env=None, credentials_file=path, **changes)


def test_a_private_file_gives_credentials(stub: StubS3, tmp_path: Path) -> None:
    path = _file(tmp_path, "[other]\naws_access_key_id = from-a-file\naws_secret_access_key = another-secret\n"
                           "aws_session_token = a-token\n")
    seen = _watch(stub)
    store_of(S3Driver, CODEC, _file_options(stub, path, profile="other")).close()
    assert "Credential=from-a-file/" in seen[0].headers["authorization"]
    assert seen[0].headers["x-amz-security-token"] == "a-token"


def _watch(stub: StubS3) -> list[Request]:
    """Return a list to which the requests of `stub` are added from now on."""
    seen: list[Request] = []

    def look(request: Request) -> None:
        seen.append(request)

    stub.fault = look
    return seen


@pytest.mark.parametrize(
    ("text", "mode", "word"),
    [("[default]\naws_access_key_id = x\naws_secret_access_key = another-secret\n", 0o604, "chmod 600"),
     ("[default]\naws_access_key_id = x\n", 0o600, "no section"), ("another-secret", 0o600, "no section"),
     ("[x]\naws_access_key_id = x\naws_secret_access_key = another-secret\n", 0o600, "[default]")],
)
def test_an_invalid_credentials_file_is_refused_without_showing_it(
    stub: StubS3, tmp_path: Path, text: str, mode: int, word: str
) -> None:
    refused(ConfigError, _file_options(stub, _file(tmp_path, text, mode)), word)


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide this machine's AWS configuration, and avoid network requests for credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION",
                 "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("bare_environment")
def test_without_credentials_the_error_says_where_to_set_them(stub: StubS3) -> None:
    chosen = options(stub.url, access_key_env=None, secret_key_env=None)
    refused(ConfigError, chosen, "no credentials found")
    refused(ConfigError, chosen.model_copy(update={"profile": "nobody"}), "nobody")


@pytest.mark.usefixtures("bare_environment")
def test_credentials_found_by_boto3_are_used(stub: StubS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    seen = _watch(stub)
    store_of(S3Driver, CODEC, options(stub.url, access_key_env=None, secret_key_env=None)).close()
    assert "Credential=from-the-environment/" in seen[0].headers["authorization"]
    assert seen[0].headers["x-amz-security-token"] == "a-token"


@pytest.fixture
def machine_role() -> Iterator[tuple[str, list[str]]]:
    """A credential server for containers: its URL, and the names that it will return; they expire after 15 minutes."""
    names = ["first", "second"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = names.pop(0) if len(names) > 1 else names[0]
            body = json.dumps({
                "AccessKeyId": name, "SecretAccessKey": "another-secret", "Token": "a-token",
                "Expiration": (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/role", names
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("bare_environment")
def test_the_role_of_a_machine_gives_credentials_and_renews_them(
    stub: StubS3, machine_role: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, names = machine_role
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
    seen = _watch(stub)
    store_of(S3Driver, CODEC, options(stub.url, access_key_env=None, secret_key_env=None)).close()
    # Credentials that expire within 15 minutes are renewed at once, so the first ones are never used.
    assert "Credential=second/" in seen[0].headers["authorization"]
    assert names == ["second"]


@pytest.mark.usefixtures("bare_environment")
@pytest.mark.parametrize(
    ("changes", "environment", "host", "path"),
    [({"region": "eu-central-1"}, {}, "pages.s3.eu-central-1.amazonaws.com", ""),
     ({}, {"AWS_DEFAULT_REGION": "us-west-2"}, "pages.s3.us-west-2.amazonaws.com", ""),
     ({"region": "cn-north-1"}, {}, "pages.s3.cn-north-1.amazonaws.com.cn", ""),
     ({"region": "eu-west-1"}, {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
      "pages.s3.dualstack.eu-west-1.amazonaws.com", ""),
     ({"region": "us-west-2"}, {"AWS_USE_FIPS_ENDPOINT": "true"}, "pages.s3-fips.us-west-2.amazonaws.com", ""),
     ({"region": "us-east-1", "bucket": "pages--use1-az4--x-s3"}, {},
      "pages--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com", ""),
     ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com"}, {}, "pages.s3.eu-west-1.amazonaws.com", ""),
     ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com", "bucket": "my.pages"}, {},
      "s3.eu-west-1.amazonaws.com", "/my.pages"),
     ({"region": "eu-west-1", "path_style": True}, {}, "s3.eu-west-1.amazonaws.com", "/pages"),
     ({"region": "eu-west-1", "bucket": "my.pages"}, {}, "s3.eu-west-1.amazonaws.com", "/my.pages"),
     ({"endpoint_url": "https://h.example:9000/s3/"}, {}, "h.example:9000", "/s3/pages"),
     ({"endpoint_url": "https://[::1]:9000"}, {}, "[::1]:9000", "/pages"),
     ({"endpoint_url": "https://h.example", "path_style": False}, {}, "pages.h.example", ""),
     ({}, {"AWS_ENDPOINT_URL": "http://h.example:1"}, "h.example:1", "/pages")],
)
def test_requests_go_to_the_endpoint_of_the_options_or_of_boto3(
    changes: dict[str, Any], environment: dict[str, str], host: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "a-secret-key", **environment}.items():
        monkeypatch.setenv(name, value)
    access = open_access(S3StorageOptions(**{"bucket": "pages", **changes}), time.monotonic() + WAIT_S)
    assert (access.host, access.path, access.origin) == (host, path, "")
    assert access.server.host == access.server.name == urlsplit(f"//{host}").hostname
    assert (access.server.tls is None) is (environment.get("AWS_ENDPOINT_URL") is not None)


def test_nothing_shows_a_secret(bucket: Bucket, unique_prefix: str) -> None:
    from hicache.backends.s3.access import Credentials  # noqa: PLC0415 - for this line only

    assert "a-secret-key" not in repr(Credentials("id", "a-secret-key", "a-secret-key"))
    store = open_s3(bucket, unique_prefix)
    assert "SECRET_KEY" in repr(driver_of(store.backend, S3Driver).options)
    store.backend.close()
