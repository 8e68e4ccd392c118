"""Histograms that cost an addition: counts by upper bound in a plain list, for snapshots that an exporter reads.

Locking design: a histogram belongs to the thread that adds to it, or to the lock under which its user adds. A snapshot
may be taken on any thread: copying a list is one operation in CPython. The count of values is the sum of the copied
counts; the total may be ahead of it by the value that is being added.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# Upper bounds, each twice the one before. A step of a scheduler takes microseconds, or what ranks wait for each other.
STEP_BOUNDS_S = tuple(0.000005 * 2**step for step in range(19))
# Of calls, copies and waits: 100 us (a lookup in memory) doubling to 26 s (past any deadline); the last
# bucket has the rest.
BOUNDS_S = tuple(0.0001 * 2**step for step in range(19))
# What a copy or a call moves: 64 KiB to 4 GiB, each four times the one before.
SIZE_BOUNDS_BYTES = tuple(float(65536 * 4**step) for step in range(9))


@dataclass(frozen=True, slots=True)
class HistogramStatistics:
    """`counts[i]` values were at most `bounds[i]` and more than the bound before; the last are larger than all bounds.
    `total` is the sum of the values."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """`counts[i]` calls took at most `BOUNDS_S[i]` and more than the bound before; the last took longer than all."""

    counts: tuple[int, ...]
    seconds: float

    @property
    def calls(self) -> int:
        """How many there were."""
        return sum(self.counts)


class Histogram:
    """See the module's docstring. `bounds` ascend."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def statistics(self) -> HistogramStatistics:
        """Return a snapshot."""
        return HistogramStatistics(self._bounds, tuple(self._counts), self._total)
