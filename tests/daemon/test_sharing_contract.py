"""The shared store passes the contract of every backend, with a store behind it, with and without a pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.memory import MemoryDriver
from hicache.daemon.pool import DaemonPool
from hicache.daemon.sharing import SharedStore
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    MISS,
    OpenStore,
    SampleContract,
    SoleDriverContract,
    Subject,
    bare,
    memory_subject,
    run_machine,
)
from tests.backends._files import OPENED, open_file

pytestmark = pytest.mark.long

# LARGE has room for the 300 pages of the contract's long batches, SMALL has not.
LARGE, SMALL = 8 << 20, 1 << 20


def shared(codec: FrameCodec, pool: DaemonPool, inner: Subject) -> Subject:
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

    @pytest.fixture
    def open_store(self) -> OpenStore:
        pool = DaemonPool(SMALL, unit_bytes=4096, is_adaptive=True)
        return lambda codec: shared(codec, pool, memory(codec))

    def test_a_random_walk_matches_the_memory_driver(self, open_store: OpenStore) -> None:
        """Without damage: a page that is stored again enters the pool, and is served from there."""
        run_machine(open_store, examples=self.machine_examples, reopens=self.reopens, damages=False)


class TestWithoutAPool(SampleContract):
    reopens = False

    @pytest.fixture
    def open_store(self) -> OpenStore:
        pool = DaemonPool(0, unit_bytes=4096)
        return lambda codec: shared(codec, pool, memory(codec))


class TestOverFile(SampleContract):
    late = TestOverMemory.late
    test_a_random_walk_matches_the_memory_driver = TestOverMemory.test_a_random_walk_matches_the_memory_driver

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        pool = DaemonPool(LARGE, unit_bytes=4096)
        return lambda codec: shared(codec, pool, open_file(tmp_path / "store", codec))
