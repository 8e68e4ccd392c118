"""Snapshots of a controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..backends.base import BackendStatistics, Usage
from ..backends.compose import CopyStatistics
from ..backends.guard import LeafStatistics
from ..histogram import BOUNDS_S, SIZE_BOUNDS_BYTES, Histogram, HistogramStatistics


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Depth of each queue now and pages lent to unfinished operations. A merged copy counts as one."""

    write: int
    load: int
    prefetch: int
    reads: int
    backup: int
    device_pages_reserved: int
    host_pages_reserved: int


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """Merged copies of one direction between L1 and L2: how long they took, and how many bytes each moved."""

    seconds: HistogramStatistics
    bytes: HistogramStatistics


class CopyCounter:
    """Counts merged copies of one direction. Belongs to the scheduler's thread."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._seconds, self._bytes = Histogram(BOUNDS_S), Histogram(SIZE_BOUNDS_BYTES)

    def add(self, pages: int, seconds: float | None) -> None:
        """Count a copy that has ended; None if it failed."""
        if seconds is not None:
            self._seconds.add(seconds)
            self._bytes.add(pages * self._page_bytes)

    def statistics(self) -> CopyTimes:
        """Return a snapshot. May be called from any thread."""
        return CopyTimes(self._seconds.statistics(), self._bytes.statistics())


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """The ranks that decide together. `wait` is how long this one waited for the slowest in each step. `is_lost`: a
    rank is gone, or they have decided differently, and none of them goes on."""

    rank: int
    size: int
    is_lost: bool
    wait: HistogramStatistics


@dataclass(frozen=True, slots=True)
class ControllerStatistics:
    """Totals since start. `refused` counts operations that a bound has refused, by queue.

    `backend` is what storage as a whole counts, `backends` what each of its stores does, `copies` what goes from one of
    them to another in the background, by part; None and empty without storage. `l1_copies` is by direction
    (device_to_host, host_to_device), empty where the engine copies. `ranks` is None without ranks.
    """

    queues: QueueStatistics
    written_pages: int
    loaded_pages: int
    prefetched_pages: int
    stored_pages: int
    refused: dict[str, int]
    worker_errors: dict[str, int]
    worker_restarts: int
    workers_alive: int
    workers_stuck: int
    open_failures: int
    backend: BackendStatistics | None
    backends: tuple[LeafStatistics, ...]
    copies: Mapping[str, CopyStatistics]
    l1_copies: Mapping[str, CopyTimes] = field(default_factory=dict)
    ranks: RankStatistics | None = None
    touched_pages: int = 0

    @property
    def usage(self) -> Usage | None:
        """What all stores hold together; None as long as that of one is not known, and without storage."""
        usages = [leaf.usage for leaf in self.backends if leaf.usage is not None]
        return Usage.total(usages) if usages and len(usages) == len(self.backends) else None
