"""The tournament of shadow caches, and each shadow beside another implementation."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest

from hicache.tournament import ArcShadow, LruShadow, S3FifoShadow, Shadow, Tournament
from tests.seeds import rng, seeds

KINDS: dict[str, type[LruShadow | S3FifoShadow | ArcShadow]] = {
    "lru": LruShadow, "s3-fifo": S3FifoShadow, "arc": ArcShadow,
}

# Hits of libcachesim 0.3.5 (LRU, S3FIFO with a ghost of the cache's size and a threshold of 1, ARC) for `accesses`, by
# seed and capacity.
PEER_HITS: dict[tuple[int, int], tuple[int, int, int]] = {
    (0, 50): (10787, 12302, 12257),
    (0, 333): (12265, 12932, 12877),
    (1, 50): (10758, 12336, 12267),
    (1, 333): (12211, 12922, 12833),
    (2, 50): (10698, 12292, 12227),
    (2, 333): (12225, 12983, 12919),
    (3, 50): (10871, 12397, 12335),
    (3, 333): (12266, 12999, 12932),
}


def accesses(seed: int, capacity: int) -> list[int]:
    """Popular keys, keys that are used once, and a loop over more keys than fit."""
    numbers = random.Random(seed)
    keys = []
    for number in range(20_000):
        kind = numbers.random()
        if kind < 0.6:
            keys.append(int(numbers.paretovariate(1.0)) % (8 * capacity))
        else:
            keys.append(10**6 + number if kind < 0.8 else 2 * 10**6 + number % (2 * capacity))
    return keys


@pytest.mark.parametrize(("seed", "capacity"), PEER_HITS)
def test_shadows_have_the_hits_of_another_implementation(seed: int, capacity: int) -> None:
    keys = accesses(seed, capacity)
    shadows = [kind(capacity) for kind in KINDS.values()]
    lru, s3_fifo, arc = (sum(shadow.use([key]) for key in keys) for shadow in shadows)
    peer_lru, peer_s3_fifo, peer_arc = PEER_HITS[seed, capacity]
    assert (lru, arc) == (peer_lru, peer_arc)
    # It evicts before it inserts, and remembers keys that leave the main queue.
    assert s3_fifo == pytest.approx(peer_s3_fifo, rel=0.005)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(4))
def test_a_shadow_holds_at_most_its_capacity_and_remembers_as_much_again(kind: str, seed: int) -> None:
    numbers = rng(seed)
    capacity = numbers.choice([1, 2, 7, 40])
    shadow: Shadow = KINDS[kind](capacity)
    for prompt in prompts(numbers, capacity):
        held = [key in shadow for key in prompt]
        assert shadow.use(prompt) == (held.index(False) if False in held else len(held))
        assert len(shadow) <= 2 * capacity
        assert sum(key in shadow for key in range(4 * capacity)) <= capacity


def prompts(numbers: random.Random, capacity: int) -> Iterator[list[int]]:
    """Yield paths of random lengths, also longer than the cache."""
    for _ in range(500):
        start = numbers.randrange(4 * capacity)
        yield list(range(start, min(4 * capacity, start + numbers.randint(0, 2 * capacity))))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tail_of_a_prompt_is_evicted_before_its_head(kind: str) -> None:
    shadow: Shadow = KINDS[kind](4)
    shadow.use(["a", "b", "c", "d"])
    shadow.use(["x"])
    assert "a" in shadow
    assert "d" not in shadow


def scan(tournament: Tournament, requests: int) -> None:
    """A popular set whose uses are further apart than the cache is large, between prompts that are used once."""
    for number in range(requests):
        once = [f"once {number} {part}" for part in range(2)]
        tournament.use([f"popular {number // 2 % 20}"] if number % 2 else once)


def test_a_scan_makes_another_shadow_the_best_and_recency_brings_lru_back() -> None:
    tournament = Tournament(40)
    found = [type(tournament.best)]
    scan(tournament, 1000)
    found.append(type(tournament.best))
    assert sum(tournament.keeps(f"popular {number}") for number in range(20)) > 10
    for number in range(4000):  # each key returns twice within the cache, and never again
        tournament.use([f"recent {number // 3 - number % 3 * 10}"])
    found.append(type(tournament.best))
    assert found == [LruShadow, S3FifoShadow, LruShadow]
    tournament.check()


def test_luck_does_not_change_the_best() -> None:
    """With uniform random uses all shadows have equally many hits in the long run."""
    changes = 0
    for seed in range(20):
        numbers, tournament = rng(seed), Tournament(30)
        for _ in range(3000):
            before = tournament.best
            tournament.use([numbers.randrange(100)])
            changes += tournament.best is not before
    assert changes <= 3


def test_the_memory_of_a_tournament_is_bounded() -> None:
    capacity = 2000
    numbers = rng(0)
    tracemalloc.start()
    try:
        tournament = Tournament(capacity)
        for _ in range(1500):
            tournament.use([numbers.getrandbits(64) for _ in range(20)])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tournament.check()
    assert taken < 1000 * capacity
