"""Levels and shards of memory pass the whole contract; with files, and nested, its sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    OpenStore,
    SampleContract,
    SoleDriverContract,
    StoreContract,
    Subject,
)

from .._files import open_file
from ._parts import levels, memory, sharded

pytestmark = pytest.mark.long

class TestMemoryLevels(SoleDriverContract):
    test_wrong_arguments_are_rejected = StoreContract.test_wrong_arguments_are_rejected

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: levels(codec, memory(codec), memory(codec))


class TestMemoryShards(SoleDriverContract):
    test_wrong_arguments_are_rejected = StoreContract.test_wrong_arguments_are_rejected

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda codec: sharded(codec, lambda codec, _: memory(codec), 3)


class TestFileShards(SampleContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: sharded(codec, lambda codec, number: open_file(tmp_path / str(number), codec), 2)


@pytest.mark.parametrize("form", ["three levels", "shards under memory", "shards of shards"])
class TestOtherForms(SampleContract):
    reopens = False

    @pytest.fixture
    def open_store(self, form: str, tmp_path: Path) -> OpenStore:
        def inner(codec: FrameCodec, _: int) -> Subject:
            return sharded(codec, lambda codec, _: memory(codec), 2)

        forms: dict[str, OpenStore] = {
            "three levels": lambda codec: levels(codec, memory(codec), open_file(tmp_path / "s", codec), memory(codec)),
            "shards under memory": lambda codec: levels(codec, memory(codec), inner(codec, 0)),
            "shards of shards": lambda codec: sharded(codec, inner, 2),
        }
        return forms[form]
