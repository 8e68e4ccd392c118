"""Stores with guards, which do not probe on their own."""

from __future__ import annotations

import time
from typing import Any

from hicache.backends.base import Direction
from hicache.backends.driver import Driver
from hicache.backends.faults import Faults
from hicache.backends.guard.calls import Refusal
from hicache.backends.store import Store
from hicache.config.guard import GuardConfig
from tests.backends._troubled import CODEC
from tests.waiting import wait_for

# Longer than a test: a breaker stays open, because no probe follows.
LONG_S = 1000.0
# Closed after each test.
GUARDS: list[Store] = []


def guard_of(driver: Driver[Any], options: GuardConfig | None = None, faults: Faults | None = None) -> Store:
    """Return the guarded store of `driver`, with the `patient` options by default. Closed after the test."""
    GUARDS.append(Store(driver, CODEC, options or patient(), name="test", faults=faults))
    return GUARDS[-1]


def patient(**options: Any) -> GuardConfig:
    """Return options of a guard that opens at the third failure and then does not probe; without retries."""
    return GuardConfig(**{"backoff_min": LONG_S, "backoff_max": LONG_S, "retry_share": 0.0, **options})


def quick(**options: Any) -> GuardConfig:
    """Return options of a guard that heals fast; without retries."""
    return GuardConfig(**{"backoff_min": 0.02, "backoff_max": 0.05, "retry_share": 0.0, **options})


def refused(guard: Store, direction: Direction, why: Refusal) -> int:
    """Return how many calls were rejected for a reason."""
    return guard.guard_statistics().refused.get((direction, why), 0)


def until_passing(guard: Store, direction: Direction, passes: bool = True) -> None:
    """Wait until calls of a direction pass, or no longer pass."""
    wait_for(lambda: guard.may_pass(direction) is passes)


def past() -> float:
    """Return a deadline in the past."""
    return time.monotonic() - 1.0
