"""Which calls a guard makes, which wait and which are refused; the results of calls; the budget for retries.

Locking design: one condition guards everything in here, breakers, budget, damage watch and latencies included. It is
held for a few instructions, also by an engine's scheduler thread (`may_pass`), and never while a backend is called. It
is taken before the lock of the task that probes, never after.
"""

from __future__ import annotations

import bisect
import enum
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...backoff import Backoff
from ...config.guard import GuardConfig, Override
from ...errors import InvariantError
from ...histogram import BOUNDS_S, SIZE_BOUNDS_BYTES, Histogram, HistogramStatistics, LatencyStatistics
from ..base import GetOutcome
from ..errors import StoreError
from .breaker import Breaker, BreakerState, BreakerStatistics

# A pause is between half of its length and the whole: many engines that lost one store must not return as one.
_JITTER_MIN = 0.5
# What a retry budget holds at most, and at the start: a few calls, and pages of two usual batches.
BURST_CALLS = 4.0
BURST_PAGES = 256.0
# Each further time that all pages are damaged, the pause is so many times as long, up to an hour: an operator who has
# to repair something needs that long.
_DAMAGE_BACKOFF_GROWTH = 4
_DAMAGE_BACKOFF_S_MAX = 3600.0
# Changes of breakers that wait for the log; they come seconds apart.
_CHANGES_MAX = 64


class Direction(enum.StrEnum):
    """Which way pages go. Lookups read, removals write."""

    READ = "read"
    WRITE = "write"


# After a single failed call a probe is to say quickly if the store still answers, before further calls hang; in one
# direction it writes a page. The probes of a breaker that is open have the time that the options give.
_FIRST_PROBE_S = {Direction.READ: 0.25, Direction.WRITE: 0.5}


class Verb(enum.StrEnum):
    """What is asked of a backend."""

    __hash__ = str.__hash__  # that of Enum is a function in Python, for each key of a dictionary
    EXISTS = "exists"
    GET = "get"
    SET = "set"
    DELETE = "delete"
    TOUCH = "touch"

    @property
    def direction(self) -> Direction:
        """Which breaker decides about it."""
        return Direction.READ if self is Verb.GET or self is Verb.EXISTS else Direction.WRITE


class Refusal(enum.StrEnum):
    """Why a call was not made."""

    OPEN = "open"  # the breaker is open, or the operator has switched the direction off
    BUSY = "busy"  # other calls had all the bytes that may be in flight, until the deadline
    CLOSED = "closed"  # the guard was closed while the call waited


class CallResult(enum.StrEnum):
    """What a call says about the store: that it works, nothing, or that it failed in one of four ways."""

    GOOD = "good"
    UNKNOWN = "unknown"
    ERROR = "error"  # half of the pages or more are errors
    LOOKUP = "lookup"  # a lookup that found less than all came with an error
    RAISED = "raised"  # the backend raised, or broke the contract
    OVERDUE = "overdue"  # the call hung past deadline and grace


@dataclass(slots=True, eq=False)
class Call:
    """A call in flight, until the end of its `with` block. Belongs to its thread, but for `overdue`. The thread sets
    `result`."""

    control: AdmissionControl
    verb: Verb
    pages: int
    bytes: int
    deadline: float
    began_s: float
    admitted: int  # the breaker's round
    overdue: bool = False  # has hung past deadline and grace; counted as failed already
    result: CallResult = CallResult.UNKNOWN

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.leave(self)


