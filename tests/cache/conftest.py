"""What holds at the end of every test of a cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cache.world import Ending


@pytest.fixture(autouse=True)
def worlds_end() -> Iterator[None]:
    """Each world that a test has not closed itself ends as an engine does, which checks its books and its bytes."""
    Ending.alive.clear()
    yield
    while Ending.alive:
        Ending.alive[0].close()
