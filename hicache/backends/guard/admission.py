"""Admission control of a guard: which calls it makes, which wait, which it rejects. Judges results, budgets retries.

The rules of breakers and health are in modules of their own. This one has their common lock and the order of events:
the end of a call, or its delay, is a result; a result moves a breaker; a moved breaker plans a probe, ends the wait of
calls and queues a line for the log. Each step reads and changes the state of the step before it, so it is one class.

Locking design: the lock of Calls guards everything in this module, including breakers, budget, damage watch and
latencies. An engine's scheduler thread takes it too (`may_pass`). Lock order: this lock, then that of the probe task.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...backoff import Backoff
from ...clock import Clock
from ...config.guard import GuardConfig, Override
from ...errors import InvariantError
from ...histogram import BOUNDS_S, SIZE_BOUNDS_BYTES, Histogram, HistogramStatistics
from ..base import Direction, GetOutcome, SetOutcome
from ..calls import Call, CallResult, Calls, Refusal, Verb
from ..errors import ErrorKind, StoreError
from .breaker import Breaker, BreakerState, BreakerStatistics
from .health import BUSY, SWITCHED_OFF, HealthWatch, StoreHealth

# A back-off lasts between half of its length and all of it, so that many engines do not return to one store together.
_JITTER_MIN = 0.5
# Breaker changes that wait for the log. They occur seconds apart, so few wait.
_CHANGES_MAX = 64
# A retry budget starts full: a few calls, and the pages of two usual batches.
BURST_CALLS = 4.0
BURST_PAGES = 256.0
# Each time that all pages are damaged again, the back-off grows by this factor, up to an hour: a repair takes time.
_DAMAGE_BACKOFF_GROWTH = 4
_DAMAGE_BACKOFF_S_MAX = 3600.0
# After a single failed call, a probe must find out quickly whether the store still answers, before more calls hang. The
# write probe needs more time because it stores a page. Probes of an open breaker may take `probe_timeout`.
_FIRST_PROBE_S = {Direction.READ: 0.25, Direction.WRITE: 0.5}


@dataclass(frozen=True, slots=True)
class GuardStatistics:
    """Totals since the guard was created, and the calls in flight. `refused` and `failures` count calls."""

    breakers: Mapping[Direction, BreakerStatistics]
    refused: Mapping[tuple[Direction, Refusal], int]
    failures: Mapping[tuple[Direction, str], int]
    retried_calls: Mapping[Direction, int]
    latency: Mapping[Verb, HistogramStatistics]
    in_flight_calls: int
    in_flight_bytes: int
    overdue_calls: int
    call_bytes: Mapping[Verb, HistogramStatistics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BreakerChange:
    """A direction of a store is now off, or on again after `after_s` seconds with `refused` rejected calls."""

    direction: Direction
    breaker: BreakerStatistics
    pause_s: float  # until the next probe
    after_s: float
    refused: int


class RetryBudget:
    """Two token buckets, one for calls and one for pages. With `share` 0 nothing is retried.

    A retry helps against a single lost request and harms an overloaded store. The budget bounds the extra load: of n
    calls at most `share` x n plus a small burst are retried. The same bound holds for their pages.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._calls = BURST_CALLS if share else 0.0
        self._pages = BURST_PAGES if share else 0.0

    def earn(self, pages: int) -> None:
        """Add tokens for the first attempt of a call of `pages` pages."""
        self._calls = min(BURST_CALLS, self._calls + self._share)
        self._pages = min(BURST_PAGES, self._pages + self._share * pages)

    def spend(self, pages: int) -> int:
        """Return how many of `pages` pages one call may retry, and take their tokens; 0 takes none."""
        granted = min(pages, int(self._pages))
        if self._calls < 1.0 or granted < 1:
            return 0
        self._calls -= 1.0
        self._pages -= granted
        return granted