@dataclass(frozen=True, slots=True)
class GuardStatistics:
    """Totals since the guard was made, and what is in flight. `refused` and `failures` count calls."""

    breakers: Mapping[Direction, BreakerStatistics]
    refused: Mapping[tuple[Direction, Refusal], int]
    failures: Mapping[tuple[Direction, str], int]
    retried_calls: Mapping[Direction, int]
    latency: Mapping[Verb, LatencyStatistics]
    in_flight_calls: int
    in_flight_bytes: int
    overdue_calls: int
    call_bytes: Mapping[Verb, HistogramStatistics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BreakerChange:
    """A direction of a store was switched off, or on again `after_s` seconds later with `refused` calls not made."""

    direction: Direction
    breaker: BreakerStatistics
    pause_s: float  # until the next probe
    after_s: float
    refused: int


class RetryBudget:
    """Two token buckets, of calls and of pages. `share` 0 means no retry ever.

    A retry helps against a single lost request and harms a store that is drowning. With a budget the load that retries
    add is bounded whatever fails: of n calls over any time at most `share` x n + a small burst are repeated, and the
    same holds for their pages.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._calls = BURST_CALLS if share else 0.0
        self._pages = BURST_PAGES if share else 0.0

    def earn(self, pages: int) -> None:
        """A call of `pages` pages is made for the first time."""
        self._calls = min(BURST_CALLS, self._calls + self._share)
        self._pages = min(BURST_PAGES, self._pages + self._share * pages)

    def spend(self, pages: int) -> int:
        """Return how many of `pages` pages one call may try again; 0 for none. They are paid for."""
        granted = min(pages, int(self._pages))
        if self._calls < 1.0 or granted < 1:
            return 0
        self._calls -= 1.0
        self._pages -= granted
        return granted


class DamageWatch:
    """Counts damaged pages since the last sound one.

    One damaged page is a bad disk or a torn write; it is removed. If everything is damaged, the reader is more likely
    wrong than the store: another MAC key, a bug, memory that breaks what it reads. Then removing would go on until
    nothing is left, so reading has to stop. After such an alarm a single further damaged page is the next one, until a
    sound page was read.
    """

    def __init__(self, options: GuardConfig) -> None:
        self._options = options
        first_s = options.damage_backoff
        self._backoff = Backoff(first_s, max(first_s, _DAMAGE_BACKOFF_S_MAX), _DAMAGE_BACKOFF_GROWTH)
        self._pages_max = options.damage_pages
        self._run = 0
        self._sound = False  # a sound page was read since the start or the last alarm

    def pages_at_once(self, read: Sequence[GetOutcome]) -> int | None:
        """Return how many pages of a batch to read next, of which `read` are read; None for all the rest.

        As long as nothing speaks for the store, the head of a batch comes alone, and after an alarm every page.
        """
        if self._sound and not self._run:
            return None
        if self._pages_max > 1 and read and GetOutcome.CORRUPT not in read:
            return None
        return self._pages_max

    def saw(self, outcomes: Iterable[GetOutcome]) -> float | None:
        """Take in the outcomes of pages, in order. None, or for how long to stop: more than 0 seconds."""
        for outcome in outcomes:
            if outcome is GetOutcome.HIT:
                self._run = 0
                self._sound = True
                self._pages_max = self._options.damage_pages
                self._backoff.reset()
            elif outcome is GetOutcome.CORRUPT:
                self._run += 1
        if self._run < self._pages_max:
            return None
        self._run = 0
        self._sound = False
        self._pages_max = 1
        return self._backoff.next_s()


class AdmissionControl:
    """See the module's docstring. `clock` is monotonic, in seconds. `wake` is called with the time at which a probe is
    due, when that is known and then with each call: it must not block.

    Invariant: `in_flight_bytes` is the sum over the calls in flight, and over the bound only if one call alone is.
    """

    def __init__(self, options: GuardConfig, clock: Callable[[], float], wake: Callable[[float], None]) -> None:
        def jitter() -> float:
            return random.uniform(_JITTER_MIN, 1.0)

        self._options = options
        self._clock = clock
        self._wake = wake
        self._state = threading.RLock()
        self._room = threading.Condition(self._state)
        self._breakers = {
            Direction.READ: Breaker(options, options.read, jitter),
            Direction.WRITE: Breaker(options, options.write, jitter),
        }
        self._damage = DamageWatch(options)
        self._budget = RetryBudget(options.retry_share)
        self._latency_counts = {verb: [0] * (len(BOUNDS_S) + 1) for verb in Verb}
        self._latency_s = dict.fromkeys(Verb, 0.0)
        self._call_bytes = {verb: Histogram(SIZE_BOUNDS_BYTES) for verb in (Verb.GET, Verb.SET)}
        self._refused: Counter[tuple[Direction, Refusal]] = Counter()
        self._failures: Counter[tuple[Direction, str]] = Counter()
        self._retried_calls: Counter[Direction] = Counter()
        self._calls: set[Call] = set()
        self._in_flight_bytes = 0
        self._probing: dict[Direction, tuple[int, float]] = {}  # rounds of probes in flight, and when they are overdue
        self._overdue_at = math.inf  # when the next of `_calls`, or a probe, will be overdue
        self._waiting: deque[object] = deque()
        self._closed = False
        self._changes: deque[BreakerChange] = deque(maxlen=_CHANGES_MAX)
        self._off_since: dict[Direction, tuple[float, int]] = {}  # directions that are off, and calls refused before
        self.probe_at = math.inf  # when the next probe is due; read by others without the lock

    # Calls

    def enter(self, verb: Verb, pages: int, size_bytes: int, deadline: float) -> Call:
        """Admit a call. Waits until its bytes have room, in the order of arrival, at most until `deadline`; calls
        without bytes do not wait. Raises StoreError for a call that is refused."""
        direction = verb.direction
        breaker = self._breakers[direction]
        self._tend()
        with self._state:
            time_s = self._clock()
            if time_s >= self._overdue_at:
                self._note_overdue()
            refusal = Refusal.OPEN if breaker.state is BreakerState.OPEN else None
            if refusal is None and size_bytes and (self._waiting or not self._has_room(size_bytes)):
                refusal = self._await_room(breaker, size_bytes, deadline)
                time_s = self._clock()
            if refusal is not None:
                self._refused[direction, refusal] += 1
                raise StoreError(f"guard_{refusal}")
            self._budget.earn(pages)
            call = Call(self, verb, pages, size_bytes, deadline, time_s, breaker.round)
            self._calls.add(call)
            self._in_flight_bytes += size_bytes
            self._overdue_at = min(self._overdue_at, deadline + self._options.grace)
            return call

    def leave(self, call: Call) -> None:
        """A call has ended."""
        with self._state:
            time_s = self._clock()
            took_s = time_s - call.began_s
            self._calls.remove(call)
            self._in_flight_bytes -= call.bytes
            self._latency_counts[call.verb][bisect.bisect_left(BOUNDS_S, took_s)] += 1
            self._latency_s[call.verb] += took_s
            if call.bytes:
                self._call_bytes[call.verb].add(call.bytes)
            if self._waiting:
                self._room.notify_all()
            if call.result is not CallResult.UNKNOWN and not call.overdue:
                self._record(call, call.result, time_s)

    def grant_retry(self, call: Call, pages: int) -> int:
        """Return how many pages of a call may be tried again: none if the breaker has opened since, or there is no
        budget."""
        direction = call.verb.direction
        with self._state:
            if call.overdue or self._closed or self._breakers[direction].round != call.admitted:
                return 0
            granted = self._budget.spend(pages)
            self._retried_calls[direction] += granted > 0
            return granted

    # Damage

    def pages_at_once(self, read: Sequence[GetOutcome]) -> int | None:
        """See DamageWatch."""
        with self._state:
            return self._damage.pages_at_once(read)

    def saw_pages(self, call: Call, outcomes: Iterable[GetOutcome]) -> bool:
        """Take in the outcomes of a read. False if the rest of the batch is not to be read: the breaker has opened."""
        with self._state:
            if self._breakers[Direction.READ].round != call.admitted:
                return False  # the damage was there when the breaker opened
            pause_s = self._damage.saw(outcomes)
            if pause_s is None:
                return True
            for breaker in self._breakers.values():
                breaker.trip("damage", pause_s, self._clock())
            self._breakers_moved()
            return self._breakers[Direction.READ].round == call.admitted

    # Probes

    def begin_probe(self, direction: Direction) -> tuple[int, float] | None:
        """Return the round of the breaker, for `probed`, and the probe's deadline; None if no probe of this direction
        is due."""
        with self._state:
            breaker, time_s = self._breakers[direction], self._clock()
            if self._closed or breaker.probe_at > time_s:
                return None
            is_first = breaker.state is BreakerState.CLOSED  # it follows a failed call
            deadline = time_s + min(self._options.probe_timeout, _FIRST_PROBE_S[direction] if is_first else math.inf)
            overdue_at = deadline + self._options.grace
            self._probing[direction] = breaker.round, overdue_at
            self._overdue_at = min(self._overdue_at, overdue_at)
            return breaker.round, deadline

    def probed(self, direction: Direction, begun: int, ok: bool) -> None:
        """A probe has ended."""
        with self._state:
            self._end_probe(direction, begun, ok)

    # State

    def may_pass(self, direction: Direction) -> bool:
        """True if a call of this direction would be made now. Looks for hanging calls too. Does not block."""
        if self._clock() >= self._overdue_at:
            with self._state:
                self._note_overdue()
        self._tend()
        return self._breakers[direction].state is not BreakerState.OPEN

    def take_changes(self) -> list[BreakerChange]:
        """Return the changes of breakers since the last call, for the log."""
        with self._state:
            changes = list(self._changes)
            self._changes.clear()
            return changes

    def off(self) -> dict[Direction, tuple[float, int]]:
        """Return the directions that are off: since how many seconds, and how many calls were refused for it."""
        with self._state:
            time_s = self._clock()
            return {
                direction: (time_s - since_s, self._refused[direction, Refusal.OPEN] - before)
                for direction, (since_s, before) in self._off_since.items()
            }

    def set_override(self, direction: Direction, override: Override) -> None:
        """The operator's word about one direction."""
        with self._state:
            self._breakers[direction].set_override(override)
            self._breakers_moved()

    def statistics(self) -> GuardStatistics:
        """A snapshot."""
        with self._state:
            self._note_overdue()
            return GuardStatistics(
                breakers={direction: breaker.statistics() for direction, breaker in self._breakers.items()},
                refused=dict(self._refused),
                failures=dict(self._failures),
                retried_calls=dict(self._retried_calls),
                latency={
                    verb: LatencyStatistics(tuple(counts), self._latency_s[verb])
                    for verb, counts in self._latency_counts.items()
                },
                in_flight_calls=len(self._calls),
                in_flight_bytes=self._in_flight_bytes,
                overdue_calls=sum(call.overdue for call in self._calls),
                call_bytes={verb: histogram.statistics() for verb, histogram in self._call_bytes.items()},
            )

    def close(self) -> None:
        """Let no call wait any more."""
        with self._state:
            self._closed = True
            self._room.notify_all()

    def check(self) -> None:
        """Raises InvariantError if the books do not add up."""
        with self._state:
            for breaker in self._breakers.values():
                breaker.check()
            total = sum(call.bytes for call in self._calls)
            alone = sum(call.bytes > 0 for call in self._calls) <= 1
            if self.probe_at != min(breaker.probe_at for breaker in self._breakers.values()):
                raise InvariantError("guard: the time of the next probe is not that of a breaker")
            if total != self._in_flight_bytes or (total > self._options.in_flight and not alone):
                raise InvariantError(f"guard: {self._in_flight_bytes} bytes in flight, {total} counted")

    # Inside, under the lock

    def _await_room(self, breaker: Breaker, size_bytes: int, deadline: float) -> Refusal | None:
        """Stand in line. Return why the call was left without room, None if there is some now."""
        place = object()
        self._waiting.append(place)
        try:
            while not (self._waiting[0] is place and self._has_room(size_bytes)):
                # Woken also when a call hangs too long, which may open the breaker.
                wait_s = min(deadline, self._overdue_at) - self._clock()
                self._room.wait(max(0.0, min(wait_s, threading.TIMEOUT_MAX)))
                time_s = self._clock()
                if time_s >= self._overdue_at:
                    self._note_overdue()
                if self._closed:
                    return Refusal.CLOSED
                if time_s >= deadline:
                    return Refusal.BUSY
                if breaker.state is BreakerState.OPEN:
                    return Refusal.OPEN
            return None
        finally:
            self._waiting.remove(place)
            self._room.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        return self._in_flight_bytes == 0 or self._in_flight_bytes + size_bytes <= self._options.in_flight

    def _record(self, call: Call, result: CallResult, time_s: float) -> None:
        direction = call.verb.direction
        is_good = result is CallResult.GOOD
        if not is_good:
            self._failures[direction, result] += 1
        breaker = self._breakers[direction]
        before = breaker.state
        breaker.record(call.admitted, is_good, result, time_s)
        # A good call moves a breaker only if it closes it, or ends a suspicion.
        if not is_good or breaker.state is not before or self.probe_at < math.inf:
            self._breakers_moved()

    def _breakers_moved(self) -> None:
        """A breaker may have opened, which those who wait for room have to know, or wants another probe or none."""
        self.probe_at = min(breaker.probe_at for breaker in self._breakers.values())
        for direction, breaker in self._breakers.items():
            if (breaker.state is BreakerState.OPEN) != (direction in self._off_since) and (
                breaker.state is not BreakerState.HALF_OPEN
            ):
                self._note_change(direction, breaker)
        self._tend()
        if self._waiting:
            self._room.notify_all()

    def _note_change(self, direction: Direction, breaker: Breaker) -> None:
        """Keep a change for the log, which the thread of the probes writes: this may be a scheduler's thread."""
        time_s, refused = self._clock(), self._refused[direction, Refusal.OPEN]
        since_s, before = self._off_since.pop(direction, (time_s, refused))
        if breaker.state is BreakerState.OPEN:
            self._off_since[direction] = (time_s, refused)
        pause_s = max(0.0, breaker.probe_at - time_s)
        self._changes.append(
            BreakerChange(direction, breaker.statistics(), pause_s, time_s - since_s, refused - before)
        )
        self._wake(time_s)

    def _tend(self) -> None:
        """Wake the thread of the probes if one is planned; it is replaced if it died or hangs."""
        probe_at = self.probe_at
        if probe_at < math.inf:
            self._wake(probe_at)

    def _end_probe(self, direction: Direction, begun: int, ok: bool) -> None:
        self._probing.pop(direction, None)
        self._breakers[direction].probed(begun, ok, self._clock())
        self._breakers_moved()

    def _note_overdue(self) -> None:
        """Calls and probes that hang have failed, while they hang."""
        time_s = self._clock()
        if time_s < self._overdue_at:
            return
        grace_s = self._options.grace
        for call in self._calls:
            if not call.overdue and time_s >= call.deadline + grace_s:
                call.overdue = True
                self._record(call, CallResult.OVERDUE, time_s)
        for direction, (begun, overdue_at) in list(self._probing.items()):
            if time_s >= overdue_at:
                self._end_probe(direction, begun, False)
        probes = (overdue_at for _, overdue_at in self._probing.values())
        calls = (call.deadline + grace_s for call in self._calls if not call.overdue)
        self._overdue_at = min((*probes, *calls), default=math.inf)
