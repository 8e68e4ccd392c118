"""The controller: queues, supervised workers, and the acks they come back with."""

from .controller import PREFETCH_S_MAX, HiCacheController
from .lifecycle import OpenBackend
from .operations import Acks, BackupOperation, CopyOperation, PrefetchOperation, PrefetchState
from .options import ControllerOptions
from .ranks import RankGroup, TorchRankGroup
from .statistics import ControllerStatistics, QueueStatistics

__all__ = [
    "PREFETCH_S_MAX",
    "Acks",
    "BackupOperation",
    "ControllerOptions",
    "ControllerStatistics",
    "CopyOperation",
    "HiCacheController",
    "OpenBackend",
    "PrefetchOperation",
    "PrefetchState",
    "QueueStatistics",
    "RankGroup",
    "TorchRankGroup",
]
