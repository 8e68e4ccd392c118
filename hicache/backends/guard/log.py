"""What a guard tells its log: one line when a direction is switched off, one when it is on again, a few in between.

Locking design: runs on the thread of the probes alone, which the guard wakes when a breaker moves.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from ...backoff import Backoff
from ...config.guard import Override
from .admission import BreakerChange, Direction
from .breaker import BreakerState

logger = logging.getLogger(__name__)

# A direction that stays off is recalled after 1, 2, 4 and 8 minutes, and then each quarter of an hour.
_RECALL_S = 60.0
_RECALL_S_MAX = 900.0
_WORDS = {Direction.READ: "reading", Direction.WRITE: "writing"}


class BreakerLog:
    """See the module's docstring. `name` is that of the store."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._errors: dict[Direction, Mapping[str, int]] = {}  # as they were counted at the last line
        self._recalls: dict[Direction, tuple[Backoff, float]] = {}  # of those that are off: when they were so long

    def changed(self, changes: Iterable[BreakerChange], errors: Mapping[str, int]) -> None:
        """Write a line for each change; `errors` are those that the store has counted so far, by kind."""
        for change in changes:
            direction, breaker, what = change.direction, change.breaker, _WORDS[change.direction]
            if breaker.state is not BreakerState.OPEN:
                self._recalls.pop(direction, None)
                logger.info("storage %s: %s is on again after %.1f s; %s calls were not made meanwhile", self._name,
                            what, change.after_s, f"{change.refused:,}")  # fmt: skip
            elif breaker.override is not Override.AUTO:
                logger.warning("storage %s: %s is off: the operator switched it off", self._name, what)
            else:
                recall = Backoff(_RECALL_S, _RECALL_S_MAX)
                self._recalls[direction] = recall, recall.next_s()
                logger.warning("storage %s: %s is off: the breaker has opened (%s); errors since the last such line: "
                               "%s; next probe in %.1f s", self._name, what, breaker.reason,
                               self._new(direction, errors), change.pause_s)  # fmt: skip

    def still_off(self, off: Mapping[Direction, tuple[float, int]], errors: Mapping[str, int]) -> None:
        """Recall directions that are off: for how long, and how many calls were refused since."""
        for direction, (off_s, refused) in off.items():
            recall, due_s = self._recalls.get(direction, (None, 0.0))
            if recall is not None and off_s >= due_s:
                self._recalls[direction] = recall, off_s + recall.next_s()
                logger.warning("storage %s: %s has been off for %.0f s; %s calls were not made; errors since the last "
                               "such line: %s", self._name, _WORDS[direction], off_s, f"{refused:,}",
                               self._new(direction, errors))  # fmt: skip

    def _new(self, direction: Direction, errors: Mapping[str, int]) -> str:
        """Return the errors since the last line of a direction, the most frequent first."""
        new = Counter(errors) - Counter(self._errors.get(direction, {}))
        self._errors[direction] = dict(errors)
        return ", ".join(f"{kind} {count:,}" for kind, count in new.most_common(3)) or "none"
