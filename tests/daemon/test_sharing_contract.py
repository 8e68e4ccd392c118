"""The shared store passes the contract of every backend, with a store behind it, with and without a pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.memory import MemoryDriver
from hicache.backends.testing import MISS, DriverContract, OpenStore, SoleDriverContract, Subject, bare, memory_subject
from hicache.daemon.pool import PagePool
from hicache.daemon.sharing import SharedStore
from hicache.frame import FrameCodec
from tests.backends._files import OPENED, open_file

pytestmark = pytest.mark.long

# LARGE has room for the 300 pages of the contract's long batches, SMALL has not.
LARGE, SMALL = 8 << 20, 1 << 20


def shared(codec: FrameCodec, pool: PagePool, inner: Subject) -> Subject:
    """Return a shared store. Its `write` damages the store behind it, and first removes the page from the pool so that
    a read gets the damaged one."""
    backend = SharedStore(codec, pool, inner.backend)
    space = pool.open(codec.namespace, codec.payload_bytes)
    OPENED.append(backend)

    def write(key: bytes, data: bytes) -> None:
        with pool.deleting(space, [key]):
            inner.write(key, data)
        pool.check()

    return Subject(backend, inner.read, write)


def memory(codec: FrameCodec) -> Subject:
    driver = MemoryDriver()
    return memory_subject(bare(driver, codec), driver)


class TestOverMemory(SoleDriverContract):
    late = frozenset({*SoleDriverContract.late, MISS, SetOutcome.REJECTED})  # with a pool, those of the pool

    @pytest.fixture(params=[SMALL, 0], ids=["pool", "no-pool"])
    def open_store(self, request: pytest.FixtureRequest) -> OpenStore:
        pool = PagePool(request.param, unit_bytes=4096)
        return lambda codec: shared(codec, pool, memory(codec))


class TestOverFile(DriverContract):
    machine_examples = 15

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        pool = PagePool(LARGE, unit_bytes=4096)
        return lambda codec: shared(codec, pool, open_file(tmp_path / "store", codec))
