"""The Redis backend against the contract, on each kind of server and connection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.backends.testing import BackendContract, OpenStore
from hicache.devservers import ValkeyServer

from .store import fresh_prefix, open_on


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


class TestValkey(BackendContract):
    @pytest.fixture
    def open_store(self, valkey: ValkeyServer) -> Iterator[OpenStore]:
        _, options = valkey.storage(key_prefix=fresh_prefix())
        with valkey.client() as client:
            yield lambda codec: open_on(client, options, codec)
