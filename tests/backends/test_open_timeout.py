"""Opening a store over a server that accepts connections and never answers ends at `open_timeout`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hicache.backends.remote.driver import create_memory
from hicache.config import Section
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.config.s3_storage import S3StorageOptions
from hicache.config.storage import STORAGE_SECTIONS
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES, open_backend
from hicache_lab.devservers.ports import LOOPBACK
from tests.tuned import tuned

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
# Below the limits that would end the attempts otherwise: 30 s and 60 s.
ENDS_S = 20.0
# Only `open_timeout` can end an attempt in time.
LONG = {"timeout": 60}
SHORT = {"open_timeout": 0.3, "connect_timeout": 60.0}


@pytest.fixture
def silent(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Any]:
    """A server that never answers: the path of its Unix socket, or its TCP port."""
    folder = scratch / "run"
    folder.mkdir(mode=0o700)
    path = folder / "daemon.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX if request.param == "unix" else socket.AF_INET)) as listener:
        listener.bind(str(path) if request.param == "unix" else (LOOPBACK, 0))
        listener.listen(16)
        yield path if request.param == "unix" else listener.getsockname()[1]


def options_of(kind: str, silent: Any) -> dict[str, Any]:
    is_unix = isinstance(silent, Path)
    if kind == "redis":
        return LONG | ({"unix_socket": str(silent)} if is_unix else {"url": f"redis://{LOOPBACK}:{silent}"})
    if kind == "remote":
        return LONG | ({"socket": str(silent)} if is_unix else {"url": f"http://{LOOPBACK}:{silent}"})
    return LONG | {
        "bucket": "pages", "endpoint_url": f"http://{LOOPBACK}:{silent}", "region": "us-east-1",
        "access_key_env": "TEST_ACCESS", "secret_key_env": "TEST_SECRET",
    }


def fails_in_time(opening: Callable[[], object]) -> bool:
    """Return True if `opening` raises BackendUnavailable within ENDS_S."""
    failed = threading.Event()

    def attempt() -> None:
        with pytest.raises(BackendUnavailable):
            opening()
        failed.set()

    threading.Thread(target=attempt, daemon=True).start()
    return failed.wait(ENDS_S)


@pytest.mark.parametrize(("kind", "silent"), [
    ("redis", "tcp"), ("redis", "unix"), ("remote", "tcp"), ("remote", "unix"), ("s3", "tcp"),
], indirect=["silent"])
def test_opening_a_store_on_a_silent_server_ends_at_the_time_limit(
    silent: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_ACCESS", "access")
    monkeypatch.setenv("TEST_SECRET", "secret")
    section = STORAGE_SECTIONS[kind].model_fields["options"].annotation
    options: Any = tuned(cast("type[Section]", section), **options_of(kind, silent), **SHORT)
    assert fails_in_time(lambda: open_backend(kind, CODEC, options))


@pytest.mark.parametrize("silent", ["tcp", "unix"], indirect=True)
def test_creating_memory_at_a_silent_daemon_ends_at_the_time_limit(silent: Any) -> None:
    options = tuned(RemoteStorageOptions, **options_of("remote", silent), **SHORT)
    assert fails_in_time(lambda: create_memory(options, "test-silent", bytes(32), PAYLOAD_BYTES, 4))


@pytest.mark.parametrize("silent", ["tcp"], indirect=True)
def test_a_service_of_credentials_that_does_not_answer_ends_the_opening(
    silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://{LOOPBACK}:{silent}/"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
    options = tuned(S3StorageOptions, bucket="pages", endpoint_url=url, **SHORT)
    with pytest.raises(BackendUnavailable, match="did not get credentials in time"):
        open_backend("s3", CODEC, options)
