"""Timers: work that is due at a time, in the steps of a cache.

Invariant: the heap has an entry for each timer that is due later, and at most as many cancelled ones, and a few.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

TIMERS_MAX = 65536
# Cancelled entries stay in the heap until they are half of it, or this many.
_SLACK = 64


class Timers:
    """Called by the scheduler thread alone; no lock."""

    def __init__(self) -> None:
        self._due: dict[int, Callable[[], object]] = {}
        self._heap: list[tuple[float, int]] = []
        self._made = 0

    def __len__(self) -> int:
        """Return the number of timers that are due later."""
        return len(self._due)

    @property
    def is_full(self) -> bool:
        """True if no more timers should be set."""
        return len(self._due) >= TIMERS_MAX

    def at(self, due_s: float, work: Callable[[], object]) -> int:
        """Call `work` at a time. Return the number for `cancel`."""
        self._made += 1
        self._due[self._made] = work
        heapq.heappush(self._heap, (due_s, self._made))
        if len(self._heap) > 2 * len(self._due) + _SLACK:
            self._heap = [one for one in self._heap if one[1] in self._due]
            heapq.heapify(self._heap)
        return self._made

    def cancel(self, number: int) -> None:
        """Forget a timer, if it is not due yet."""
        self._due.pop(number, None)

    def advance(self, now_s: float) -> None:
        """Do what is due."""
        while self._heap and self._heap[0][0] <= now_s:
            if (work := self._due.pop(heapq.heappop(self._heap)[1], None)) is not None:
                work()

    def clear(self) -> None:
        """Forget all timers."""
        self._due.clear()
        self._heap.clear()
