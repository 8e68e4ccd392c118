"""The metrics themselves: a snapshot of `statistics()` becomes metric families at each scrape.

What is exported is an explicit table of `MetricSpec`, each with a function that picks its samples out of the snapshot.
Nothing counts twice and no hot path touches a metric object: the numbers are those of `statistics()`.

Locking design: the collector holds nothing that changes. `snapshot` is called on the server's threads, one call per
scrape and possibly several at once; making that safe is the snapshot's business (frozen values are).
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..backends.base import GetOutcome, SetOutcome
from ..backends.guard import BOUNDS_S, GuardStatistics, LatencyStatistics, LeafStatistics, Override, Verb
from ..cache.statistics import CacheStatistics
from ..errors import InvalidInput

# Few labels with few values each. Never a key, a tenant or a path: a label value lives as long as the time series.
LABELS = frozenset({"tier", "backend", "direction", "reason", "outcome", "queue", "worker", "route", "verb"})
_NAME = re.compile(r"hicache(_[a-z0-9]+)+")
S = TypeVar("S")
Sample = tuple[tuple[str, ...], float]


class MetricKind(enum.Enum):
    """How a value moves: a counter only rises until the process restarts, a gauge may fall."""

    COUNTER = CounterMetricFamily
    GAUGE = GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class MetricSpec(Generic[S]):
    """One metric: how it is named and described, and how its samples come out of a snapshot.

    `samples` yields (label values in the order of `labels`, value); it must not block. Raises InvalidInput for a name
    that breaks the naming rules (prefix, `_total` for counters and for them alone), an unknown label or no help text.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    samples: Callable[[S], Iterable[Sample]]

    def __post_init__(self) -> None:
        _require_rules(self.name, self.help, self.labels, is_counter=self.kind is MetricKind.COUNTER)

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """An empty family of this metric."""
        family: CounterMetricFamily | GaugeMetricFamily = self.kind.value(self.name, self.help, labels=self.labels)
        return family

    def collect(self, snapshot: S) -> CounterMetricFamily | GaugeMetricFamily:
        """The family of a snapshot."""
        family = self.family()
        for labels, value in self.samples(snapshot):
            family.add_metric(labels, value)
        return family


@dataclass(frozen=True, slots=True)
class HistogramSpec(Generic[S]):
    """A metric of durations, in the buckets of `LatencyStatistics`. Otherwise as `MetricSpec`."""

    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[S], Iterable[tuple[tuple[str, ...], LatencyStatistics]]]

    def __post_init__(self) -> None:
        _require_rules(self.name, self.help, self.labels, is_counter=False)

    def family(self) -> HistogramMetricFamily:
        """An empty family of this metric."""
        return HistogramMetricFamily(self.name, self.help, labels=self.labels)

    def collect(self, snapshot: S) -> HistogramMetricFamily:
        """The family of a snapshot."""
        family = self.family()
        for labels, latency in self.samples(snapshot):
            bounds = [*(f"{bound:.6g}" for bound in BOUNDS_S), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(latency.counts), strict=True))
            family.add_metric(labels, buckets, latency.seconds)
        return family


AnySpec: TypeAlias = "MetricSpec[S] | HistogramSpec[S]"


def _require_rules(name: str, text: str, labels: Sequence[str], *, is_counter: bool) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"metric {name}: a name is hicache_ and lower case words, the unit last")
    if name.endswith("_total") is not is_counter:
        raise InvalidInput(f"metric {name}: counters, and only they, end with _total")
    if unknown := set(labels) - LABELS:
        raise InvalidInput(f"metric {name}: labels {sorted(unknown)} are none of {sorted(LABELS)}")
    if not text:
        raise InvalidInput(f"metric {name}: has no help text")


