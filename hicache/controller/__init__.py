"""The controller: queues, supervised workers, and the acks they come back with."""

from .controller import ControllerOptions, ControllerStatistics, HiCacheController, QueueStatistics
from .operations import Acks, BackupOperation, CopyOperation, PrefetchOperation, PrefetchState

__all__ = [
    "Acks",
    "BackupOperation",
    "ControllerOptions",
    "ControllerStatistics",
    "CopyOperation",
    "HiCacheController",
    "PrefetchOperation",
    "PrefetchState",
    "QueueStatistics",
]
