"""Levels against the contract of every backend, over memory and file levels and with each way of cascading."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.compose import CascadePolicy, LevelsBackend, LevelsOptions, Part
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import OpenStore, SoleBackendContract, Store
from hicache.frame import FrameCodec

from .._files import open_file
from ._parts import side_door

# For a few pages of the largest size that the contract stores.
ROOM = 8 << 20


def memory(codec: FrameCodec) -> Store:
    backend = MemoryBackend(codec)
    return Store(backend, backend.peek, backend.poke)


def levels(codec: FrameCodec, stores: list[Store], options: LevelsOptions) -> Store:
    parts = [Part(f"level-{number}", store.backend) for number, store in enumerate(stores)]
    return side_door(LevelsBackend(codec, parts, options), stores)


class TestMemoryLevels(SoleBackendContract):
    @pytest.fixture(params=list(CascadePolicy))
    def open_store(self, request: pytest.FixtureRequest) -> OpenStore:
        options = LevelsOptions(cascade=request.param, cascade_bytes_max=ROOM, selective_hits=1)
        return lambda codec: levels(codec, [memory(codec), memory(codec)], options)


class TestFileOverMemory(SoleBackendContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        options = LevelsOptions(cascade_bytes_max=ROOM)
        return lambda codec: levels(codec, [open_file(tmp_path / "s", codec), memory(codec)], options)


class TestThreeLevels(SoleBackendContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        options = LevelsOptions(cascade_bytes_max=ROOM)
        return lambda codec: levels(codec, [memory(codec), open_file(tmp_path / "s", codec), memory(codec)], options)