class SnapshotCollector(Collector, Generic[S]):
    """A collector that calls `snapshot` once per scrape. Raises InvalidInput if two specs have the same name."""

    def __init__(self, snapshot: Callable[[], S], specs: Sequence[AnySpec[S]]) -> None:
        names = [spec.name for spec in specs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidInput(f"metrics defined twice: {', '.join(twice)}")
        self._snapshot = snapshot
        self._specs = tuple(specs)

    def describe(self) -> Iterable[Metric]:
        """The families without samples: registering does not take a snapshot."""
        return [spec.family() for spec in self._specs]

    def collect(self) -> Iterable[Metric]:
        """The families of one snapshot."""
        snapshot = self._snapshot()
        for spec in self._specs:
            yield spec.collect(snapshot)


Backends: TypeAlias = "Callable[[S], Iterable[LeafStatistics]]"


def backend_metrics(backends: Backends[S]) -> tuple[AnySpec[S], ...]:
    """The metrics of stores and of their guards, found in a snapshot by `backends`; each has its name as a label."""
    return (*_store_metrics(backends), *_guard_metrics(backends))


def _store_metrics(backends: Backends[S]) -> tuple[MetricSpec[S], ...]:
    def spec(
        name: str,
        kind: MetricKind,
        text: str,
        label: str | None,
        pick: Callable[[LeafStatistics], Mapping[str, float]],
    ) -> MetricSpec[S]:
        def samples(snapshot: S) -> Iterator[Sample]:
            for backend in backends(snapshot):
                for value_label, value in pick(backend).items():
                    yield (backend.name,) if label is None else (backend.name, value_label), value

        labels = ("backend",) if label is None else ("backend", label)
        return MetricSpec(f"hicache_backend_{name}", kind, text, labels, samples)

    counter, gauge = MetricKind.COUNTER, MetricKind.GAUGE
    return (
        spec("get_pages_total", counter, "Pages asked of the backend, by what became of them.", "outcome",
             lambda b: _with_zeros(GetOutcome, b.statistics.gets)),
        spec("set_pages_total", counter, "Pages given to the backend, by what became of them.", "outcome",
             lambda b: _with_zeros(SetOutcome, b.statistics.sets)),
        spec("corrupt_pages_total", counter, "Stored pages that were refused, by what was wrong with them.", "reason",
             lambda b: b.statistics.corrupt),
        spec("errors_total", counter, "Operations that failed, by class of error.", "reason",
             lambda b: b.statistics.errors),
        spec("transferred_bytes_total", counter, "Bytes of whole frames moved.", "direction",
             lambda b: {"read": b.statistics.read_bytes, "write": b.statistics.written_bytes}),
        spec("evicted_pages_total", counter, "Pages removed to make room.", None,
             lambda b: {"": b.statistics.evicted_pages}),
        spec("stored_pages", gauge, "Pages stored now, by all processes that share the store.", None,
             lambda b: {} if b.usage is None else {"": b.usage.pages}),
        spec("stored_bytes", gauge, "Bytes stored now, by all processes that share the store.", None,
             lambda b: {} if b.usage is None else {"": b.usage.bytes}),
        spec("capacity_bytes", gauge, "Bytes the store may hold; absent if the server sets the limit.", None,
             lambda b: {} if b.usage is None or b.usage.capacity_bytes is None else {"": b.usage.capacity_bytes}),
    )  # fmt: skip


def _guard_metrics(backends: Backends[S]) -> tuple[AnySpec[S], ...]:
    def spec(
        name: str,
        kind: MetricKind,
        text: str,
        labels: tuple[str, ...],
        pick: Callable[[GuardStatistics], Iterable[Sample]],
    ) -> MetricSpec[S]:
        def samples(snapshot: S) -> Iterator[Sample]:
            for leaf in backends(snapshot):
                for values, value in () if leaf.guard is None else pick(leaf.guard):
                    yield (leaf.name, *values), value

        return MetricSpec(f"hicache_backend_{name}", kind, text, ("backend", *labels), samples)

    def latencies(snapshot: S) -> Iterator[tuple[tuple[str, ...], LatencyStatistics]]:
        for leaf in backends(snapshot):
            if leaf.guard is not None:
                for verb in Verb:
                    yield (leaf.name, verb), leaf.guard.latency[verb]

    counter, gauge = MetricKind.COUNTER, MetricKind.GAUGE
    direction = ("direction",)
    return (
        spec("breaker_state", gauge, "0: calls are made (closed), 1: the next one decides, 2: none is made (open).",
             direction, lambda g: [((way,), b.state) for way, b in g.breakers.items()]),
        spec("override", gauge, "1 if the operator has switched a direction on or off.", direction,
             lambda g: [((way,), b.override is not Override.AUTO) for way, b in g.breakers.items()]),
        spec("breaker_opens_total", counter, "Times that the breaker has opened.", direction,
             lambda g: [((way,), b.opens) for way, b in g.breakers.items()]),
        spec("probes_total", counter, "Probes of the store, by what became of them.", ("direction", "outcome"),
             lambda g: [((way, outcome), count) for way, b in g.breakers.items()
                        for outcome, count in (("good", b.good_probes), ("failed", b.failed_probes))]),
        spec("refused_calls_total", counter, "Calls that were not made, by reason.", ("direction", "reason"),
             lambda g: g.refused.items()),
        spec("failed_calls_total", counter, "Calls that count as failed, by reason.", ("direction", "reason"),
             lambda g: g.failures.items()),
        spec("retried_calls_total", counter, "Calls that were tried a second time.", direction,
             lambda g: [((way,), g.retried_calls.get(way, 0)) for way in g.breakers]),
        spec("in_flight_bytes", gauge, "Bytes of the frames that are being read or written.", (),
             lambda g: [((), g.in_flight_bytes)]),
        spec("in_flight_calls", gauge, "Calls under way.", (), lambda g: [((), g.in_flight_calls)]),
        spec("overdue_calls", gauge, "Calls that hang past their deadline.", (), lambda g: [((), g.overdue_calls)]),
        HistogramSpec("hicache_backend_call_seconds", "How long calls take.", ("backend", "verb"), latencies),
    )  # fmt: skip


def _with_zeros(outcomes: type[enum.StrEnum], counts: Mapping[Any, int]) -> dict[str, float]:
    """Counts by outcome, zero for what has not happened: a rate needs the sample before the first event."""
    return {outcome.value: counts.get(outcome, 0) for outcome in outcomes}


def _known(figures: Mapping[str, int]) -> dict[str, float]:
    """Figures without those that are unknown, which are 0."""
    return {label: figure for label, figure in figures.items() if figure}


CacheMetrics: TypeAlias = "tuple[AnySpec[CacheStatistics | None], ...]"


def cache_metrics() -> CacheMetrics:
    """The metrics of a cache and of its stores. None yields no samples."""
    return (
        *_request_metrics(),
        *_payoff_metrics(),
        *_tier_metrics(),
        *_controller_metrics(),
        *_event_metrics(),
        *backend_metrics(_backends_of),
        *_copy_metrics(),
    )


def _backends_of(state: CacheStatistics | None) -> Sequence[LeafStatistics]:
    return () if state is None else state.controller.backends


def _spec(
    name: str, kind: MetricKind, text: str, label: str, pick: Callable[[CacheStatistics], Mapping[str, float]]
) -> MetricSpec[CacheStatistics | None]:
    def samples(state: CacheStatistics | None) -> Iterator[Sample]:
        if state is not None:
            for value_label, value in pick(state).items():
                yield (value_label,) if label else (), value

    return MetricSpec(f"hicache_{name}", kind, text, (label,) if label else (), samples)


def _request_metrics() -> CacheMetrics:
    counter = MetricKind.COUNTER
    return (
        _spec("requests_total", counter, "Requests that were given KV.", "", lambda s: {"": s.requests}),
        _spec("prompt_tokens_total", counter, "Prompt tokens of those requests.", "", lambda s: {"": s.prompt_tokens}),
        _spec("hit_tokens_total", counter, "Prompt tokens whose KV was reused, by tier it came from.", "tier",
             lambda s: {tier: s.hit_tokens.get(tier, 0) for tier in ("device", "host", "storage")}),
        _spec("evicted_pages_total", counter, "Pages that left a tier for lack of room.", "tier",
             lambda s: {tier: s.evicted_pages.get(tier, 0) for tier in ("device", "host")}),
        _spec("skipped_total", counter, "What the cache did not do, by reason; each is a slower request.", "reason",
             lambda s: s.skipped),
    )  # fmt: skip


def _payoff_metrics() -> CacheMetrics:
    counter, gauge = MetricKind.COUNTER, MetricKind.GAUGE

    def decisions(state: CacheStatistics | None) -> Iterator[Sample]:
        if state is not None:
            yield from state.payoff.decisions.items()

    return (
        MetricSpec("hicache_payoff_decisions_total", counter, "Hits fetched (or not: too_slow, calibration), by why.",
                   ("route", "reason"), decisions),
        _spec("payoff_prefill_tokens_per_second", gauge, "Prefill speed that decisions use; absent if unknown.", "",
             lambda s: _known({"": s.payoff.figures.prefill_tokens_per_s})),
        _spec("payoff_bandwidth_bytes_per_second", gauge, "Speed up from a tier that decisions use; absent if unknown.",
             "tier", lambda s: _known({"host": s.payoff.figures.host_bytes_per_s,
                                       "storage": s.payoff.figures.storage_bytes_per_s})),
        _spec("payoff_operations_per_second", gauge, "One over the fixed part of a copy up from a tier.", "tier",
             lambda s: _known({"host": s.payoff.figures.host_operations_per_s,
                               "storage": s.payoff.figures.storage_operations_per_s})),
    )  # fmt: skip


def _tier_metrics() -> CacheMetrics:
    gauge = MetricKind.GAUGE
    return (
        _spec("tier_capacity_bytes", gauge, "Memory of a tier.", "tier",
             lambda s: {"device": s.device.capacity_pages * s.device.page_bytes,
                        "host": s.host.capacity_pages * s.host.page_bytes}),
        _spec("tier_free_bytes", gauge, "Memory of a tier that nothing holds.", "tier",
             lambda s: {"device": s.device.free_pages * s.device.page_bytes,
                        "host": s.host.free_pages * s.host.page_bytes}),
        _spec("tier_cached_bytes", gauge, "Memory of a tier that holds cached pages.", "tier",
             lambda s: {"device": s.device.cached_pages * s.device.page_bytes,
                        "host": s.host.cached_pages * s.host.page_bytes}),
        _spec("tier_evictable_bytes", gauge, "Memory of a tier whose pages may leave it now.", "tier",
             lambda s: {"device": s.device.evictable_pages * s.device.page_bytes,
                        "host": s.host.evictable_pages * s.host.page_bytes}),
        _spec("pinned_bytes", gauge, "Host memory that pinned prefixes take, or would take.", "",
             lambda s: {"": s.pinned_pages * s.host.page_bytes}),
        _spec("nodes", gauge, "Nodes of the radix tree.", "", lambda s: {"": s.nodes}),
        _spec("weights_epoch", gauge, "Epoch of the weights whose pages are served.", "",
             lambda s: {"": s.weights_epoch}),
    )  # fmt: skip


def _controller_metrics() -> CacheMetrics:
    counter, gauge = MetricKind.COUNTER, MetricKind.GAUGE
    return (
        _spec("refused_operations_total", counter, "Operations turned away by a bound, by queue.", "queue",
             lambda s: s.controller.refused),
        _spec("moved_pages_total", counter, "Pages moved between tiers.", "direction",
             lambda s: {"device_to_host": s.controller.written_pages, "host_to_device": s.controller.loaded_pages,
                        "storage_to_host": s.controller.prefetched_pages,
                        "host_to_storage": s.controller.stored_pages}),
        _spec("queued_operations", gauge, "Operations queued or under way.", "queue",
             lambda s: {"write": s.controller.queues.write, "load": s.controller.queues.load,
                        "prefetch": s.controller.queues.prefetch, "reads": s.controller.queues.reads,
                        "backup": s.controller.queues.backup}),
        _spec("worker_errors_total", counter, "Exceptions in workers, by worker and kind.", "worker",
             lambda s: s.controller.worker_errors),
        _spec("worker_restarts_total", counter, "Workers that died and were replaced.", "",
             lambda s: {"": s.controller.worker_restarts}),
        _spec("storage_open_failures_total", counter, "Attempts to open storage for new weights that failed.", "",
             lambda s: {"": s.controller.open_failures}),
        _spec("workers_alive", gauge, "Workers that run and are not stuck.", "",
             lambda s: {"": s.controller.workers_alive}),
    )  # fmt: skip


def _copy_metrics() -> CacheMetrics:
    def outcomes(state: CacheStatistics | None) -> Iterator[Sample]:
        for part, copies in () if state is None else state.controller.copies.items():
            for outcome in ("copied", "present", "failed", "dropped"):
                yield (part, outcome), getattr(copies, outcome)

    return (
        MetricSpec("hicache_backend_copies_total", MetricKind.COUNTER, "Pages to be copied to a part of a composition "
                   "in the background, by what became of them.", ("backend", "outcome"), outcomes),
        _spec("backend_waiting_copies", MetricKind.GAUGE, "Pages that wait to be copied to a part.", "backend",
              lambda s: {part: copies.waiting for part, copies in s.controller.copies.items()}),
    )  # fmt: skip


def _event_metrics() -> CacheMetrics:
    counter, gauge = MetricKind.COUNTER, MetricKind.GAUGE
    return (
        _spec("events_total", counter, "KV events recorded.", "",
              lambda s: {} if s.events is None else {"": s.events.events}),
        _spec("event_snapshots_total", counter, "Snapshots of the tree made for readers that missed events.", "",
              lambda s: {} if s.events is None else {"": s.events.snapshots}),
        _spec("event_publisher_alive", gauge, "1 while the publisher of KV events runs.", "",
              lambda s: {} if s.publisher is None else {"": s.publisher.alive}),
        _spec("event_slow_batches_total", counter, "Batches that some subscriber did not get: it reads too slowly.", "",
              lambda s: {} if s.publisher is None else {"": s.publisher.slow}),
        _spec("event_gaps_total", counter, "Times that events were dropped before they were published.", "",
              lambda s: {} if s.publisher is None else {"": s.publisher.gaps}),
        _spec("event_refused_total", counter, "Keys of subscribers that are not on the list, and broken requests.", "",
              lambda s: {} if s.publisher is None else {"": s.publisher.refused}),
        _spec("event_publisher_errors_total", counter, "Unexpected errors of the publisher, by class.", "reason",
              lambda s: {} if s.publisher is None else s.publisher.errors),
    )  # fmt: skip
