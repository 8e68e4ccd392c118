"""A guard keeps the contract of what it guards, and so does one with faults between them."""

from __future__ import annotations

import pytest

from hicache.backends.faults import FaultyBackend
from hicache.backends.guard import GuardedBackend, GuardOptions
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import BackendContract, OpenStore, Store
from hicache.frame import FrameCodec


def guarded(codec: FrameCodec, options: GuardOptions | None = None) -> Store:
    memory = MemoryBackend(codec)
    return Store(GuardedBackend(FaultyBackend(memory), options), memory.peek, memory.poke)


class TestGuardedBackend(BackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return guarded


class TestGuardWithHardlyAnyRoom(BackendContract):
    """Each batch is larger than what may be in flight, so they go one by one."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: guarded(codec, GuardOptions(in_flight_bytes_max=1))
