"""Agreement: from what has ended on this rank (`Progress`) to what has ended on every rank.

All ranks make the same decisions as long as they decide by the same facts. Facts that come from threads, storage and
clocks differ, so none is acted on directly: each step sends this rank's `Progress` as one vector of integers through a
MIN all-reduce, and acts on what the one before gave. Every number is made so that the minimum is the safe answer.

    number                           minimum over the ranks means
    leading copies ended             ended everywhere; copies of a direction end in the order of their launch
    a store: 0 runs, 1 bad, 2 well   runs somewhere; else bad somewhere; else well everywhere
    a prefetch: pages                the shorter prefix
    a prefetch: ended, in time       ended everywhere; its time is over as soon as it is somewhere
    healthy                          not healthy as soon as one rank says so
    storage: opened, read, write     not open, or closed in a direction, as long as it is on one rank
    time, rates                    the earliest time, the smallest measurement
    counters, each as +x and -x      equal on all ranks, else the ranks have decided differently: RankError

The vector has fixed places for the oldest operations of each kind. All ranks submit the same operations in the same
order, so the n-th place means the same operation everywhere, which the counters prove. A result speaks of the
operations that were in the places when it was started; Agreement remembers them.

Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..errors import RankError
from ..histogram import STEP_BOUNDS_S, Histogram
from .gate import Readiness
from .operations import Lookup, Read, Store
from .ranks import RankGroup
from .statistics import RankStatistics

# Stores end nearly in the order of submission, so the oldest few are all that can have ended, but for those of a step.
STORE_PLACES = 64
# What must be equal on all ranks, or they have decided differently.
COUNTERS = ("writes", "loads", "stores", "prefetches", "free host pages")
# Backends start no page after the deadline but finish what they read; without this, a request would go on a moment
# before its last batch of up to a hundred pages arrives.
PREFETCH_GRACE_S = 0.05


class StoreProgress(enum.IntEnum):
    """Where a store is. Ordered, so that the minimum over the ranks is the state of them all."""

    RUNNING = 0
    FAILED = 1
    STORED = 2


class PrefetchProgress(NamedTuple):
    """Where a lookup or a read is."""

    operation: Lookup | Read
    ended: bool
    pages: int  # found by a lookup that has ended, or read so far
    in_time: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has ended and what is possible: on this rank, or on all of them. `rates` are measurements."""

    healthy: bool = True
    storage: Readiness = field(default_factory=Readiness)
    time_ms: int = 0  # since the start
    writes_done: int = 0
    loads_done: int = 0
    rates: tuple[int, ...] = ()
    prefetches: Sequence[PrefetchProgress] = ()
    stores: Sequence[tuple[Store, StoreProgress]] = ()


def prefetch_progress(prefetches: Iterable[Lookup | Read], time_s: float) -> list[PrefetchProgress]:
    """Where each is on this rank at `time_s`. `ended` is read first: after it the pages do not change."""
    late_s = time_s - PREFETCH_GRACE_S
    return [PrefetchProgress(one, one.ended, one.pages_here, late_s < one.deadline) for one in prefetches]


def store_progress(store: Store, *, elsewhere: bool) -> StoreProgress:
    """Where a store is on this rank; with `elsewhere`, another rank does the work, and this one agrees to its word."""
    if elsewhere:
        return StoreProgress.STORED
    if not store.ended:
        return StoreProgress.RUNNING
    return StoreProgress.STORED if store.complete else StoreProgress.FAILED


class Agreement:
    """One exchange of `Progress` per step.

    REQUIRES: the same arguments on all ranks (the length of the vector depends on them), and each rank calls `result`
    and then `start` once per step. Once something raised RankError, everything does.
    """

    def __init__(self, group: RankGroup, *, prefetch_places: int, rates: int) -> None:
        self._group = group
        self._prefetch_places = prefetch_places
        self._rates = rates
        self._sent: tuple[list[Lookup | Read], list[Store]] | None = None
        self._failure: RankError | None = None
        self._wait = Histogram(STEP_BOUNDS_S)

    def start(self, local: Progress, counts: Mapping[str, int]) -> None:
        """Send this rank's progress. Does not wait. Operations beyond the places are left for later steps.

        `counts` has the values of `COUNTERS`. Raises RankError.
        """
        self._require_whole()
        prefetches = list(local.prefetches[: self._prefetch_places])
        stores = list(local.stores[:STORE_PLACES])
        numbers = [int(local.healthy), *map(int, local.storage)]
        numbers += [local.time_ms, local.writes_done, local.loads_done, *local.rates]
        for name in COUNTERS:
            numbers += [counts[name], -counts[name]]
        for prefetch in prefetches:
            numbers += [int(prefetch.ended), prefetch.pages, int(prefetch.in_time)]
        numbers += [0, 0, 0] * (self._prefetch_places - len(prefetches))
        numbers += [state for _, state in stores]
        numbers += [0] * (STORE_PLACES - len(stores))
        self._group.start(np.array(numbers, dtype=np.int64))
        self._sent = [prefetch.operation for prefetch in prefetches], [store for store, _ in stores]

    def result(self) -> Progress:
        """What all ranks had ended when the last `start` was called; nothing before the first. Waits for the slowest
        rank, up to the group's deadline. Raises RankError, also if the ranks have gone astray.
        """
        self._require_whole()
        if self._sent is None:
            return Progress(rates=(0,) * self._rates)
        (prefetches, stores), self._sent = self._sent, None
        began_s = time.perf_counter()
        try:
            numbers = iter(self._group.result().tolist())
        except RankError as error:
            self._failure = error
            raise
        finally:
            self._wait.add(time.perf_counter() - began_s)
        healthy, opened, read, write, time_ms, writes_done, loads_done = itertools.islice(numbers, 7)
        rates = tuple(itertools.islice(numbers, self._rates))
        self._require_equal_counters(list(itertools.islice(numbers, 2 * len(COUNTERS))))
        places = list(itertools.islice(numbers, 3 * self._prefetch_places))
        return Progress(
            healthy=healthy == 1,
            storage=Readiness(opened, read == 1, write == 1),
            time_ms=time_ms,
            writes_done=writes_done,
            loads_done=loads_done,
            rates=rates,
            prefetches=[
                PrefetchProgress(prefetch, places[3 * i] == 1, places[3 * i + 1], places[3 * i + 2] == 1)
                for i, prefetch in enumerate(prefetches)
            ],
            stores=[(store, StoreProgress(state)) for store, state in zip(stores, numbers, strict=False)],
        )

    def statistics(self) -> RankStatistics:
        """Return a snapshot. May be called from any thread."""
        return RankStatistics(
            self._group.rank, self._group.size, self._failure is not None, self._wait.statistics()
        )

    def close(self) -> None:
        """Take no further part."""
        self._group.close()

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _require_equal_counters(self, numbers: list[int]) -> None:
        for i, name in enumerate(COUNTERS):
            lowest, highest = numbers[2 * i], -numbers[2 * i + 1]
            if lowest != highest:
                self._failure = RankError(
                    f"the ranks have decided differently: between {lowest} and {highest} {name}; "
                    "call `close()`, then restart all ranks"
                )
                raise self._failure
