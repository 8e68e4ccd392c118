"""A guarded store keeps the contracts, with a faulty driver that injects nothing, and with a low in-flight limit."""

from __future__ import annotations

import pytest

from hicache.backends.memory import MemoryDriver
from hicache.backends.store import Store
from hicache.config.guard import GuardConfig
from hicache.frame import FrameCodec
from hicache_lab.conformance import OpenStore, SoleDriverContract, StoreContract, Subject, memory_subject
from hicache_lab.faults import FaultyDriver

pytestmark = pytest.mark.long


def guarded(codec: FrameCodec) -> Subject:
    """Return a store whose batches all exceed the in-flight limit, so that they run one by one."""
    driver = MemoryDriver()
    return memory_subject(Store(FaultyDriver(driver), codec, GuardConfig(in_flight=1)), driver)


class TestGuardedMemory(SoleDriverContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return guarded


class TestGuardedStore(StoreContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return guarded
