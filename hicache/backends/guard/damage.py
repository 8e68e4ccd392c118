"""Damage of a whole namespace: many damaged pages and no sound one among them.

One damaged page is a bad disk or a torn write; it is removed. If everything is damaged, the reader is more likely wrong
than the store: another MAC key, a bug, memory that breaks what it reads. Then removing goes on until nothing is left,
so reading has to stop.

Locking design: nothing here locks; whoever owns it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...backoff import Backoff
from ...config.guard import GuardConfig
from ..base import GetOutcome

# Each further time, the pause is so many times as long, up to an hour: whoever has to repair something needs that long.
_BACKOFF_GROWTH = 4
_BACKOFF_S_MAX = 3600.0


class DamageWatch:
    """Counts damaged pages since the last sound one.

    After an alarm nothing is trusted until a sound page was read: a single further damaged one is the next alarm.
    """

    def __init__(self, options: GuardConfig) -> None:
        self._pages_max = options.damage_pages
        first_s = options.damage_backoff
        self._backoff = Backoff(first_s, max(first_s, _BACKOFF_S_MAX), _BACKOFF_GROWTH)
        self._run = 0
        self._sound = False  # a sound page was read since the start or the last alarm
        self._alarmed = False

    def pages_at_once(self, read: Sequence[GetOutcome]) -> int | None:
        """How many pages of a batch to read next, of which `read` are read; None for all the rest.

        As long as nothing speaks for the store, the head of a batch comes alone, and after an alarm every page.
        """
        if self._sound and not self._run:
            return None
        if self._alarmed:
            return 1
        return None if read and GetOutcome.CORRUPT not in read else self._pages_max

    def saw(self, outcomes: Iterable[GetOutcome]) -> float | None:
        """Take in what was read, in order. None, or for how long to stop: more than 0 seconds."""
        for outcome in outcomes:
            if outcome is GetOutcome.HIT:
                self._run = 0
                self._sound = True
                self._alarmed = False
                self._backoff.reset()
            elif outcome is GetOutcome.CORRUPT:
                self._run += 1
        if self._run < (1 if self._alarmed else self._pages_max):
            return None
        self._run = 0
        self._sound = False
        self._alarmed = True
        return self._backoff.next_s()
