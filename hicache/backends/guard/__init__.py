"""The guard in front of every storage backend: a failing store does not harm the engine."""

from ...config.guard import Override
from ...histogram import BOUNDS_S, LatencyStatistics
from .admission import CallResult, Direction, GuardStatistics, Refusal, Verb
from .backend import GuardedBackend, LeafStatistics, guards_of, leaf_statistics, may_pass, named_leaves, unique_names
from .overrides import Overrides

__all__ = [
    "BOUNDS_S",
    "CallResult",
    "Direction",
    "GuardStatistics",
    "GuardedBackend",
    "LatencyStatistics",
    "LeafStatistics",
    "Override",
    "Overrides",
    "Refusal",
    "Verb",
    "guards_of",
    "leaf_statistics",
    "may_pass",
    "named_leaves",
    "unique_names",
]
