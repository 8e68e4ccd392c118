"""The metrics of an engine's storage: those of its stores, and skipped calls.

Locking design: the collector does not change; it takes one snapshot per scrape, on the requesting thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..backends.compose import CopyStatistics
from ..backends.guard import Direction, LeafStatistics
from ..metrics.families import BUILD_INFO
from ..metrics.spec import MetricSpec
from ..metrics.stores import copies_by_outcome, store_families, waiting_copies


@dataclass(frozen=True, slots=True)
class EngineStorageStatistics:
    """Totals since the start. `skipped` counts calls that were not made because storage is not open, has just failed or
    its breaker is open. `stores` are those of `StorageGate.leaves`."""

    skipped: Mapping[Direction, int]
    open_failures: int
    stores: tuple[LeafStatistics, ...]
    copies: Mapping[str, CopyStatistics]


class StorageCollector(Collector):
    """A collector that calls `statistics` of an EngineStorage once per scrape."""

    def __init__(self, statistics: Callable[[], EngineStorageStatistics]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """Return the families without samples, so that registering does not take a snapshot."""
        return [BUILD_INFO.collect(()), *(spec.collect(()) for spec in STORAGE_METRICS), *store_families(())]

    def collect(self) -> Iterable[Metric]:
        """Return the families of one snapshot."""
        found = self._statistics()
        yield BUILD_INFO.collect((((), None),))
        yield from (spec.collect((((), found),)) for spec in STORAGE_METRICS)
        yield from store_families(found.stores)


# With the same names as in a cache, so that dashboards and alerts work for both.
STORAGE_METRICS: tuple[MetricSpec[EngineStorageStatistics], ...] = (
    MetricSpec("skipped_total", "Skipped calls of storage, by reason.", ("reason",),
               lambda s: {"prefetch_paused": s.skipped[Direction.READ], "store_paused": s.skipped[Direction.WRITE]},
               "Rises while storage is not open, or has just failed."),
    MetricSpec("storage_open_failures_total", "Failed attempts to open storage.", (),
               lambda s: s.open_failures, "Rises while the server is down. The log has the error."),
    MetricSpec("backend_copies_total", "Pages to be copied to a part of a composition in the background, by outcome.",
               ("backend", "outcome"), lambda s: copies_by_outcome(s.copies),
               "As for a cache that has the composition."),
    MetricSpec("backend_waiting_copies", "Pages waiting to be copied to a part.", ("backend",),
               lambda s: waiting_copies(s.copies), "As for a cache that has the composition."),
)  # fmt: skip
