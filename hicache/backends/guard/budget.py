"""The budget for retries of a guard, and its count of damaged pages.

Locking design: this module does not lock; its user, `AdmissionControl`, does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...backoff import Backoff
from ...config.guard import GuardConfig
from ..base import GetOutcome

# A retry budget starts full: a few calls, and the pages of two usual batches.
BURST_CALLS = 4.0
BURST_PAGES = 256.0
# Each time that all pages are damaged again, the back-off grows by this factor, up to an hour: an operator needs time
# for a repair.
_DAMAGE_BACKOFF_GROWTH = 4
_DAMAGE_BACKOFF_S_MAX = 3600.0


class RetryBudget:
    """Two token buckets, one for calls and one for pages. With `share` 0 nothing is retried.

    A retry helps against a single lost request and harms an overloaded store. The budget bounds the extra load: of n
    calls at most `share` x n plus a small burst are retried. The same bound holds for their pages.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._calls = BURST_CALLS if share else 0.0
        self._pages = BURST_PAGES if share else 0.0

    def earn(self, pages: int) -> None:
        """Add tokens for the first attempt of a call of `pages` pages."""
        self._calls = min(BURST_CALLS, self._calls + self._share)
        self._pages = min(BURST_PAGES, self._pages + self._share * pages)

    def spend(self, pages: int) -> int:
        """Return how many of `pages` pages one call may retry, and take their tokens; 0 takes none."""
        granted = min(pages, int(self._pages))
        if self._calls < 1.0 or granted < 1:
            return 0
        self._calls -= 1.0
        self._pages -= granted
        return granted


class DamageWatch:
    """Counts damaged pages since the last sound one, and raises an alarm at `damage_pages`.

    One damaged page means a bad disk or a torn write, and the backend removes it. If every page is damaged, the reader
    is more likely at fault than the store: a different MAC key, a bug, bad memory. Reading must then stop, or it would
    remove every page. After an alarm, each further damaged page raises the next alarm until a sound page is read.
    """

    def __init__(self, options: GuardConfig) -> None:
        self._options = options
        first_s = options.damage_backoff
        self._backoff = Backoff(first_s, max(first_s, _DAMAGE_BACKOFF_S_MAX), _DAMAGE_BACKOFF_GROWTH)
        self._pages_max = options.damage_pages
        self._run = 0
        self._sound = False  # True once a sound page was read since the start or the last alarm
        # True while `pages_at_once` returns None and `saw` has nothing to note unless a page is damaged.
        self.is_calm = False

    def pages_at_once(self, read: Sequence[GetOutcome]) -> int | None:
        """Return how many pages of a batch to read next, after the outcomes `read`; None for all remaining pages.

        Until the reader has seen a sound page, the first pages of a batch are read alone. After an alarm, pages are
        read one at a time.
        """
        if self.is_calm:
            return None
        if self._pages_max > 1 and read and GetOutcome.CORRUPT not in read:
            return None
        return self._pages_max

    def saw(self, outcomes: Iterable[GetOutcome]) -> float | None:
        """Record the outcomes of pages, in order. Return None, or after an alarm the seconds to stop reading (> 0)."""
        for outcome in outcomes:
            if outcome is GetOutcome.HIT:
                self._run = 0
                self._sound = True
                self._pages_max = self._options.damage_pages
                self._backoff.reset()
            elif outcome is GetOutcome.CORRUPT:
                self._run += 1
        self.is_calm = self._sound and not self._run
        if self._run < self._pages_max:
            return None
        self._run = 0
        self._sound = False
        self._pages_max = 1
        return self._backoff.next_s()
