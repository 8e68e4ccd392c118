"""The description of a metric, and the collector: a snapshot becomes families of samples at each scrape.

A table of `MetricSpec` belongs to one kind of snapshot. docs/metrics.md is generated from the tables. The numbers are
those of `statistics()`, so hot paths do not update metric objects. `prometheus_client`'s counters are not used, so
several processes do not need a shared directory: each has its own exporter.

Locking design: a collector does not change. The server's threads take snapshots, one per scrape and possibly several at
the same time, which is safe because snapshots are frozen values.
"""

from __future__ import annotations

import itertools
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import __version__
from ..histogram import HistogramStatistics
from ..keys import FORMAT_VERSION

# Few labels with few values each. Never a key, a tenant or a path: a label value stays as long as the time series.
# `namespace` has 8 digits of the digest, as in log lines; their number in a daemon is limited.
LABELS = frozenset({
    "tier", "backend", "direction", "reason", "outcome", "queue", "worker", "route", "verb", "state", "source",
    "action", "operation", "status", "listener", "namespace", "label", "weights_epoch",
    "detail", "version", "python", "torch", "native", "page_format",
})
S = TypeVar("S")
# Without labels: a value, or None if it is unknown. With one label: a mapping from its values; with several: from
# tuples of their values. The value of a histogram is a `HistogramStatistics`.
Values: TypeAlias = "float | HistogramStatistics | Mapping[Any, Any] | None"


class MetricSpec(NamedTuple, Generic[S]):
    """One metric: its name without `hicache_`, its help, its labels, and its values in a snapshot; `pick` must not
    block. The name ends with the unit, or with `_total` for a counter, which only rises until the process restarts.
    `act` explains what it means for an operator, and what to do.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    pick: Callable[[S], Values]
    act: str = ""
    is_histogram: bool = False

    @property
    def kind(self) -> str:
        """Its type: `counter`, `gauge` or `histogram`."""
        if self.is_histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    def collect(self, snapshots: Iterable[tuple[tuple[str, ...], S]], *outer: str) -> Metric:
        """Return the family of some snapshots, each with its values of the labels `outer`, which come first."""
        kinds: dict[str, Any] = {
            "counter": CounterMetricFamily, "histogram": HistogramMetricFamily, "gauge": GaugeMetricFamily,
        }
        family = kinds[self.kind](f"hicache_{self.name}", self.help, labels=(*outer, *self.labels))
        for prefix, snapshot in snapshots:
            values = self.pick(snapshot)
            if not isinstance(values, Mapping):
                values = {} if values is None else {(): values}
            for label, value in values.items():
                labels = (*prefix, *(label if isinstance(label, tuple) else (label,)))
                if self.is_histogram:
                    _add_histogram(family, labels, value)
                else:
                    family.add_metric(labels, value)
        return cast("Metric", family)


def _add_histogram(family: Any, labels: Iterable[str], value: HistogramStatistics) -> None:
    bounds = [*(f"{bound:.10g}" for bound in value.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, itertools.accumulate(value.counts), strict=True)), value.total)


def _build() -> Values:
    """Return the versions. PyTorch is included only if it is loaded: a scrape does not import packages."""
    torch = sys.modules.get("torch")
    native = "yes" if "hicache._native" in sys.modules else "no"
    loaded = "" if torch is None else str(getattr(torch, "__version__", ""))
    return {(__version__, platform.python_version(), loaded, native, str(FORMAT_VERSION)): 1}


BUILD_INFO: MetricSpec[None] = MetricSpec(
    "build_info", "Versions of the software: always 1.", ("version", "python", "torch", "native", "page_format"),
    lambda _: _build(),
    "Shows engines that were not upgraded. native: whether the optional native helper is used. Engines share stored "
    "pages only if page_format is equal.",
)


class Table(NamedTuple, Generic[S]):
    """Metrics of one kind of part of a snapshot: `parts` returns them, each with its values of the labels `outer`."""

    specs: Iterable[MetricSpec[Any]]
    parts: Callable[[S], Iterable[tuple[tuple[str, ...], Any]]]
    outer: tuple[str, ...] = ()


class SnapshotCollector(Collector, Generic[S]):
    """A collector that takes one snapshot per scrape and fills `tables` from it; without a snapshot the tables have no
    samples. `BUILD_INFO` comes first."""

    def __init__(self, snapshot: Callable[[], S | None], *tables: Table[S]) -> None:
        self._snapshot, self._tables = snapshot, tables

    def describe(self) -> Iterable[Metric]:
        """Return the families without a snapshot, which registering does not need."""
        return self._families(None)

    def collect(self) -> Iterable[Metric]:
        """Return the families of one snapshot."""
        return self._families(self._snapshot())

    def _families(self, state: S | None) -> Iterator[Metric]:
        yield BUILD_INFO.collect([((), None)])
        for specs, parts, outer in self._tables:
            found = [] if state is None else list(parts(state))
            yield from (spec.collect(found, *outer) for spec in specs)
