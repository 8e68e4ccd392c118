"""Delays between attempts. All retries in HiCache use this back-off."""

from __future__ import annotations


class Backoff:
    """Delays that start at `min_s` and grow by the factor `growth` up to `max_s` seconds. Not thread-safe.

    REQUIRES: `0 < min_s <= max_s`, `growth >= 1`.
    """

    def __init__(self, min_s: float, max_s: float, growth: float = 2.0) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._growth = growth
        self._next_s = min_s

    def next_s(self) -> float:
        """Return the delay before the next attempt. Each call makes the following delay longer."""
        delay_s, self._next_s = self._next_s, min(self._growth * self._next_s, self._max_s)
        return delay_s

    def reset(self) -> None:
        """Start over with the shortest delay: call it after a success."""
        self._next_s = self._min_s
