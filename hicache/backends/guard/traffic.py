"""The calls that pass a guard: which are made, which wait, which are refused, and what became of them.

Locking design: one condition guards everything in here, breakers, budget, damage watch and histograms included. It is
held for a few instructions, also by an engine's scheduler thread (`may_pass`), and never while a backend is called.
"""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...config.guard import GuardConfig
from ...errors import InvariantError
from ..base import GetOutcome
from .breaker import Breaker, BreakerState, BreakerStatistics
from .budget import RetryBudget
from .damage import DamageWatch
from .histogram import LatencyHistogram, LatencyStatistics
from .options import Direction, Override

# After a single failed call a probe is to say quickly whether the store still answers; a page has to be written for it
# in one direction. The probes of a breaker that is open have the time that the options give.
_SUSPECTED_S = {Direction.READ: 0.25, Direction.WRITE: 0.5}
# A pause is between half of its length and the whole: many engines that lost one store must not return as one.
_JITTER_MIN = 0.5


class Verb(enum.StrEnum):
    """What is asked of a backend."""

    EXISTS = "exists"
    GET = "get"
    SET = "set"
    DELETE = "delete"

    @property
    def direction(self) -> Direction:
        """Which breaker decides about it."""
        return Direction.READ if self in (Verb.EXISTS, Verb.GET) else Direction.WRITE


class Refusal(enum.StrEnum):
    """Why a call was not made."""

    OPEN = "open"  # the breaker is open, or the operator has switched the direction off
    BUSY = "busy"  # other calls had all the bytes that may be in flight, until the deadline
    DEADLINE = "deadline"  # there was no time left when it came
    CLOSED = "closed"  # the guard is closed


class Verdict(NamedTuple):
    """What a call says about the store: well, not well, or nothing (None). `reason` names a failure in a word."""

    ok: bool | None
    reason: str = ""


class Probe(NamedTuple):
    """A probe under way. A thorough one has to read back what it writes."""

    direction: Direction
    number: int
    deadline: float
    thorough: bool


@dataclass(slots=True, eq=False)
class Call:
    """A call under way. Belongs to its thread, but for `overdue`."""

    verb: Verb
    pages: int
    bytes: int
    deadline: float
    began_s: float
    admitted: int  # the breaker's round
    overdue: bool = False  # has hung past deadline and grace; counted as failed already


@dataclass(frozen=True, slots=True)
class GuardStatistics:
    """Totals since the guard was made, and what is under way. `refused` and `failures` count calls, `refused_pages` the
    pages of those that were refused, and `raised` what the backend raised or answered against the contract, by kind."""

    breakers: Mapping[Direction, BreakerStatistics]
    refused: Mapping[tuple[Direction, Refusal], int]
    refused_pages: Mapping[Verb, int]
    failures: Mapping[tuple[Direction, str], int]
    retried_calls: Mapping[Direction, int]
    raised: Mapping[str, int]
    latency: Mapping[Verb, LatencyStatistics]
    in_flight_calls: int
    in_flight_bytes: int
    overdue_calls: int


@dataclass(slots=True, eq=False)
class _Counts:
    refused: Counter[tuple[Direction, Refusal]] = field(default_factory=Counter)
    refused_pages: Counter[Verb] = field(default_factory=Counter)
    failures: Counter[tuple[Direction, str]] = field(default_factory=Counter)
    retried_calls: Counter[Direction] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)


