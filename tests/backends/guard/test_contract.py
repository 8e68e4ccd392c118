"""A guard keeps the contract of its backend, also with a fault injector between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.faults import FaultyBackend
from hicache.backends.guard import GuardedBackend
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import BackendContract, OpenStore, SoleBackendContract, Store
from hicache.config.guard import GuardConfig
from hicache.frame import FrameCodec
from tests.backends._files import open_file

pytestmark = pytest.mark.long


def guarded(codec: FrameCodec, options: GuardConfig | None = None) -> Store:
    memory = MemoryBackend(codec)
    return Store(GuardedBackend(FaultyBackend(memory), options), memory.peek, memory.poke)


class TestGuardedBackend(SoleBackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return guarded


class TestGuardWithHardlyAnyRoom(SoleBackendContract):
    """Each batch exceeds the in-flight limit, so batches run one by one."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: guarded(codec, GuardConfig(in_flight=1))


class TestGuardedFiles(BackendContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        def open_it(codec: FrameCodec) -> Store:
            store = open_file(tmp_path / "store", codec)
            return Store(GuardedBackend(store.backend), store.read, store.write)

        return open_it
