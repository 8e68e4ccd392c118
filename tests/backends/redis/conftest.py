"""A cluster that these tests may hurt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.devservers import RedisCluster


@pytest.fixture(scope="package")
def own_cluster() -> Iterator[RedisCluster]:
    """Three nodes for tests that push slots around, fill nodes or stop them, and leave all of it serving again."""
    with RedisCluster() as cluster:
        yield cluster
