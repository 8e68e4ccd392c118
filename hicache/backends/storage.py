"""Storage: one store, or several behind the same verbs, and statistics of each store.

A `Store` is the shell around a driver; `compose` and the daemon's pool are a `StoreGroup` each. `verbs` has the rules.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from .base import BackendStatistics, Direction, EvictionListener, Usage
from .guard.admission import GuardStatistics
from .guard.health import IDLE, NOT_OPEN, HealthState, StoreHealth, problem
from .store import Store
from .verbs import Verbs

T = TypeVar("T")


class StoreGroup(Verbs):
    """Storage that passes its calls on to other stores."""

    @property
    @abstractmethod
    def stores(self) -> tuple[Store, ...]:
        """The stores behind it, in the order in which they are read. Does not block."""

    def statistics(self) -> BackendStatistics:
        """Return the totals of all stores since they were opened. A page that two stores looked up counts twice. Does
        not block."""
        found = [store.statistics() for store in self.stores]
        return BackendStatistics(
            gets=_sum(one.gets for one in found),
            sets=_sum(one.sets for one in found),
            corrupt=_sum(one.corrupt for one in found),
            errors=_sum(one.errors for one in found),
            evicted_pages=sum(one.evicted_pages for one in found),
            read_bytes=sum(one.read_bytes for one in found),
            written_bytes=sum(one.written_bytes for one in found),
            expired_pages=sum(one.expired_pages for one in found),
        )

    def may_pass(self, direction: Direction) -> bool:
        """True if at least one store would be called now. Does not block; a scheduler calls it each step."""
        return any(store.may_pass(direction) for store in self.stores)

    def register_memory(self, memory: memoryview) -> None:
        """Register `memory`, which contains the frames, with stores that transfer such memory faster. Called before the
        first verb; may block. Other frames also work, with an additional copy.

        REQUIRES: `memory` stays until the storage is closed. A failure is counted and logged. Raises InvalidInput
        for memory that cannot be registered at all.
        """
        for store in self.stores:
            store.register_memory(memory)

    def watch_evictions(self, listener: EvictionListener) -> None:
        """Call `listener` with the keys of this namespace's pages after a store has evicted them in this process. One
        listener at a time. Does not block."""
        for store in self.stores:
            store.watch_evictions(listener)


# What engines use.
Storage: TypeAlias = Store | StoreGroup


def _sum(counts: Iterable[Mapping[T, int]]) -> dict[T, int]:
    total: Counter[T] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Statistics of one store. `name` is unique in its storage. `usage` is None until it is known; `guard` is None for
    storage that is not open."""

    name: str
    statistics: BackendStatistics
    usage: Usage | None
    guard: GuardStatistics | None
    health: StoreHealth = IDLE


def unopened(name: str, since_s: float, detail: str) -> StoreStatistics:
    """Return the statistics of storage that is wanted and not open since `since_s` (wall clock), with the reason."""
    health = problem(HealthState.KEEPS_NOTHING, since_s, NOT_OPEN, detail=detail)
    return StoreStatistics(name, BackendStatistics({}, {}, {}, {}, 0, 0, 0), None, None, health)


def store_statistics(storage: Storage) -> tuple[StoreStatistics, ...]:
    """Return the statistics of each store, in the order of reads, named as by `named_stores`. Does not block."""
    return tuple(
        StoreStatistics(name, store.statistics(), store.usage_sample(), store.guard_statistics(), store.health())
        for name, store in named_stores(storage)
    )


def named_stores(storage: Storage) -> list[tuple[str, Store]]:
    """Return the stores with their names, in the order of reads. The second store of a name is called `name-2`."""
    return list(zip(unique_names([store.name for store in storage.stores]), storage.stores, strict=True))


def unique_names(names: Sequence[str]) -> list[str]:
    """Return `names` made unique: the second occurrence of a name gets the suffix `-2`."""
    found: dict[str, None] = {}
    seen: Counter[str] = Counter()
    for name in names:
        unique = name
        while unique in found:
            seen[name] += 1
            unique = f"{name}-{seen[name] + 1}"
        found[unique] = None
    return list(found)
