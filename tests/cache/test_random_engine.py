"""Random requests on real threads over three tiers that are far too small; every page served is compared bytewise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache.frame import HEADER_BYTES
from hicache.tiers import EngineBlocks, HostWindow
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import Indices
from tests.cache.random_engine import RandomEngine, small_world
from tests.cache.world import World, codec, memory_backend, prompt
from tests.seeds import rng, seeds

pytestmark = [pytest.mark.usefixtures("threads_switch_often"), pytest.mark.long]

# 20 seeds of these make the 100,000 pages that a change has to be served right; SOAK_FACTOR=100 makes ten million.
PAGES_PER_SEED = 5_000
SCALE = 6  # prompts of up to 60 pages


def large_engine(seed: int, **changes: Any) -> RandomEngine:
    backend = memory_backend(100 * SCALE * codec().frame_bytes)
    return RandomEngine(rng(seed), small_world(backend, scale=SCALE, **changes), SCALE)


@pytest.mark.parametrize("seed", seeds(20))
def test_thousands_of_pages_are_served_right_bytes_while_threads_switch_all_the_time(seed: int) -> None:
    engine = large_engine(seed)
    while engine.world.compared_pages < PAGES_PER_SEED:
        engine.act()
    engine.settle()
    loaded = engine.world.cache.statistics().controller.loaded_pages
    engine.world.close()
    assert engine.world.wrong_pages == 0
    assert loaded > 0


class _FlipsOneBit(CpuCopyEngine):
    """Damages one bit of one page in one load, once in its life."""

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        super().__init__(blocks, window)
        self.flipped = False

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        super()._load_layer(layer, host_blocks, blocks)
        if not self.flipped:
            self._regions[layer][-1][blocks[-1], 7] ^= np.uint8(0x10)
            self.flipped = True


def test_the_comparison_finds_one_bit_that_one_copy_of_many_has_changed() -> None:
    """Negative control: the same engine over copies that go wrong once."""
    engine = large_engine(0, copies=_FlipsOneBit)
    while engine.world.compared_pages < PAGES_PER_SEED:
        engine.act()
    assert engine.world.wrong_pages > 0
    engine.settle()
    engine.world.wrong_pages = 0
    engine.world.close()


def test_the_comparison_finds_a_byte_that_changed_on_l2() -> None:
    """Negative control: with one payload byte of a host page changed, the engine counts a wrong page."""
    world = World(backend=None)
    world.serve("a", prompt(1, 2))
    world.settle()
    world.cache.evict(100)
    node = world.cache.match_prefix(prompt(1, 2)).node
    assert node.host is not None
    world.host.frame(int(node.host[0]))[HEADER_BYTES] ^= 1
    world.serve("b", prompt(1, 2))
    assert world.wrong_pages == 1
    world.wrong_pages = 0
    world.close()
