"""The metrics of an engine's storage: those of its stores, and skipped calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client.registry import Collector

from ..backends.base import Direction
from ..backends.compose import CopyStatistics
from ..backends.storage import StoreStatistics
from ..metrics.spec import MetricSpec, SnapshotCollector, Table
from ..metrics.stores import copy_metrics, store_table


@dataclass(frozen=True, slots=True)
class EngineStorageStatistics:
    """Totals since the start. `skipped` counts calls that were not made because storage is not open, has just failed or
    its breaker is open. `stores` are those of `Slot.leaves`."""

    skipped: Mapping[Direction, int]
    open_failures: int
    stores: tuple[StoreStatistics, ...]
    copies: Mapping[str, CopyStatistics]


_COPIES: tuple[MetricSpec[EngineStorageStatistics], ...] = copy_metrics(lambda s: s.copies)

# With the same names as in a cache, so that dashboards and alerts work for both.
STORAGE_METRICS: tuple[MetricSpec[EngineStorageStatistics], ...] = (
    MetricSpec("skipped_total", "Skipped calls of storage, by reason.", ("reason",),
               lambda s: {"prefetch_paused": s.skipped[Direction.READ], "store_paused": s.skipped[Direction.WRITE]},
               "Rises while storage is not open, or has just failed."),
    MetricSpec("storage_open_failures_total", "Failed attempts to open storage.", (),
               lambda s: s.open_failures, "Rises while the server is down. The log has the error."),
    *_COPIES,
)  # fmt: skip


def storage_collector(statistics: Callable[[], EngineStorageStatistics]) -> Collector:
    """Return the collector of an engine's storage."""
    return SnapshotCollector(statistics, Table(STORAGE_METRICS, lambda s: [((), s)]), store_table(lambda s: s.stores))
