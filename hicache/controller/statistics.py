"""Snapshots of a controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..backends.base import BackendStatistics, Usage
from ..backends.compose import CopyStatistics
from ..backends.guard import LeafStatistics


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
class ControllerStatistics:
    """Totals since start. `refused` counts operations that a bound has refused, by queue.

    `backend` is what storage as a whole counts, `backends` what each of its stores does, `copies` what goes from one of
    them to another in the background, by part; None and empty without storage.
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

    @property
    def usage(self) -> Usage | None:
        """What all stores hold together; None as long as that of one is not known, and without storage."""
        usages = [leaf.usage for leaf in self.backends if leaf.usage is not None]
        return Usage.total(usages) if usages and len(usages) == len(self.backends) else None
