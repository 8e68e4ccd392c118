"""The log lines of a guard: one when a direction goes off, one when it is on again, and a few reminders in between; and
one when a store keeps nothing or cannot be read for more than a moment, and one at the end of that.

Locking design: runs only on the probe thread, which the guard wakes when a breaker changes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from ...backoff import Backoff
from ...clock import Clock
from ...config.guard import Override
from ..base import Direction
from .admission import BreakerChange
from .breaker import BreakerState
from .health import StoreHealth

logger = logging.getLogger(__name__)

# Reminders of a direction that stays off are 1, 2, 4 and 8 minutes apart, then a quarter of an hour.
_RECALL_S = 60.0
_RECALL_S_MAX = 900.0
_WORDS = {Direction.READ: "reads", Direction.WRITE: "writes"}


class GuardLog:
    """See the module's docstring. `name` is the name of the store."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._errors: dict[Direction, Mapping[str, int]] = {}  # error counts at the last line
        self._recalls: dict[Direction, tuple[Backoff, float]] = {}  # per direction that is off: off time of a reminder

    def changed(self, changes: Iterable[BreakerChange], errors: Mapping[str, int]) -> None:
        """Write a line for each change. `errors` are the store's error counts so far, by kind."""
        for change in changes:
            direction, breaker, what = change.direction, change.breaker, _WORDS[change.direction]
            if breaker.state is not BreakerState.OPEN:
                self._recalls.pop(direction, None)
                logger.info("storage %s: %s are on again after %.1f s; %s calls were rejected", self._name,
                            what, change.after_s, f"{change.refused:,}")
            elif breaker.override is not Override.AUTO:
                logger.warning("storage %s: the operator switched %s off", self._name, what)
            else:
                recall = Backoff(_RECALL_S, _RECALL_S_MAX)
                self._recalls[direction] = recall, recall.next_s()
                logger.warning("storage %s: the breaker for %s opened (%s); errors since the last line: %s; "
                               "next probe in %.1f s", self._name, what, breaker.reason,
                               self._new(direction, errors), change.pause_s)

    def still_off(self, off: Mapping[Direction, tuple[float, int]], errors: Mapping[str, int]) -> None:
        """Write the due reminders. `off` has per direction the seconds and the rejected calls since it went off."""
        for direction, (off_s, refused) in off.items():
            recall, due_s = self._recalls.get(direction, (None, 0.0))
            if recall is not None and off_s >= due_s:
                self._recalls[direction] = recall, off_s + recall.next_s()
                logger.warning("storage %s: %s have been off for %.0f s; %s calls were rejected; errors since the last "
                               "line: %s", self._name, _WORDS[direction], off_s, f"{refused:,}",
                               self._new(direction, errors))

    def health(self, found: StoreHealth) -> None:
        """Write a line about a new health: a problem, or the end of one."""
        if found.is_problem:
            logger.warning("storage %s: %s (this began %.0f s ago): %s. %s", self._name, found.words,
                           self._clock.wall_s() - (found.since_s or 0.0), found.what, found.advice)
        else:
            logger.info("storage %s: keeps pages and can be read again", self._name)

    def _new(self, direction: Direction, errors: Mapping[str, int]) -> str:
        """Return the three most frequent errors since the last line of a direction, as text."""
        new = Counter(errors) - Counter(self._errors.get(direction, {}))
        self._errors[direction] = dict(errors)
        return ", ".join(f"{kind} {count:,}" for kind, count in new.most_common(3)) or "none"
