"""The cost of the cache on the scheduler's thread: every call is timed, by kind of call, by step and by request.

There are two clocks. `cpu` is the processor time of the thread; `elapsed` also includes waiting for a core and for the
interpreter's lock. Both exclude the replay's own work (filling and comparing pages, reading the trace). The cost of
timing an empty call (about 0.6 us) is measured at the start and subtracted from each call.

A call that names one request is charged to it. A call for all requests (such as `poll`) is divided evenly among those
that wait or run in that step. So the requests' times add up to the scheduler's time.

Owned by the scheduler's thread; no lock.
"""

from __future__ import annotations

import enum
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from hicache.cache import TreeCache

# Values are counted in classes with a width of 1/32: percentiles are exact to 3 %, and one day in ns has 1,400 classes.
_PRECISION_BITS = 5


class Call(enum.StrEnum):
    """The cache's calls of a scheduler."""

    PREFETCH = "prefetch_from_storage"
    PROGRESS = "check_prefetch_progress"
    BEGIN = "begin_request"
    START_LOADING = "start_loading"
    EXTEND = "extend"
    SHARE = "cache_unfinished_req"
    FINISH = "cache_finished_req"
    POLL = "poll"
    PEEK = "peek"


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of times in microseconds. `classes` are pairs of upper bound and count, ascending."""

    count: int
    total_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float
    max_us: float
    classes: tuple[tuple[float, int], ...]

    def at(self, percent: float) -> float:
        """Return the time that `percent` of all values do not exceed, or 0 without values."""
        return at_percent(self.classes, self.max_us, percent)


def at_percent(classes: Sequence[tuple[float, int]], max_us: float, percent: float) -> float:
    """Return the upper bound of the class of the smallest value that `percent` of all values do not exceed."""
    # Slightly less, because 99.9 % of 2,000 would otherwise be the value after the 1,998th.
    rank = percent * sum(count for _, count in classes) / 100 - 1e-9
    for upper_us, count in classes:
        rank -= count
        if rank <= 0:
            return min(upper_us, max_us)
    return max_us


class Histogram:
    """Times in nanoseconds, counted in classes of 3 % width (as HdrHistogram does)."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()  # by upper bound in us
        self._total_us = self._max_us = 0.0

    def add(self, value_ns: float) -> None:
        """Count a value."""
        self._counts[upper_bound(max(0, int(value_ns))) / 1000] += 1
        self._total_us += value_ns / 1000
        self._max_us = max(self._max_us, value_ns / 1000)

    def add_all(self, other: Latency) -> None:
        """Count all values of another distribution."""
        self._counts.update(dict(other.classes))
        self._total_us += other.total_us
        self._max_us = max(self._max_us, other.max_us)

    def latency(self) -> Latency:
        """Return the distribution as a value."""
        classes = tuple(sorted(self._counts.items()))
        p50, p90, p99, p999 = (at_percent(classes, self._max_us, percent) for percent in (50, 90, 99, 99.9))
        return Latency(self._counts.total(), self._total_us, p50, p90, p99, p999, self._max_us, classes)


def merged_latency(parts: Iterable[Latency]) -> Latency:
    """Return the distribution of the values of several distributions."""
    whole = Histogram()
    for part in parts:
        whole.add_all(part)
    return whole.latency()


def upper_bound(value: int) -> int:
    """Return the largest value of the class of `value`."""
    shift = max(0, value.bit_length() - 1 - _PRECISION_BITS)
    return (((value >> shift) + 1) << shift) - 1


@dataclass(slots=True)
class Cost:
    """Nanoseconds of the scheduler's thread."""

    cpu_ns: float = 0.0
    elapsed_ns: float = 0.0

    def add(self, other: Cost) -> None:
        """Add another."""
        self.cpu_ns += other.cpu_ns
        self.elapsed_ns += other.elapsed_ns


@dataclass(slots=True)
class CallTotal:
    """All calls of one kind."""

    calls: int = 0
    cpu_s: float = 0.0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTimes:
    """The cost of the cache on the scheduler's thread. `steps` counts steps with work."""

    steps: int
    idle_steps: int
    step_cpu: Latency
    step_elapsed: Latency
    request_cpu: Latency
    request_elapsed: Latency
    calls: Mapping[str, CallTotal]

    def distributions(self) -> dict[str, Latency]:
        """Return all four distributions by a name for people."""
        return {
            "request, cpu": self.request_cpu,
            "request, elapsed": self.request_elapsed,
            "step, cpu": self.step_cpu,
            "step, elapsed": self.step_elapsed,
        }