class DamageWatch:
    """Counts damaged pages since the last sound one, and raises an alarm at `damage_pages`.

    One damaged page means a bad disk or a torn write, and the backend removes it. If every page is damaged, the reader
    is more likely at fault than the store: a different MAC key, a bug, bad memory. Reading must then stop, or it would
    remove every page. After an alarm, each further damaged page raises the next alarm until a sound page is read.
    """

    def __init__(self, options: GuardConfig) -> None:
        self._options = options
        first_s = options.damage_backoff
        self._backoff = Backoff(first_s, max(first_s, _DAMAGE_BACKOFF_S_MAX), _DAMAGE_BACKOFF_GROWTH)
        self._pages_max = options.damage_pages
        self._run = 0
        self._sound = False  # True once a sound page was read since the start or the last alarm
        # True while `pages_at_once` returns None and `saw` has nothing to note unless a page is damaged.
        self.is_calm = False

    def pages_at_once(self, read: Sequence[GetOutcome]) -> int | None:
        """Return how many pages of a batch to read next, after the outcomes `read`; None for all remaining pages.

        Until the reader has seen a sound page, the first pages of a batch are read alone. After an alarm, pages are
        read one at a time.
        """
        if self.is_calm:
            return None
        if self._pages_max > 1 and read and GetOutcome.CORRUPT not in read:
            return None
        return self._pages_max

    def saw(self, outcomes: Iterable[GetOutcome]) -> float | None:
        """Record the outcomes of pages, in order. Return None, or after an alarm the seconds to stop reading (> 0)."""
        for outcome in outcomes:
            if outcome is GetOutcome.HIT:
                self._run = 0
                self._sound = True
                self._pages_max = self._options.damage_pages
                self._backoff.reset()
            elif outcome is GetOutcome.CORRUPT:
                self._run += 1
        self.is_calm = self._sound and not self._run
        if self._run < self._pages_max:
            return None
        self._run = 0
        self._sound = False
        self._pages_max = 1
        return self._backoff.next_s()


