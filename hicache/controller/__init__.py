"""The controller: queues, supervised workers, and the acks they come back with."""

from .controller import (
    PREFETCH_S_MAX,
    ControllerOptions,
    ControllerStatistics,
    HiCacheController,
    QueueStatistics,
)
from .lifecycle import OpenBackend
from .operations import Acks, BackupOperation, CopyOperation, PrefetchOperation, PrefetchState

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
]
