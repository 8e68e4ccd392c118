"""Snapshots of a daemon, for its metrics, its page, `/statusz` and `hicache ctl status`. Counts are totals since the
start of the daemon.

As JSON, for `/statusz` and the page at `/`, the fields have the same names. A mapping whose keys are pairs becomes a
mapping of mappings: `requests` is `{operation: {status: answers}}`. A breaker's state is its name in lower case.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ..backends.base import BackendStatistics
from ..backends.compose import CopyStatistics
from ..backends.guard import StoreProblem, grouped
from ..backends.slot import Waiting
from ..backends.storage import StoreStatistics
from ..ghosts import Kind
from ..histogram import BOUNDS_S, Histogram, HistogramStatistics

# The limits that reject or end requests and connections, by their names in counters, with words for the log.
LIMITS: Mapping[str, str] = {
    "answer_lost": "connections were lost while they were answered",
    "answer_timeout": "clients did not read their answer in time (daemon.client_timeout)",
    "body_bytes": "bodies were too long",
    "body_lost": "connections were lost before the end of a body",
    "body_timeout": "bodies did not arrive in time (daemon.client_timeout)",
    "connections": "connections were too many (daemon.connections_max)",
    "draining": "requests came while the daemon was ending",
    "head_bytes": "heads of requests were too long",
    "head_timeout": "heads of requests did not arrive in time (daemon.client_timeout)",
    "host": "requests named a host that is not this daemon (daemon.hosts)",
    "idle_timeout": "connections were closed after an early answer (daemon.client_timeout)",
    "peer": "connections came from another user's processes",
    "pipelining": "clients did not wait for their answer",
    "requests": "requests were too many at once (daemon.connections_max)",
    "token": "requests came without the token",
}


class CallCounters:
    """The counters of requests: totals since the start, and the current requests and connections.

    Only the event loop's thread counts. Any thread may take a snapshot: copying a dictionary or list is one operation.
    """

    def __init__(self) -> None:
        self.connections = {"unix": 0, "tcp": 0}
        self.in_flight = 0
        self.requests: Counter[tuple[str, int]] = Counter()  # answers by operation and status
        self.refused: Counter[str] = Counter()  # by limit
        self._took: dict[str, Histogram] = {}

    def answered(self, operation: str, status: int, took_s: float) -> None:
        """Count an answer. `operation` is one of a few names, never a client's text."""
        self.requests[operation, status] += 1
        if operation not in self._took:
            self._took = {**self._took, operation: Histogram(BOUNDS_S)}
        self._took[operation].add(took_s)

    def refuse(self, limit: str) -> None:
        """Count a request or connection that a limit has rejected."""
        self.refused[limit] += 1

    def latency(self) -> dict[str, HistogramStatistics]:
        return {name: histogram.statistics() for name, histogram in self._took.items()}


class NodeState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The host pool of a daemon, over all namespaces. `admitted` and `evicted` are pages."""

    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    pages: int
    admitted: int
    evicted: int


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A chain that requests used often recently, by the first 8 hexadecimal digits of the key of its last hot page."""

    page: str
    label: str
    pages: int
    hits: int


@dataclass(frozen=True, slots=True)
class SharingStatistics:
    """Pages of one namespace by their source, and pages that two clients shared.

    `pool_hits` came from the host pool, `store_hits` from a store, `shared_reads` from another client's read in flight.
    `misses` were looked up and not found, or read in vain, `missed` by kind. An engine reads the pages that a lookup
    has found and no others, so each requested page counts once; a prompt that is looked up again counts again.
    `shared_writes` were not written because another client was writing them.
    """

    pool_hits: int
    store_hits: int
    misses: int
    shared_reads: int
    shared_writes: int
    missed: Mapping[Kind, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NamespaceStatistics:
    """One open namespace. `namespace` is its digest in hexadecimal digits. `backend` counts for its clients, `stores`
    are those of `Slot.leaves`. `opening` says why a wanted store is not open; None if it is open, or none is wanted,
    or the first attempt has not ended."""

    namespace: str
    label: str
    weights_epoch: int
    frame_bytes: int
    pool_bytes: int
    quota_bytes: int | None
    sharing: SharingStatistics
    backend: BackendStatistics
    stores: tuple[StoreStatistics, ...]
    copies: Mapping[str, CopyStatistics]
    opening: Waiting | None


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """The shared memory of one engine on this host. `operations` on its frames are in flight."""

    name: str
    pages: int
    frame_bytes: int
    operations: int
    is_alive: bool


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """The whole daemon. `connections` are by listener (unix, tcp), each with the limit `connections_max`; `requests`
    counts answers by (operation, status code), `refused` rejected requests by limit; `latency` is by operation."""

    instance: str
    state: NodeState
    uptime_s: float
    pool: PoolStatistics
    namespaces: tuple[NamespaceStatistics, ...]
    clients: tuple[ClientStatistics, ...]
    connections: Mapping[str, int]
    connections_max: int
    requests: Mapping[tuple[str, int], int]
    refused: Mapping[str, int]
    latency: Mapping[str, HistogramStatistics]
    in_flight_requests: int
    hot: tuple[HotPrefix, ...]

    def problems(self) -> list[StoreProblem]:
        """Return the stores that keep nothing or cannot be read."""
        return grouped((leaf.name, one.label, leaf.health) for one in self.namespaces for leaf in one.stores)


def status_json(statistics: NodeStatistics) -> dict[str, Any]:
    """Return `statistics` as JSON values; `latency_bounds_s` are the upper bounds of all `counts` in it."""
    status: dict[str, Any] = _plain(statistics)
    return status | {"latency_bounds_s": list(BOUNDS_S)}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.IntEnum):  # before int: readers need the name
        return value.name.lower()
    if value is None or isinstance(value, (str, int, float)):  # a StrEnum is written as its value
        return value
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for key, one in value.items():
            if isinstance(key, tuple):
                first, second = key
                plain.setdefault(str(first), {})[str(second)] = _plain(one)
            else:
                plain[str(key)] = _plain(one)
        return plain
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TypeError(f"a snapshot cannot hold a {type(value).__name__}")
