"""The metrics of a daemon: its snapshot as metric families, for `/metrics`.

Samples of a namespace have its first 8 digits as a label, as in log lines, and are not added up: a sum over namespaces
would fall when one is closed, which Prometheus treats as a restart. At most `daemon.namespaces_max` are open at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from prometheus_client.registry import Collector

from ..backends.base import GetOutcome, SetOutcome
from ..ghosts import KINDS
from ..histogram import BOUNDS_S, Histogram
from ..metrics.spec import MetricSpec, SnapshotCollector, Table, Values
from ..metrics.stores import STORE_METRICS, copy_metrics, with_zeros
from .gate import OPERATIONS
from .statistics import LIMITS, NamespaceStatistics, NodeState, NodeStatistics

# Answers by the first digit of their status; /v1 has no other ones.
_STATUSES = ("2xx", "4xx", "5xx")
_NEVER = Histogram(BOUNDS_S).statistics()


def _requests(state: NodeStatistics) -> Values:
    found = Counter({(operation, status): 0 for operation in OPERATIONS for status in _STATUSES})
    for (operation, code), count in state.requests.items():
        found[operation, f"{code // 100}xx"] += count
    return found


DAEMON_METRICS: tuple[MetricSpec[NodeStatistics], ...] = (
    MetricSpec("daemon_state", "1 for the current state of the daemon.", ("state",),
               lambda n: {state.value: n.state is state for state in NodeState},
               "draining for longer than daemon.drain_timeout: a store hangs."),
    MetricSpec("daemon_uptime_seconds", "Seconds since the daemon was started.", (), lambda n: n.uptime_s,
               "Falls: the daemon was restarted."),
    MetricSpec("daemon_connections", "Connections of clients, by listener.", ("listener",), lambda n: n.connections,
               "At daemon_connections_max further ones are rejected."),
    MetricSpec("daemon_connections_max", "Limit of connections for each listener.", (),
               lambda n: n.connections_max, "The entry daemon.connections_max; SIGHUP reloads it."),
    MetricSpec("daemon_in_flight_requests", "Requests that are not yet answered.", (), lambda n: n.in_flight_requests,
               "At daemon.connections_max further ones are rejected. Steadily high: the stores are slow."),
    MetricSpec("daemon_requests_total", "Answers by operation and class of status.", ("operation", "status"), _requests,
               "5xx of a verb: see daemon_refused_requests_total. 4xx: a client has no token, has another version, or "
               "is not a HiCache client."),
    MetricSpec("daemon_request_seconds", "Time of answers, from the head of the request.", ("operation",),
               lambda n: {operation: n.latency.get(operation, _NEVER) for operation in OPERATIONS},
               "The difference from backend_call_seconds is the daemon's share.",
               True),
    MetricSpec("daemon_refused_requests_total", "Requests and connections that a limit rejected or ended, by limit.",
               ("reason",), lambda n: with_zeros(LIMITS, n.refused),
               "token: clients without the token. connections, requests: raise the entry of that name, or add a node. "
               "..._timeout: slow or hostile clients."),
    MetricSpec("daemon_clients", "Engines of this host whose memory the daemon has mapped.", (),
               lambda n: len(n.clients), "Fewer than engines: the others send their pages through the socket."),
    MetricSpec("daemon_gone_clients", "Ended engines whose memory is still mapped.", (),
               lambda n: sum(not one.is_alive for one in n.clients),
               "Above 0 for long: an operation on that memory hangs in a store."),
    MetricSpec("daemon_client_memory_bytes", "Mapped memory of engines.", (),
               lambda n: sum(one.pages * one.frame_bytes for one in n.clients),
               "At 8 TiB further engines send their pages through the socket."),
    MetricSpec("daemon_client_operations", "Operations in flight on memory of engines.", (),
               lambda n: sum(one.operations for one in n.clients),
               "Stays above 0 without load: a store hangs."),
    MetricSpec("daemon_pool_capacity_bytes", "Memory of the pool of hot pages.", (), lambda n: n.pool.capacity_bytes,
               "The entry daemon.pool."),
    MetricSpec("daemon_pool_used_bytes", "Memory of the pool with pages.", (), lambda n: n.pool.used_bytes,
               "Full is normal."),
    MetricSpec("daemon_pool_pinned_bytes", "Memory of the pool used by pinned pages.", (),
               lambda n: n.pool.pinned_bytes, "Not available to eviction; `hicache ctl unpin` ends pins."),
    MetricSpec("daemon_pool_pages", "Pages in the pool.", (), lambda n: n.pool.pages, "As daemon_pool_used_bytes."),
    MetricSpec("daemon_pool_admitted_pages_total", "Pages that entered the pool.", (), lambda n: n.pool.admitted,
               "Near daemon_pages_total: almost no page is requested again."),
    MetricSpec("daemon_pool_evicted_pages_total", "Pages evicted from the pool.", (),
               lambda n: n.pool.evicted,
               "Near the admitted pages while pool hits are rare: the pool is too small."),
)

_COPIES: tuple[MetricSpec[NamespaceStatistics], ...] = copy_metrics(
    lambda s: s.copies, *["As for an engine that has the composition itself."] * 2
)

# For each namespace; its first 8 digits are the label `namespace`, which comes first.
NAMESPACE_METRICS: tuple[MetricSpec[NamespaceStatistics], ...] = (
    MetricSpec("daemon_namespace_info", "The label and weights epoch of a namespace: always 1.",
               ("label", "weights_epoch"), lambda s: {(s.label, str(s.weights_epoch)): 1},
               "Adds labels to the other series of a namespace: `... * on(instance, namespace) group_left(label) "
               "hicache_daemon_namespace_info`."),
    MetricSpec("daemon_pages_total", "Pages that engines requested, by source.", ("source",),
               lambda s: {"pool": s.sharing.pool_hits, "store": s.sharing.store_hits,
                          "shared_read": s.sharing.shared_reads, "miss": s.sharing.misses},
               "pool: the daemon's gain over the store. shared_read: requested by two engines at once, read once. "
               "miss: not found, or read in vain."),
    MetricSpec("daemon_missed_pages_total", "Pages that were looked up or read and not found, by reason.",
               ("reason", "detail"), lambda s: {**dict.fromkeys(KINDS, 0), **s.sharing.missed},
               "Their sum is the misses of daemon_pages_total. docs/daemon.md has the reasons and what to do."),
    MetricSpec("daemon_shared_writes_total", "Pages not written because another engine was writing them.", (),
               lambda s: s.sharing.shared_writes, "Writes that sharing saved."),
    MetricSpec("daemon_get_pages_total", "Pages that engines requested, by outcome.", ("outcome",),
               lambda s: with_zeros(GetOutcome, s.backend.gets), "As backend_get_pages_total, as engines see it."),
    MetricSpec("daemon_set_pages_total", "Pages that engines stored, by outcome.", ("outcome",),
               lambda s: with_zeros(SetOutcome, s.backend.sets), "As backend_set_pages_total, as engines see it."),
    MetricSpec("daemon_transferred_bytes_total", "Bytes of frames sent to and received from engines.", ("direction",),
               lambda s: {"read": s.backend.read_bytes, "write": s.backend.written_bytes},
               "The difference from backend_transferred_bytes_total is the traffic that pool and sharing save the "
               "stores."),
    MetricSpec("daemon_namespace_pool_bytes", "Memory of the pool used by the namespace.", (),
               lambda s: s.pool_bytes, "Shows which namespace uses the pool."),
    MetricSpec("daemon_namespace_quota_bytes", "The quota of a namespace; absent without one.", (),
               lambda s: s.quota_bytes, "Set by `hicache ctl quota`."),
    *_COPIES,
)


def daemon_collector(statistics: Callable[[], NodeStatistics]) -> Collector:
    return SnapshotCollector(
        statistics,
        Table(DAEMON_METRICS, lambda n: [((), n)]),
        Table(NAMESPACE_METRICS, lambda n: [((one.namespace[:8],), one) for one in n.namespaces], ("namespace",)),
        Table(
            STORE_METRICS,
            lambda n: [((one.namespace[:8], store.name), store) for one in n.namespaces for store in one.stores],
            ("namespace", "backend"),
        ),
    )
