"""The guard: what stands in front of every storage backend, so that its troubles stay its own."""

from .backend import GuardedBackend, guards_of
from .breaker import BreakerState, BreakerStatistics
from .histogram import BOUNDS_S, LatencyStatistics
from .options import Direction, GuardOptions, Override
from .traffic import GuardStatistics, Refusal, Verb

__all__ = [
    "BOUNDS_S",
    "BreakerState",
    "BreakerStatistics",
    "Direction",
    "GuardOptions",
    "GuardStatistics",
    "GuardedBackend",
    "LatencyStatistics",
    "Override",
    "Refusal",
    "Verb",
    "guards_of",
]
