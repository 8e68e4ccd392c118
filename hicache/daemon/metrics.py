"""The metrics of a daemon: its snapshot as metric families, for `/metrics`.

Samples of a namespace carry its first 8 digits as a label, as log lines do, and are not added up: a sum over namespaces
would fall when one is closed, which Prometheus takes for a restart. At most `daemon.namespaces_max` are open at a time.

Locking design: the collector holds nothing that changes; it takes one snapshot per scrape, on the thread that asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..backends.base import GetOutcome, SetOutcome
from ..histogram import BOUNDS_S, LatencyStatistics
from ..metrics.families import BUILD_INFO
from ..metrics.spec import MetricSpec, Values
from ..metrics.stores import STORE_METRICS, copies_by_outcome, outcomes, waiting_copies, with_zeros
from .calls import LIMITS
from .gate import OPERATIONS
from .statistics import NamespaceStatistics, NodeState, NodeStatistics

# Answers by the first digit of their status; below /v1 there are no others.
_STATUSES = ("2xx", "4xx", "5xx")
_NEVER = LatencyStatistics((0,) * (len(BOUNDS_S) + 1), 0.0)


class DaemonCollector(Collector):
    """A collector that calls `statistics` of a node once per scrape."""

    def __init__(self, statistics: Callable[[], NodeStatistics]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """The families without samples: registering does not take a snapshot."""
        return [BUILD_INFO.collect(()), *(spec.collect(()) for spec in DAEMON_METRICS), *_of_namespaces(())]

    def collect(self) -> Iterable[Metric]:
        """The families of one snapshot."""
        state = self._statistics()
        yield BUILD_INFO.collect((((), None),))
        yield from (spec.collect((((), state),)) for spec in DAEMON_METRICS)
        yield from _of_namespaces(state.namespaces)


def _of_namespaces(namespaces: Iterable[NamespaceStatistics]) -> Iterator[Metric]:
    named = [((one.namespace[:8],), one) for one in namespaces]
    yield from (spec.collect(named, "namespace") for spec in NAMESPACE_METRICS)
    stores = [((*name, store.name), store) for name, one in named for store in one.stores]
    yield from (spec.collect(stores, "namespace", "backend") for spec in STORE_METRICS)


def _requests(state: NodeStatistics) -> Values:
    found = Counter({(operation, status): 0 for operation in OPERATIONS for status in _STATUSES})
    for (operation, code), count in state.requests.items():
        found[operation, f"{code // 100}xx"] += count
    return found


DAEMON_METRICS: tuple[MetricSpec[NodeStatistics], ...] = (
    MetricSpec("daemon_state", "1 for the state that the daemon is in.", ("state",),
               lambda n: {state.value: n.state is state for state in NodeState},
               "draining for longer than daemon.drain_timeout: a store hangs while it is closed."),
    MetricSpec("daemon_uptime_seconds", "Seconds since the daemon was started.", (), lambda n: n.uptime_s,
               "Falls: the daemon was restarted; the log of the last one says why it ended."),
    MetricSpec("daemon_connections", "Connections of clients, by listener.", ("listener",), lambda n: n.connections,
               "At daemon_connections_max further ones are refused."),
    MetricSpec("daemon_connections_max", "The most connections that each listener takes.", (),
               lambda n: n.connections_max, "The entry daemon.connections_max; SIGHUP takes a new one."),
    MetricSpec("daemon_in_flight_requests", "Requests that are not answered yet.", (), lambda n: n.in_flight_requests,
               "At daemon.requests_max further ones are refused. Steadily high: the stores are slow."),
    MetricSpec("daemon_requests_total", "Answers by operation and class of status.", ("operation", "status"), _requests,
               "5xx of a verb: back-pressure, or a namespace whose store cannot be opened; the log says which. 4xx: "
               "a client without a token, of another version, or not one of HiCache."),
    MetricSpec("daemon_request_seconds", "How long answers take, from the head of the request on.", ("operation",),
               lambda n: {operation: n.latency.get(operation, _NEVER) for operation in OPERATIONS},
               "Against backend_call_seconds it is what the daemon adds. get and set contain the wait for the store.",
               True),
    MetricSpec("daemon_refused_requests_total", "Requests and connections that a limit refused or ended, by limit.",
               ("reason",), lambda n: with_zeros(LIMITS, n.refused),
               "token: somebody without the token asks. connections, requests: raise the entry of that name, or add "
               "a node. ..._timeout: slow or hostile clients. docs/daemon.md has the bounds."),
    MetricSpec("daemon_clients", "Engines of this host whose memory the daemon has mapped.", (),
               lambda n: len(n.clients), "Fewer than engines: the others send their pages through the socket."),
    MetricSpec("daemon_gone_clients", "Engines that have ended whose memory is still mapped.", (),
               lambda n: sum(not one.is_alive for one in n.clients),
               "Above 0 for more than moments: an operation on that memory does not return; a store hangs."),
    MetricSpec("daemon_client_memory_bytes", "Memory of engines that is mapped.", (),
               lambda n: sum(one.pages * one.frame_bytes for one in n.clients),
               "At daemon.memory_max further engines are refused and send their pages through the socket."),
    MetricSpec("daemon_client_operations", "Operations in flight that touch memory of engines.", (),
               lambda n: sum(one.operations for one in n.clients),
               "Stays above 0 without load: a store hangs."),
    MetricSpec("daemon_pool_capacity_bytes", "Memory of the pool of hot pages.", (), lambda n: n.pool.capacity_bytes,
               "The entry daemon.pool."),
    MetricSpec("daemon_pool_used_bytes", "Memory of the pool that holds pages.", (), lambda n: n.pool.used_bytes,
               "Full is normal."),
    MetricSpec("daemon_pool_pinned_bytes", "Memory of the pool that pinned pages take.", (),
               lambda n: n.pool.pinned_bytes, "What eviction cannot use; pins end by `hicache ctl unpin`."),
    MetricSpec("daemon_pool_pages", "Pages in the pool.", (), lambda n: n.pool.pages, "As the used bytes."),
    MetricSpec("daemon_pool_admitted_pages_total", "Pages that entered the pool.", (), lambda n: n.pool.admitted,
               "Near daemon_pages_total: nearly each page enters once and is not asked for again."),
    MetricSpec("daemon_pool_evicted_pages_total", "Pages that left the pool for lack of room.", (),
               lambda n: n.pool.evicted,
               "Rises as fast as admitted pages while pool hits are rare: the pool is too small for the load."),
)  # fmt: skip

# Of each namespace; its first 8 digits are the label `namespace`, which comes before the others.
NAMESPACE_METRICS: tuple[MetricSpec[NamespaceStatistics], ...] = (
    MetricSpec("daemon_namespace_info", "The label and weights epoch of a namespace: always 1.",
               ("label", "weights_epoch"), lambda s: {(s.label, str(s.weights_epoch)): 1},
               "Names the other series of a namespace: `... * on(instance, namespace) group_left(label) "
               "hicache_daemon_namespace_info`."),
    MetricSpec("daemon_pages_total", "Pages that engines asked for, by where they came from.", ("source",),
               lambda s: {"pool": s.sharing.pool_hits, "store": s.sharing.store_hits,
                          "shared_read": s.sharing.shared_reads, "miss": s.sharing.misses},
               "pool is what the daemon gains over the store alone; shared_read are pages that two engines wanted at "
               "the same time and one read brought."),
    MetricSpec("daemon_shared_writes_total", "Pages that were not written since another engine was writing them.", (),
               lambda s: s.sharing.shared_writes, "Writes that sharing saved."),
    MetricSpec("daemon_get_pages_total", "Pages that engines asked for, by outcome.", ("outcome",),
               lambda s: outcomes(GetOutcome, s.backend.gets), "As backend_get_pages_total, as engines see it."),
    MetricSpec("daemon_set_pages_total", "Pages that engines stored, by outcome.", ("outcome",),
               lambda s: outcomes(SetOutcome, s.backend.sets), "As backend_set_pages_total, as engines see it."),
    MetricSpec("daemon_transferred_bytes_total", "Bytes of frames that went to and came from engines.", ("direction",),
               lambda s: {"read": s.backend.read_bytes, "write": s.backend.written_bytes},
               "Against backend_transferred_bytes_total it is what pool and sharing save the stores."),
    MetricSpec("daemon_namespace_pool_bytes", "Memory of the pool that pages of the namespace take.", (),
               lambda s: s.pool_bytes, "Which namespace has the pool."),
    MetricSpec("daemon_namespace_quota_bytes", "The most that a namespace may take; absent without a quota.", (),
               lambda s: s.quota_bytes, "Set by `hicache ctl quota`."),
    MetricSpec("backend_copies_total", "Pages to be copied to a part of a composition in the background, by what "
               "became of them.", ("backend", "outcome"), lambda s: copies_by_outcome(s.copies),
               "As of an engine that has the composition itself."),
    MetricSpec("backend_waiting_copies", "Pages that wait to be copied to a part.", ("backend",),
               lambda s: waiting_copies(s.copies), "As of an engine that has the composition itself."),
)  # fmt: skip
