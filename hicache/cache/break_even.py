"""Break-even: whether bringing a hit up from a slower tier takes less time than computing it again.

A hit of n tokens costs n / prefill speed to compute. To fetch, it costs per tier on the way a fixed part (a round trip,
a launch) and bytes / bandwidth: a load goes over the bus, a prefetch through storage and then over the bus. All of it
is measured while the engine runs, and a hit is fetched if

    fetching <= margin x computing

A page is stored if a hit on it could pay: if fetching a prefix of it, however long and so without the fixed parts, is
not slower than computing. A store that is slower than that costs bandwidth and brings nothing.

Nothing is taken off for what overlaps: a load hides behind the layers that compute meanwhile, a prefetch behind the
requests before it. So what pays here pays anyhow, and an engine that wants to free its device for others, even if a
single request takes longer, raises the margin.

Each speed is a line through the last few operations (`RateEstimator`). While a speed is unknown the hit is fetched, in
order to measure; while hits are refused, one in `probe_every` is fetched all the same, so that a tier that was slow
once is measured again; and one run in `probe_every` is stored, so that there is something to fetch. A tier that
recovers is used again after four such probes as a rule, after seven at most. Where all requests are hits, as after a
restart, no prefill would ever be measured: so a few hits are computed, one in `probe_every` too.

Ranks must decide alike although each measures for itself. So measurements go into local estimates, `rates` shows
those, and decisions read only what `use_rates` was given: the minimum over all ranks, agreed once per step. Probes
count decisions and not time, for the same reason. A page has another length on each pipeline stage, so all ranks count
it as the bytes of the longest (`page_bytes`).

Owned by the scheduler thread; no lock. `statistics` may be called from any thread.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..config import BreakEvenConfig
from ..errors import InvalidInput, InvariantError

# An estimate is a median over this many operations. Three stalls among seven do not move it, however long they took; a
# real change is believed after the fourth. A decaying sum has no such number: thirty seconds once outweigh a hundred
# normal operations, and forgetting them takes longer the worse they were.
WINDOW = 7
# The first operation of a kind often warms something up; with three it is outvoted.
OBSERVATIONS_MIN = 3
# A prefill of fewer tokens says how long a step takes at least and nothing about speed. Where most prompts are hits,
# such remainders would push every real prefill out of the window.
PREFILL_TOKENS_MIN = 64
# Sizes closer than this factor do not show which part of the time is fixed: the noise of the two would decide.
SPREAD_MIN = 2
# How much of the shortest operation may be fixed. The rest bounds what a hit much larger than all measured so far is
# promised: no more than 32 times the speed of that operation.
FIXED_SHARE_MAX = 31 / 32
# What a tier costs in vain if it never recovers: one request in sixteen fetches a hit that does not pay.
PROBE_EVERY = 16
# Hits that are computed in order to measure prefill. An engine that reports none by then never will.
CALIBRATIONS_MAX = 2 * OBSERVATIONS_MIN
# A fixed part below a microsecond is none, and rates stay small integers.
OPERATIONS_PER_S_MAX = 1_000_000
# What ranks can exchange. A time so short that a speed would be more rounds to no time at all.
SPEED_MAX = 2.0**62


class Route(enum.StrEnum):
    """Which copy a decision is about."""

    LOAD = "load"  # L2 to L1
    PREFETCH = "prefetch"  # storage to L2; its pages are loaded afterwards
    STORE = "store"  # L2 to storage, for a prefetch later


class Decision(enum.StrEnum):
    """What to do with a hit, or with a run that storage lacks, and why."""

    PAYS = "pays"
    TOO_SLOW = "too_slow"  # refused
    CALIBRATION = "calibration"  # prefill speed is not known yet: refused, in order to measure it
    UNMEASURED = "unmeasured"  # a speed is not known yet: fetch, in order to measure
    PROBE = "probe"  # too slow, but refused so often since the last fetch that it is measured again
    OVERRIDDEN = "overridden"  # the configuration says: always

    @property
    def go(self) -> bool:
        """Whether to fetch, or to store."""
        return self is not Decision.TOO_SLOW and self is not Decision.CALIBRATION


class Rates(NamedTuple):
    """Speeds as integers, 0 where unknown, so that ranks can agree on the minimum of each.

    `..._operations_per_s` is one over the fixed part: how many operations of no size at all fit into a second.
    """

    prefill_tokens_per_s: int = 0
    host_bytes_per_s: int = 0
    host_operations_per_s: int = 0
    storage_bytes_per_s: int = 0
    storage_operations_per_s: int = 0


@dataclass(frozen=True, slots=True)
class BreakEvenStatistics:
    """Decisions since start by (route, reason), and the rates that decisions use now."""

    decisions: Mapping[tuple[str, str], int]
    rates: Rates


class Line(NamedTuple):
    """seconds = fixed_s + units x per_unit_s."""

    fixed_s: float
    per_unit_s: float


class RateEstimator:
    """How long operations of one kind take, as a line through the last `WINDOW` of them.

    The fixed part is that of the line whose slope is the median of the slopes between any two operations of clearly
    different size (Theil 1950, Sen 1968), but no longer than the shortest operation. The speed is the median of the
    speeds without it. Operations of one size have a speed and no fixed part.

    `line` is None before there are `OBSERVATIONS_MIN` operations. It is computed when it is asked for, since many
    operations may have ended by then. With a speed that is `given`, in units per second, no operation is taken in, and
    there is no fixed part.
    """

    def __init__(self, given: int | None = None) -> None:
        self.given = given is not None
        self._line = None if given is None else Line(0.0, 1 / given)
        self._is_current = True
        self._seen: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # (units, seconds)

    def observe(self, units: int, seconds: float) -> None:
        """Take in one operation. What has no size or no time tells nothing and is ignored."""
        if self.given or units <= 0 or not 0 < seconds < math.inf:
            return
        self._seen.append((units, seconds))
        self._is_current = False

    @property
    def line(self) -> Line | None:
        """The line through the last operations."""
        if not self._is_current and len(self._seen) >= OBSERVATIONS_MIN:
            fixed_s = self._fixed_s()
            per_unit_s = statistics.median((seconds - fixed_s) / units for units, seconds in self._seen)
            self._line = Line(fixed_s, max(per_unit_s, 1 / SPEED_MAX))
        self._is_current = True
        return self._line

    def _fixed_s(self) -> float:
        slopes = [
            (seconds_b - seconds_a) / (units_b - units_a)
            for (units_a, seconds_a), (units_b, seconds_b) in itertools.combinations(self._seen, 2)
            if max(units_a, units_b) >= SPREAD_MIN * min(units_a, units_b)
        ]
        slope = statistics.median(slopes) if slopes else 0.0
        if slope <= 0:
            return 0.0  # one size alone, or a speed that changes: nothing can be told apart
        fixed_s = statistics.median(seconds - slope * units for units, seconds in self._seen)
        shortest_s = min(seconds for _, seconds in self._seen)
        return min(max(0.0, fixed_s), FIXED_SHARE_MAX * shortest_s)

    def rates(self) -> tuple[int, int]:
        """Return units and operations per second, both 0 if unknown."""
        line = self.line
        if line is None:
            return 0, 0
        return _integer(1 / line.per_unit_s), _integer(1 / max(line.fixed_s, 1 / OPERATIONS_PER_S_MAX))


class BreakEven:
    """See the module's docstring.

    Invariant: on no route that is measured were `probe_every` or more hits refused since the last one that was fetched.
    """

    def __init__(
        self, config: BreakEvenConfig | None = None, page_bytes: int = 1, *, probe_every: int = PROBE_EVERY
    ) -> None:
        """`page_bytes` is what a page counts for, equal on all ranks: the bytes of its longest part.

        `probe_every` is the length of a run of decisions that cannot all be refusals; tests shorten it. Raises
        InvalidInput if it is below 1.
        """
        if probe_every < 1:
            raise InvalidInput(f"break_even: probe_every must be at least 1, got {probe_every}")
        config = config or BreakEvenConfig()
        self._always = {route for route in Route if config.mode == "always"}
        if config.writes == "always":
            self._always.add(Route.STORE)
        self._margin = config.margin
        self._probe_every = probe_every
        self._page_bytes = page_bytes
        self._prefill = RateEstimator(config.prefill_tokens_per_second)
        host, storage = RateEstimator(config.host_bandwidth), RateEstimator(config.storage_bandwidth)
        self._tiers = {Route.LOAD: host, Route.PREFETCH: storage}
        self._decisions: Counter[tuple[Route, Decision]] = Counter()
        self._refused = dict.fromkeys(Route, 0)  # since the last fetch
        self._unmeasured = 0  # fetched for lack of a speed since the last calibration
        # Where all speeds are given, a probe would measure nothing that counts.
        both = host.given and storage.given
        self._given = {Route.LOAD: host.given, Route.PREFETCH: both, Route.STORE: both}
        self._measured: Rates | None = self._estimate()
        self._agreed = self._measured
        self._given_rates: tuple[int, ...] = ()
        self._seconds: dict[Route, tuple[float, float] | None] = {}
        self.use_rates(self._measured)

    def observe_transfer(self, route: Route, pages: int, seconds: float) -> None:
        """Take in how long a copy of `route` itself took, waiting in queues left out."""
        self._tiers[route].observe(pages * self._page_bytes, seconds)
        self._measured = None

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Take in how long one forward over `tokens` prompt tokens took. REQUIRES: it did not wait for a load."""
        if tokens >= PREFILL_TOKENS_MIN:
            self._prefill.observe(tokens, seconds)
            self._measured = None

    def rates(self) -> Rates:
        """What this rank has measured by now, given speeds in place of measured ones. Cheap if nothing is new."""
        if self._measured is None:
            self._measured = self._estimate()
        return self._measured

    def use_rates(self, rates: tuple[int, ...]) -> None:
        """Decide by `rates` from now on; once per step, with the minimum over all ranks (alone: `rates()`)."""
        if rates is self._given_rates:
            return
        self._given_rates = rates
        self._agreed = agreed = Rates(*rates)
        load = _seconds(self._page_bytes, agreed.host_bytes_per_s, agreed.host_operations_per_s)
        read = _seconds(self._page_bytes, agreed.storage_bytes_per_s, agreed.storage_operations_per_s)
        both = None if load is None or read is None else (load[0] + read[0], load[1] + read[1])
        # Of what is stored without the fixed parts, since the prefix that it will be fetched with may be long.
        self._seconds = {Route.LOAD: load, Route.PREFETCH: both, Route.STORE: None if both is None else (0.0, both[1])}

    def decide(self, route: Route, tokens: int, pages: int) -> Decision:
        """Whether to fetch a hit of `tokens` tokens, which are `pages` pages, or to store them; counts the decision.

        REQUIRES: under several ranks all call it in the same order with the same arguments.
        """
        decision = self.would(route, tokens, pages)
        self._refused[route] = 0 if decision.go else self._refused[route] + 1
        self._decisions[route, decision] += 1
        if decision is Decision.UNMEASURED and route is not Route.STORE:
            self._unmeasured += 1
        elif decision is Decision.CALIBRATION:
            self._unmeasured = 0
        return decision

    def would(self, route: Route, tokens: int, pages: int) -> Decision:
        """What `decide` would answer. Changes nothing."""
        if route in self._always:
            return Decision.OVERRIDDEN
        seconds, prefill_tokens_per_s = self._seconds[route], self._agreed.prefill_tokens_per_s
        if seconds is None:
            return Decision.UNMEASURED
        may_refuse = self._refused[route] + 1 < self._probe_every or self._given[route]
        if prefill_tokens_per_s == 0:
            if route is Route.STORE:
                return Decision.UNMEASURED  # not storing would measure nothing
            calibrations = sum(self._decisions[each, Decision.CALIBRATION] for each in Route)
            due = self._unmeasured + 1 >= self._probe_every and calibrations < CALIBRATIONS_MAX
            return Decision.CALIBRATION if due and may_refuse else Decision.UNMEASURED
        if seconds[0] + pages * seconds[1] <= self._margin * tokens / prefill_tokens_per_s:
            return Decision.PAYS
        return Decision.TOO_SLOW if may_refuse else Decision.PROBE

    def statistics(self) -> BreakEvenStatistics:
        """A snapshot; a decision that was never taken counts 0."""
        counts = dict(self._decisions)
        decisions = {(r.value, d.value): counts.get((r, d), 0) for r, d in itertools.product(Route, Decision)}
        return BreakEvenStatistics(decisions, self._agreed)

    def check(self) -> None:
        """Raises InvariantError if a route has been refused for longer than it may be."""
        if any(self._refused[route] >= self._probe_every and not self._given[route] for route in Route):
            raise InvariantError(f"break_even: no probe although {self._refused} hits were refused in a row")

    def _estimate(self) -> Rates:
        # Of a prefill only what each further token costs: the rest of the prompt is computed in any case, and so is the
        # fixed part of its forward.
        tokens_per_s, _ = self._prefill.rates()
        return Rates(tokens_per_s, *self._tiers[Route.LOAD].rates(), *self._tiers[Route.PREFETCH].rates())


def _integer(speed: float) -> int:
    """A speed as a rate: at least 1, since 0 says that it is unknown, and no more than ranks can exchange."""
    return round(min(max(speed, 1.0), SPEED_MAX))


def _seconds(page_bytes: int, bytes_per_s: int, operations_per_s: int) -> tuple[float, float] | None:
    """Seconds of an operation and of each of its pages, None if a speed is unknown."""
    if bytes_per_s == 0 or operations_per_s == 0:
        return None
    return 1 / operations_per_s, page_bytes / bytes_per_s
