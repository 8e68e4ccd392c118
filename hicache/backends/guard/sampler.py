"""Usage of a store as it was a moment ago, for those who must not wait for it: a server counts by listing.

Locking design: `_sample` and `_next_at` are written by the chore's thread and read by others; each is one reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..base import Usage
from .chore import Chore

# A sample younger than this is not renewed, and renewing takes at most a small part of the time: a listing may be slow.
SAMPLE_S = 5.0
_DUTY = 20
# A count that takes longer hangs.
_PATIENCE_S = 300.0


class UsageSampler:
    """The last known usage. `measure` may block; None from it means that it could not be had now."""

    def __init__(self, name: str, measure: Callable[[], Usage | None]) -> None:
        self._measure = measure
        self._sample: Usage | None = None
        self._next_at = 0.0
        self._chore = Chore(f"usage-{name}", self._renew, _PATIENCE_S)

    def sample(self) -> Usage | None:
        """What was found last, None before the first time. Does not block; has it found anew if it is old."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + SAMPLE_S
            self._chore.wake()
        return self._sample

    def close(self, timeout_s: float) -> bool:
        """End the thread. False if it hangs in the store."""
        return self._chore.close(timeout_s)

    def _renew(self) -> float:
        began_s = time.monotonic()
        usage = self._measure()
        if usage is not None:
            self._sample = usage
        ended_s = time.monotonic()
        self._next_at = ended_s + max(SAMPLE_S, _DUTY * (ended_s - began_s))
        return float("inf")
