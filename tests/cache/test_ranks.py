"""Ranks with different hits, speeds and faults decide identically. One thread steps all ranks in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from hicache.backends.storage import Storage
from hicache.cache.break_even import BreakEven, Route
from hicache.controller.ranks import RankGroup
from hicache.errors import TransferError
from hicache.radix import POLICIES
from hicache.types import Indices
from tests.cache.random_engine import NO_POLICIES, STEPS, RandomEngine, small_world
from tests.cache.ranked import LONG_S, SHORT_S, UnevenCopies, UnreliableBackend, decisions
from tests.cache.world import GEOMETRY, WAIT_S, World, filled, memory_backend, prompt
from tests.ranks import Exchange
from tests.seeds import rng, seeds
from tests.waiting import wait_for

# Operations end at all points of a step.
pytestmark = [pytest.mark.usefixtures("threads_switch_often"), pytest.mark.long]


PREFETCH_POLICIES: tuple[Literal["timeout", "best_effort", "wait_complete"], ...] = (
    "timeout",
    "best_effort",
    "wait_complete",
)


def policies(seed: int) -> dict[str, str]:
    """Return the policies of a seed, which are the same on all ranks."""
    return {
        "write_policy": ("write_through", "write_through_selective", "write_back")[seed % 3],
        "eviction_policy": tuple(POLICIES)[seed % len(POLICIES)],
    }


class Engines:
    """One random engine per rank. All draw the same random numbers."""

    def __init__(
        self,
        seed: int,
        backends: Sequence[Storage],
        groups: Sequence[RankGroup | None],
        *,
        timeout_s: float = SHORT_S,
        share_pages: bool = False,
        varied: bool = True,
    ) -> None:
        self.engines = [
            RandomEngine(
                rng(seed),
                small_world(
                    backend,
                    timeout_s=timeout_s,
                    ranks=group,
                    copies=UnevenCopies,
                    stores_pages=not share_pages or rank == 0,
                    policies=policies(seed) if varied else NO_POLICIES,
                    prefetch_policy=PREFETCH_POLICIES[seed // 3 % 3] if varied else "timeout",
                ),
            )
            for rank, (backend, group) in enumerate(zip(backends, groups, strict=True))
        ]

    def run(self) -> None:
        for _ in range(STEPS):
            for engine in self.engines:
                engine.next_action()()
            self.compare()
        while any(engine.waiting or engine.running for engine in self.engines):
            for engine in self.engines:
                engine.wind_down()
            self.compare()
        while not all(engine.world.controller.idle for engine in self.engines):
            for engine in self.engines:
                engine.world.step()
            self.compare()

    def compare(self) -> None:
        digests = [decisions(engine.world, [r for r, _ in engine.running]) for engine in self.engines]
        assert digests == digests[:1] * len(digests)

    def close(self) -> None:
        for engine in self.engines:
            engine.world.close()
            assert engine.world.wrong_pages == 0
            assert engine.world.compared_pages > 0


@pytest.mark.parametrize(("size", "seed"), [(size, seed) for size in (2, 4, 8) for seed in seeds(8 // size)])
def test_ranks_with_different_hits_speeds_and_faults_decide_identically_in_each_step(size: int, seed: int) -> None:
    backends = [UnreliableBackend(100 * seed + rank, misses=0.4 / size) for rank in range(size)]
    # The second engine serves the same prompts, and finds the stored pages of the first.
    for _ in range(2):
        exchange = Exchange(size)
        engines = Engines(seed, backends, exchange.ranks())
        engines.run()
        engines.close()
        assert exchange.disagreements() > 0, "the ranks did not differ, so the test has tested nothing"


def test_without_agreement_the_same_ranks_decide_differently() -> None:
    """The control: if each rank acts on its own ended operations, the digests differ in some runs."""
    differed = 0
    for seed in range(5):
        engines = Engines(seed, [UnreliableBackend(100 * seed + rank) for rank in range(2)], [None, None])
        try:
            engines.run()
        except AssertionError:
            differed += 1
        for engine in engines.engines:
            engine.world.cache.close()
    assert differed > 0


@pytest.mark.parametrize("seed", seeds(2))
def test_of_ranks_with_the_same_bytes_only_the_first_one_stores(seed: int) -> None:
    """As with the latent of MLA: all ranks share one store, and read the pages that rank 0 has written."""
    first = UnreliableBackend(seed, misses=0, failures=0)
    backends = [first, UnreliableBackend(seed + 1000, misses=0, failures=0, shared=first.driver)]
    for _ in range(2):
        engines = Engines(seed, backends, Exchange(2).ranks(), timeout_s=LONG_S, share_pages=True, varied=False)
        engines.run()
        hits = [engine.world.cache.statistics().hit_tokens["storage"] for engine in engines.engines]
        engines.close()
    assert first.set_pages > 0
    assert backends[1].set_pages == 0
    assert hits[0] == hits[1] > 0


STORED, NEW = prompt(*range(1, 9)), prompt(*range(11, 19))


def measured_rank(group: RankGroup | None, page_s: float, read_s: float) -> World:
    """Return a rank that has measured the times of computing and of reading a page, over a store that has STORED."""
    break_even = BreakEven(page_bytes=GEOMETRY.payload_bytes)
    for pages in (16, 32, 64, 128):
        break_even.observe_prefill(pages * GEOMETRY.page_size, pages * page_s)
        break_even.observe_transfer(Route.LOAD, pages, pages * 1e-9)
        break_even.observe_transfer(Route.PREFETCH, pages, pages * read_s)
    return World(backend=filled(memory_backend(), STORED), break_even=break_even, ranks=group)


def stored_pages_behind_another_prompt(worlds: Sequence[World]) -> list[int]:
    """Let a stored prompt wait on all ranks for the computing of another one. Return how many pages each rank reads."""

    def step() -> None:
        for world in worlds:
            world.step()

    wait_for(lambda: all(world.cache.break_even.prefill_tokens_per_s for world in worlds), step)
    for rid, key in (("first", NEW), ("second", STORED)):
        for world in worlds:
            world.cache.prefetch_from_storage(rid, key)
    wait_for(lambda: not any(world.cache._prefetcher.is_active("second") for world in worlds), step)
    for world in worlds:
        world.cache.abort_prefetch("first")
        world.cache.abort_prefetch("second")
    wait_for(lambda: all(world.controller.idle for world in worlds), step)
    return [world.controller.statistics().prefetched_pages for world in worlds]


def test_of_ranks_that_measure_different_speeds_the_slowest_decides_how_much_is_read_during_a_wait() -> None:
    # While another prompt of 8 pages computes for 0.4 s, 4 of 8 pages arrive that take 0.15 s instead of 0.05 s.
    groups = Exchange(2).ranks()
    worlds = [measured_rank(groups[0], 0.01, 0.15), measured_rank(groups[1], 0.05, 0.01)]
    assert stored_pages_behind_another_prompt(worlds) == [4, 4]
    rates = [world.cache.statistics().break_even.rates for world in worlds]
    assert rates[0] == rates[1]
    for world in worlds:
        world.close()


def test_alone_these_ranks_decide_differently() -> None:
    """The control."""
    assert stored_pages_behind_another_prompt([measured_rank(None, 0.01, 0.15)]) == [0]
    assert stored_pages_behind_another_prompt([measured_rank(None, 0.05, 0.01)]) == [8]


class FailingCopies(UnevenCopies):
    """A copy engine whose copies to L2 fail."""

    def _backup_layer(self, layer: int, blocks: Indices, host_blocks: Indices) -> None:
        raise OSError("device lost")


def test_after_a_failed_copy_on_one_rank_all_ranks_reject_requests_in_the_same_step() -> None:
    groups = Exchange(2).ranks()
    worlds = [
        World(backend=memory_backend(), ranks=group, copies=copies)
        for group, copies in zip(groups, (UnevenCopies, FailingCopies), strict=True)
    ]
    for world in worlds:
        request = world.begin("a", prompt(1, 2))
        world.cache.cache_finished_req(request, prompt(1, 2))
    rejected = [False, False]
    for _ in range(int(WAIT_S * 1000)):
        for world in worlds:
            world.step()
        rejected = [_rejects(world) for world in worlds]
        assert rejected[0] == rejected[1]
        if all(rejected):
            break
    assert all(rejected)
    for world in worlds:
        while not world.controller.idle:
            for each in worlds:
                each.step()
        world.close()


def _rejects(world: World) -> bool:
    try:
        request = world.admit("b", prompt(7))
    except TransferError:
        return True
    world.cache.cache_finished_req(request, None)
    return False
