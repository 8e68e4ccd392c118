"""The bucket that these tests share, on a real SeaweedFS; each test has its own prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hicache.backends.s3 import S3Driver
from hicache.backends.stored import StoredPages
from hicache_lab.conformance import Subject
from hicache_lab.devservers import DevService, SeaweedServer
from tests.backends.s3.bucket import OPENED, Bucket, open_on, options
from tests.backends.s3.stub import StubS3


@pytest.fixture(scope="session")
def shared_bucket(seaweed: SeaweedServer) -> Iterator[Bucket]:
    """One client for all tests: botocore takes a third of a second to create one."""
    found = Bucket(seaweed.endpoint_url, seaweed.bucket, seaweed.client())
    yield found
    found.close()


@pytest.fixture
def bucket(shared_bucket: Bucket, seaweed: SeaweedServer, login: Callable[[DevService], None]) -> Bucket:
    """The side door to the shared bucket, with its credentials in the environment."""
    login(seaweed)
    return shared_bucket


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubS3]:
    """A scripted server, with credentials in the environment, which it does not check."""
    monkeypatch.setenv("S3_ACCESS_KEY", "an-access-key")
    monkeypatch.setenv("S3_SECRET_KEY", "a-secret-key")
    with StubS3("pages") as server:
        yield server
        server.released.set()
        while OPENED:
            OPENED.pop().close()


@pytest.fixture
def store(stub: StubS3) -> Subject:
    """A backend on the stub, with the stub's dictionary as the side door."""
    return open_on(stub)


@pytest.fixture
def raw(stub: StubS3) -> Iterator[StoredPages]:
    """The pages of the stub's bucket as an operator sees them."""
    found = StoredPages(S3Driver(None, options(stub.url)), "s3")
    yield found
    found.close()