class SchedulerClock:
    """See the module's docstring. `cpu` and `elapsed` are its two clocks, in nanoseconds.

    Invariant: after `end_step`, the costs of ended requests, of active requests and of no request add up to the sum
    over `calls`.
    """

    def __init__(
        self, *, cpu: Callable[[], int] = time.thread_time_ns, elapsed: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.calls = {call: CallTotal() for call in Call}
        self.step_cpu, self.step_elapsed = Histogram(), Histogram()
        self.request_cpu, self.request_elapsed = Histogram(), Histogram()
        self._accounts: dict[str, Cost] = {}  # of active requests
        self._step = Cost()  # of this step
        self._shared = Cost()  # of this step, for all active requests
        self._cpu, self._elapsed = cpu, elapsed
        self._per_request = Cost()  # shared calls since the start, divided by the active requests of each step
        self._empty = self._empty_call()

    def _empty_call(self) -> Cost:
        """Return the time that `timed` measures for an empty call: the median of some hundred calls."""
        costs = []
        for _ in range(301):
            elapsed_ns, cpu_ns = self._elapsed(), self._cpu()
            costs.append((self._cpu() - cpu_ns, self._elapsed() - elapsed_ns))
        cpu, elapsed = zip(*costs, strict=True)
        return Cost(statistics.median(cpu), statistics.median(elapsed))

    def watch(self, cache: TreeCache) -> TreeCache:
        """Return `cache` with each `Call` timed. All other names are those of `cache`."""
        return cast("TreeCache", _Watched(cache, self))

    def timed(self, call: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`. Charge it to the request that its first argument names, or to all active requests."""
        cpu, elapsed = self._cpu, self._elapsed
        elapsed_ns, cpu_ns = elapsed(), cpu()
        try:
            return function(*args, **kwargs)
        finally:
            cpu_ns, elapsed_ns = cpu() - cpu_ns, elapsed() - elapsed_ns
            cost = Cost(max(0.0, cpu_ns - self._empty.cpu_ns), max(0.0, elapsed_ns - self._empty.elapsed_ns))
            entry = self.calls[call]
            entry.calls += 1
            entry.cpu_s += cost.cpu_ns / 1e9
            entry.elapsed_s += cost.elapsed_ns / 1e9
            self._step.add(cost)
            named = args[0] if args else None
            rid = named if isinstance(named, str) else getattr(named, "rid", None)
            (self._shared if rid is None else self._account(rid)).add(cost)

    def _account(self, rid: str) -> Cost:
        """Return the account of a request, which becomes active with its first call."""
        account = self._accounts.get(rid)
        if account is None:
            account = self._accounts[rid] = Cost(-self._per_request.cpu_ns, -self._per_request.elapsed_ns)
        return account

    def end_step(self, in_play: int, *, worked: bool) -> None:
        """End a step in which `in_play` requests waited or ran. Steps without work are not counted."""
        if worked:
            self.step_cpu.add(self._step.cpu_ns)
            self.step_elapsed.add(self._step.elapsed_ns)
        if in_play:
            self._per_request.add(Cost(self._shared.cpu_ns / in_play, self._shared.elapsed_ns / in_play))
        self._step, self._shared = Cost(), Cost()

    def ended(self, rid: str) -> None:
        """Close the account of a request. REQUIRES: between steps."""
        account = self._account(rid)
        self.request_cpu.add(account.cpu_ns + self._per_request.cpu_ns)
        self.request_elapsed.add(account.elapsed_ns + self._per_request.elapsed_ns)
        del self._accounts[rid]

    def times(self, idle_steps: int) -> SchedulerTimes:
        """Return all costs as a value."""
        step_cpu = self.step_cpu.latency()
        return SchedulerTimes(
            steps=step_cpu.count,
            idle_steps=idle_steps,
            step_cpu=step_cpu,
            step_elapsed=self.step_elapsed.latency(),
            request_cpu=self.request_cpu.latency(),
            request_elapsed=self.request_elapsed.latency(),
            calls={call.value: replace(total) for call, total in self.calls.items()},
        )


class _Watched:
    """The cache with timed calls; `SchedulerClock.watch` returns it."""

    def __init__(self, cache: TreeCache, clock: SchedulerClock) -> None:
        self._cache = cache
        for call in Call:
            setattr(self, call, functools.partial(clock.timed, call, getattr(cache, call)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
