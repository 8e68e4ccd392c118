"""Guards over faulty stores, which do not probe on their own."""

from __future__ import annotations

import time
from typing import Any

from hicache.backends.base import StorageBackend
from hicache.backends.guard import Direction, GuardedBackend
from hicache.backends.guard.calls import Refusal
from hicache.config.guard import GuardConfig
from tests.waiting import wait_for

# Longer than a test: a breaker stays open, because no probe follows.
LONG_S = 1000.0
# Closed after each test.
GUARDS: list[GuardedBackend] = []


def guard_of(store: StorageBackend, options: GuardConfig | None = None) -> GuardedBackend:
    """Return a guard over `store`, with the `patient` options by default. Closed after the test."""
    GUARDS.append(GuardedBackend(store, options or patient(), name="test"))
    return GUARDS[-1]


def patient(**options: Any) -> GuardConfig:
    """Return options of a guard that opens at the third failure and then does not probe; without retries."""
    return GuardConfig(**{"backoff_min": LONG_S, "backoff_max": LONG_S, "retry_share": 0.0, **options})


def quick(**options: Any) -> GuardConfig:
    """Return options of a guard that heals fast; without retries."""
    return GuardConfig(**{"backoff_min": 0.02, "backoff_max": 0.05, "retry_share": 0.0, **options})


def refused(guard: GuardedBackend, direction: Direction, why: Refusal) -> int:
    """Return how many calls were rejected for a reason."""
    return guard.guard_statistics().refused.get((direction, why), 0)


def until_passing(guard: GuardedBackend, direction: Direction, passes: bool = True) -> None:
    """Wait until calls of a direction pass, or no longer pass."""
    wait_for(lambda: guard.may_pass(direction) is passes)


def past() -> float:
    """Return a deadline in the past."""
    return time.monotonic() - 1.0
