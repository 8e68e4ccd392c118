"""What waits change in the evictions of a cache: nothing without hints, nothing if they are noise, much if exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from hicache.keys import RadixKey
from tests.cache.hinting import action, send, tokens
from tests.cache.world import StepClock, World, prompt
from tests.seeds import rng, seeds

SESSIONS, REQUESTS = 14, 120


class Agents:
    """Sessions that return after a time of their own, and a cache that is too small for all of them."""

    def __init__(self, seed: int) -> None:
        numbers = rng(seed)
        self.world = World(device_pages=8, host_pages=16, clock=StepClock())
        now_s = self.world.controller.clock()
        self.due = {number: now_s + numbers.uniform(0, 20) for number in range(SESSIONS)}
        self.pause_s = {number: numbers.choice([4.0, 15.0, 60.0, 150.0]) for number in range(SESSIONS)}
        self.random = numbers

    def contents(self) -> list[tuple[bytes, bool, bool]]:
        """Return the nodes of the tree, with their tiers."""
        nodes = self.world.cache.tree.nodes()
        return sorted((node.key, node.device is not None, node.host is not None) for node in nodes)

    def requests(self, announced: Callable[[float, random.Random], float] | None) -> Iterator[int]:
        """Serve requests as they are due. Yield the cached tokens of each. `announced` returns what a session says
        when it waits for a real time; None: it says nothing."""
        clock, cache, noise = self.world.controller.clock, self.world.cache, rng(0)
        assert isinstance(clock, StepClock)
        for number in range(REQUESTS):
            session = min(self.due, key=self.due.__getitem__)
            clock.advance(max(0.0, self.due[session] - clock()))
            self.world.step()
            real_s = self.pause_s[session] * self.random.uniform(0.8, 1.2)
            if announced is not None:
                name = f"{session}"
                wait = action("session.wait", session_id=name, expected_s=announced(real_s, noise), source="x")
                cache.hint({"actions": [wait]}, f"{number}")
            key = prompt(10 * session + 1, 10 * session + 2)
            yield self.world.serve(f"{number}", key).cached_tokens
            self.world.settle()
            self.due[session] = self.due[session] + real_s

    def learn_noise(self) -> None:
        """Let the record of the source be that of noise."""
        record, noise = self.world.cache._hints._record("x"), rng(1)
        for _ in range(400):
            record.add(noise.choice([4, 15, 60, 150]), 1000 / noise.choice([4, 15, 60, 150]))


def noise(real_s: float, numbers: random.Random) -> float:
    return 500 / real_s * numbers.uniform(0.5, 2)  # also worse than chance, so that no chance makes it look right


@pytest.mark.parametrize("seed", seeds(2))
def test_noise_evicts_as_lru_once_it_is_known_as_noise(seed: int) -> None:
    hinted, plain = Agents(seed), Agents(seed)
    hinted.learn_noise()
    steps = zip(hinted.requests(noise), plain.requests(None), strict=True)
    for number, (found, expected) in enumerate(steps):
        assert found == expected, number
        assert hinted.contents() == plain.contents(), number
    assert hinted.world.cache._hints._record("x").expected(10)[1] == 0
    assert hinted.world.cache.tree._hinted is not None and plain.world.cache.tree._hinted is None


def test_noise_of_a_new_source_ends_as_lru_and_exact_times_hit_more() -> None:
    def hits(announced: Callable[[float, random.Random], float] | None) -> int:
        return sum(sum(Agents(seed).requests(announced)) for seed in range(2))

    lru = hits(None)
    assert hits(lambda real_s, numbers: real_s) > 1.05 * lru
    assert hits(noise) > 0.95 * lru


def test_hints_that_do_not_change_the_order_make_none() -> None:
    world = World()
    for number in range(20):
        key: RadixKey = prompt(number)
        cache = world.cache
        assert not cache._hints.is_busy
        if number >= 10:
            cache.hint({"actions": [action("session.turn", session_id="s"), action("kv.pin")]}, f"{number}")
            send(cache, "kv.demote", tokens=tokens(prompt(number - 1)))
        else:
            assert not cache._hints.is_used
        world.serve(f"{number}", key)
        world.settle()
    assert world.cache.tree._hinted is None
    assert world.cache.tree.queues.device._rank is world.cache._policy.rank
