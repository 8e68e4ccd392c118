"""Checks at the end of every test of a cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cache.world import AutoClosed


@pytest.fixture(autouse=True)
def close_worlds() -> Iterator[None]:
    """Close all worlds that the test has left open, which checks their page counts and their bytes."""
    AutoClosed.alive.clear()
    yield
    while AutoClosed.alive:
        AutoClosed.alive[0].close()
