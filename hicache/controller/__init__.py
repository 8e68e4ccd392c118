"""The controller: queues, supervised workers, and the acks they come back with."""

from .controller import PREFETCH_S_MAX, HiCacheController
from .lifecycle import OpenBackend
from .operations import Acks, Backup, Found, Load, Lookup, Read, ReadEnded, Store, StoreEnded
from .ranks import RankGroup, TorchRankGroup
from .statistics import ControllerStatistics, QueueStatistics

__all__ = [
    "PREFETCH_S_MAX",
    "Acks",
    "Backup",
    "ControllerStatistics",
    "Found",
    "HiCacheController",
    "Load",
    "Lookup",
    "OpenBackend",
    "QueueStatistics",
    "RankGroup",
    "Read",
    "ReadEnded",
    "Store",
    "StoreEnded",
    "TorchRankGroup",
]
