"""The circuit breaker of one direction: decides by the results of calls whether the next call is made.

    CLOSED     calls are made. After a failed one the store is probed at once (but not again right after a good
               probe), so that an outage that begins with a single call is known without further callers paying for
               it. A failed probe opens it, and so do enough failures in a row or among the last 20 calls.
    OPEN       no call is made. After a pause the store is probed: bad, the pause doubles; good, it is half-open.
    HALF_OPEN  calls are made. The first that ends decides; if none comes, a second good probe closes.

For a store that takes probes and fails real calls the pauses grow, because only a good call makes them short again.

Locking design: nothing here locks or looks at a clock; the owner of a breaker does (`admission`).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...backoff import Backoff
from ...config.guard import GuardConfig, Override
from ...errors import InvariantError

# The share of failures is taken over so many calls: enough that two bad ones among them mean nothing.
WINDOW_CALLS = 20


class BreakerState(enum.IntEnum):
    """Ordered by how little passes; the number is what the metric shows."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerStatistics:
    """`state` is what holds, with the override applied; `reason` is why it opened last, empty if it never did."""

    state: BreakerState
    override: Override
    reason: str
    opens: int
    good_probes: int
    failed_probes: int


class Breaker:
    """See the module's docstring. Times are monotonic seconds, `jitter` draws from (0, 1], the share of a pause.

    A call or probe carries the round in which it began: one that ends in a later round began before the breaker opened,
    or before the operator spoke, and tells nothing about now.

    Invariant: while the breaker decides and is not closed, `probe_at` says when a probe is due, or that one is in
    flight, so it cannot stay open for good.
    """

    def __init__(self, options: GuardConfig, override: Override, jitter: Callable[[], float]) -> None:
        self.override = override
        self.round = 0  # changes when the breaker opens, and with each override
        self.probe_at = math.inf  # when the next probe is due; in the past until a probe that is in flight has ended
        self._options = options
        self._jitter = jitter
        self._state = BreakerState.CLOSED
        self._reason = ""
        self._opens = self._good_probes = self._failed_probes = 0
        self._failures = 0  # in a row
        self._recent: deque[bool] = deque(maxlen=WINDOW_CALLS)
        self._calm_until = -math.inf  # a probe has just been good: single failures bring none before that
        self._backoff = Backoff(options.backoff_min, options.backoff_max)

    @property
    def state(self) -> BreakerState:
        """What holds now."""
        if self.override is Override.AUTO:
            return self._state
        return BreakerState.CLOSED if self.override is Override.ON else BreakerState.OPEN

    def record(self, admitted: int, ok: bool, reason: str, time_s: float) -> None:
        """A call has ended, well or not. `reason` says in a word what failed."""
        if self.override is not Override.AUTO or admitted != self.round or self._state is BreakerState.OPEN:
            return
        self._recent.append(ok)
        if ok:
            self._close()
            self._backoff.reset()
            return
        self._failures += 1
        bad = self._recent.count(False)
        too_many = len(self._recent) == WINDOW_CALLS and bad >= self._options.failure_share * WINDOW_CALLS
        if self._state is BreakerState.HALF_OPEN or self._failures >= self._options.failures or too_many:
            self._open(reason, time_s, self._backoff.next_s())
        else:
            self.probe_at = max(time_s, self._calm_until)

    def trip(self, reason: str, pause_s: float, time_s: float) -> None:
        """Open, for at least half of `pause_s`, whatever the state is."""
        if self.override is Override.AUTO:
            self._open(reason, time_s, pause_s)

    def probed(self, begun: int, ok: bool, time_s: float) -> None:
        """A probe has ended."""
        if begun != self.round:
            return
        self._good_probes += ok
        self._failed_probes += not ok
        if self._state is BreakerState.OPEN and ok:
            self._state = BreakerState.HALF_OPEN
            self.probe_at = time_s + self._options.backoff_min
        elif self._state is BreakerState.OPEN:
            self.probe_at = time_s + self._backoff.next_s() * self._jitter()
        elif self._state is BreakerState.HALF_OPEN and ok:
            self._close()
        elif ok:
            self.probe_at = math.inf
            self._calm_until = time_s + self._options.backoff_min
        elif self.probe_at < math.inf:  # else a call was good since the probe began
            self._open("probe", time_s, self._backoff.next_s())

    def set_override(self, override: Override) -> None:
        """The operator's word. Back at AUTO the breaker is closed and knows of no failure."""
        self.override = override
        self.round += 1
        self._recent.clear()
        self._backoff.reset()
        self._close()

    def statistics(self) -> BreakerStatistics:
        """A snapshot."""
        return BreakerStatistics(
            self.state, self.override, self._reason, self._opens, self._good_probes, self._failed_probes
        )

    def check(self) -> None:
        """Raises InvariantError if the breaker could stay open for good."""
        if self.override is not Override.AUTO:
            return
        if self._state is not BreakerState.CLOSED and self.probe_at == math.inf:
            raise InvariantError(f"breaker: {self._state.name} and no probe is planned")
        if self._failures >= self._options.failures:
            raise InvariantError(f"breaker: {self._state.name} after {self._failures} failures in a row")

    def _open(self, reason: str, time_s: float, pause_s: float) -> None:
        self._state = BreakerState.OPEN
        self._reason = reason
        self._opens += 1
        self.round += 1
        self._failures = 0
        self._recent.clear()
        self.probe_at = time_s + pause_s * self._jitter()

    def _close(self) -> None:
        self._state = BreakerState.CLOSED
        self._failures = 0
        self.probe_at = math.inf
