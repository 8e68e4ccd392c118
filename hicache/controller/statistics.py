"""Snapshots of a controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..backends.base import BackendStatistics, Usage
from ..backends.compose import CopyStatistics
from ..backends.storage import StoreStatistics
from ..histogram import BOUNDS_S, SIZE_BOUNDS_BYTES, Histogram, HistogramStatistics


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Depth of each queue now, and pages reserved for unfinished operations. A merged copy counts as one."""

    write: int = 0
    load: int = 0
    prefetch: int = 0
    reads: int = 0
    backup: int = 0
    device_pages_reserved: int = 0
    host_pages_reserved: int = 0


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """Merged copies of one direction between L1 and L2: the seconds and the bytes of each."""

    seconds: HistogramStatistics
    bytes: HistogramStatistics


class CopyCounter:
    """Counts merged copies of one direction. Owned by the scheduler thread."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._seconds, self._bytes = Histogram(BOUNDS_S), Histogram(SIZE_BOUNDS_BYTES)

    def add(self, pages: int, seconds: float | None) -> None:
        """Count an ended copy; `seconds` is None if it failed, which is not counted."""
        if seconds is not None:
            self._seconds.add(seconds)
            self._bytes.add(pages * self._page_bytes)

    def statistics(self) -> CopyTimes:
        """Return a snapshot. May be called from any thread."""
        return CopyTimes(self._seconds.statistics(), self._bytes.statistics())


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """The ranks that decide together. `wait` is how long this rank waited for the slowest in each step. `is_lost`: a
    rank is gone, or the ranks have decided differently, and all have stopped."""

    rank: int
    size: int
    is_lost: bool
    wait: HistogramStatistics


@dataclass(frozen=True, slots=True)
class ControllerStatistics:
    """Totals since start. `refused` counts operations rejected by a bound, by queue.

    `backend` has the counts of storage as a whole, `backends` of each store, `copies` of the background copies between
    stores, by part; None and empty without storage. Of storage that cannot be opened, `backends` has one entry with the
    reason. `l1_copies` is by direction (device_to_host, host_to_device), empty
    if the engine copies. `ranks` is None without ranks.
    """

    queues: QueueStatistics = QueueStatistics()
    written_pages: int = 0
    loaded_pages: int = 0
    prefetched_pages: int = 0
    stored_pages: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    worker_errors: Mapping[str, int] = field(default_factory=dict)
    worker_restarts: int = 0
    workers_alive: int = 0
    workers_stuck: int = 0
    open_failures: int = 0
    backend: BackendStatistics | None = None
    backends: tuple[StoreStatistics, ...] = ()
    copies: Mapping[str, CopyStatistics] = field(default_factory=dict)
    l1_copies: Mapping[str, CopyTimes] = field(default_factory=dict)
    ranks: RankStatistics | None = None
    touched_pages: int = 0

    @property
    def usage(self) -> Usage | None:
        """The total usage of all stores; None if the usage of one is unknown, and without storage."""
        usages = [leaf.usage for leaf in self.backends if leaf.usage is not None]
        return Usage.total(usages) if usages and len(usages) == len(self.backends) else None
