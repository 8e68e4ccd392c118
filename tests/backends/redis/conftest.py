"""A cluster that these tests may disturb, and shared servers without the pages of other tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_lab.devservers import RedisCluster
from hicache_lab.devservers.redis import RedisLike


@pytest.fixture(scope="package")
def own_cluster() -> Iterator[RedisCluster]:
    """Three nodes for tests that move slots, fill nodes or stop them, and leave the whole cluster working again."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def uncrowded(request: pytest.FixtureRequest) -> None:
    """Empty the shared server before a test: the usage of a server with many keys is an estimate."""
    for name in {"valkey", "old_redis"} & set(request.fixturenames):
        server: RedisLike = request.getfixturevalue(name)
        with server.client() as client:
            client.flushall()
