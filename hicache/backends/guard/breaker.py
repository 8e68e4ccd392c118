"""The circuit breaker of one direction: decides by what became of calls whether the next one is made.

    CLOSED     calls are made. After a failed one the store is probed at once (but not again right after a good
               probe), so that an outage that begins with a single call is known without further callers paying for
               it; enough failures in a row open it.
    OPEN       no call is made. After a pause the store is probed: bad, the pause doubles; good, it is half-open.
    HALF_OPEN  calls are made. The first that ends decides; if none comes, a second good probe closes.

Failures are those of calls and of probes; a good probe takes back bad probes, and no call. For a store that takes
probes and fails real calls the pauses grow, because only a good call makes them short again.

Locking design: nothing here locks or looks at a clock; whoever owns a breaker does (`traffic`).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...backoff import Backoff
from ...config.guard import GuardConfig
from ...errors import InvariantError
from .options import Override

# The share of failures is taken over so many calls: enough that two bad ones among them mean nothing.
WINDOW_CALLS = 20
# A probe that follows a failed call counts as so many: it is small and asks for nothing that may be slow, so that it
# fails says more.
_PROBE_WEIGHT = 2


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

    A call carries the round in which it was admitted: what ends in a later round began before the breaker opened, or
    before the operator spoke, and tells nothing about now. A probe has a number for the same reason.

    Invariant: while the breaker decides and is not closed, a probe is planned or under way, so it cannot stay open for
    good.
    """

    def __init__(self, options: GuardConfig, override: Override, jitter: Callable[[], float]) -> None:
        self.override = override
        self._options = options
        self._jitter = jitter
        self._state = BreakerState.CLOSED
        self._reason = ""
        self._opens = self._good_probes = self._failed_probes = 0
        self._failures = 0  # calls in a row
        self._suspicions = 0  # bad probes in a row while it is closed, in failed calls
        self._recent: deque[bool] = deque(maxlen=WINDOW_CALLS)
        self._reset_backoff()
        self._probe_at = math.inf
        self._calm_until = -math.inf  # a probe has just been good: single failures bring none before that
        self._probe = 0  # number of the latest
        self._probing_until = math.inf  # a probe is under way that has to end by then; infinity if none is
        self._round = 0
        self._thorough = False

    @property
    def state(self) -> BreakerState:
        """What holds now."""
        if self.override is Override.AUTO:
            return self._state
        return BreakerState.CLOSED if self.override is Override.ON else BreakerState.OPEN

    @property
    def round(self) -> int:
        """What a call that is admitted now carries. It changes when the breaker opens, and with each override."""
        return self._round

    def record(self, admitted: int, ok: bool, reason: str, time_s: float) -> None:
        """A call has ended well or not. `reason` says in a word what failed."""
        if self.override is not Override.AUTO or admitted != self._round or self._state is BreakerState.OPEN:
            return
        if ok:
            self._close()
            self._recent.append(True)
            self._reset_backoff()
        elif self._state is BreakerState.HALF_OPEN:
            self._open(reason, time_s)
        else:
            self._recent.append(False)
            self._failures += 1
            self._judge(reason, time_s)

    def trip(self, reason: str, backoff_s: float, time_s: float) -> None:
        """Open, for at least half of `backoff_s`, whatever was before; only a thorough probe heals it."""
        if self.override is not Override.AUTO:
            return
        # Such a pause may be longer than the longest.
        self._backoff = Backoff(backoff_s, max(backoff_s, self._options.backoff_max))
        self._open(reason, time_s)
        self._thorough = True

    def set_override(self, override: Override) -> None:
        """The operator's word. Back at AUTO the breaker is closed and knows of no failure."""
        self.override = override
        self._round += 1
        self._probing_until = math.inf
        self._thorough = False
        self._recent.clear()
        self._reset_backoff()
        self._close()

    # Probes

    @property
    def probe_at(self) -> float:
        """When the next probe is due; infinity for none."""
        return self._probe_at if self._probing_until == math.inf else math.inf

    @property
    def is_suspected(self) -> bool:
        """Whether the next probe follows a failed call of a direction that is still closed."""
        return self._state is BreakerState.CLOSED

    @property
    def thorough(self) -> bool:
        """Whether a probe has to read back what it has written."""
        return self._thorough

    @property
    def probing_until(self) -> float:
        """When the probe under way is overdue; infinity if none is under way."""
        return self._probing_until

    def begin_probe(self, until_s: float) -> int:
        """A probe starts that has to end by `until_s`; its number."""
        self._probing_until = until_s
        self._probe_at = math.inf
        self._probe += 1
        return self._probe

    def note_overdue(self, time_s: float) -> None:
        """A probe that hangs past its time has failed; what comes of it later does not count."""
        if time_s >= self._probing_until:
            self.probed(self._probe, False, "overdue", time_s)

    def probed(self, number: int, ok: bool, reason: str, time_s: float) -> None:
        """A probe has ended."""
        if number != self._probe or self._probing_until == math.inf:
            return  # it was overdue, or the breaker has opened anew since, which has planned a probe of its own
        self._good_probes += ok
        self._failed_probes += not ok
        self._probing_until = math.inf
        if self._state is BreakerState.OPEN:
            if not ok:
                self._plan_probe(time_s)
                return
            if self._thorough:
                self._thorough = False
                self._reset_backoff()
            self._state = BreakerState.HALF_OPEN
            self._probe_at = time_s + self._options.backoff_min
        elif self._state is BreakerState.HALF_OPEN:
            if ok:
                self._close()
            else:
                self._open(reason, time_s)
        elif ok:
            self._suspicions = 0
            self._calm_until = time_s + self._options.backoff_min
        else:
            self._suspicions += _PROBE_WEIGHT
            self._judge(reason, time_s)

    # State

    def statistics(self) -> BreakerStatistics:
        """A snapshot."""
        return BreakerStatistics(
            self.state, self.override, self._reason, self._opens, self._good_probes, self._failed_probes
        )

    def check(self) -> None:
        """Raises InvariantError if the breaker could stay open for good."""
        if self.override is not Override.AUTO:
            return
        if self._state is not BreakerState.CLOSED and min(self._probe_at, self._probing_until) == math.inf:
            raise InvariantError(f"breaker: {self._state.name} and no probe is planned")
        if self._failures + self._suspicions >= self._options.failures:
            raise InvariantError(f"breaker: {self._state.name} after {self._failures} failures in a row")

    def _judge(self, reason: str, time_s: float) -> None:
        """Open after too many failures; else have the store probed now."""
        bad = self._recent.count(False)
        too_many = len(self._recent) == WINDOW_CALLS and bad >= self._options.failure_share * WINDOW_CALLS
        if self._failures + self._suspicions >= self._options.failures or too_many:
            self._open(reason, time_s)
        else:
            self._probe_at = max(time_s, self._calm_until)

    def _open(self, reason: str, time_s: float) -> None:
        self._state = BreakerState.OPEN
        self._reason = reason
        self._opens += 1
        self._round += 1
        self._failures = self._suspicions = 0
        self._probing_until = math.inf
        self._recent.clear()
        self._plan_probe(time_s)

    def _plan_probe(self, time_s: float) -> None:
        self._probe_at = time_s + self._backoff.next_s() * self._jitter()

    def _reset_backoff(self) -> None:
        self._backoff = Backoff(self._options.backoff_min, self._options.backoff_max)

    def _close(self) -> None:
        self._state = BreakerState.CLOSED
        self._failures = self._suspicions = 0
        self._probe_at = math.inf
