"""Snapshots of this package's parts as the models of the admin surface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backends.base import Direction
from ..backends.storage import StoreStatistics
from ..ghosts import Kind
from .models import BreakerStatus, Cause, StoreStatus


def store_status(namespace: str, leaf: StoreStatistics) -> StoreStatus:
    """Return the status of one store."""
    usage, guard = leaf.usage, leaf.guard
    breakers = {
        way: BreakerStatus.model_validate({
            "state": one.state.name.lower(), "override": one.override, "reason": one.reason, "opens": one.opens,
        })
        for way, one in (() if guard is None else guard.breakers.items())
    }
    return StoreStatus(
        name=leaf.name, namespace=namespace, pages=None if usage is None else usage.pages,
        bytes=None if usage is None else usage.bytes, capacity_bytes=None if usage is None else usage.capacity_bytes,
        read=breakers.get(Direction.READ), write=breakers.get(Direction.WRITE),
        in_flight_calls=0 if guard is None else guard.in_flight_calls,
        errors=sum(leaf.statistics.errors.values()), damaged=sum(leaf.statistics.corrupt.values()),
        health=leaf.health,
    )


def causes(counts: Mapping[Kind, int]) -> list[Cause]:
    """Return the counts that are not 0, in their order."""
    return [Cause(reason=reason, detail=detail, tokens=n) for (reason, detail), n in counts.items() if n]


def state_of(state: str, stores: Sequence[StoreStatus]) -> str:
    """Return `state`, or `degraded` if the target is ready and one of its stores has a problem."""
    return "degraded" if state == "ready" and any(store.health.is_problem for store in stores) else state