class Traffic:
    """See the module's docstring. `clock` is monotonic, in seconds; `jitter` draws from [0, 1).

    Invariant: `in_flight_bytes` is the sum over the calls under way, and over `in_flight_bytes_max` only if one call
    alone is.
    """

    def __init__(self, options: GuardConfig, clock: Callable[[], float], jitter: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._state = threading.Condition()
        self._breakers = {
            direction: Breaker(options, Override(override), lambda: _JITTER_MIN + (1 - _JITTER_MIN) * jitter())
            for direction, override in ((Direction.READ, options.read), (Direction.WRITE, options.write))
        }
        self._damage = DamageWatch(options)
        self._budget = RetryBudget(options.retry_share)
        self._latency = {verb: LatencyHistogram() for verb in Verb}
        self._counts = _Counts()
        self._calls: set[Call] = set()
        self._in_flight_bytes = 0
        self._overdue_at = math.inf  # when the next of `_calls`, or a probe, will be overdue
        self._waiting: deque[object] = deque()
        self._closed = False
        self.probe_at = math.inf  # when the next probe is due; read by others without the lock
        self.failed_writes = 0  # calls that left pages unwritten

    # Calls

    def enter(self, verb: Verb, pages: int, size_bytes: int, deadline: float) -> Call | Refusal:
        """Admit a call, or count why not. Waits until its bytes have room, in the order of arrival, at most until
        `deadline`; calls without bytes do not wait. Whoever gets a Call ends it by `leave`."""
        direction = verb.direction
        breaker = self._breakers[direction]
        with self._state:
            time_s = self._clock()
            refusal = self._refusal(breaker, time_s, deadline, Refusal.DEADLINE)
            if refusal is None and size_bytes and (self._waiting or not self._has_room(size_bytes)):
                refusal = self._await_room(breaker, size_bytes, deadline)
                time_s = self._clock()
            if refusal is not None:
                self._counts.refused[direction, refusal] += 1
                self._counts.refused_pages[verb] += pages
                return refusal
            self._budget.earn(pages)
            call = Call(verb, pages, size_bytes, deadline, time_s, breaker.round)
            self._calls.add(call)
            self._in_flight_bytes += size_bytes
            self._overdue_at = min(self._overdue_at, deadline + self._options.grace)
            return call

    def leave(self, call: Call, verdict: Verdict) -> None:
        """A call has returned."""
        with self._state:
            time_s = self._clock()
            self._calls.remove(call)
            self._in_flight_bytes -= call.bytes
            self._latency[call.verb].observe(time_s - call.began_s)
            if self._waiting:
                self._state.notify_all()
            if verdict.ok is not None and not call.overdue:
                self._record(call, verdict, time_s)

    def grant_retry(self, call: Call, pages: int) -> int:
        """How many pages of a call may be tried again: none if the breaker has opened meanwhile, or there is no budget.
        """
        direction = call.verb.direction
        with self._state:
            if call.overdue or self._closed or self._breakers[direction].round != call.admitted:
                return 0
            granted = self._budget.spend(pages)
            self._counts.retried_calls[direction] += granted > 0
            return granted

    def count_raised(self, kind: str) -> bool:
        """Count what the backend raised, or answered against the contract. Whether it is the first of its kind."""
        with self._state:
            self._counts.raised[kind] += 1
            return self._counts.raised[kind] == 1

    def count_failed_write(self) -> None:
        """A call has left pages unwritten."""
        with self._state:
            self.failed_writes += 1

    # Damage

    def pages_at_once(self, read: Sequence[GetOutcome]) -> int | None:
        """How many pages of a batch to read next, of which `read` are read; None for all the rest."""
        with self._state:
            return self._damage.pages_at_once(read)

    def read_pages(self, call: Call, outcomes: Iterable[GetOutcome]) -> bool:
        """Take in what was read. False if the rest of the batch is not to be read: the breaker has opened."""
        breaker = self._breakers[Direction.READ]
        with self._state:
            if breaker.round != call.admitted:
                return False  # whatever it has found was there when the breaker opened
            backoff_s = self._damage.saw(outcomes)
            if backoff_s is None:
                return True
            for each in self._breakers.values():
                each.trip("damage", backoff_s, self._clock())
            self._breakers_moved()
            return breaker.round == call.admitted

    # Probes

    def begin_probe(self, direction: Direction) -> Probe | None:
        """The probe of a direction starts; None if none is due."""
        breaker = self._breakers[direction]
        with self._state:
            time_s = self._clock()
            if self._closed or breaker.probe_at > time_s:
                return None
            timeout_s = self._options.probe_timeout
            deadline = time_s + (min(timeout_s, _SUSPECTED_S[direction]) if breaker.is_suspected else timeout_s)
            overdue_at = deadline + self._options.grace
            self._overdue_at = min(self._overdue_at, overdue_at)
            number = breaker.begin_probe(overdue_at)
            self._breakers_moved()
            return Probe(direction, number, deadline, breaker.thorough)

    def probed(self, probe: Probe, verdict: Verdict) -> None:
        """A probe has ended."""
        with self._state:
            self._breakers[probe.direction].probed(probe.number, verdict.ok is True, verdict.reason, self._clock())
            self._breakers_moved()

    # State

    def may_pass(self, direction: Direction) -> bool:
        """Whether a call of this direction would be made now. Looks for hanging calls too. Does not block."""
        if self._clock() >= self._overdue_at:
            with self._state:
                self._note_overdue()
        return self._breakers[direction].state is not BreakerState.OPEN

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
                refused=dict(self._counts.refused),
                refused_pages=dict(self._counts.refused_pages),
                failures=dict(self._counts.failures),
                retried_calls=dict(self._counts.retried_calls),
                raised=dict(self._counts.raised),
                latency={verb: histogram.statistics() for verb, histogram in self._latency.items()},
                in_flight_calls=len(self._calls),
                in_flight_bytes=self._in_flight_bytes,
                overdue_calls=sum(call.overdue for call in self._calls),
            )

    def close(self) -> None:
        """Admit no call any more, and let none wait."""
        with self._state:
            self._closed = True
            self._state.notify_all()

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

    def _refusal(self, breaker: Breaker, time_s: float, deadline: float, late: Refusal) -> Refusal | None:
        if time_s >= self._overdue_at:
            self._note_overdue()
        if self._closed:
            return Refusal.CLOSED
        if time_s >= deadline:
            return late
        return Refusal.OPEN if breaker.state is BreakerState.OPEN else None

    def _await_room(self, breaker: Breaker, size_bytes: int, deadline: float) -> Refusal | None:
        """Stand in line; why it was left without room, None if there is some now."""
        place = object()
        self._waiting.append(place)
        refusal: Refusal | None = None
        while refusal is None and not (self._waiting[0] is place and self._has_room(size_bytes)):
            # Woken also when a call hangs too long, which may open the breaker.
            wait_s = min(deadline, self._overdue_at) - self._clock()
            self._state.wait(max(0.0, min(wait_s, threading.TIMEOUT_MAX)))
            refusal = self._refusal(breaker, self._clock(), deadline, Refusal.BUSY)
        self._waiting.remove(place)
        self._state.notify_all()
        return refusal

    def _has_room(self, size_bytes: int) -> bool:
        return self._in_flight_bytes == 0 or self._in_flight_bytes + size_bytes <= self._options.in_flight

    def _record(self, call: Call, verdict: Verdict, time_s: float) -> None:
        direction, ok = call.verb.direction, verdict.ok is True
        if not ok:
            self._counts.failures[direction, verdict.reason] += 1
        breaker = self._breakers[direction]
        before = breaker.state
        breaker.record(call.admitted, ok, verdict.reason, time_s)
        # A good call moves a breaker only if it closes it, or ends a suspicion.
        if not ok or breaker.state is not before or self.probe_at < math.inf:
            self._breakers_moved()

    def _breakers_moved(self) -> None:
        """A breaker may have opened, which those who wait for room have to know, or wants another probe or none."""
        self.probe_at = min(breaker.probe_at for breaker in self._breakers.values())
        if self._waiting:
            self._state.notify_all()

    def _note_overdue(self) -> None:
        time_s = self._clock()
        if time_s < self._overdue_at:
            return
        grace_s = self._options.grace
        for call in self._calls:
            if not call.overdue and time_s >= call.deadline + grace_s:
                call.overdue = True
                self._record(call, Verdict(False, "overdue"), time_s)
        for breaker in self._breakers.values():
            breaker.note_overdue(time_s)
        self._breakers_moved()
        probes = (breaker.probing_until for breaker in self._breakers.values())
        self._overdue_at = min((*probes, *(c.deadline + grace_s for c in self._calls if not c.overdue)))
