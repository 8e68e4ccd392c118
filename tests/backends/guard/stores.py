"""Stores with guards, whose time a test moves."""

from __future__ import annotations

import math
from typing import Any

from hicache.backends.base import Direction
from hicache.backends.calls import Refusal
from hicache.backends.driver import Driver
from hicache.backends.store import Store
from hicache.clock import Clock
from hicache.config.guard import GuardConfig
from hicache_lab.clocks import ManualClock
from tests.backends._troubled import CODEC
from tests.clocks import PassingClock
from tests.tuned import tuned
from tests.waiting import wait_for

# The back-off between the probes of an open breaker, at most.
LONG_S = 1000.0
# A deadline that has passed on every clock.
PAST = -math.inf
# Closed after each test.
GUARDS: list[Store] = []


def guard_of(
    driver: Driver[Any], options: GuardConfig | None = None, clock: Clock | None = None
) -> Store:
    """Return the guarded store of `driver`, with the `patient` options by default. Closed after the test."""
    clock = PassingClock() if clock is None else clock
    GUARDS.append(Store(driver, CODEC, options or patient(), name="test", clock=clock))
    return GUARDS[-1]


def patient(**options: Any) -> GuardConfig:
    """Return options of a guard that opens at the third failure and probes after LONG_S; without retries."""
    return tuned(GuardConfig, **{"backoff_min": LONG_S, "backoff_max": LONG_S, "retry_share": 0.0, **options})


def refused(guard: Store, direction: Direction, why: Refusal) -> int:
    """Return how many calls were rejected for a reason."""
    return guard.guard_statistics().refused.get((direction, why), 0)


def probes(guard: Store, direction: Direction) -> int:
    """Return how many probes have ended."""
    breaker = guard.guard_statistics().breakers[direction]
    return breaker.good_probes + breaker.failed_probes


def probe(guard: Store, direction: Direction, clock: ManualClock) -> None:
    """Move to the next probe, and wait until it has ended. The time stands still during the probe."""
    before = probes(guard, direction)
    clock.advance(LONG_S)
    wait_for(lambda: probes(guard, direction) > before)


def until_passing(guard: Store, direction: Direction, clock: ManualClock) -> None:
    """Make probes until calls of a direction pass."""
    while not guard.may_pass(direction):
        probe(guard, direction, clock)


def until_stopped(guard: Store, direction: Direction) -> None:
    """Wait until calls of a direction no longer pass."""
    wait_for(lambda: not guard.may_pass(direction))
