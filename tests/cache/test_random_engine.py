"""Random requests on real threads over three tiers that are far too small; every page served is compared bytewise."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from hicache.frame import HEADER_BYTES
from tests.cache.random_engine import RandomEngine, small_world
from tests.cache.world import World, codec, memory_backend, prompt
from tests.seeds import rng, seeds


@pytest.fixture(autouse=True)
def _switch_threads_often() -> Iterator[None]:
    """Have the interpreter switch threads every few instructions, which brings races out."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("seed", seeds(30))
def test_random_requests_are_served_right_bytes_and_the_books_balance(seed: int) -> None:
    engine = RandomEngine(rng(seed), small_world(memory_backend(100 * codec().frame_bytes)))
    engine.run()
    hits = engine.world.cache.statistics().hit_tokens
    engine.world.close()
    assert engine.world.wrong_pages == 0
    assert engine.world.compared_pages > 0
    assert hits["device"] > 0 and hits["host"] + hits["storage"] > 0


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
