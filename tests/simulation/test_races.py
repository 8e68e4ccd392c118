"""Negative control of the simulation: it finds the races that other caches have had, planted one at a time."""

from __future__ import annotations

import pytest

from tests.simulation.memory import Finding
from tests.simulation.races import RACES, Race
from tests.simulation.simulation import Simulation

pytestmark = pytest.mark.long


def first_finding(race: Race) -> tuple[int, str] | None:
    """The first seed that shows the race as itself, and what it shows."""
    for seed in range(race.seeds):
        try:
            Simulation(seed, race.parts).run()
        except Finding as finding:
            if finding.kind in race.kinds:
                return seed, str(finding)
    return None


@pytest.mark.parametrize("name", RACES)
def test_the_simulation_finds_that(name: str) -> None:
    assert first_finding(RACES[name]) is not None, f"not found within {RACES[name].seeds} seeds"
