"""A master that the tests of a module share, a side door to its store, and a backend that stays open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.backends.store import Store
from hicache_lab.devservers import MooncakeMaster

from .store import LEASE_MS, SideDoor, open_backend


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster(lease_ms=LEASE_MS) as server:
        yield server


@pytest.fixture(scope="module")
def door(master: MooncakeMaster) -> Iterator[SideDoor]:
    door = SideDoor(master)
    yield door
    door.close()


@pytest.fixture(scope="module")
def here(master: MooncakeMaster) -> Iterator[Store]:
    """Keeps this process's client open between tests, because leaving a store takes a second."""
    backend = open_backend(master)
    yield backend
    backend.close()
