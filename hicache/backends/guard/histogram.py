"""How long calls take: counts in buckets whose bounds double.

Locking design: nothing here locks; whoever owns it does.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

# Upper bounds in seconds: 100 us (a lookup in memory) doubling to 26 s (past any deadline); the last bucket has the
# rest.
BOUNDS_S = tuple(0.0001 * 2**step for step in range(19))


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """`counts[i]` calls took at most `BOUNDS_S[i]` and more than the bound before; the last took longer than all."""

    counts: tuple[int, ...]
    seconds: float

    @property
    def calls(self) -> int:
        """How many there were."""
        return sum(self.counts)


class LatencyHistogram:
    """Counts of calls by duration, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count a call."""
        self._counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def statistics(self) -> LatencyStatistics:
        """A snapshot."""
        return LatencyStatistics(tuple(self._counts), self._seconds)
