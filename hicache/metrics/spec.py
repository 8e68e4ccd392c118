"""The description of a metric, and the conversion of a snapshot to a family of samples.

A table of `MetricSpec` belongs to one kind of snapshot. docs/metrics.md is generated from the tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..histogram import BOUNDS_S, HistogramStatistics, LatencyStatistics

# Few labels with few values each. Never a key, a tenant or a path: a label value stays as long as the time series.
# `namespace` has 8 digits of the digest, as in log lines; their number in a daemon is limited.
LABELS = frozenset({
    "tier", "backend", "direction", "reason", "outcome", "queue", "worker", "route", "verb", "state", "source",
    "operation", "status", "listener", "namespace", "label", "weights_epoch",
    "version", "python", "torch", "native", "page_format",
})  # fmt: skip
S = TypeVar("S")
# Without labels: a value, or None if it is unknown. With one label: a mapping from its values; with several: from
# tuples of their values. The value of a histogram is a `LatencyStatistics` or a `HistogramStatistics`.
Values: TypeAlias = "float | LatencyStatistics | HistogramStatistics | Mapping[Any, Any] | None"


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
        }  # fmt: skip
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


def _add_histogram(family: Any, labels: Iterable[str], value: LatencyStatistics | HistogramStatistics) -> None:
    if isinstance(value, LatencyStatistics):
        value = HistogramStatistics(BOUNDS_S, value.counts, value.seconds)
    bounds = [*(f"{bound:.10g}" for bound in value.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, itertools.accumulate(value.counts), strict=True)), value.total)
