"""Break-even: decides whether fetching a hit from a slower tier takes less time than computing it.

Computing a hit of n tokens takes C = n / prefill speed. Fetching it takes F: for each tier on the way, a fixed time (a
round trip, a launch) and bytes / bandwidth, and before that the reads ahead of it. A load crosses the bus, a prefetch
goes through storage and then crosses the bus. All of it is measured while the engine runs. A hit is fetched if

    F <= Q + C + a/2 x C^2

Q is the time that its request waits for the device in any case (`ComputeQueue`): reading during it costs nothing. `a`
is the rate of arrivals: a x C requests arrive while the device computes, and wait for half of C on average. A fetch
spares them that. For a load Q and a are 0: its request is at its turn.

If a whole hit does not pay, its first pages may: those for which F <= Q + C, if a longer hit is worse.

A page is stored if a fetch of the prompt up to it would pay, without the fixed times and with the median Q and a of the
last prefetches: a slow store is worth writing to while requests wait.

The bandwidth of a tier is that of all its transfers together, see `observe_transfer`.

Each speed is a line through the last few operations (`RateEstimator`). While a speed is unknown, hits are fetched in
order to measure it. While hits are refused, one in `probe_every` is fetched nevertheless, so that a tier that was slow
is measured again, and one run in `probe_every` is stored, so that there is something to fetch. A tier that recovers is
normally used again after four such probes, after seven at most. If all requests are hits, as after a restart, prefill
would never be measured: so one hit in `probe_every` is computed until it is.

All ranks must decide identically although each measures for itself. So measurements go into local estimates, which
`rates` returns, and decisions read only the argument of `use_rates`: the minimum over all ranks, agreed once per step.
For the same reason probes count decisions and not time. The length of a page differs between pipeline stages, so all
ranks use the bytes of the longest (`page_bytes`).

Owned by the scheduler thread; no lock. Any thread may call `statistics`.
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
from ..errors import InvariantError

# An estimate is a median over this many operations. Three stalls of any length among seven do not move it; a real
# change shows after the fourth. A decaying sum would be worse: one stall of thirty seconds outweighs a hundred normal
# operations, and a longer stall is forgotten later.
WINDOW = 7
# The first operation of a kind is often slow (warm-up); with three, the median ignores it.
OBSERVATIONS_MIN = 3
# A prefill of fewer tokens shows the shortest time of a step, not the speed. If most prompts are hits, such remainders
# would push every real prefill out of the window.
PREFILL_TOKENS_MIN = 64
# Two sizes closer than this factor do not show which part of the time is fixed: noise would decide.
SPREAD_MIN = 2
# The largest fixed share of the shortest operation. It limits the estimate for hits much larger than all measured ones
# to 32 times the speed of that operation.
FIXED_SHARE_MAX = 31 / 32
# The cost of a tier that never recovers: one request in sixteen fetches a hit that does not pay.
PROBE_EVERY = 16
# Hits that are computed in order to measure prefill. An engine that has not reported one by then never will.
CALIBRATIONS_MAX = 2 * OBSERVATIONS_MIN
# A fixed time below a microsecond counts as zero, and rates stay small integers.
OPERATIONS_PER_S_MAX = 1_000_000
# The largest number that ranks can exchange. Times so short that the speed would be larger count as zero.
SPEED_MAX = 2.0**62


class Route(enum.StrEnum):
    """The copy that a decision is about."""

    LOAD = "load"  # L2 to L1
    PREFETCH = "prefetch"  # storage to L2; its pages are loaded afterwards
    STORE = "store"  # L2 to storage, for a prefetch later


class Decision(enum.StrEnum):
    """Whether to fetch a hit, or to store a run, and the reason."""

    PAYS = "pays"
    PARTLY = "partly"  # the first pages pay
    TOO_SLOW = "too_slow"  # refused
    CALIBRATION = "calibration"  # prefill speed is unknown: refused, in order to measure it
    UNMEASURED = "unmeasured"  # a speed is unknown: fetched, in order to measure it
    PROBE = "probe"  # too slow, but refused so often since the last fetch that it is measured again
    OVERRIDDEN = "overridden"  # `always` is configured

    @property
    def go(self) -> bool:
        """True for fetching or storing."""
        return self is not Decision.TOO_SLOW and self is not Decision.CALIBRATION


class Ahead(NamedTuple):
    """What is ahead of a hit: its request waits `wait_s` seconds for the device anyway, and `pages` pages are read
    first. `arrivals_per_s` are the requests that arrive."""

    wait_s: float = 0.0
    pages: int = 0
    arrivals_per_s: float = 0.0


NOTHING_AHEAD = Ahead()


class Rates(NamedTuple):
    """Speeds as integers, 0 where unknown, so that ranks can agree on the minimum of each.

    `..._operations_per_s` is one over the fixed time: how many operations of size zero fit into a second.
    """

    prefill_tokens_per_s: int = 0
    host_bytes_per_s: int = 0
    host_operations_per_s: int = 0
    storage_bytes_per_s: int = 0
    storage_operations_per_s: int = 0


UNKNOWN = Rates()


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
    """Estimates the time of operations of one kind by a line through the last `WINDOW` of them.

    The slope is the median of the slopes between any two operations of clearly different size (Theil 1950, Sen 1968);
    it gives the fixed time, at most the time of the shortest operation. The speed is the median of the speeds without
    the fixed time. For operations of a single size the fixed time is zero.

    `line` is None before `OBSERVATIONS_MIN` operations. It is computed when it is read, because many operations may
    have ended by then. With `given`, a known speed in units per second, operations are ignored; the fixed time is zero.
    """

    def __init__(self, given: int = 0) -> None:
        self.given = given > 0
        self._line = Line(0.0, 1 / given) if given else None
        self._is_current = True
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (units, seconds)

    def observe(self, units: float, seconds: float) -> None:
        """Record one operation. Operations of size or time zero are ignored."""
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
            return 0.0  # only one size, or a changing speed: the fixed time cannot be determined
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

    Invariant: on each measured route, fewer than `probe_every` hits were refused since the last fetch.
    """

    def __init__(
        self, config: BreakEvenConfig | None = None, page_bytes: int = 1, *, given: Rates = UNKNOWN,
        probe_every: int = PROBE_EVERY,
    ) -> None:
        """`page_bytes` is the size of a page, equal on all ranks: that of the longest pipeline stage. The speeds in
        `given` that are not 0 are not measured, and have no fixed time.

        `probe_every` is the length of a run of decisions that cannot all be refusals; tests change it.
        """
        config = config or BreakEvenConfig()
        self._always = {route for route in Route if config.mode == "always"}
        if config.writes == "always":
            self._always.add(Route.STORE)
        self._probe_every = probe_every
        self._page_bytes = page_bytes
        self._prefill = RateEstimator(given.prefill_tokens_per_s)
        host, storage = RateEstimator(given.host_bytes_per_s), RateEstimator(given.storage_bytes_per_s)
        self._tiers = {Route.LOAD: host, Route.PREFETCH: storage}
        self._decisions: Counter[tuple[Route, Decision]] = Counter()
        self._refused = dict.fromkeys(Route, 0)  # since the last fetch
        self._unmeasured = 0  # fetched since the last calibration because a speed was unknown
        # If all speeds are given, probes are useless.
        both = host.given and storage.given
        self._given = {Route.LOAD: host.given, Route.PREFETCH: both, Route.STORE: both}
        self._measured: Rates | None = self._estimate()
        self._agreed = self._measured
        self._given_rates: tuple[int, ...] = ()
        self._seconds: dict[Route, tuple[float, float] | None] = {}
        self._aheads: deque[Ahead] = deque(maxlen=WINDOW)  # of the last prefetches
        self._usual_ahead: Ahead | None = NOTHING_AHEAD  # None if it is to be computed
        self.use_rates(self._measured)

    def observe_transfer(self, route: Route, pages: int, seconds: float, charged_s: float = 0.0) -> None:
        """Record the time of a copy of `route`, without its time in queues.

        `charged_s` is its share of that time, if copies overlap and divide it among them. In that time, the tier has
        moved seconds / charged_s times its bytes, and one copy, several at once, large and small ones all show the
        same bandwidth and the same fixed time.
        """
        overlap = seconds / charged_s if 0 < charged_s < seconds else 1.0
        self._tiers[route].observe(overlap * pages * self._page_bytes, seconds)
        self._measured = None

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record the time of one forward over `tokens` prompt tokens. REQUIRES: it did not wait for a load."""
        if tokens >= PREFILL_TOKENS_MIN:
            self._prefill.observe(tokens, seconds)
            self._measured = None

    def rates(self) -> Rates:
        """Return this rank's measured or given rates. Cheap if nothing is new."""
        if self._measured is None:
            self._measured = self._estimate()
        return self._measured

    def use_rates(self, rates: tuple[int, ...]) -> None:
        """Decide by `rates` from now on; once per step, with the minimum over all ranks (with one rank: `rates()`)."""
        if rates is self._given_rates:
            return
        self._given_rates = rates
        self._agreed = agreed = Rates(*rates)
        load = _seconds(self._page_bytes, agreed.host_bytes_per_s, agreed.host_operations_per_s)
        read = _seconds(self._page_bytes, agreed.storage_bytes_per_s, agreed.storage_operations_per_s)
        both = None if load is None or read is None else (load[0] + read[0], load[1] + read[1])
        # Without the fixed times, because the page may later be fetched as part of a long prefix.
        self._seconds = {Route.LOAD: load, Route.PREFETCH: both, Route.STORE: None if both is None else (0.0, both[1])}

    @property
    def prefill_tokens_per_s(self) -> int:
        """The speed of computing that decisions use, 0 if it is unknown."""
        return self._agreed.prefill_tokens_per_s

    @property
    def usual_ahead(self) -> Ahead:
        """What was ahead of the last prefetches, as medians, without reads; nothing before the first."""
        if self._usual_ahead is None:
            waits_s, _, arrivals_per_s = zip(*self._aheads, strict=True)
            self._usual_ahead = Ahead(statistics.median(waits_s), 0, statistics.median(arrivals_per_s))
        return self._usual_ahead

    def fetch_s(self, pages: int) -> float | None:
        """Return the seconds for fetching pages from storage; None while a speed is unknown."""
        seconds = self._seconds[Route.PREFETCH]
        return None if seconds is None else seconds[0] + pages * seconds[1]

    def decide(
        self, route: Route, tokens: int, pages: int, ahead: Ahead = NOTHING_AHEAD, part_pages: float = math.inf
    ) -> Decision:
        """Decide whether to fetch or store `tokens` tokens, which are `pages` pages; count the decision. A part of at
        least `part_pages` pages may be fetched, see `paying_pages`.

        REQUIRES: under several ranks all call it in the same order with the same arguments.
        """
        decision = self.would(route, tokens, pages, ahead, part_pages)
        if route is Route.PREFETCH:
            self._aheads.append(ahead)
            self._usual_ahead = None
        self._refused[route] = 0 if decision.go else self._refused[route] + 1
        self._decisions[route, decision] += 1
        if decision is Decision.UNMEASURED and route is not Route.STORE:
            self._unmeasured += 1
        elif decision is Decision.CALIBRATION:
            self._unmeasured = 0
        return decision

    def would(
        self, route: Route, tokens: int, pages: int, ahead: Ahead = NOTHING_AHEAD, part_pages: float = math.inf
    ) -> Decision:
        """Return what `decide` would return. Changes nothing."""
        if route in self._always:
            return Decision.OVERRIDDEN
        seconds, prefill_tokens_per_s = self._seconds[route], self._agreed.prefill_tokens_per_s
        if seconds is None:
            return Decision.UNMEASURED
        may_refuse = self._refused[route] + 1 < self._probe_every or self._given[route]
        if prefill_tokens_per_s == 0:
            if route is Route.STORE:
                return Decision.UNMEASURED  # without a store nothing could be measured
            calibrations = sum(self._decisions[each, Decision.CALIBRATION] for each in Route)
            due = self._unmeasured + 1 >= self._probe_every and calibrations < CALIBRATIONS_MAX
            return Decision.CALIBRATION if due and may_refuse else Decision.UNMEASURED
        if self.lacking_s(route, tokens, pages, ahead) <= 0:
            return Decision.PAYS
        if self.paying_pages(tokens, pages, ahead) >= part_pages:
            return Decision.PARTLY
        return Decision.TOO_SLOW if may_refuse else Decision.PROBE

    def lacking_s(self, route: Route, tokens: int, pages: int, ahead: Ahead = NOTHING_AHEAD) -> float:
        """Return how much longer a request must wait for the device for the hit to pay; at most 0 if it pays, and 0
        while a speed is unknown."""
        seconds, prefill_tokens_per_s = self._seconds[route], self._agreed.prefill_tokens_per_s
        if seconds is None or not prefill_tokens_per_s:
            return 0.0
        compute_s = tokens / prefill_tokens_per_s
        spared_s = compute_s + ahead.arrivals_per_s / 2 * compute_s * compute_s
        return self._late_s(seconds, ahead) + pages * seconds[1] - spared_s

    def paying_pages(self, tokens: int, pages: int, ahead: Ahead) -> int:
        """Return how many of the first pages pay if the whole hit does not: more of them would make the request later
        than computing does. REQUIRES: the speeds are known."""
        seconds, prefill_tokens_per_s = self._seconds[Route.PREFETCH], self._agreed.prefill_tokens_per_s
        if seconds is None or not prefill_tokens_per_s:
            return pages
        lost_s = seconds[1] - tokens / pages / prefill_tokens_per_s
        early_s = -self._late_s(seconds, ahead)
        return min(pages, int(early_s / lost_s)) if early_s > 0 and lost_s > 0 else 0

    def _late_s(self, seconds: tuple[float, float], ahead: Ahead) -> float:
        """Return how long after the turn of its request a fetch begins to move bytes; below zero if before it."""
        read_s = 0.0
        if ahead.pages and self._agreed.storage_bytes_per_s:
            read_s = ahead.pages * self._page_bytes / self._agreed.storage_bytes_per_s
        return seconds[0] + read_s - ahead.wait_s

    def statistics(self) -> BreakEvenStatistics:
        """Return a snapshot, with 0 for decisions that were never taken."""
        counts = dict(self._decisions)
        decisions = {(r.value, d.value): counts.get((r, d), 0) for r, d in itertools.product(Route, Decision)}
        return BreakEvenStatistics(decisions, self._agreed)

    def check(self) -> None:
        """Raises InvariantError if a route has been refused for longer than it may be."""
        if any(self._refused[route] >= self._probe_every and not self._given[route] for route in Route):
            raise InvariantError(f"break_even: no probe although {self._refused} hits were refused in a row")

    def _estimate(self) -> Rates:
        # Only the time per token of a prefill: the rest of the prompt is computed anyway, which takes the fixed time.
        tokens_per_s, _ = self._prefill.rates()
        return Rates(tokens_per_s, *self._tiers[Route.LOAD].rates(), *self._tiers[Route.PREFETCH].rates())


def _integer(speed: float) -> int:
    """Return a speed as an integer: at least 1, since 0 means unknown, and at most the maximum that ranks exchange."""
    return round(min(max(speed, 1.0), SPEED_MAX))


def _seconds(page_bytes: int, bytes_per_s: int, operations_per_s: int) -> tuple[float, float] | None:
    """Return the seconds of an operation and of each of its pages; None if a speed is unknown."""
    if bytes_per_s == 0 or operations_per_s == 0:
        return None
    return 1 / operations_per_s, page_bytes / bytes_per_s
