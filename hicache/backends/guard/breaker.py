"""The circuit breaker of one direction: it decides from the results of calls whether the next call is made.

    CLOSED     Calls are made. A failed call triggers a probe at once (unless a probe has just succeeded), so that
               an outage is found before more calls fail. A failed probe opens the breaker, and so do enough
               failures in a row or among the last 20 calls.
    OPEN       No call is made. After a back-off the store is probed. A failed probe doubles the back-off; a good
               probe makes the breaker half-open.
    HALF_OPEN  Calls are made. The first call that ends decides; without calls, a second good probe closes it.

Only a good call resets the back-off, so it grows for a store that passes probes and fails calls.

Locking design: this module neither locks nor reads a clock; the owner of the breaker does (`admission`).
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

# The share of failures is measured over so many calls that two failures do not matter.
WINDOW_CALLS = 20


class BreakerState(enum.IntEnum):
    """The states, from the most to the least permissive. The metric shows the number."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerStatistics:
    """A snapshot of a breaker. `state` includes the override; `reason` is why it opened last, empty if it never did."""

    state: BreakerState
    override: Override
    reason: str
    opens: int
    good_probes: int
    failed_probes: int


class Breaker:
    """See the module's docstring. Times are monotonic seconds. `jitter` returns a factor in (0, 1] for each back-off.

    A call or probe carries the round in which it began. If it ends in a later round, it began before the breaker opened
    or the override changed; its result is ignored as stale.

    Invariant: unless the breaker is closed or overridden, a probe is due at `probe_at` or in flight, so the breaker
    cannot stay open forever.
    """

    def __init__(self, options: GuardConfig, override: Override, jitter: Callable[[], float]) -> None:
        self.override = override
        self.round = 0  # incremented when the breaker opens or the override changes
        self.probe_at = math.inf  # when the next probe is due; in the past while a probe is in flight
        self._options = options
        self._jitter = jitter
        self._state = BreakerState.CLOSED
        self._reason = ""
        self._opens = self._good_probes = self._failed_probes = 0
        self._failures = 0  # in a row
        self._recent: deque[bool] = deque(maxlen=WINDOW_CALLS)
        self._calm_until = -math.inf  # no probe follows a single failure before this time: a probe has just succeeded
        self._backoff = Backoff(options.backoff_min, options.backoff_max)

    @property
    def state(self) -> BreakerState:
        """The state, with the override applied."""
        if self.override is Override.AUTO:
            return self._state
        return BreakerState.CLOSED if self.override is Override.ON else BreakerState.OPEN

    def record(self, admitted: int, ok: bool, reason: str, time_s: float) -> None:
        """Record the end of a call. `reason` names the kind of failure in one word."""
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
        """Open from any state, for `pause_s` times the jitter. Does nothing if the breaker is overridden."""
        if self.override is Override.AUTO:
            self._open(reason, time_s, pause_s)

    def probed(self, begun: int, ok: bool, time_s: float) -> None:
        """Record the end of a probe."""
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
        elif self.probe_at < math.inf:  # otherwise a call has succeeded since the probe began
            self._open("probe", time_s, self._backoff.next_s())

    def set_override(self, override: Override) -> None:
        """Apply the operator's override. Back at AUTO, the breaker is closed and has forgotten all failures."""
        self.override = override
        self.round += 1
        self._recent.clear()
        self._backoff.reset()
        self._close()

    def statistics(self) -> BreakerStatistics:
        """Return a snapshot."""
        return BreakerStatistics(
            self.state, self.override, self._reason, self._opens, self._good_probes, self._failed_probes
        )

    def check(self) -> None:
        """Raise InvariantError if the breaker could stay open forever."""
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
