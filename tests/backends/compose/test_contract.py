"""Compositions against the contract of every backend, over memory and file parts, and inside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.compose import CascadePolicy, LevelsBackend, LevelsOptions, MirrorBackend, Part, ShardedBackend
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import BackendContract, OpenStore, Store
from hicache.frame import FrameCodec

from .._files import open_file
from ._parts import COPIES, side_door


def memory(codec: FrameCodec) -> Store:
    backend = MemoryBackend(codec)
    return Store(backend, backend.peek, backend.poke)


def parts(stores: list[Store]) -> list[Part]:
    return [Part(f"part-{number}", store.backend) for number, store in enumerate(stores)]


def levels(codec: FrameCodec, stores: list[Store], options: LevelsOptions) -> Store:
    return side_door(LevelsBackend(codec, parts(stores), options), stores)


def mirror(codec: FrameCodec, stores: list[Store], write_quorum: int = 1) -> Store:
    return side_door(
        MirrorBackend(codec, parts(stores), write_quorum=write_quorum, copy_bytes_max=COPIES), stores
    )


def sharded(codec: FrameCodec, stores: list[Store]) -> Store:
    return side_door(ShardedBackend(codec, parts(stores)), stores)


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


class TestMemoryMirror(BackendContract):
    @pytest.fixture(params=[1, 2])
    def open_store(self, request: pytest.FixtureRequest) -> OpenStore:
        return lambda codec: mirror(codec, [memory(codec), memory(codec)], request.param)


class TestFileMirror(BackendContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: mirror(codec, [open_file(tmp_path / "s", codec), memory(codec)])


class TestMemoryShards(BackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: sharded(codec, [memory(codec) for _ in range(3)])


class TestFileShards(BackendContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: sharded(codec, [open_file(tmp_path / str(part), codec) for part in range(2)])


class TestShardsOfMirrorsUnderMemory(BackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        def open_it(codec: FrameCodec) -> Store:
            low = sharded(codec, [mirror(codec, [memory(codec), memory(codec)]) for _ in range(2)])
            return levels(codec, [memory(codec), low], LevelsOptions(cascade_bytes_max=COPIES))

        return open_it
