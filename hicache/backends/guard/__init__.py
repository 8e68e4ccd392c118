"""The guard: what stands in front of every storage backend, so that its troubles stay its own."""

from .backend import GuardedBackend
from .breaker import BreakerState, BreakerStatistics
from .histogram import BOUNDS_S, LatencyStatistics
from .options import Direction, Override
from .traffic import GuardStatistics, Refusal, Verb
from .view import LeafStatistics, guards_of, leaf_statistics, may_pass

__all__ = [
    "BOUNDS_S",
    "BreakerState",
    "BreakerStatistics",
    "Direction",
    "GuardStatistics",
    "GuardedBackend",
    "LatencyStatistics",
    "LeafStatistics",
    "Override",
    "Refusal",
    "Verb",
    "guards_of",
    "leaf_statistics",
    "may_pass",
]
