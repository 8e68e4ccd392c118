"""A cluster that these tests may hurt, and shared servers without what other tests have left on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.devservers import RedisCluster
from hicache.devservers.redis import RedisLike


@pytest.fixture(scope="package")
def own_cluster() -> Iterator[RedisCluster]:
    """Three nodes for tests that push slots around, fill nodes or stop them, and leave all of it serving again."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def uncrowded(request: pytest.FixtureRequest) -> None:
    """Empty the shared server of a test before it: usage of a crowded one is an estimate."""
    for name in {"valkey", "old_redis"} & set(request.fixturenames):
        server: RedisLike = request.getfixturevalue(name)
        with server.client() as client:
            client.flushall()