class AdmissionControl(Calls):
    """See the module's docstring. `wake` is called with the time of the next probe when a probe is planned, and on each
    call until then; it must not block.

    Invariant: `in_flight_bytes` is the sum over the calls in flight. It exceeds the limit only if a single call does.
    """

    def __init__(self, options: GuardConfig, frame_bytes: int, clock: Clock, wake: Callable[[float], None]) -> None:
        super().__init__(frame_bytes, clock)
        jitter = functools.partial(random.uniform, _JITTER_MIN, 1.0)
        self._options = options
        self._wake = wake
        self._breakers = {
            Direction.READ: Breaker(options, options.read, jitter),
            Direction.WRITE: Breaker(options, options.write, jitter),
        }
        self._damage = DamageWatch(options)
        self._health = HealthWatch(wake, clock)
        self._budget = RetryBudget(options.retry_share)
        self._latency = {verb: Histogram(BOUNDS_S) for verb in Verb}
        self._call_bytes = {verb: Histogram(SIZE_BOUNDS_BYTES) for verb in (Verb.GET, Verb.SET)}
        self._refused: Counter[tuple[Direction, Refusal]] = Counter()
        self._failures: Counter[tuple[Direction, str]] = Counter()
        self._retried_calls: Counter[Direction] = Counter()
        self._in_flight_bytes = 0
        self._probing: dict[Direction, tuple[int, float]] = {}  # round and overdue time of each probe in flight
        self._overdue_at = math.inf  # when the next call or probe becomes overdue
        self._waiting: deque[object] = deque()
        self._changes: deque[BreakerChange] = deque(maxlen=_CHANGES_MAX)
        self._off_since: dict[Direction, tuple[float, int]] = {}  # per direction that is off: start, refused before it
        self.probe_at = math.inf  # when the next probe is due; other threads read it without the lock

    # Calls

    def _admit(self, call: Call) -> None:
        """See Calls. Waits in order of arrival until the in-flight limit has room for the call, or its deadline."""
        breaker = self._breakers[call.verb.direction]
        if self.probe_at < math.inf:
            self._tend()
        if call.began_s >= self._overdue_at:
            self._note_overdue()
        refusal = Refusal.OPEN if breaker.state is BreakerState.OPEN else None
        if refusal is None and call.bytes and (self._waiting or not self._has_room(call.bytes)):
            refusal = self._await_room(breaker, call)
            call.began_s = self._clock()
        if refusal is not None:
            self._refused[call.verb.direction, refusal] += 1
            if call.verb is Verb.SET and breaker.override is Override.AUTO and refusal is not Refusal.CLOSED:
                self._health.kept_nothing(call.pages, BUSY if refusal is Refusal.BUSY else "", "", call.began_s)
            raise StoreError(f"guard_{refusal}")
        self._budget.earn(call.pages)
        call.round = breaker.round
        self._in_flight_bytes += call.bytes
        self._overdue_at = min(self._overdue_at, call.deadline + self._options.grace)

    def _end(self, call: Call) -> None:
        """See Calls. Records the latency of the call, its bytes and its result."""
        time_s = self._clock()
        self._in_flight_bytes -= call.bytes
        self._latency[call.verb].add(time_s - call.began_s)
        if call.bytes:
            self._call_bytes[call.verb].add(call.bytes)
        if self._waiting:
            self._changed.notify_all()
        if call.kept is SetOutcome.STORED:
            self._health.kept(time_s)
        elif call.kept is not None:
            is_rejected = call.kept is SetOutcome.REJECTED
            self._health.kept_nothing(call.new_pages, call.cause, call.detail, time_s, is_rejected=is_rejected)
        if call.result is not CallResult.UNKNOWN and not call.overdue:
            self._record(call, call.result, time_s)

    def grant_retry(self, call: Call, pages: int) -> int:
        """Return how many pages of a call may be retried: 0 if the breaker has opened since or the budget is spent."""
        direction = call.verb.direction
        with self._lock:
            if call.overdue or self._closed or self._breakers[direction].round != call.round:
                return 0
            granted = self._budget.spend(pages)
            self._retried_calls[direction] += granted > 0
            return granted

    # Damage

    def pages_at_once(self, read: Sequence[GetOutcome]) -> int | None:
        if self._damage.is_calm:
            return None
        with self._lock:
            return self._damage.pages_at_once(read)

    def saw_pages(self, call: Call, outcomes: Sequence[GetOutcome]) -> bool:
        """Record the outcomes of a read. Return False if the breaker has opened: do not read the rest of the batch."""
        if self._damage.is_calm and GetOutcome.CORRUPT not in outcomes:
            return self._breakers[Direction.READ].round == call.round
        with self._lock:
            if self._breakers[Direction.READ].round != call.round:
                return False  # the breaker opened after this call began: do not count its damage again
            pause_s = self._damage.saw(outcomes)
            if pause_s is None:
                return True
            for breaker in self._breakers.values():
                breaker.trip("damage", pause_s, self._clock())
            self._breakers_moved()
            return self._breakers[Direction.READ].round == call.round

    # Probes

    def begin_probe(self, direction: Direction) -> tuple[int, float] | None:
        """Begin a probe if one is due. Return the breaker's round, to pass to `probed`, and the probe's deadline; None
        if no probe of this direction is due."""
        with self._lock:
            breaker, time_s = self._breakers[direction], self._clock()
            if self._closed or breaker.probe_at > time_s:
                return None
            is_first = breaker.state is BreakerState.CLOSED  # the probe follows a single failed call
            deadline = time_s + min(self._options.probe_timeout, _FIRST_PROBE_S[direction] if is_first else math.inf)
            overdue_at = deadline + self._options.grace
            self._probing[direction] = breaker.round, overdue_at
            self._overdue_at = min(self._overdue_at, overdue_at)
            return breaker.round, deadline

    def probed(self, direction: Direction, begun: int, ok: bool, cause: str = "", *, kept: bool = False) -> None:
        """Record the end of a probe. `cause` is the kind of its error; `kept` means that it stored a page."""
        with self._lock:
            if cause and not ok:
                self._health.failed(direction, cause)
            self._end_probe(direction, begun, ok)
            if kept and self._breakers[direction].state is BreakerState.CLOSED:
                self._health.probed(self._clock())

    # State

    def may_pass(self, direction: Direction) -> bool:
        """True if a call of this direction would be made now. Also counts hanging calls as failed. Does not block."""
        if self._clock() >= self._overdue_at:
            with self._lock:
                self._note_overdue()
        self._tend()
        return self._breakers[direction].state is not BreakerState.OPEN

    def take_changes(self) -> list[BreakerChange]:
        """Return and forget the breaker changes since the last call, for the log."""
        with self._lock:
            changes = list(self._changes)
            self._changes.clear()
            return changes

    def off(self) -> dict[Direction, tuple[float, int]]:
        """Return, per direction that is off, for how many seconds and how many calls were rejected since."""
        with self._lock:
            time_s = self._clock()
            return {
                direction: (time_s - since_s, self._refused[direction, Refusal.OPEN] - before)
                for direction, (since_s, before) in self._off_since.items()
            }

    def health(self) -> StoreHealth:
        """Return the health of the store now. Does not block."""
        with self._lock:
            return self._health.verdict(self._off(), self._clock())

    def health_news(self) -> tuple[StoreHealth | None, float]:
        """Return the health if it is to be logged, and the time of the next call. See HealthWatch."""
        with self._lock:
            return self._health.news(self._off(), self._clock())

    def set_override(self, direction: Direction, override: Override) -> None:
        """Apply the operator's override to one direction."""
        with self._lock:
            self._breakers[direction].set_override(override)
            self._breakers_moved()

    def guard_statistics(self) -> GuardStatistics:
        """Return a snapshot of admission and breakers."""
        with self._lock:
            self._note_overdue()
            return GuardStatistics(
                breakers={direction: breaker.statistics() for direction, breaker in self._breakers.items()},
                refused=dict(self._refused),
                failures=dict(self._failures),
                retried_calls=dict(self._retried_calls),
                latency={verb: histogram.statistics() for verb, histogram in self._latency.items()},
                in_flight_calls=len(self._in_flight),
                in_flight_bytes=self._in_flight_bytes,
                overdue_calls=sum(call.overdue for call in self._in_flight),
                call_bytes={verb: histogram.statistics() for verb, histogram in self._call_bytes.items()},
            )

    def check(self) -> None:
        """Raise InvariantError if the invariants do not hold."""
        with self._lock:
            for breaker in self._breakers.values():
                breaker.check()
            total = sum(call.bytes for call in self._in_flight)
            alone = sum(call.bytes > 0 for call in self._in_flight) <= 1
            if self.probe_at != min(breaker.probe_at for breaker in self._breakers.values()):
                raise InvariantError("guard: the time of the next probe differs from the breakers'")
            if total != self._in_flight_bytes or (total > self._options.in_flight and not alone):
                raise InvariantError(f"guard: {self._in_flight_bytes} bytes in flight, {total} counted")

    def after_fork(self) -> None:
        """Reject all calls in the child of a fork, where other threads of the parent may have held the lock. All totals
        begin again."""
        AdmissionControl.__init__(self, self._options, self._frame_bytes, self._clock, lambda time_s: None)
        self._closed, self.refusal = True, ErrorKind.FORKED

    # Inside, under the lock

    def _off(self) -> dict[Direction, tuple[float, str]]:
        """Return, per direction that is off, since when and why; without those that the configuration switches off."""
        configured = {Direction.READ: self._options.read, Direction.WRITE: self._options.write}
        found: dict[Direction, tuple[float, str]] = {}
        for direction, (since_s, _) in self._off_since.items():
            breaker = self._breakers[direction]
            if breaker.override is not Override.OFF:
                found[direction] = since_s, breaker.statistics().reason
            elif configured[direction] is not Override.OFF:
                found[direction] = since_s, SWITCHED_OFF
        return found

    def _await_room(self, breaker: Breaker, call: Call) -> Refusal | None:
        """Wait in the queue for room. Return None when there is room, else why the call is rejected."""
        place = object()
        self._waiting.append(place)
        try:
            while not (self._waiting[0] is place and self._has_room(call.bytes)):
                # Also wake up when a call becomes overdue: that may open the breaker.
                self._clock.wait(self._changed, min(call.deadline, self._overdue_at) - self._clock())
                time_s = self._clock()
                if time_s >= self._overdue_at:
                    self._note_overdue()
                if self._closed:
                    return Refusal.CLOSED
                if time_s >= call.deadline:
                    return Refusal.BUSY
                if breaker.state is BreakerState.OPEN:
                    return Refusal.OPEN
            return None
        finally:
            self._waiting.remove(place)
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        return self._in_flight_bytes == 0 or self._in_flight_bytes + size_bytes <= self._options.in_flight

    def _record(self, call: Call, result: CallResult, time_s: float) -> None:
        direction = call.verb.direction
        is_good = result is CallResult.GOOD
        if is_good:
            self._health.worked()
        else:
            self._failures[direction, result] += 1
            self._health.failed(direction, call.cause or result)
        breaker = self._breakers[direction]
        was_closed = breaker.state is BreakerState.CLOSED
        breaker.record(call.round, is_good, result, time_s)
        # A good call changes a breaker only if it closes the breaker or cancels a planned probe.
        if not (is_good and was_closed and self.probe_at == math.inf):
            self._breakers_moved()

    def _breakers_moved(self) -> None:
        """React to a change of a breaker: update the next probe, note a switch for the log, wake the waiting calls."""
        self.probe_at = min(breaker.probe_at for breaker in self._breakers.values())
        for direction, breaker in self._breakers.items():
            if (breaker.state is BreakerState.OPEN) != (direction in self._off_since) and (
                breaker.state is not BreakerState.HALF_OPEN
            ):
                self._note_change(direction, breaker)
        self._tend()
        if self._waiting:
            self._changed.notify_all()

    def _note_change(self, direction: Direction, breaker: Breaker) -> None:
        """Queue a change for the log. The probe thread writes it, because this may be a scheduler's thread."""
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
        """Wake the probe thread if a probe is planned; restart it if it died or hangs."""
        probe_at = self.probe_at
        if probe_at < math.inf:
            self._wake(probe_at)

    def _end_probe(self, direction: Direction, begun: int, ok: bool) -> None:
        self._probing.pop(direction, None)
        breaker, time_s = self._breakers[direction], self._clock()
        breaker.probed(begun, ok, time_s)
        self._breakers_moved()

    def _note_overdue(self) -> None:
        """Count hanging calls and probes as failed while they still hang."""
        time_s = self._clock()
        if time_s < self._overdue_at:
            return
        grace_s = self._options.grace
        for call in self._in_flight:
            if not call.overdue and time_s >= call.deadline + grace_s:
                call.overdue = True
                self._record(call, CallResult.OVERDUE, time_s)
        for direction, (begun, overdue_at) in list(self._probing.items()):
            if time_s >= overdue_at:
                self._end_probe(direction, begun, False)
        probes = (overdue_at for _, overdue_at in self._probing.values())
        calls = (call.deadline + grace_s for call in self._in_flight if not call.overdue)
        self._overdue_at = min((*probes, *calls), default=math.inf)
