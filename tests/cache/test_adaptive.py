"""Each cache tells its adaptive eviction of each request once, when it begins, with the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache.cache.tiered import TieredCache
from hicache.radix import AdaptiveEviction
from tests.cache.host_world import HostWorld
from tests.cache.test_engine_cache import engine_of, tokens_of, whole
from tests.cache.world import World, every_hit, prompt


def recorded(cache: TieredCache) -> list[int]:
    """Return the lengths of the prompts that the tournament will be told of, in key bytes."""
    lengths: list[int] = []

    class Recorded(AdaptiveEviction):
        def begin(self, key: object) -> None:
            lengths.append(len(key.tokens))  # type: ignore[attr-defined]

    cache.tree.adaptive = Recorded(cache.tree.page_bytes, 1, 1)
    return lengths


def test_a_request_of_a_tree_cache_counts_once_even_if_it_is_shared_in_parts() -> None:
    world = World()
    lengths, key = recorded(world.cache), prompt(1, 2, 3)
    request = world.begin("a", key)
    world.cache.cache_unfinished_req(request, key.head(4))
    world.cache.cache_unfinished_req(request, key.head(8))
    world.cache.cache_finished_req(request, key)
    world.serve("b", key)
    world.close()
    assert lengths == [len(key.tokens)] * 2


def test_a_request_of_an_engine_with_its_own_slots_counts_once() -> None:
    with engine_of() as engine:
        lengths = recorded(engine.cache)
        for _ in range(2):
            whole(engine, tokens_of(1, 5))
    assert lengths == [4 * (len(tokens_of(1, 5)) - 1)] * 2  # the last token is computed anyway


def test_a_request_of_an_engine_with_its_own_device_cache_counts_once_however_often_it_is_looked_up() -> None:
    world = HostWorld()
    lengths, key = recorded(world.cache), prompt(1, 2, 3, tail=0)
    for rid in ("a", "b"):
        for _ in range(3):
            world.cache.lookup(rid, key)
        world.cache.abort(rid)
    world.close()
    assert lengths == [len(key.tokens)] * 2


@pytest.mark.parametrize(("policy", "write_policy", "expected"), [
    ("adaptive", "write_through", [True, True]),
    ("adaptive", "write_back", [True, True]),
    ("adaptive", "write_through_selective", [True, False]),
    ("lru", "write_through", [False, False]),
])
def test_the_policies_decide_which_tiers_ask_the_tournament(
    policy: str, write_policy: str, expected: Sequence[bool]
) -> None:
    world = World(config=every_hit(eviction_policy=policy, write_policy=write_policy))
    for _ in range(2):
        queues = world.cache.tree.queues
        assert [queues.device.keeps is not None, queues.host.keeps is not None] == expected
        before = world.cache.tree
        world.cache.clear()
        assert [before.queues.device.keeps, before.queues.host.keeps] == [None, None]
    world.close()
