"""The metrics themselves: a snapshot of `statistics()` becomes metric families at each scrape.

What is exported is two tables of `MetricSpec`, of the cache and of each of its stores, each with a function that picks
the values out of the snapshot. Nothing counts twice and no hot path touches a metric object: the numbers are those of
`statistics()`.

Locking design: the collector holds nothing that changes. `statistics` is called on the server's threads, one call per
scrape and possibly several at once; making that safe is the snapshot's business (frozen values are).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..backends.base import GetOutcome, SetOutcome
from ..backends.guard import BOUNDS_S, GuardStatistics, LatencyStatistics, LeafStatistics, Override, Verb
from ..cache.statistics import CacheStatistics, TierStatistics

# Few labels with few values each. Never a key, a tenant or a path: a label value lives as long as the time series.
LABELS = frozenset({"tier", "backend", "direction", "reason", "outcome", "queue", "worker", "route", "verb"})
S = TypeVar("S")
# Without labels a value, or None if it is unknown; with one label a value for each of its values, with two a value for
# each pair. A duration's value is a `LatencyStatistics`.
Values: TypeAlias = "float | Mapping[Any, Any] | None"


class MetricSpec(NamedTuple, Generic[S]):
    """One metric: its name without `hicache_`, its help, its labels, and its values in a snapshot; `pick` must not
    block. The name ends with the unit; `_total` makes it a counter, which only rises until the process restarts, and
    `_seconds` a histogram.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    pick: Callable[[S], Values]

    def collect(self, snapshots: Iterable[tuple[tuple[str, ...], S]], *outer: str) -> Metric:
        """The family of some snapshots, each with its values of the labels `outer`, which come first."""
        last = self.name.rpartition("_")[2]
        kind: Any = {"total": CounterMetricFamily, "seconds": HistogramMetricFamily}.get(last, GaugeMetricFamily)
        family = kind(f"hicache_{self.name}", self.help, labels=(*outer, *self.labels))
        for prefix, snapshot in snapshots:
            values = self.pick(snapshot)
            if not isinstance(values, Mapping):
                values = {} if values is None else {(): values}
            for label, value in values.items():
                labels = (*prefix, *(label if isinstance(label, tuple) else (label,)))
                if isinstance(value, LatencyStatistics):
                    bounds = [*(f"{bound:.6g}" for bound in BOUNDS_S), "+Inf"]
                    buckets = list(zip(bounds, itertools.accumulate(value.counts), strict=True))
                    family.add_metric(labels, buckets, value.seconds)
                else:
                    family.add_metric(labels, value)
        return cast("Metric", family)


