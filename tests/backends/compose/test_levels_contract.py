"""Levels against the contract of every backend, over memory and file levels and with each way of cascading."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.compose import CascadePolicy, LevelsBackend, LevelsOptions, Part
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import BackendContract, OpenStore, Store
from hicache.frame import FrameCodec

from .._files import open_file
from ._parts import COPIES, side_door


def memory(codec: FrameCodec) -> Store:
    backend = MemoryBackend(codec)
    return Store(backend, backend.peek, backend.poke)


def levels(codec: FrameCodec, stores: list[Store], options: LevelsOptions) -> Store:
    parts = [Part(f"level-{number}", store.backend) for number, store in enumerate(stores)]
    return side_door(LevelsBackend(codec, parts, options), stores)


class TestMemoryLevels(BackendContract):
    @pytest.fixture(params=list(CascadePolicy))
    def open_store(self, request: pytest.FixtureRequest) -> OpenStore:
        options = LevelsOptions(cascade=request.param, cascade_bytes_max=COPIES, selective_hits=1)
        return lambda codec: levels(codec, [memory(codec), memory(codec)], options)


class TestFileOverMemory(BackendContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        options = LevelsOptions(cascade_bytes_max=COPIES)
        return lambda codec: levels(codec, [open_file(tmp_path / "s", codec), memory(codec)], options)


class TestThreeLevels(BackendContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        options = LevelsOptions(cascade_bytes_max=COPIES)
        return lambda codec: levels(codec, [memory(codec), open_file(tmp_path / "s", codec), memory(codec)], options)
