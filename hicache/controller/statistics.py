"""Snapshots of a controller."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.base import BackendStatistics, Usage


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Depth of each queue now and pages lent to unfinished operations. A merged copy counts as one."""

    write: int
    load: int
    prefetch: int
    reads: int
    backup: int
    device_pages_lent: int
    host_pages_lent: int


@dataclass(frozen=True, slots=True)
class ControllerStatistics:
    """Totals since start. `refused` counts operations turned away by a bound, by queue."""

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
    usage: Usage | None
