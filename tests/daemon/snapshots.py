"""Snapshots of a daemon with constructed values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hicache.backends.base import BackendStatistics, Direction, GetOutcome, SetOutcome, Usage
from hicache.backends.guard import GuardStatistics, Override, Verb
from hicache.backends.guard.breaker import BreakerState, BreakerStatistics
from hicache.backends.storage import StoreStatistics
from hicache.daemon.statistics import (
    ClientStatistics,
    HotPrefix,
    NamespaceStatistics,
    NodeState,
    NodeStatistics,
    PoolStatistics,
    SharingStatistics,
)
from hicache.histogram import BOUNDS_S, HistogramStatistics

MIB = 1 << 20
DIGEST = "5e" * 32


def latency(*counts: int) -> HistogramStatistics:
    """Return latencies with these numbers of calls in the first buckets."""
    all_counts = (*counts, *(0 for _ in range(len(BOUNDS_S) + 1 - len(counts))))
    return HistogramStatistics(BOUNDS_S, all_counts, sum(counts) * 0.001)


def breaker(
    state: BreakerState = BreakerState.CLOSED, reason: str = "", opens: int = 0, override: Override = Override.AUTO
) -> BreakerStatistics:
    """Return a breaker without probes."""
    return BreakerStatistics(state, override, reason, opens, 0, 0)


def guard(
    read: BreakerStatistics | None = None, failures: Mapping[Any, int] | None = None, **fields: Any
) -> GuardStatistics:
    """Return a guard with a closed write breaker."""
    values: dict[str, Any] = {
        "breakers": {Direction.READ: read or breaker(), Direction.WRITE: breaker()},
        "refused": {}, "failures": failures or {}, "retried_calls": {},
        "latency": {verb: latency() for verb in Verb},
        "in_flight_calls": 2, "in_flight_bytes": 3 * MIB, "overdue_calls": 0,
    }
    return GuardStatistics(**(values | fields))


def backend(read_bytes: int = 0, written_bytes: int = 0, corrupt: Mapping[str, int] | None = None) -> BackendStatistics:
    """Return statistics of a store, or of the calls of clients."""
    return BackendStatistics(
        gets={GetOutcome.HIT: 5}, sets={SetOutcome.STORED: 3}, corrupt=corrupt or {}, errors={}, evicted_pages=0,
        read_bytes=read_bytes, written_bytes=written_bytes,
    )


def store(name: str = "nvme", **fields: Any) -> StoreStatistics:
    """Return a store of 1000 MiB of which 300 MiB are used."""
    values: dict[str, Any] = {"statistics": backend(), "guard": guard(), "usage": Usage(300, 300 * MIB, 1000 * MIB)}
    return StoreStatistics(name=name, **(values | fields))


def namespace(label: str = "llama-8b", **fields: Any) -> NamespaceStatistics:
    """Return a namespace with one store."""
    values: dict[str, Any] = {
        "namespace": DIGEST, "label": label, "weights_epoch": 3, "frame_bytes": MIB, "pool_bytes": 40 * MIB,
        "quota_bytes": None, "sharing": SharingStatistics(0, 0, 0, 0, 0), "backend": backend(), "stores": (store(),),
        "copies": {}, "opening": None,
    }
    return NamespaceStatistics(**(values | fields))


def node(*namespaces: NamespaceStatistics, **fields: Any) -> NodeStatistics:
    """Return a daemon that serves one engine."""
    values: dict[str, Any] = {
        "instance": "0123456789abcdef", "state": NodeState.READY, "uptime_s": 4000.0,
        "pool": PoolStatistics(100 * MIB, 40 * MIB, 5 * MIB, 40, 60, 20), "namespaces": namespaces,
        "clients": (ClientStatistics("engine0", 64, MIB, 1, True),), "connections": {"unix": 3, "tcp": 0},
        "connections_max": 512,
        "requests": {("get", 200): 12, ("get", 503): 1, ("set", 200): 4}, "refused": {"requests": 0},
        "latency": {"get": latency(3, 9)}, "in_flight_requests": 2,
        "hot": (HotPrefix("deadbeef", "llama-8b", 12, 34),),
    }
    return NodeStatistics(**(values | fields))
