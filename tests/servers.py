"""Real servers for tests: one of each kind per session, and fresh ones for tests that hurt theirs.

A shared server starts with the first test that asks for it. Tests keep apart by key prefixes (`unique_prefix`), never
by emptying it. Who stops, fills or restarts a server makes one: `with ValkeyServer() as server`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from hicache.devservers import (
    DevService,
    MooncakeClientDaemon,
    MooncakeMaster,
    RedisCluster,
    RedisSentinel,
    RedisServer,
    SeaweedServer,
    ValkeyServer,
)

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """A shared Valkey without password."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def old_redis() -> Iterator[RedisServer]:
    """A shared Redis 6.2."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """Three shared nodes, each with a third of the slots."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def redis_sentinel() -> Iterator[RedisSentinel]:
    """A shared primary with a replica and a sentinel. Failovers are for private ones."""
    with RedisSentinel() as sentinel:
        yield sentinel


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """A shared S3 server with its bucket. Takes 5 to 15 s to start, and a bucket of its own some seconds more."""
    with SeaweedServer() as server:
        yield server


@pytest.fixture(scope="session")
def mooncake_master() -> Iterator[MooncakeMaster]:
    """A shared master with short leases. Memory comes from its clients."""
    with MooncakeMaster(lease_ms=500) as master:
        yield master


@pytest.fixture(scope="session")
def mooncake_daemon(mooncake_master: MooncakeMaster) -> Iterator[MooncakeClientDaemon]:
    """Shared memory of `mooncake_master` in a process of its own."""
    with MooncakeClientDaemon(mooncake_master) as daemon:
        yield daemon


@pytest.fixture
def unique_prefix() -> str:
    """A key prefix that no other test of this session uses."""
    return f"test{next(_NUMBERS)}/"


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> Callable[[DevService], None]:
    """Put the credentials of a server into this test's environment."""

    def put(service: DevService) -> None:
        for name, value in service.environ().items():
            monkeypatch.setenv(name, value)

    return put
