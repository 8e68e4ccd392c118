"""The guard in front of every storage backend: a failing store does not harm the engine."""

from ...config.guard import Override
from ...histogram import BOUNDS_S, LatencyStatistics
from .admission import GuardStatistics
from .backend import GuardedBackend
from .calls import CallResult, Direction, Refusal, Verb
from .health import CONFIRM_S, IDLE, HealthState, StoreHealth, StoreProblem, grouped
from .leaves import LeafStatistics, guards_of, leaf_statistics, may_pass, named_leaves, unique_names, unopened

__all__ = [
    "BOUNDS_S",
    "CONFIRM_S",
    "IDLE",
    "CallResult",
    "Direction",
    "GuardStatistics",
    "GuardedBackend",
    "HealthState",
    "LatencyStatistics",
    "LeafStatistics",
    "Override",
    "Refusal",
    "StoreHealth",
    "StoreProblem",
    "Verb",
    "grouped",
    "guards_of",
    "leaf_statistics",
    "may_pass",
    "named_leaves",
    "unique_names",
    "unopened",
]
