"""Random requests on real threads over three tiers that are much too small. All served pages are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache.tiers import EngineBlocks, HostWindow
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import Indices
from tests.cache.random_engine import RandomEngine, small_world
from tests.cache.world import codec, memory_backend
from tests.seeds import rng, seeds

pytestmark = [pytest.mark.usefixtures("threads_switch_often"), pytest.mark.long]

# 5 seeds compare 25,000 pages; `make soak` compares 500,000.
PAGES_PER_SEED = 5_000
SCALE = 6  # prompts of up to 60 pages


def large_engine(seed: int, **changes: Any) -> RandomEngine:
    backend = memory_backend(100 * SCALE * codec().frame_bytes)
    return RandomEngine(rng(seed), small_world(backend, scale=SCALE, **changes), SCALE)


@pytest.mark.parametrize("seed", seeds(5))
def test_thousands_of_served_pages_have_the_right_bytes_while_threads_switch_often(seed: int) -> None:
    engine = large_engine(seed)
    while engine.world.compared_pages < PAGES_PER_SEED:
        engine.act()
    engine.settle()
    loaded = engine.world.cache.statistics().controller.loaded_pages
    engine.world.close()
    assert engine.world.wrong_pages == 0
    assert loaded > 0


class _FlipsOneBit(CpuCopyEngine):
    """A copy engine that changes one bit in one of its loads."""

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        super().__init__(blocks, window)
        self.flipped = False

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        super()._load_layer(layer, host_blocks, blocks)
        if not self.flipped:
            self._regions[layer][-1][blocks[-1], 7] ^= np.uint8(0x10)
            self.flipped = True


def test_the_comparison_finds_one_bit_that_one_of_many_copies_has_changed() -> None:
    """The control: the same engine with one wrong copy."""
    engine = large_engine(0, copies=_FlipsOneBit)
    while engine.world.compared_pages < PAGES_PER_SEED:
        engine.act()
    assert engine.world.wrong_pages > 0
    engine.settle()
    engine.world.wrong_pages = 0
    engine.world.close()
