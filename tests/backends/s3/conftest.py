"""The S3 store that these tests share: a real SeaweedFS, each test below a prefix of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.s3.bucket import ACCESS_KEY, BUCKET, SECRET_KEY, Bucket
from tests.waiting import wait_for


def _free_port() -> int:
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            if port > 50000:
                continue
            try:
                other.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return port


@pytest.fixture(scope="session")
def seaweed() -> Iterator[str]:
    """The URL of a SeaweedFS with an empty bucket."""
    folder = Path(tempfile.mkdtemp(prefix="hicache-weed-", dir="/dev/shm"))
    ports = [_free_port() for _ in range(4)]
    (folder / "s3.json").write_text(json.dumps({"identities": [{
        "name": "tests", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List"],
    }]}))  # fmt: skip
    (folder / "logs").mkdir()
    (folder / "data").mkdir()
    weed = Path(sysconfig.get_path("scripts")) / "weed"
    with (folder / "out").open("wb") as out:
        server = subprocess.Popen(
            [str(weed), f"-logdir={folder}/logs", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
             f"-dir={folder}/data", "-s3", f"-s3.port={ports[0]}", f"-s3.config={folder}/s3.json",
             f"-master.port={ports[1]}",
             f"-volume.port={ports[2]}", f"-filer.port={ports[3]}", "-s3.port.lance=0", "-s3.port.iceberg=0",
             "-master.volumeSizeLimitMB=64", "-volume.max=20", "-master.telemetry=false"],
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{ports[0]}"
    bucket = Bucket(url, BUCKET)
    try:
        wait_for(lambda: _answers(url), pause_s=0.05)
        wait_for(lambda: _stores(bucket), pause_s=0.1)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        bucket.close()
        shutil.rmtree(folder)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False
    return True


def _stores(bucket: Bucket) -> bool:
    return bucket.try_to_make() and bucket.try_to_store("ready")


@pytest.fixture(scope="session")
def bucket(seaweed: str) -> Iterator[Bucket]:
    """The side door to the shared bucket."""
    found = Bucket(seaweed, BUCKET)
    yield found
    found.close()


@pytest.fixture
def prefix() -> str:
    """A place in the bucket that no other test uses."""
    return f"test-{secrets.token_hex(8)}/"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that `options` name."""
    monkeypatch.setenv("HICACHE_TEST_S3_KEY", ACCESS_KEY)
    monkeypatch.setenv("HICACHE_TEST_S3_SECRET", SECRET_KEY)
