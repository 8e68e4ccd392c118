"""The retry budget: how much may be tried again, as a share of what is tried once.

A retry helps against a single lost request and harms a store that is drowning. With a budget the load that retries add
is bounded whatever fails: of n calls over any time at most `share` x n + a small burst are repeated, and the same holds
for their pages.

Locking design: nothing here locks; whoever owns it does.
"""

from __future__ import annotations

# What a budget holds at most, and at the start: a few calls, and pages of two usual batches.
BURST_CALLS = 4.0
BURST_PAGES = 256.0


class RetryBudget:
    """Two token buckets, of calls and of pages. `share` 0 means no retry ever."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._calls = BURST_CALLS if share else 0.0
        self._pages = BURST_PAGES if share else 0.0

    def earn(self, pages: int) -> None:
        """A call of `pages` pages is made for the first time."""
        self._calls = min(BURST_CALLS, self._calls + self._share)
        self._pages = min(BURST_PAGES, self._pages + self._share * pages)

    def spend(self, pages: int) -> int:
        """How many of `pages` pages one call may try again; 0 for none. They are paid for."""
        granted = min(pages, int(self._pages))
        if self._calls < 1.0 or granted < 1:
            return 0
        self._calls -= 1.0
        self._pages -= granted
        return granted
