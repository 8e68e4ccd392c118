"""Compositions pass the contract of all backends: with memory parts, with file parts, and nested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hicache.backends.compose import LevelsBackend, Part
from hicache.backends.compose.sharded import ShardCodec, ShardedBackend
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import BackendContract, OpenStore, SoleBackendContract, Store
from hicache.frame import FrameCodec

from .._files import open_file
from ._parts import side_door

pytestmark = pytest.mark.long

# Room for a few pages of the largest size in the contract.
ROOM = 8 << 20
# Opening a file store takes some time, and walks open it again and again.
FILE_WALKS = 15


def memory(codec: FrameCodec) -> Store:
    backend = MemoryBackend(codec)
    return Store(backend, backend.peek, backend.poke)


def parts(stores: Sequence[Store]) -> list[Part]:
    return [Part(f"part-{number}", store.backend) for number, store in enumerate(stores)]


def levels(codec: FrameCodec, *stores: Store) -> Store:
    return side_door(LevelsBackend(codec, parts(stores), cascade_bytes_max=ROOM), stores)


def sharded(codec: FrameCodec, open_part: Callable[[FrameCodec, int], Store], count: int) -> Store:
    shard_codec = ShardCodec(codec)
    stores = [open_part(shard_codec, number) for number in range(count)]
    return side_door(ShardedBackend(shard_codec, parts(stores)), stores)


class TestMemoryLevels(SoleBackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: levels(codec, memory(codec), memory(codec))


class TestFileOverMemory(SoleBackendContract):
    machine_examples = FILE_WALKS

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: levels(codec, open_file(tmp_path / "s", codec), memory(codec))


class TestThreeLevels(SoleBackendContract):
    machine_examples = FILE_WALKS

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: levels(codec, memory(codec), open_file(tmp_path / "s", codec), memory(codec))


class TestMemoryShards(SoleBackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: sharded(codec, lambda codec, _: memory(codec), 3)


class TestFileShards(BackendContract):
    machine_examples = FILE_WALKS

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: sharded(codec, lambda codec, number: open_file(tmp_path / str(number), codec), 2)


class TestShardsUnderMemory(SoleBackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: levels(codec, memory(codec), sharded(codec, lambda codec, _: memory(codec), 2))


class TestShardsOfShards(SoleBackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        def inner(codec: FrameCodec, _: int) -> Store:
            return sharded(codec, lambda codec, _: memory(codec), 2)

        return lambda codec: sharded(codec, inner, 2)
