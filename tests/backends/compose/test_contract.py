"""Compositions against the contract of every backend, over memory and file parts, and inside each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.backends.compose import (
    LevelsBackend,
    MirrorBackend,
    Part,
    ShardCodec,
    ShardedBackend,
)
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import BackendContract, OpenStore, SoleBackendContract, Store
from hicache.config.composed_storage import CopyOptions
from hicache.frame import FrameCodec

from .._files import open_file
from ._parts import side_door

pytestmark = pytest.mark.long

# For a few pages of the largest size that the contract stores.
ROOM = 8 << 20
# Opening a file store takes some time, and walks open it again and again.
FILE_WALKS = 15


def memory(codec: FrameCodec) -> Store:
    backend = MemoryBackend(codec)
    return Store(backend, backend.peek, backend.poke)


def parts(stores: list[Store]) -> list[Part]:
    return [Part(f"part-{number}", store.backend) for number, store in enumerate(stores)]


def levels(codec: FrameCodec, stores: list[Store], options: CopyOptions) -> Store:
    return side_door(LevelsBackend(codec, parts(stores), options), stores)


def mirror(codec: FrameCodec, stores: list[Store], write_quorum: int = 1) -> Store:
    return side_door(
        MirrorBackend(codec, parts(stores), write_quorum=write_quorum, copy_bytes_max=ROOM), stores
    )


def sharded(codec: FrameCodec, open_part: Callable[[FrameCodec, int], Store], count: int) -> Store:
    shard_codec = ShardCodec(codec)
    stores = [open_part(shard_codec, number) for number in range(count)]
    return side_door(ShardedBackend(shard_codec, parts(stores)), stores)


class TestMemoryLevels(SoleBackendContract):
    @pytest.fixture(params=["through", "on_eviction", "selective"])
    def open_store(self, request: pytest.FixtureRequest) -> OpenStore:
        options = CopyOptions(write=request.param, cascade_bytes_max=ROOM, selective_hits=1)
        return lambda codec: levels(codec, [memory(codec), memory(codec)], options)


class TestFileOverMemory(SoleBackendContract):
    machine_examples = FILE_WALKS

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        options = CopyOptions(cascade_bytes_max=ROOM)
        return lambda codec: levels(codec, [open_file(tmp_path / "s", codec), memory(codec)], options)


class TestThreeLevels(SoleBackendContract):
    machine_examples = FILE_WALKS

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        options = CopyOptions(cascade_bytes_max=ROOM)
        return lambda codec: levels(codec, [memory(codec), open_file(tmp_path / "s", codec), memory(codec)], options)


class TestMemoryMirror(SoleBackendContract):
    @pytest.fixture(params=[1, 2])
    def open_store(self, request: pytest.FixtureRequest) -> OpenStore:
        return lambda codec: mirror(codec, [memory(codec), memory(codec)], request.param)


class TestFileMirror(BackendContract):
    machine_examples = FILE_WALKS

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: mirror(codec, [open_file(tmp_path / str(part), codec) for part in range(2)])


class TestFileBesideMemory(SoleBackendContract):
    machine_examples = FILE_WALKS

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: mirror(codec, [open_file(tmp_path / "s", codec), memory(codec)])


class TestMemoryShards(SoleBackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: sharded(codec, lambda codec, _: memory(codec), 3)


class TestFileShards(BackendContract):
    machine_examples = FILE_WALKS

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: sharded(codec, lambda codec, number: open_file(tmp_path / str(number), codec), 2)


class TestShardsOfMirrorsUnderMemory(SoleBackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        def open_it(codec: FrameCodec) -> Store:
            low = sharded(codec, lambda codec, _: mirror(codec, [memory(codec), memory(codec)]), 2)
            return levels(codec, [memory(codec), low], CopyOptions(cascade_bytes_max=ROOM))

        return open_it


class TestMirrorOfShards(SoleBackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: mirror(codec, [sharded(codec, lambda codec, _: memory(codec), 2) for _ in range(2)])
