"""The fixtures that all contract classes need."""

from __future__ import annotations

import os
import random
from abc import abstractmethod
from collections.abc import Iterator

import pytest

from ...frame import FrameCodec
from .pages import NAMESPACE, PAYLOAD_BYTES, OpenStore, Store


class ContractFixtures:
    """What a contract asks of its subclass, `open_store`, and what it makes of that."""

    @pytest.fixture
    @abstractmethod
    def open_store(self) -> OpenStore:
        """Opens the store of this test as a codec's namespace sees it."""

    @pytest.fixture
    def codec(self) -> FrameCodec:
        return FrameCodec(NAMESPACE, PAYLOAD_BYTES)

    @pytest.fixture
    def store(self, open_store: OpenStore, codec: FrameCodec) -> Iterator[Store]:
        store = open_store(codec)
        yield store
        store.backend.close()

    @pytest.fixture
    def seed(self) -> int:
        """The seed of a random test: TEST_SEED if that is set, else a new one, which is printed."""
        seed = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(2**32)))
        print(f"TEST_SEED={seed} replays this")
        return seed
