"""Levels and shards of memory pass the whole contract; with files, and nested, its sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hicache.backends.compose import Levels, Part, Shards
from hicache.backends.compose.sharded import ShardCodec
from hicache.backends.memory import MemoryDriver
from hicache.backends.testing import (
    OpenStore,
    SampleContract,
    SoleDriverContract,
    StoreContract,
    Subject,
    bare,
    memory_subject,
)
from hicache.frame import FrameCodec

from .._files import open_file
from ._parts import side_door

pytestmark = pytest.mark.long

# Room for a few pages of the largest size in the contract.
ROOM = 8 << 20


def memory(codec: FrameCodec) -> Subject:
    driver = MemoryDriver()
    return memory_subject(bare(driver, codec), driver)


def parts(stores: Sequence[Subject]) -> list[Part]:
    return [Part(f"part-{number}", store.backend) for number, store in enumerate(stores)]


def levels(codec: FrameCodec, *stores: Subject) -> Subject:
    return side_door(Levels(codec, parts(stores), cascade_bytes_max=ROOM), stores)


def sharded(codec: FrameCodec, open_part: Callable[[FrameCodec, int], Subject], count: int) -> Subject:
    shard_codec = ShardCodec(codec)
    stores = [open_part(shard_codec, number) for number in range(count)]
    return side_door(Shards(shard_codec, parts(stores)), stores)


class TestMemoryLevels(SoleDriverContract):
    test_wrong_arguments_are_rejected = StoreContract.test_wrong_arguments_are_rejected

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: levels(codec, memory(codec), memory(codec))


class TestThreeLevels(SampleContract):
    reopens = False

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: levels(codec, memory(codec), open_file(tmp_path / "s", codec), memory(codec))


class TestMemoryShards(SoleDriverContract):
    test_wrong_arguments_are_rejected = StoreContract.test_wrong_arguments_are_rejected

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: sharded(codec, lambda codec, _: memory(codec), 3)


class TestFileShards(SampleContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: sharded(codec, lambda codec, number: open_file(tmp_path / str(number), codec), 2)


class TestShardsUnderMemory(SampleContract):
    reopens = False

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: levels(codec, memory(codec), sharded(codec, lambda codec, _: memory(codec), 2))


class TestShardsOfShards(SampleContract):
    reopens = False

    @pytest.fixture
    def open_store(self) -> OpenStore:
        def inner(codec: FrameCodec, _: int) -> Subject:
            return sharded(codec, lambda codec, _: memory(codec), 2)

        return lambda codec: sharded(codec, inner, 2)
