"""Agreement: turns the `Progress` of this rank into the progress that all ranks have made.

All ranks make the same decisions if they decide by the same facts. Facts from threads, storage and clocks differ
between ranks, so no rank acts on them directly. Each step sends this rank's `Progress` as one vector of integers
through a MIN all-reduce, and acts on the previous result. Each number is chosen so that the minimum is the safe value.

    number                                 minimum over the ranks means
    leading copies ended                   ended on all ranks; copies of a direction end in the order of their launch
    a store: 0 running, 1 failed, 2 stored running on a rank; else failed on a rank; else stored on all ranks
    a prefetch: pages                      the shorter prefix
    a prefetch: ended                      ended on all ranks
    healthy                                not healthy if one rank is not
    storage: opened, read, write           not open, or closed in a direction, if it is so on one rank
    time, rates                            the earliest time, the smallest measurement
    counters, each as +x and -x            equal on all ranks, else the ranks have decided differently: RankError

The vector has fixed slots for the oldest operations of each kind. All ranks submit the same operations in the same
order, so slot n is the same operation on all ranks; the counters verify this. A result belongs to the operations that
were in the slots at its start, so Agreement keeps them.

Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..errors import RankError
from ..histogram import STEP_BOUNDS_S, Histogram
from .gate import Readiness
from .operations import LookupOperation, ReadOperation, StoreOperation
from .ranks import RankGroup
from .statistics import RankStatistics

# Stores end nearly in the order of submission, so nearly all ended stores are among the oldest.
STORE_PLACES = 64
# Counters that are equal on all ranks, unless the ranks have decided differently.
COUNTERS = ("writes", "loads", "stores", "prefetches", "free host pages")


class StoreProgress(enum.IntEnum):
    """State of a store. Ordered, so that the minimum over the ranks is the state for all ranks."""

    RUNNING = 0
    FAILED = 1
    STORED = 2


class PrefetchProgress(NamedTuple):
    """State of a lookup or a read."""

    operation: LookupOperation | ReadOperation
    ended: bool
    pages: int  # found by an ended lookup, or read so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Ended operations and the readiness of storage, on this rank or on all ranks. `rates` are measurements."""

    healthy: bool = True
    storage: Readiness = field(default_factory=Readiness)
    time_ms: int = 0  # since the start
    writes_done: int = 0
    loads_done: int = 0
    rates: tuple[int, ...] = ()
    prefetches: Sequence[PrefetchProgress] = ()
    stores: Sequence[tuple[StoreOperation, StoreProgress]] = ()


def store_progress(store: StoreOperation, *, elsewhere: bool) -> StoreProgress:
    """Return the state of a store on this rank. With `elsewhere`, another rank stores, and its state decides."""
    if elsewhere:
        return StoreProgress.STORED
    if not store.ended:
        return StoreProgress.RUNNING
    return StoreProgress.STORED if store.complete else StoreProgress.FAILED


class Agreement:
    """Exchanges `Progress` with the other ranks once per step.

    REQUIRES: the same arguments on all ranks, because the length of the vector depends on them; each rank calls
    `result` and then `start` once per step. After the first RankError, every call raises RankError.
    """

    def __init__(self, group: RankGroup, *, prefetch_places: int, rates: int) -> None:
        self._group = group
        self._prefetch_places = prefetch_places
        self._rates = rates
        self._sent: tuple[list[LookupOperation | ReadOperation], list[StoreOperation]] | None = None
        self._failure: RankError | None = None
        self._wait = Histogram(STEP_BOUNDS_S)

    def start(self, local: Progress, counts: Mapping[str, int]) -> None:
        """Send this rank's progress. Does not wait. Operations beyond the slots are left for later steps.

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
            numbers += [int(prefetch.ended), prefetch.pages]
        numbers += [0, 0] * (self._prefetch_places - len(prefetches))
        numbers += [state for _, state in stores]
        numbers += [0] * (STORE_PLACES - len(stores))
        self._group.start(np.array(numbers, dtype=np.int64))
        self._sent = [prefetch.operation for prefetch in prefetches], [store for store, _ in stores]

    def result(self) -> Progress:
        """Return the progress of all ranks as of the last `start`; an empty one before the first. Waits for the slowest
        rank, up to the group's deadline. Raises RankError, also if the ranks have decided differently.
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
        places = list(itertools.islice(numbers, 2 * self._prefetch_places))
        return Progress(
            healthy=healthy == 1,
            storage=Readiness(opened, read == 1, write == 1),
            time_ms=time_ms,
            writes_done=writes_done,
            loads_done=loads_done,
            rates=rates,
            prefetches=[
                PrefetchProgress(prefetch, places[2 * i] == 1, places[2 * i + 1])
                for i, prefetch in enumerate(prefetches)
            ],
            stores=[(store, StoreProgress(state)) for store, state in zip(stores, numbers, strict=False)],
        )

    def statistics(self) -> RankStatistics:
        """Return a snapshot. May be called from any thread."""
        return RankStatistics(self._group.rank, self._group.size, self._failure is not None, self._wait.statistics())

    def close(self) -> None:
        """Leave the group."""
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
