"""GuardedBackend: one wrapper in front of every leaf backend; a failing store does not harm the engine.

    deadline     a call past its deadline is not made; a call that hangs past it counts as failed while it hangs
    bytes        frames in flight are limited; a call over the limit waits, at most until its deadline
    breaker      a failing direction is not used; it is probed, and used again when it works
    damage       a reader that finds every page damaged is stopped before it has removed them all
    retries      failed pages are retried once, within a budget and the deadline
    containment  an exception or an invalid answer of the backend is counted, and its pages are ERROR

A rejected call returns 0 or ERROR at once. The guard abandons nothing: a hanging call keeps its thread and its frames
until it returns. Its caller must cope with that (`supervised`).

Locking design: verbs run on their callers' threads, several at once, and hold no lock during a backend call. They share
`AdmissionControl`, which locks itself. Probes and usage measurements run on separate threads (BackgroundTask), started
when needed. `_sample`, `_last_statistics` and the fields `_usage_...` are single references; `_failed_writes` is only
compared for equality.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from ...arguments import instance_or_new
from ...background import BackgroundTask
from ...config.guard import GuardConfig, Override
from ...errors import BackendError, InvalidInput
from ...frame import PageBuffer
from ..base import (
    BackendStatistics,
    GetOutcome,
    SetOutcome,
    StorageBackend,
    Usage,
    leaves,
    register_memory,
    rejection_of,
    touch,
)
from ..calls import parent_outside, runs, take_last_error
from ..envelope import Compound, Envelope, Touchable
from .admission import AdmissionControl, GuardStatistics
from .calls import Call, CallResult, Direction, Verb
from .health import REJECTED, StoreHealth
from .log import GuardLog
from .probes import Prober

logger = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = TypeVar("Outcome", GetOutcome, SetOutcome)

# The pause before a retry lasts between half of this and all of it, so that a brief failure can pass.
_RETRY_PAUSE_S = 0.05
# A call that fails after more than this is not retried: its caller would wait twice, and the breaker would react late.
_RETRY_AFTER_S_MAX = 0.25
# A call with less time than this that runs out of it proves nothing about the store.
_SHORT_S = 0.1
_KEPT = frozenset({SetOutcome.STORED, SetOutcome.PRESENT})
# Usage measurements take 1/50 of the time at most: a file store is measured up to ten times a second, a bucket whose
# listing takes ten seconds every eight minutes. A measurement that takes longer than the patience counts as hung.
_USAGE_PERIOD_S_MIN = 0.1
_USAGE_DUTY = 50
_USAGE_PATIENCE_S = 300.0
# Most stores answer within this time, so a caller waits as long for a current value.
_USAGE_WAIT_S = 0.05
# How long `close` waits for each of the guard's threads before it closes the backend anyway.
_CLOSE_S = 3.0


class GuardedBackend(Compound, Touchable):
    """See the module's docstring. A Composite of one part. `name` is the store's name in metrics and messages. `clock`
    is the clock of deadlines; tests pass their own.

    Its error counts include the pages of rejected calls (`guard_open`, `guard_busy`) and the backend's exceptions
    (`raised_KeyError`).
    """

    def __init__(
        self,
        inner: StorageBackend,
        options: GuardConfig | None = None,
        *,
        name: str = "storage",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner.codec)
        self.name = name
        self.options = instance_or_new("options", options, GuardConfig)
        self._inner = inner
        self._clock = clock
        self._closing = threading.Event()
        self._log = GuardLog(name)
        self._raised: set[str] = set()  # classes of exceptions already logged
        self._failed_writes = 0
        self._last_statistics = BackendStatistics({}, {}, {}, {}, 0, 0, 0)
        for leaf in leaves(inner):
            if isinstance(leaf, Envelope):
                leaf.name = name
        self._prober = Prober(inner, self._contain)
        # One run probes both directions; a run that takes longer counts as hung.
        patience_s = 2 * (self.options.probe_timeout + self.options.grace)
        self._probes = BackgroundTask(
            f"probe-{name}", self._probe, patience_s, on_error=lambda: self.count("internal")
        )
        self._admission = AdmissionControl(self.options, clock, self._probes.wake)
        self._sample: Usage | None = None
        self._usage_due_s = self._usage_took_s = 0.0
        self._usage_renewed = threading.Event()
        self._usage_renewed.set()
        self._usage_task = BackgroundTask(f"usage-{name}", self._renew_usage, _USAGE_PATIENCE_S)

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """The guarded backend."""
        return (self._inner,)

    # Verbs, see Envelope. Each raises StoreError for a rejected call.

    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope."""

        def is_answer(found: object) -> bool:
            return type(found) is int and 0 <= found <= len(keys)

        return self._look_up(
            lambda: self._inner.batch_exists(keys, deadline=deadline), is_answer, deadline, len(keys), 0
        )

    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Envelope."""
        pages = len(keys)

        def is_answer(found: object) -> bool:
            return isinstance(found, list) and len(found) == pages and set(map(type, found)) == {bool}

        return self._look_up(
            lambda: self._inner.batch_has(keys, deadline=deadline), is_answer, deadline, [True] * pages, [False] * pages
        )

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope. Until the guard has seen a sound page, the first pages of a batch are read before the rest."""
        with self._enter(Verb.GET, len(keys), deadline) as call:
            outcomes: list[GetOutcome] = []
            while len(outcomes) < len(keys):
                start = len(outcomes)
                end = start + (self._admission.pages_at_once(outcomes) or len(keys))
                found = self._get(call, keys[start:end], pages[start:end])
                outcomes += found
                if not self._admission.saw_pages(call, found):
                    break
            outcomes += [GetOutcome.ERROR] * (len(keys) - len(outcomes))
            call.result = self._judge(call, outcomes.count(GetOutcome.ERROR))
            return outcomes

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope."""
        with self._enter(Verb.SET, len(keys), deadline) as call:
            outcomes = self._set(call, keys, pages, parent)
            if SetOutcome.ERROR in outcomes:
                for run in runs([p for p, outcome in enumerate(outcomes) if outcome is SetOutcome.ERROR]):
                    again = slice(run.start, run.start + self._may_retry(call, run.stop - run.start))
                    if again.stop > again.start:
                        before = parent_outside(keys[again], keys[run.start - 1] if run.start else parent)
                        outcomes[again] = self._set(call, keys[again], pages[again], before)
                self._failed_writes += SetOutcome.ERROR in outcomes
            call.result = self._judge(call, outcomes.count(SetOutcome.ERROR))
            call.kept = not _KEPT.isdisjoint(outcomes)
            if not call.kept:
                self._explain(call, outcomes)
            return outcomes

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope."""
        return self._remove(lambda: self._inner.delete(keys, deadline=deadline), deadline, len(keys))

    def remove_all(self, deadline: float) -> int:
        """See Envelope."""
        return self._remove(lambda: self._inner.clear(deadline=deadline), deadline, math.inf)

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """See Touchable. Does nothing if the breaker is open. A failure is not retried and does not affect the breaker.
        """
        if not self.may_pass(Direction.WRITE):
            return []
        with self._enter(Verb.TOUCH, 1, deadline):
            missing = self._contain(lambda: touch(self._inner, keys, deadline=deadline))
        return missing if isinstance(missing, list) else []

    def measure(self) -> Usage:
        """See Envelope. Returns the last known usage if the backend raises or the breaker is open. Blocks as the
        backend does."""
        usage = self._contain(self._inner.usage) if self._admission.may_pass(Direction.READ) else None
        if isinstance(usage, Usage):
            self._sample = self._usage = usage
        return self._usage

    def statistics(self) -> BackendStatistics:
        """See StorageBackend, and this class."""
        own, inner = self._calls.statistics(), self._inner_statistics()
        errors = Counter(own.errors)
        errors.update(inner.errors)
        return replace(own, corrupt=inner.corrupt, errors=dict(errors), evicted_pages=inner.evicted_pages)

    def close(self) -> None:
        """See StorageBackend. Waits for calls in flight for at most the grace, then closes the backend anyway. Raises
        the backend's BackendError; any other exception of the backend is counted."""
        self._closing.set()
        self._admission.close()
        self._close(self.options.grace)

    def shut(self) -> None:
        """See Envelope."""
        self._probes.close(_CLOSE_S)
        self._usage_task.close(_CLOSE_S)
        failures: list[BackendError] = []

        def close_inner() -> None:
            try:
                self._inner.close()
            except BackendError as error:
                failures.append(error)

        self._contain(close_inner)
        if failures:
            raise failures[0]

    def register_memory(self, memory: memoryview) -> None:
        """See MemoryRegistration. Passes `memory` to the backend. A failure is counted and logged; pages are then
        copied."""

        def register() -> None:
            try:
                register_memory(self._inner, memory)
            except BackendError as error:
                self.count("raised_registration")
                logger.warning(
                    "storage %s: host memory is not registered, so its pages are copied: %s", self.name, error
                )

        self._contain(register)

    # Additions to StorageBackend

    def may_pass(self, direction: Direction) -> bool:
        """True if a call of this direction would be made now. Does not block; a scheduler calls it each step."""
        return self._admission.may_pass(direction)

    def override(self, direction: Direction, mode: Override) -> None:
        """Switch a direction on or off, or return it to the breaker. Does not block."""
        self._admission.set_override(direction, mode)

    def usage_sample(self) -> Usage | None:
        """Return the latest usage sample, None before the first. An old sample is renewed on one of the guard's
        threads. Waits for that at most 50 ms, and only if the last measurement was as fast."""
        if self._usage_renewed.is_set() and time.monotonic() >= self._usage_due_s:
            self._usage_renewed.clear()
            self._usage_task.wake()
            if self._usage_took_s < _USAGE_WAIT_S:
                self._usage_renewed.wait(_USAGE_WAIT_S)
        else:
            self._usage_task.tend()
        return self._sample

    def guard_statistics(self) -> GuardStatistics:
        """Return the guard's own counters. Does not block."""
        return self._admission.statistics()

    def health(self) -> StoreHealth:
        """Return whether the store does what it is for. Does not block."""
        return self._admission.health()

    def check(self) -> None:
        """Raise InvariantError if the guard's invariants do not hold."""
        self._admission.check()

    # Inside

    def _enter(self, verb: Verb, pages: int, deadline: float) -> Call:
        # A lookup or removal of any number of keys moves no bytes. If rejected, it counts as one page.
        size_bytes = pages * self.codec.frame_bytes if verb in (Verb.GET, Verb.SET) else 0
        call = self._admission.enter(verb, pages, size_bytes, deadline)
        take_last_error()  # of an earlier call
        return call

    def _probe(self) -> float:
        """Write pending log lines and make the due probes; return the time of the next one. Blocks as the store does.
        """
        errors = self._inner_statistics().errors
        self._log.changed(self._admission.take_changes(), errors)
        self._log.still_off(self._admission.off(), errors)
        for direction in Direction:
            due = self._admission.begin_probe(direction)
            if due is not None:
                begun, deadline = due
                probe, ok = self._prober.read if direction is Direction.READ else self._prober.write, False
                take_last_error()
                try:
                    ok = probe(deadline)
                finally:
                    self._admission.probed(direction, begun, ok, take_last_error())
        health, next_news_s = self._admission.health_news()
        if health is not None:
            self._log.health(health)
        return min(self._admission.probe_at, next_news_s)

    def _look_up(
        self, ask: Callable[[], object], is_answer: Callable[[object], bool], deadline: float, whole: T, nothing: T
    ) -> T:
        """Make a lookup and retry it once if it failed. Return its answer, or `nothing` if the answer is invalid.
        `whole` is the answer if all pages are stored.

        A store that is down and an empty store answer identically; only the error count tells them apart.
        """
        with self._enter(Verb.EXISTS, 1, deadline) as call:
            for is_retried in (False, True):
                errors_before = sum(self._inner_statistics().errors.values())
                writes_before = self._failed_writes
                answer = self._contain(ask)
                found = cast(T, answer) if is_answer(answer) else nothing
                if found is not answer:
                    call.result, call.cause = CallResult.RAISED, take_last_error()
                elif found == whole or sum(self._inner_statistics().errors.values()) == errors_before:
                    call.result = CallResult.GOOD
                    break
                elif self._failed_writes != writes_before or self._was_short(call):
                    call.result = CallResult.UNKNOWN  # the errors may come from a write that ended during the lookup
                    break
                else:
                    call.result, call.cause = CallResult.LOOKUP, take_last_error()
                if is_retried or not self._may_retry(call, 1):
                    break
            return found

    def _remove(self, ask: Callable[[], object], deadline: float, most: float) -> int:
        with self._enter(Verb.DELETE, 1, deadline) as call:
            removed = self._contain(ask)
            if type(removed) is int and 0 <= removed <= most:
                return removed  # 0 is ambiguous: no such pages, or the store is down; so the result stays UNKNOWN
            call.result = CallResult.RAISED
            return 0

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        """Read pages, and retry the failed ones once."""

        def read(keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
            answer = self._contain(lambda: self._inner.batch_get(keys, pages, deadline=call.deadline))
            return self._outcomes(answer, GetOutcome, len(keys))

        outcomes = read(keys, pages)
        failed = [i for i, outcome in enumerate(outcomes) if outcome is GetOutcome.ERROR]
        again = failed[: self._may_retry(call, len(failed))] if failed else []
        if again:
            for i, outcome in zip(again, read([keys[i] for i in again], [pages[i] for i in again]), strict=True):
                outcomes[i] = outcome
        return outcomes

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        answer = self._contain(lambda: self._inner.batch_set(keys, pages, parent=parent, deadline=call.deadline))
        return self._outcomes(answer, SetOutcome, len(keys))

    def _outcomes(self, answer: object, kind: type[Outcome], pages: int) -> list[Outcome]:
        """Return `answer` if it is one outcome per page, else ERROR for each page."""
        if isinstance(answer, list) and len(answer) == pages and set(map(type, answer)) == {kind}:
            return answer
        if answer is not None:
            self.count("raised_WrongAnswer")
        return [kind("error")] * pages

    def _may_retry(self, call: Call, pages: int) -> int:
        """Return how many pages to retry, after a short pause. Return 0 if the call took too long, too little time is
        left, or no retry is granted."""
        time_s = self._clock()
        took_s = time_s - call.began_s
        pause_s = _RETRY_PAUSE_S * random.uniform(0.5, 1.0)
        # Assume that the retry takes as long as the first attempt.
        if took_s > _RETRY_AFTER_S_MAX or time_s + pause_s + max(took_s, 0.01) >= call.deadline:
            return 0
        granted = self._admission.grant_retry(call, pages)
        if granted:
            self._closing.wait(pause_s)
        return granted

    def _judge(self, call: Call, failed: int) -> CallResult:
        """Return the result of a call with `failed` pages: it failed if at least half of its pages did."""
        if failed:
            call.cause = take_last_error()
        if 2 * failed < call.pages:
            return CallResult.GOOD
        return CallResult.UNKNOWN if self._was_short(call) else CallResult.ERROR

    def _explain(self, call: Call, outcomes: Sequence[SetOutcome]) -> None:
        """Record in `call` why it kept none of its pages; a call that proves nothing about the store does not tell it.
        """
        call.cause = call.cause or take_last_error()
        if call.result is CallResult.UNKNOWN:
            call.kept = None
        elif SetOutcome.REJECTED in outcomes:
            call.cause = call.cause or REJECTED
            reason = str(self._contain(lambda: rejection_of(self._inner)) or "")
            call.detail = "" if reason == call.cause else reason

    def _was_short(self, call: Call) -> bool:
        return call.deadline - call.began_s < _SHORT_S and self._clock() >= call.deadline

    def _renew_usage(self) -> float:
        began_s = time.monotonic()
        try:
            self.measure()
        finally:
            ended_s = time.monotonic()
            self._usage_took_s = ended_s - began_s
            self._usage_due_s = ended_s + max(_USAGE_PERIOD_S_MIN, _USAGE_DUTY * self._usage_took_s)
            self._usage_renewed.set()
        return math.inf

    def _inner_statistics(self) -> BackendStatistics:
        found = self._contain(self._inner.statistics)
        if isinstance(found, BackendStatistics):
            self._last_statistics = found
        return self._last_statistics

    def _contain(self, call: Callable[[], object]) -> object:
        """Return the answer of `call`. Return None if it raises: the exception is counted, and logged once per class.
        Exceptions of third-party backends end here. Raises InvalidInput."""
        try:
            return call()
        except InvalidInput:
            raise  # an error of the caller, not of the store
        except Exception as error:
            kind = type(error).__name__
            self.count(f"raised_{kind}")
            if kind not in self._raised:
                self._raised.add(kind)
                logger.exception("storage %s: unexpected %s; further ones are only counted", self.name, kind)
            return None
