"""Cheap histograms: counts by upper bound in a plain list. An exporter reads snapshots of them.

Locking design: one thread adds to a histogram, or several threads under a lock of the user. Any thread can take a
snapshot, because copying a list is one operation in CPython. The number of values is the sum of the copied counts. The
total may already include a value that is not counted yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# Upper bounds, each twice the previous one. A step of a scheduler takes microseconds, or until all ranks agree.
STEP_BOUNDS_S = tuple(0.000005 * 2**step for step in range(19))
# For calls, copies and waits: 100 us (a lookup in memory), doubling up to 26 s (longer than any deadline). The last
# bucket counts longer ones.
BOUNDS_S = tuple(0.0001 * 2**step for step in range(19))
# Bytes that a copy or a call moves: 64 KiB to 4 GiB, each four times the previous one.
SIZE_BOUNDS_BYTES = tuple(float(65536 * 4**step) for step in range(9))


@dataclass(frozen=True, slots=True)
class HistogramStatistics:
    """`counts[i]` is the number of values up to `bounds[i]` and above the previous bound; the last count is that of the
    values above all bounds. `total` is the sum of the values."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


class Histogram:
    """See the module's docstring. REQUIRES: `bounds` are ascending."""

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
