"""Thousands of seeds in which nothing may go wrong (see `simulation`). TEST_SEED=n replays one of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.seeds import seeds
from tests.simulation.memory import Finding
from tests.simulation.races import RACES, Race
from tests.simulation.setting import Parts
from tests.simulation.simulation import Simulation
from tests.simulation.streams import StagedCopyEngine, StreamedCopyEngine

pytestmark = pytest.mark.long

SEEDS = 2000
STREAMED_SEEDS = 150
BLOCK = 100  # seeds in one test


def blocks() -> list[list[int]]:
    """The seeds of this run in pieces, one test each."""
    all_seeds = seeds(SEEDS)
    return [all_seeds[first : first + BLOCK] for first in range(0, len(all_seeds), BLOCK)]


def simulate(seed: int, parts: Parts | None = None) -> Simulation:
    """Run one seed; the message of a failure says how to run it again and what came before."""
    simulation = Simulation(seed, parts or Parts())
    try:
        simulation.run()
    except Finding as finding:
        steps = "\n    ".join(simulation.trace)
        raise AssertionError(
            f"TEST_SEED={seed} replays this.\n{finding}\n{simulation.setting}\nlast steps:\n    {steps}"
        ) from finding
    return simulation


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"seeds-{block[0]}-{block[-1]}")
def test_every_page_is_right_and_the_books_balance_in(block: list[int]) -> None:
    verified, hits = 0, Counter[str]()
    for seed in block:
        simulation = simulate(seed)
        verified += simulation.verified_pages
        hits.update(simulation.cache.statistics().hit_tokens)
    # A block that served nothing from some tier would prove nothing about it.
    assert len(block) < BLOCK or (verified and hits["device"] and hits["host"] and hits["storage"])


@pytest.mark.parametrize("copies", [StreamedCopyEngine, StagedCopyEngine], ids=["direct", "staged"])
def test_every_page_is_right_with_the_copies_of_a_cuda_device(copies: type[StreamedCopyEngine]) -> None:
    verified = sum(simulate(seed, Parts(copies=copies)).verified_pages for seed in seeds(STREAMED_SEEDS))
    assert verified > 0


def test_a_seed_runs_the_same_way_twice() -> None:
    first, second = simulate(7), simulate(7)
    assert first.trace == second.trace
    assert first.verified_pages == second.verified_pages
    counted = second.cache.statistics()
    # Steps are timed by the real clock.
    assert replace(first.cache.statistics(), step=counted.step) == counted


# Negative control: it finds the races that other caches have had, planted one at a time


def first_finding(race: Race, parts: Parts | None = None) -> tuple[int, str] | None:
    """The first seed that shows the race as itself, and what it shows."""
    for seed in range(race.seeds):
        try:
            Simulation(seed, parts or race.parts).run()
        except Finding as finding:
            if finding.kind in race.kinds:
                return seed, str(finding)
    return None


@pytest.mark.parametrize("name", RACES)
def test_the_simulation_finds_that(name: str) -> None:
    assert first_finding(RACES[name]) is not None, f"not found within {RACES[name].seeds} seeds"


@pytest.mark.parametrize(
    "name", ["a load does not wait for the last reader of its pages", "the forward does not wait for a layer"]
)
def test_with_the_copies_of_a_cuda_device_the_simulation_finds_that(name: str) -> None:
    race = RACES[name]
    assert first_finding(race, replace(race.parts, copies=StreamedCopyEngine)) is not None
