"""Guards over stores that misbehave, whose probes do not come by themselves."""

from __future__ import annotations

import time
from typing import Any

from hicache.backends.base import StorageBackend
from hicache.backends.guard import Direction, GuardedBackend
from hicache.backends.guard.admission import Refusal
from hicache.config.guard import GuardConfig
from tests.waiting import wait_for

# A breaker that stays open for as long as a test takes: nobody probes meanwhile.
LONG_S = 1000.0
# Closed after each test.
GUARDS: list[GuardedBackend] = []


def guard_of(store: StorageBackend, options: GuardConfig | None = None) -> GuardedBackend:
    """A guard over `store`, `patient` if nothing else is said. Closed after the test."""
    GUARDS.append(GuardedBackend(store, options or patient(), name="test"))
    return GUARDS[-1]


def patient(**options: Any) -> GuardConfig:
    """Options of a guard that opens at the third failure and is not probed after that; without retries."""
    return GuardConfig(**{"backoff_min": LONG_S, "backoff_max": LONG_S, "retry_share": 0.0, **options})


def quick(**options: Any) -> GuardConfig:
    """Options of a guard that heals fast; without retries."""
    return GuardConfig(**{"backoff_min": 0.02, "backoff_max": 0.05, "retry_share": 0.0, **options})


def refused(guard: GuardedBackend, direction: Direction, why: Refusal) -> int:
    """How many calls were refused for a reason."""
    return guard.guard_statistics().refused.get((direction, why), 0)


def until_passing(guard: GuardedBackend, direction: Direction, passes: bool = True) -> None:
    """Wait until calls of a direction are let through, or not any more."""
    wait_for(lambda: guard.may_pass(direction) is passes)


def past() -> float:
    """A deadline that is over."""
    return time.monotonic() - 1.0
