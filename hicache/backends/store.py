"""Store: the shell around every driver, and the only place where a batch is limited, retried and contained.

    arguments    checked once; a call after its deadline or after `close` is not made (see `verbs`)
    bytes        frames in flight are limited; a call over the limit waits, at most until its deadline
    breaker      a failing direction is not used; it is probed, and used again when it works
    hanging      a call that hangs past its deadline counts as failed while it hangs
    damage       a damaged page is removed; a reader that finds every page damaged is stopped before it removes them all
    retries      failed pages are retried once, within a budget and the deadline
    containment  an exception of the driver is counted, and its pages are ERROR
    capacity     a limit in bytes for stores without their own (see `limit`)
    retention    pages beyond a maximum age are neither served nor kept (see `retention`)

A call that is not made returns 0 or ERROR at once. A store abandons nothing: a hanging call keeps its thread and its
frames until it returns. Its caller must cope with that (`supervised`).

Locking design: verbs run on their callers' threads, several at once, and hold no lock during a call of the driver.
`AdmissionControl` locks itself, once at the begin and once at the end of a call. Probes and usage measurements run on
separate threads (BackgroundTask), started when needed. `_sample` and the fields `_usage_...` are single references.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar, final

from .. import tracing
from ..arguments import instance
from ..background import BackgroundTask
from ..clock import SYSTEM_CLOCK, Clock
from ..config.guard import GuardConfig, Override
from ..errors import BackendError, InvalidInput
from ..frame import FrameCodec, PageBuffer
from ..supervised import SupervisedPool, WorkerFactory
from .attempts import Attempts
from .base import BackendStatistics, Direction, EvictionListener, GetOutcome, SetOutcome, Usage
from .calls import Call, CallResult, check_keys, hits_in, parent_outside, runs
from .driver import Driver, RegistersMemory, ReportsEvictions
from .errors import RAISED, ErrorKind
from .guard.admission import AdmissionControl, GuardStatistics
from .guard.health import REJECTED, HealthState, StoreHealth, problem
from .guard.log import GuardLog
from .guard.probes import Prober
from .limit import CapacityLimit
from .retention import Retention
from .verbs import Verbs

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The pause before a retry lasts between half of this and all of it, so that a brief failure can pass.
_RETRY_PAUSE_S = 0.05
# A call that fails after more than this is not retried: its caller would wait twice, and the breaker would react late.
_RETRY_AFTER_S_MAX = 0.25
# A call with less time than this that runs out of it proves nothing about the store.
_SHORT_S = 0.1
# Usage measurements take 1/50 of the time at most: a file store is measured up to ten times a second, a bucket whose
# listing takes ten seconds every eight minutes. A measurement that takes longer than the patience counts as hung.
_USAGE_PERIOD_S_MIN = 0.1
_USAGE_DUTY = 50
_USAGE_PATIENCE_S = 300.0
# Most stores answer within this time, so a caller waits as long for a current value.
_USAGE_WAIT_S = 0.05
# How long `close` waits for each of the store's threads before it closes the driver anyway.
_CLOSE_S = 3.0

# No breaker, no retry, no limit of bytes in flight, and `close` waits: for tests and measurements of drivers.
class _Unguarded(GuardConfig):
    retry_share: ClassVar[float] = 0.0
    damage_pages: ClassVar[int] = 1_000_000
    grace: ClassVar[float] = 1e6


UNGUARDED = _Unguarded(read=Override.ON, write=Override.ON, in_flight=1 << 50)
_DEFAULT = GuardConfig()

_stores: weakref.WeakSet[Store] = weakref.WeakSet()


@final
class Store(Verbs):
    """Storage of one store; see the module's docstring, and `verbs`. Thread-safe. Owns `driver`, `limit` and
    `retention`.

    `name` is the store's name in metrics and messages. Deadlines are times of `clock`. `workers` makes the pools of its
    threads. The child of a fork rejects every verb (`errors["forked"]`): its threads and connections are gone.
    """

    def __init__(
        self, driver: Driver[Any], codec: FrameCodec, guard: GuardConfig = _DEFAULT, *, name: str = "storage",
        limit: CapacityLimit | None = None, retention: Retention | None = None, clock: Clock = SYSTEM_CLOCK,
        workers: WorkerFactory = SupervisedPool,
    ) -> None:
        self.guard = instance("guard", guard, GuardConfig)
        # One run probes both directions; a run that takes longer counts as hung.
        patience_s = 2 * (self.guard.probe_timeout + self.guard.grace)
        self._probes = BackgroundTask(
            f"probe-{name}", self._probe, patience_s, on_error=lambda: self._admission.count(ErrorKind.INTERNAL),
            clock=clock, workers=workers,
        )
        self._admission = AdmissionControl(self.guard, codec.frame_bytes, clock, self._probes.wake)
        super().__init__(codec, self._admission)
        self.driver = driver
        self.name = name
        self._limit = limit
        self._sweepers = [one for one in (limit, retention) if one is not None]
        self._clock = clock
        self._closing = threading.Event()
        self._attempts = Attempts(driver, codec, name, self._admission, limit=limit, retention=retention, clock=clock)
        self._prober = Prober(self._attempts, codec.frame_bytes)
        self._log = GuardLog(name, clock)
        self._sample: Usage | None = None
        self._usage_due_s, self._usage_took_s = -math.inf, 0.0
        self._usage_renewed = threading.Event()
        self._usage_renewed.set()
        self._usage_task = BackgroundTask(
            f"usage-{name}", self._renew_usage, _USAGE_PATIENCE_S, clock=clock, workers=workers
        )
        for sweeper in self._sweepers:
            sweeper.start()
        _stores.add(self)

    @property
    def stores(self) -> tuple[Store, ...]:
        return (self,)

    # The verbs

    def batch_touch(self, keys: Sequence[bytes], *, deadline: float, errors: list[str] | None = None) -> list[bytes]:
        """See Verbs. Does nothing if the breaker is open. A failure is not retried and does not affect the breaker."""
        check_keys(keys)
        return super().batch_touch(keys, deadline=deadline, errors=errors) if self.may_pass(Direction.WRITE) else []

    def statistics(self) -> BackendStatistics:
        """Return totals since this store was opened. Does not block. Errors include the pages of rejected calls
        (`guard_open`, `guard_busy`) and exceptions of the driver (`raised_KeyError`)."""
        found, incidents = self._admission.statistics(), self._attempts.incidents()
        errors = Counter(found.errors)
        errors.update(incidents.errors)
        return replace(
            found, errors=dict(errors), evicted_pages=incidents.evicted_pages, expired_pages=incidents.expired_pages
        )

    def register_memory(self, memory: memoryview) -> None:
        """See StoreGroup. A failure is counted and logged; pages are then copied. Does nothing after `close`."""
        with self._admission.use() as is_open:
            if not is_open or not isinstance(self.driver, RegistersMemory):
                return
            try:
                self.driver.register_memory(memory)
            except InvalidInput:
                raise
            except BackendError as error:
                self._admission.count("raised_registration")
                logger.warning(
                    "storage %s: host memory is not registered, so its pages are copied: %s", self.name, error
                )
            except Exception as error:
                self._admission.count(self._attempts.contained(error))

    def watch_evictions(self, listener: EvictionListener) -> None:
        if isinstance(self.driver, ReportsEvictions):
            self.driver.watch_evictions(self.codec.namespace, listener)
        for sweeper in self._sweepers:
            sweeper.on_evicted = listener

    def close(self) -> None:
        """See Verbs. Waits for calls in flight for at most the grace, then closes the driver anyway. Raises the
        driver's BackendError; any other exception of the driver is counted."""
        self._closing.set()
        for sweeper in self._sweepers:
            sweeper.stop()
        with self._close_lock:
            if self._admission.close(self.guard.grace):
                _stores.discard(self)
                self._probes.close(_CLOSE_S)
                self._usage_task.close(_CLOSE_S)
                self._attempts.close()

    # The state

    @property
    def valid_s(self) -> tuple[float, float]:
        """The Unix times between which a page was stored that this store serves now. Does not block."""
        return self._attempts.valid_s

    def may_pass(self, direction: Direction) -> bool:
        return self._admission.may_pass(direction)

    def override(self, direction: Direction, mode: Override) -> None:
        """Switch a direction on or off, or return it to the breaker. Does not block."""
        self._admission.set_override(direction, mode)

    def usage_sample(self) -> Usage | None:
        """Return the latest usage sample, None before the first. An old sample is renewed on one of the store's
        threads. Waits for that at most 50 ms, and only if the last measurement was as fast."""
        if self._usage_renewed.is_set() and self._clock() >= self._usage_due_s:
            self._usage_renewed.clear()
            self._usage_task.wake()
            if self._usage_took_s < _USAGE_WAIT_S:
                self._clock.wait_set(self._usage_renewed, _USAGE_WAIT_S)
        else:
            self._usage_task.tend()
        return self._sample

    def guard_statistics(self) -> GuardStatistics:
        """Return the counters of admission and breakers. Does not block."""
        return self._admission.guard_statistics()

    def health(self) -> StoreHealth:
        """Return whether the store does what it is for. Does not block."""
        found = self._in_own_words(self._admission.health())
        outage = self._attempts.incidents().outage
        if outage is None or found.is_problem:
            return found
        return problem(HealthState.PARTLY, outage[0], ErrorKind.NODE_DOWN, detail=outage[1])

    def explanation(self, cause: str) -> str:
        """Return the driver's own words about the last rejection, or an error kind, and after `; ` what to do; empty
        without. Does not block."""
        return self._attempts.rejection() if cause == REJECTED else self._attempts.explanation(cause)

    def _in_own_words(self, found: StoreHealth) -> StoreHealth:
        detail = self._attempts.explanation(found.cause) if found.is_problem else ""
        return problem(found.state, found.since_s or 0.0, found.cause, found.pages, detail) if detail else found

    def check(self) -> None:
        """Raise InvariantError if the invariants of admission do not hold."""
        self._admission.check()

    # A call

    def _call(self, call: Call, refused: T, work: Callable[..., T], *arguments: object) -> T:
        """See Verbs. An admitted call has a span."""
        return super()._call(call, refused, self._traced, work, *arguments)

    def _traced(self, call: Call, work: Callable[..., T], *arguments: object) -> T:
        with tracing.span("store." + call.verb, store=self.name, pages=call.keys, bytes=call.bytes) as span:
            answer = work(call, *arguments)
            if span is not None:
                tracing.note(span, hit_pages=hits_in(answer, call.keys), outcome=call.result.value)
        return answer

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        return self._look_up(call, self._attempts.prefix, keys)

    def _has(self, call: Call, keys: Sequence[bytes]) -> list[bool]:
        return self._look_up(call, self._attempts.has, keys)

    def _look_up(self, call: Call, look: Callable[..., tuple[T, Sequence[str]]], keys: Sequence[bytes]) -> T:
        """Make a lookup, and retry it once if it failed."""
        for is_retried in (False, True):
            found, errors = look(keys, call.deadline)
            self._note(call, errors)
            if not errors or call.cause == ErrorKind.NODE_DOWN:
                call.result = CallResult.GOOD
                break
            if self._was_short(call):
                call.result = CallResult.UNKNOWN
                break
            is_raised = errors[-1].startswith(RAISED)
            call.result = CallResult.RAISED if is_raised else CallResult.LOOKUP
            if is_retried or not self._may_retry(call, 1):
                break
        return found

    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]:
        missing, errors = self._attempts.touch(keys, call.deadline)
        self._note(call, errors)
        return missing

    def _delete(self, call: Call, keys: list[bytes]) -> int:
        return self._removed(call, *self._attempts.remove(keys, call.deadline))

    def _clear(self, call: Call) -> int:
        return self._removed(call, *self._attempts.clear(call.deadline))

    def _removed(self, call: Call, removed: int, errors: list[str]) -> int:
        self._note(call, errors)
        if errors and errors[-1].startswith(RAISED):
            call.result = CallResult.RAISED
        return removed  # 0 is ambiguous: no such pages, or the store is down; so the result stays UNKNOWN

    def _measure(self) -> Usage:
        """See Verbs. While the breaker is open, it returns the last usage, which is not an error."""
        if self._admission.may_pass(Direction.READ):
            self._sample = self._usage = self._attempts.usage()
        return self._usage

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        """See Verbs. Until the store has read a sound page, the first pages of a batch are read before the rest."""
        outcomes: list[GetOutcome] = []
        while len(outcomes) < len(keys):
            start = len(outcomes)
            end = start + (self._admission.pages_at_once(outcomes) or len(keys))
            found = self._read_twice(call, keys[start:end], pages[start:end])
            outcomes += found
            if not self._admission.saw_pages(call, found):
                break
        outcomes += [GetOutcome.ERROR] * (len(keys) - len(outcomes))
        call.result = self._judge(call, outcomes.count(GetOutcome.ERROR), len(keys))
        if self._limit is not None:
            self._limit.note_uses([key for key, one in zip(keys, outcomes, strict=True) if one is GetOutcome.HIT])
        return outcomes

    def _read_twice(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        """Read pages, and retry the failed ones once."""
        outcomes, errors = self._attempts.read(keys, pages, call.deadline)
        if not errors:
            return outcomes
        self._note(call, errors)
        failed = [i for i, outcome in enumerate(outcomes) if outcome is GetOutcome.ERROR]
        again = failed[: self._may_retry(call, len(failed))] if failed else []
        if again:
            answers, errors = self._attempts.read([keys[i] for i in again], [pages[i] for i in again], call.deadline)
            self._note(call, errors)
            for i, outcome in zip(again, answers, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        def write(part: slice, before: bytes | None) -> list[SetOutcome]:
            found, errors = self._attempts.write(keys[part], pages[part], before, call.deadline)
            self._note(call, errors)
            return found

        outcomes = write(slice(0, len(keys)), parent)
        if SetOutcome.ERROR in outcomes:
            for run in runs([p for p, outcome in enumerate(outcomes) if outcome is SetOutcome.ERROR]):
                again = slice(run.start, run.start + self._may_retry(call, run.stop - run.start))
                if again.stop > again.start:
                    outcomes[again] = write(
                        again, parent_outside(keys[again], keys[run.start - 1] if run.start else parent)
                    )
        call.new_pages = len(keys) - outcomes.count(SetOutcome.PRESENT)
        if call.new_pages:  # pages that are present prove nothing about writes
            call.result = self._judge(call, outcomes.count(SetOutcome.ERROR), call.new_pages)
            # Whether it stored a new page, and why not, unless it proves nothing about the store.
            if SetOutcome.STORED in outcomes:
                call.kept = SetOutcome.STORED
            elif SetOutcome.REJECTED in outcomes:
                call.kept = SetOutcome.REJECTED
                call.cause = call.cause or REJECTED
                reason = self._attempts.rejection()
                call.detail = "" if reason == call.cause else reason
            elif call.result is not CallResult.UNKNOWN and call.cause != ErrorKind.NODE_DOWN:
                call.kept = SetOutcome.ERROR
        return outcomes

    def _may_retry(self, call: Call, pages: int) -> int:
        """Return how many pages to retry, after a short pause. Return 0 if only a part of the store is down, the call
        took too long, too little time is left, or no retry is granted."""
        time_s = self._clock()
        took_s = time_s - call.began_s
        pause_s = _RETRY_PAUSE_S * random.uniform(0.5, 1.0)
        # Assume that the retry takes as long as the first attempt.
        if took_s > _RETRY_AFTER_S_MAX or time_s + pause_s + max(took_s, 0.01) >= call.deadline:
            return 0
        granted = 0 if call.cause == ErrorKind.NODE_DOWN else self._admission.grant_retry(call, pages)
        if granted:
            self._clock.wait_set(self._closing, pause_s)
        return granted

    def _judge(self, call: Call, failed: int, pages: int) -> CallResult:
        """Return the result of a call with `failed` of `pages` pages: it failed if at least half of them did, unless
        all of those are on a part of the store that is down."""
        if 2 * failed < pages or call.cause == ErrorKind.NODE_DOWN:
            return CallResult.GOOD
        return CallResult.UNKNOWN if self._was_short(call) else CallResult.ERROR

    def _was_short(self, call: Call) -> bool:
        return call.deadline - call.began_s < _SHORT_S and self._clock() >= call.deadline

    @staticmethod
    def _note(call: Call, errors: Sequence[str]) -> None:
        """Add the errors to a call. The last one is its cause; NODE_DOWN only without other errors."""
        if errors:
            others = [kind for kind in errors if kind != ErrorKind.NODE_DOWN]
            call.cause = others[-1] if others else call.cause or ErrorKind.NODE_DOWN
            call.errors += errors

    # On the store's own threads

    def _probe(self) -> float:
        """Write pending log lines and make the due probes; return the time of the next. Blocks as the store does."""
        errors = {kind: count for kind, count in self.statistics().errors.items() if not kind.startswith("guard_")}
        self._log.changed(self._admission.take_changes(), errors)
        self._log.still_off(self._admission.off(), errors)
        for direction in Direction:
            due = self._admission.begin_probe(direction)
            if due is not None:
                begun, deadline = due
                probe = self._prober.read if direction is Direction.READ else self._prober.write
                ok, kept, kinds = probe(deadline)
                self._admission.count(*kinds)
                self._admission.probed(direction, begun, ok, kinds[-1] if kinds else "", kept=kept)
        health, next_news_s = self._admission.health_news()
        if health is not None:
            self._log.health(self._in_own_words(health))
        return min(self._admission.probe_at, next_news_s)

    def _renew_usage(self) -> float:
        began_s = self._clock()
        try:
            self.usage()
        finally:
            ended_s = self._clock()
            self._usage_took_s = ended_s - began_s
            self._usage_due_s = ended_s + max(_USAGE_PERIOD_S_MIN, _USAGE_DUTY * self._usage_took_s)
            self._usage_renewed.set()
        return math.inf

    def after_fork(self) -> None:
        """Reject all verbs in the child of a fork, where other threads of the parent may have held the locks."""
        self._close_lock = threading.Lock()
        self._admission.after_fork()


def _after_fork() -> None:
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork)