class CacheCollector(Collector):
    """A collector that calls `statistics` of a cache once per scrape; None yields no samples."""

    def __init__(self, statistics: Callable[[], CacheStatistics | None]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """The families without samples: registering does not take a snapshot."""
        return [*(spec.collect(()) for spec in CACHE_METRICS), *store_families(())]

    def collect(self) -> Iterable[Metric]:
        """The families of one snapshot."""
        state = self._statistics()
        states = () if state is None else (((), state),)
        yield from (spec.collect(states) for spec in CACHE_METRICS)
        yield from store_families(() if state is None else state.controller.backends)


def store_families(stores: Iterable[LeafStatistics]) -> Iterator[Metric]:
    """The families of stores and of their guards; the name of each store is a label."""
    named = [((store.name,), store) for store in stores]
    return (spec.collect(named, "backend") for spec in STORE_METRICS)


def _with_zeros(outcomes: type[enum.StrEnum], counts: Mapping[Any, int]) -> Values:
    """Counts by outcome, zero for what has not happened: a rate needs the sample before the first event."""
    return {outcome.value: counts.get(outcome, 0) for outcome in outcomes}


def _known(**rates: int) -> Values:
    """Rates by tier without those that are unknown, which are 0."""
    return {tier: rate for tier, rate in rates.items() if rate}


def _tiers(pages: Callable[[TierStatistics], int]) -> Callable[[CacheStatistics], Values]:
    """Bytes by tier, of a number of pages."""
    return lambda s: {"device": pages(s.device) * s.device.page_bytes, "host": pages(s.host) * s.host.page_bytes}


def _guarded(pick: Callable[[GuardStatistics], Values]) -> Callable[[LeafStatistics], Values]:
    """What a store's guard shows; nothing without a guard."""
    return lambda store: {} if store.guard is None else pick(store.guard)


CACHE_METRICS: tuple[MetricSpec[CacheStatistics], ...] = (
    MetricSpec("requests_total", "Requests that were given KV.", (), lambda s: s.requests),
    MetricSpec("prompt_tokens_total", "Prompt tokens of those requests.", (), lambda s: s.prompt_tokens),
    MetricSpec("hit_tokens_total", "Prompt tokens whose KV was reused, by tier it came from.", ("tier",),
               lambda s: {tier: s.hit_tokens.get(tier, 0) for tier in ("device", "host", "storage")}),
    MetricSpec("evicted_pages_total", "Pages that left a tier for lack of room.", ("tier",),
               lambda s: {tier: s.evicted_pages.get(tier, 0) for tier in ("device", "host")}),
    MetricSpec("skipped_total", "What the cache did not do, by reason; each is a slower request.", ("reason",),
               lambda s: s.skipped),
    MetricSpec("break_even_decisions_total", "Hits fetched (or not: too_slow, calibration), by why.",
               ("route", "reason"), lambda s: s.break_even.decisions),
    MetricSpec("break_even_prefill_tokens_per_second", "Prefill speed that decisions use; absent if unknown.", (),
               lambda s: s.break_even.rates.prefill_tokens_per_s or None),
    MetricSpec("break_even_bandwidth_bytes_per_second", "Speed up from a tier that decisions use; absent if unknown.",
               ("tier",), lambda s: _known(host=s.break_even.rates.host_bytes_per_s,
                                           storage=s.break_even.rates.storage_bytes_per_s)),
    MetricSpec("break_even_operations_per_second", "One over the fixed part of a copy up from a tier.", ("tier",),
               lambda s: _known(host=s.break_even.rates.host_operations_per_s,
                                storage=s.break_even.rates.storage_operations_per_s)),
    MetricSpec("tier_capacity_bytes", "Memory of a tier.", ("tier",), _tiers(lambda tier: tier.capacity_pages)),
    MetricSpec("tier_free_bytes", "Memory of a tier that nothing holds.", ("tier",),
               _tiers(lambda tier: tier.free_pages)),
    MetricSpec("tier_cached_bytes", "Memory of a tier that holds cached pages.", ("tier",),
               _tiers(lambda tier: tier.cached_pages)),
    MetricSpec("tier_evictable_bytes", "Memory of a tier whose pages may leave it now.", ("tier",),
               _tiers(lambda tier: tier.evictable_pages)),
    MetricSpec("pinned_bytes", "Host memory that pinned prefixes take, or would take.", (),
               lambda s: s.pinned_pages * s.host.page_bytes),
    MetricSpec("nodes", "Nodes of the radix tree.", (), lambda s: s.nodes),
    MetricSpec("weights_epoch", "Epoch of the weights whose pages are served.", (), lambda s: s.weights_epoch),
    MetricSpec("refused_operations_total", "Operations turned away by a bound, by queue.", ("queue",),
               lambda s: s.controller.refused),
    MetricSpec("moved_pages_total", "Pages moved between tiers.", ("direction",),
               lambda s: {"device_to_host": s.controller.written_pages, "host_to_device": s.controller.loaded_pages,
                          "storage_to_host": s.controller.prefetched_pages,
                          "host_to_storage": s.controller.stored_pages}),
    MetricSpec("queued_operations", "Operations queued or under way.", ("queue",),
               lambda s: {queue: getattr(s.controller.queues, queue)
                          for queue in ("write", "load", "prefetch", "reads", "backup")}),
    MetricSpec("worker_errors_total", "Exceptions in workers, by worker and kind.", ("worker",),
               lambda s: s.controller.worker_errors),
    MetricSpec("worker_restarts_total", "Workers that died and were replaced.", (),
               lambda s: s.controller.worker_restarts),
    MetricSpec("storage_open_failures_total", "Attempts to open storage for new weights that failed.", (),
               lambda s: s.controller.open_failures),
    MetricSpec("workers_alive", "Workers that run and are not stuck.", (), lambda s: s.controller.workers_alive),
    MetricSpec("events_total", "KV events recorded.", (), lambda s: None if s.events is None else s.events.events),
    MetricSpec("event_snapshots_total", "Snapshots of the tree made for readers that missed events.", (),
               lambda s: None if s.events is None else s.events.snapshots),
    MetricSpec("event_publisher_alive", "1 while the publisher of KV events runs.", (),
               lambda s: None if s.publisher is None else s.publisher.alive),
    MetricSpec("event_slow_batches_total", "Batches that some subscriber did not get: it reads too slowly.", (),
               lambda s: None if s.publisher is None else s.publisher.slow),
    MetricSpec("event_gaps_total", "Times that events were dropped before they were published.", (),
               lambda s: None if s.publisher is None else s.publisher.gaps),
    MetricSpec("event_refused_total", "Keys of subscribers that are not on the list, and broken requests.", (),
               lambda s: None if s.publisher is None else s.publisher.refused),
    MetricSpec("event_publisher_errors_total", "Unexpected errors of the publisher, by class.", ("reason",),
               lambda s: None if s.publisher is None else s.publisher.errors),
    MetricSpec("backend_copies_total", "Pages to be copied to a part of a composition in the background, by what "
               "became of them.", ("backend", "outcome"),
               lambda s: {(part, outcome): getattr(copies, outcome) for part, copies in s.controller.copies.items()
                          for outcome in ("copied", "present", "failed", "dropped")}),
    MetricSpec("backend_waiting_copies", "Pages that wait to be copied to a part.", ("backend",),
               lambda s: {part: copies.waiting for part, copies in s.controller.copies.items()}),
)  # fmt: skip

# Of each store; the label `backend` comes before the others.
STORE_METRICS: tuple[MetricSpec[LeafStatistics], ...] = (
    MetricSpec("backend_get_pages_total", "Pages asked of the backend, by what became of them.", ("outcome",),
               lambda b: _with_zeros(GetOutcome, b.statistics.gets)),
    MetricSpec("backend_set_pages_total", "Pages given to the backend, by what became of them.", ("outcome",),
               lambda b: _with_zeros(SetOutcome, b.statistics.sets)),
    MetricSpec("backend_corrupt_pages_total", "Stored pages that were refused, by what was wrong with them.",
               ("reason",), lambda b: b.statistics.corrupt),
    MetricSpec("backend_errors_total", "Operations that failed, by class of error.", ("reason",),
               lambda b: b.statistics.errors),
    MetricSpec("backend_transferred_bytes_total", "Bytes of whole frames moved.", ("direction",),
               lambda b: {"read": b.statistics.read_bytes, "write": b.statistics.written_bytes}),
    MetricSpec("backend_evicted_pages_total", "Pages removed to make room.", (), lambda b: b.statistics.evicted_pages),
    MetricSpec("backend_stored_pages", "Pages stored now, by all processes that share the store.", (),
               lambda b: None if b.usage is None else b.usage.pages),
    MetricSpec("backend_stored_bytes", "Bytes stored now, by all processes that share the store.", (),
               lambda b: None if b.usage is None else b.usage.bytes),
    MetricSpec("backend_capacity_bytes", "Bytes the store may hold; absent if the server sets the limit.", (),
               lambda b: None if b.usage is None else b.usage.capacity_bytes),
    MetricSpec("backend_breaker_state", "0: calls are made (closed), 1: the next one decides, 2: none is made (open).",
               ("direction",), _guarded(lambda g: {way: b.state for way, b in g.breakers.items()})),
    MetricSpec("backend_override", "1 if the operator has switched a direction on or off.", ("direction",),
               _guarded(lambda g: {way: b.override is not Override.AUTO for way, b in g.breakers.items()})),
    MetricSpec("backend_breaker_opens_total", "Times that the breaker has opened.", ("direction",),
               _guarded(lambda g: {way: b.opens for way, b in g.breakers.items()})),
    MetricSpec("backend_probes_total", "Probes of the store, by what became of them.", ("direction", "outcome"),
               _guarded(lambda g: {(way, outcome): count for way, b in g.breakers.items()
                                   for outcome, count in (("good", b.good_probes), ("failed", b.failed_probes))})),
    MetricSpec("backend_refused_calls_total", "Calls that were not made, by reason.", ("direction", "reason"),
               _guarded(lambda g: g.refused)),
    MetricSpec("backend_failed_calls_total", "Calls that count as failed, by reason.", ("direction", "reason"),
               _guarded(lambda g: g.failures)),
    MetricSpec("backend_retried_calls_total", "Calls that were tried a second time.", ("direction",),
               _guarded(lambda g: {way: g.retried_calls.get(way, 0) for way in g.breakers})),
    MetricSpec("backend_in_flight_bytes", "Bytes of the frames that are being read or written.", (),
               _guarded(lambda g: g.in_flight_bytes)),
    MetricSpec("backend_in_flight_calls", "Calls under way.", (), _guarded(lambda g: g.in_flight_calls)),
    MetricSpec("backend_overdue_calls", "Calls that hang past their deadline.", (),
               _guarded(lambda g: g.overdue_calls)),
    MetricSpec("backend_call_seconds", "How long calls take.", ("verb",),
               _guarded(lambda g: {verb: g.latency[verb] for verb in Verb})),
)  # fmt: skip
