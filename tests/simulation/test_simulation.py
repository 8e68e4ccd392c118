"""Five hundred seeds of the simulation without a finding (see `simulation`). TEST_SEED=n replays one of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from hicache.cache.prefetch_states import RULES, State
from hicache.cache.statistics import CacheStatistics
from hicache.hints import KINDS
from tests.seeds import seeds
from tests.simulation.memory import Finding
from tests.simulation.races import RACES, Race
from tests.simulation.setting import Parts, Setting
from tests.simulation.simulation import Simulation
from tests.simulation.streams import StagedCopyEngine, StreamedCopyEngine

pytestmark = pytest.mark.long

SEEDS = 500
LONG_SEEDS = 200
STREAMED_SEEDS = 100
POOLED_SEEDS = 60
HINTED_SEEDS = 25
BLOCK = 100  # seeds in one test


def blocks() -> list[list[int]]:
    """Return the seeds of this run in blocks, one test each."""
    all_seeds = seeds(SEEDS)
    return [all_seeds[first : first + BLOCK] for first in range(0, len(all_seeds), BLOCK)]


def simulate(seed: int, parts: Parts | None = None, stored_talks: int = 0) -> Simulation:
    """Run one seed. The message of a failure says how to replay it, and lists the last steps."""
    simulation = Simulation(seed, parts or Parts())
    for _ in range(stored_talks):
        simulation.others_store()
    try:
        simulation.run()
    except Finding as finding:
        steps = "\n    ".join(simulation.trace)
        raise AssertionError(
            f"TEST_SEED={seed} replays this.\n{finding}\n{simulation.setting}\nlast steps:\n    {steps}"
        ) from finding
    return simulation


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"seeds-{block[0]}-{block[-1]}")
def test_every_page_is_correct_and_nothing_leaks_in(block: list[int]) -> None:
    verified, hits = 0, Counter[str]()
    for seed in block:
        simulation = simulate(seed)
        verified += simulation.verified_pages
        hits.update(simulation.cache.statistics().hit_tokens)
    # Otherwise the block has not tested each tier.
    assert len(block) < BLOCK or (verified and hits["device"] and hits["host"] and hits["storage"])


def test_prompts_longer_than_their_share_of_l2_go_through_all_states_of_prefetches() -> None:
    """Requests are aborted, begun and started again with longer prompts in each state; stores hang, L1 and L2 evict.

    Three moves are so rare that tests in `tests/cache` make them: one each from AWAITING_ROOM, AWAITING_L1 and ARRIVED.
    """
    all_seeds, moves = seeds(LONG_SEEDS), Counter[tuple[State, State]]()
    for seed in all_seeds:
        moves.update(simulate(seed, Parts(draw=Setting.draw_long), stored_talks=4).moves)
    allowed = {(state, following) for state, rule in RULES.items() for following in rule.next}
    rare = {
        (State.AWAITING_ROOM, State.FOLLOWING), (State.AWAITING_L1, State.ENDED), (State.ARRIVED, State.QUEUED),
    }
    assert len(all_seeds) < LONG_SEEDS or allowed - rare <= moves.keys()


def test_every_page_and_slot_is_correct_with_trailing_pools() -> None:
    """The slots of pages on L1 come and go; a prefix whose last pages lack them is loaded from L2, or computed."""
    all_seeds = seeds(POOLED_SEEDS)
    hits, skipped, verified = Counter[str](), Counter[str](), 0
    for seed in all_seeds:
        simulation = simulate(seed, Parts(draw=Setting.draw_pooled))
        statistics = simulation.cache.statistics()
        verified += simulation.verified_slots
        hits.update(statistics.hit_tokens)
        skipped.update(statistics.skipped)
    rare = skipped["no_slots"] and skipped["backup_without_slots"]
    assert len(all_seeds) < POOLED_SEEDS or (verified and rare and all(hits[tier] for tier in hits))


@pytest.mark.parametrize("copies", [StreamedCopyEngine, StagedCopyEngine], ids=["direct", "staged"])
def test_every_page_is_correct_with_the_copy_engine_for_cuda(copies: type[StreamedCopyEngine]) -> None:
    verified = sum(simulate(seed, Parts(copies=copies)).verified_pages for seed in seeds(STREAMED_SEEDS))
    assert verified > 0


@pytest.mark.parametrize(
    ("draw", "count"), [(Setting.draw, HINTED_SEEDS), (Setting.draw_long, HINTED_SEEDS), (Setting.draw_pooled, 10)]
)
def test_every_page_is_correct_and_nothing_leaks_with_hints(
    draw: Callable[[random.Random], Setting], count: int
) -> None:
    """Hints pin, retain, fetch, demote and release pages in all states of requests and operations."""
    all_seeds, outcomes = seeds(count), Counter[tuple[str, str]]()
    for seed in all_seeds:
        simulation = simulate(seed, Parts(draw=draw, hints=True), stored_talks=2)
        outcomes.update(simulation.hints)
    usual = {(kind, "accepted") for kind in KINDS if kind != "kv.demote"}
    usual |= {(kind, "missing") for kind in KINDS if kind != "kv.prefetch"}
    assert len(all_seeds) < HINTED_SEEDS or usual <= outcomes.keys()


def test_two_runs_of_a_seed_are_equal() -> None:
    first, second = simulate(7), simulate(7)
    assert first.trace == second.trace
    assert first.verified_pages == second.verified_pages
    counted, again = first.cache.statistics(), second.cache.statistics()
    assert _without_times(counted, again) == again
    assert counted.controller.backend == again.controller.backend


def _without_times(counted: CacheStatistics, other: CacheStatistics) -> CacheStatistics:
    """Return statistics with the durations of `other`: steps and calls of stores take their time on the real clock."""
    controller = replace(counted.controller, backends=other.controller.backends)
    return replace(counted, step=other.step, controller=controller)


# Negative control: the simulation finds planted races, one at a time


def first_finding(race: Race, parts: Parts | None = None) -> tuple[int, str] | None:
    """Return the first seed with a finding of the race's kinds, and the finding."""
    for seed in range(race.seeds):
        try:
            Simulation(seed, parts or race.parts).run()
        except Finding as finding:
            if finding.kind in race.kinds:
                return seed, str(finding)
    return None


@pytest.mark.parametrize("name", RACES)
def test_the_simulation_finds_a_planted_race(name: str) -> None:
    assert first_finding(RACES[name]) is not None, f"not found within {RACES[name].seeds} seeds"


@pytest.mark.parametrize(
    "name", ["a load does not wait for the last reader of its pages", "the forward does not wait for a layer"]
)
def test_the_simulation_with_the_copy_engine_for_cuda_finds_a_planted_race(name: str) -> None:
    race = RACES[name]
    assert first_finding(race, replace(race.parts, copies=StreamedCopyEngine)) is not None
