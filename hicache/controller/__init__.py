"""The controller: queues, supervised workers, and their acks."""

from .controller import PREFETCH_S_MAX, HiCacheController
from .operations import Acks, Backup, Load, LookupOperation, ReadOperation, StoreOperation
from .ranks import RankGroup, TorchRankGroup
from .statistics import ControllerStatistics, QueueStatistics

__all__ = [
    "PREFETCH_S_MAX", "Acks", "Backup", "ControllerStatistics", "HiCacheController", "Load", "LookupOperation",
    "QueueStatistics", "RankGroup", "ReadOperation", "StoreOperation", "TorchRankGroup",
]
