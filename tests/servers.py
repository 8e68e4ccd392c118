"""Real servers for tests, one of each kind per session.

A shared server starts with the first test that uses it. Tests use different key prefixes (`unique_prefix`) and never
empty a shared server. A test that stops, fills or restarts a server starts its own: `with ValkeyServer() as server`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache_lab.devservers import (
    DevService,
    MooncakeClientDaemon,
    MooncakeMaster,
    RedisCluster,
    RedisSentinel,
    RedisServer,
    SeaweedServer,
    Storage,
    ValkeyServer,
)
from hicache_lab.devservers.redis import RedisLike

# The timeouts of stores, of 1 to 5 s, are failures on a machine that runs other tests.
PATIENCE = "60s"
_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """Let tests wait longer for a server, unless they pass other timeouts."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (RedisLike, RedisCluster, RedisSentinel, SeaweedServer):
            patch.setattr(kind, "storage", _patient(kind.storage))
        yield


def _patient(storage: Callable[..., Storage]) -> Callable[..., Storage]:
    def patient(server: DevService, **extra: Any) -> Storage:
        return storage(server, **{"timeout": PATIENCE, **extra})

    return patient


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """Start a shared Valkey without a password."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def old_redis() -> Iterator[RedisServer]:
    """Start a shared Redis 6.2."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """Start a shared cluster of three nodes, each with a third of the slots."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def redis_sentinel() -> Iterator[RedisSentinel]:
    """Start a shared primary with a replica and a sentinel. Do not fail it over; start your own for that."""
    with RedisSentinel() as sentinel:
        yield sentinel


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """Start a shared S3 server with its bucket. The start takes 5 to 15 s; another bucket takes some seconds more."""
    with SeaweedServer() as server:
        yield server


@pytest.fixture(scope="session")
def mooncake_master() -> Iterator[MooncakeMaster]:
    """Start a shared master with short leases. Its clients provide the memory."""
    with MooncakeMaster(lease_ms=500) as master:
        yield master


@pytest.fixture(scope="session")
def mooncake_daemon(mooncake_master: MooncakeMaster) -> Iterator[MooncakeClientDaemon]:
    """Start a process that provides memory to `mooncake_master`."""
    with MooncakeClientDaemon(mooncake_master) as daemon:
        yield daemon


@pytest.fixture
def unique_prefix() -> str:
    """Return a key prefix that no other test of this session uses."""
    return f"test{next(_NUMBERS)}/"


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> Callable[[DevService], None]:
    """Return a function that sets the credentials of a server in this test's environment."""

    def put(service: DevService) -> None:
        for name, value in service.environ().items():
            monkeypatch.setenv(name, value)

    return put
