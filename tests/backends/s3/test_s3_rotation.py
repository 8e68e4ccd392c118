"""Keys and certificates that are replaced, in the store and in a mounted Secret, while the backend is open."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import GetOutcome, SetOutcome
from hicache_lab.conformance import load, make_keys, store_chain
from hicache_lab.devservers import SeaweedServer
from tests.backends.s3.bucket import PATIENCE_S, errors, open_on, opened, options
from tests.backends.s3.stub import StubS3
from tests.certificates import make_certificates
from tests.mounted import MountedSecret
from tests.proxy import Proxy
from tests.waiting import wait_for

HITS, ERRORS, STORED = [GetOutcome.HIT] * 3, [GetOutcome.ERROR] * 3, [SetOutcome.STORED] * 3
KEYS, MORE = make_keys(3), make_keys(3, "more")


class OwnSeaweed(SeaweedServer):
    """A server whose account changes while it runs."""

    def change_account(self, access_key: str, secret_key: str) -> None:
        """Replace the only account, and wait until the server has loaded it."""
        self.access_key, self.secret_key = access_key, secret_key
        (self.directory / "accounts.json").write_text(json.dumps(self._accounts()))
        os.kill(self.pid, signal.SIGHUP)
        wait_for(self.serves)


@pytest.fixture(scope="module")
def server() -> Iterator[OwnSeaweed]:
    with OwnSeaweed() as started:
        yield started


def ini(access_key: str, secret_key: str) -> str:
    return f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n"


@pytest.mark.parametrize("source", ["credentials_file", "the files of boto3"])
def test_replaced_keys_sign_the_next_request(
    server: OwnSeaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The control: until the file changes, the server rejects every request."""
    server.change_account("first", "first-secret")
    mounted = MountedSecret(tmp_path / "secret", {"credentials": ini("first", "first-secret")})
    changes: dict[str, Any] = {"prefix": f"{len(source)}/"}
    if source == "credentials_file":
        changes["credentials_file"] = mounted["credentials"]
    else:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(mounted["credentials"]))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    changes |= {"bucket": server.bucket, "access_key_env": None, "secret_key_env": None, "timeout": PATIENCE_S}
    with opened(options(server.endpoint_url, **changes)) as store:
        assert store_chain(store, KEYS) == STORED
        server.change_account("second", "second-secret")
        assert load(store, KEYS) == ERRORS
        assert set(errors(store)) <= {"wrong_credentials", "access_denied"}
        mounted.replace({"credentials": ini("second", "second-secret")})
        assert load(store, KEYS) == HITS
        assert store_chain(store, MORE) == STORED


def test_a_replaced_authority_is_trusted_by_new_connections(
    stub: StubS3, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The control: until the file changes, the server with the new certificate is not trusted."""
    old, new = (make_certificates(tmp_path_factory.mktemp(name)) for name in ("old", "new"))
    mounted = MountedSecret(tmp_path / "tls", {"ca": old.ca_file.read_bytes()})
    served = old.server_context()
    with Proxy(stub.port, tls=served) as proxy, contextlib.ExitStack() as undo:
        url = f"https://127.0.0.1:{proxy.port}"
        store = open_on(stub, endpoint_url=url, ca_file=mounted["ca"], connections=1)
        undo.callback(store.backend.close)  # before the proxy ends
        assert store_chain(store, KEYS) == STORED
        served.load_cert_chain(new.cert_file, new.key_file)
        proxy.drop()
        assert load(store, KEYS) == ERRORS
        assert errors(store)["tls"]
        mounted.replace({"ca": new.ca_file.read_bytes()})
        assert load(store, KEYS) == HITS
