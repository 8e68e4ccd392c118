"""GuardedBackend: one wrapper in front of every leaf backend, so that a store's troubles stay its own.

    deadline     a call that has none left is not made; one that hangs past it counts as failed while it still hangs
    bytes        frames in flight are bounded; a call that finds no room waits, at most until its deadline
    breaker      a direction that fails is left alone, probed, and used again when it works
    damage       a reader to whom everything is damaged is stopped before it has removed everything
    retries      failed pages are tried once more, within a budget and the deadline
    containment  an exception of the backend, or an answer against the contract, is counted, and its pages are ERROR

Calls that are not made return at once: 0 or ERROR. Nothing is abandoned here: a call that hangs keeps its thread and
its frames until it returns, which the caller has to bear (`supervised`).

Locking design: verbs run on their callers' threads, several at once, with no lock held while the backend works. They
share `AdmissionControl`, which locks itself. Probes and the measuring of usage run on threads of their own
(BackgroundTask), started when needed. `_sample`, `_last_statistics` and the fields `_usage_...` are one reference each;
`_failed_writes` is only compared for equality.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from ...arguments import instance_or_new
from ...background import BackgroundTask
from ...config.guard import GuardConfig, Override
from ...errors import BackendError, InvalidInput
from ...frame import PageBuffer
from ..base import (
    BackendStatistics,
    Composite,
    GetOutcome,
    SetOutcome,
    StorageBackend,
    Usage,
    leaves,
    register_memory,
    touch,
)
from ..calls import parent_outside, runs
from ..envelope import Compound, Envelope, Touchable
from .admission import AdmissionControl, Call, CallResult, Direction, GuardStatistics, Verb
from .log import BreakerLog
from .probes import Prober

logger = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = TypeVar("Outcome", GetOutcome, SetOutcome)

# Before failed pages are tried again, between half of this and the whole: a moment for what was only a hiccup.
_RETRY_PAUSE_S = 0.05
# What failed only after so long has hung. A caller would wait twice, and the breaker would learn of it late.
_RETRY_AFTER_S_MAX = 0.25
# A call that was given less time than this and has used it up says nothing about the store.
_SHORT_S = 0.1
# Measuring usage takes a small part of the time, however slow it is: a file store is asked ten times a second at most,
# a bucket whose listing takes ten seconds every eight minutes. A measurement that takes longer than the last one hangs.
_USAGE_PERIOD_S_MIN = 0.1
_USAGE_DUTY = 50
_USAGE_PATIENCE_S = 300.0
# Most stores answer within this; a caller waits as long, so that it sees what holds now.
_USAGE_WAIT_S = 0.05
# How long `close` waits for the guard's own threads before it closes the backend all the same.
_CLOSE_S = 3.0


class GuardedBackend(Compound, Touchable):
    """See the module's docstring. A Composite of one part. `name` is how it is called in metrics and messages, and
    `clock` that of deadlines; tests give their own.

    Its statistics count as errors also the calls that were refused (`guard_open`, `guard_busy`), by their pages, and
    the exceptions of the backend (`raised_KeyError`).
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
        self._log = BreakerLog(name)
        self._raised: set[str] = set()  # kinds of exceptions that were logged
        self._failed_writes = 0
        self._last_statistics = BackendStatistics({}, {}, {}, {}, 0, 0, 0)
        for leaf in leaves(inner):
            if isinstance(leaf, Envelope):
                leaf.name = name
        self._prober = Prober(inner, self._contain)
        # One run makes a probe in each direction; what takes longer hangs.
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
        """The backend behind it."""
        return (self._inner,)

    # Verbs, see Envelope. Each raises StoreError where the call is not made.

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
        """See Envelope. While nothing speaks for what is stored, the head of a batch is read before the rest."""
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
            return outcomes

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope."""
        return self._remove(lambda: self._inner.delete(keys, deadline=deadline), deadline, len(keys))

    def remove_all(self, deadline: float) -> int:
        """See Envelope."""
        return self._remove(lambda: self._inner.clear(deadline=deadline), deadline, math.inf)

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """See Touchable. Made once, and not at all by a breaker that is open; a failure says nothing about the store.
        """
        if not self.may_pass(Direction.WRITE):
            return []
        with self._enter(Verb.TOUCH, 1, deadline):
            missing = self._contain(lambda: touch(self._inner, keys, deadline=deadline))
        return missing if isinstance(missing, list) else []

    def measure(self) -> Usage:
        """See Envelope. What was found last, if the backend raises or is left alone; blocks as it does."""
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
        """See StorageBackend. Raises the backend's own BackendError; any other exception of it is counted. A call that
        hangs is waited for no longer than the grace: how it ends is the backend's business, which is closed then."""
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
        """See MemoryRegistration, for the backend behind it. A failure is counted and logged: pages are copied then."""

        def register() -> None:
            try:
                register_memory(self._inner, memory)
            except BackendError as error:
                self.count("raised_registration")
                logger.warning(
                    "storage %s: host memory is not registered, so its pages are copied: %s", self.name, error
                )

        self._contain(register)

    # What a guard adds

    def may_pass(self, direction: Direction) -> bool:
        """True if a call of this direction would be made now. Does not block; for each step of a scheduler."""
        return self._admission.may_pass(direction)

    def override(self, direction: Direction, mode: Override) -> None:
        """Switch a direction on or off, or leave it to the breaker. Does not block."""
        self._admission.set_override(direction, mode)

    def usage_sample(self) -> Usage | None:
        """Return the usage of a moment ago, None before it was first known. One that is old is renewed on a thread of
        the guard's own. Waits for that 50 ms at most, and only for a store that was quick the last time."""
        if self._usage_renewed.is_set() and time.monotonic() >= self._usage_due_s:
            self._usage_renewed.clear()
            self._usage_task.wake()
            if self._usage_took_s < _USAGE_WAIT_S:
                self._usage_renewed.wait(_USAGE_WAIT_S)
        else:
            self._usage_task.tend()
        return self._sample

    def guard_statistics(self) -> GuardStatistics:
        """What the guard itself has counted. Does not block."""
        return self._admission.statistics()

    def check(self) -> None:
        """Raises InvariantError if the guard's books do not add up."""
        self._admission.check()

    # Inside

    def _enter(self, verb: Verb, pages: int, deadline: float) -> Call:
        # A lookup or removal, of any number of keys, moves no bytes and is refused as one page would be.
        size_bytes = pages * self.codec.frame_bytes if verb in (Verb.GET, Verb.SET) else 0
        return self._admission.enter(verb, pages, size_bytes, deadline)

    def _probe(self) -> float:
        """Make the probes that are due; return when the next is. Blocks as the store does."""
        errors = self._inner_statistics().errors
        self._log.changed(self._admission.take_changes(), errors)
        self._log.still_off(self._admission.off(), errors)
        for direction in Direction:
            due = self._admission.begin_probe(direction)
            if due is not None:
                begun, deadline = due
                probe, ok = self._prober.read if direction is Direction.READ else self._prober.write, False
                try:
                    ok = probe(deadline)
                finally:
                    self._admission.probed(direction, begun, ok)
        return self._admission.probe_at

    def _look_up(
        self, ask: Callable[[], object], is_answer: Callable[[object], bool], deadline: float, whole: T, nothing: T
    ) -> T:
        """The answer of a lookup, and once more where it failed. `whole` is that of a store that has all pages.

        A store that is down has nothing, as one that is empty has: only its count of errors tells them apart.
        """
        with self._enter(Verb.EXISTS, 1, deadline) as call:
            for is_retried in (False, True):
                errors_before = sum(self._inner_statistics().errors.values())
                writes_before = self._failed_writes
                answer = self._contain(ask)
                found = cast(T, answer) if is_answer(answer) else nothing
                if found is not answer:
                    call.result = CallResult.RAISED
                elif found == whole or sum(self._inner_statistics().errors.values()) == errors_before:
                    call.result = CallResult.GOOD
                    break
                elif self._failed_writes != writes_before or self._was_short(call):
                    call.result = CallResult.UNKNOWN  # the errors may be those of a write that has ended since
                    break
                else:
                    call.result = CallResult.LOOKUP
                if is_retried or not self._may_retry(call, 1):
                    break
            return found

    def _remove(self, ask: Callable[[], object], deadline: float, most: float) -> int:
        with self._enter(Verb.DELETE, 1, deadline) as call:
            removed = self._contain(ask)
            if type(removed) is int and 0 <= removed <= most:
                return removed  # none removed: there were none, or the store is down
            call.result = CallResult.RAISED
            return 0

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        """Read, and what failed once more."""

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
        """The answer, if it is one outcome per page; else all pages failed."""
        if isinstance(answer, list) and len(answer) == pages and set(map(type, answer)) == {kind}:
            return answer
        if answer is not None:
            self.count("raised_WrongAnswer")
        return [kind("error")] * pages

    def _may_retry(self, call: Call, pages: int) -> int:
        """How many pages to try again, after a short pause; 0 if the rest of the time would not do, or for a store that
        hangs."""
        time_s = self._clock()
        took_s = time_s - call.began_s
        pause_s = _RETRY_PAUSE_S * random.uniform(0.5, 1.0)
        # A second try is expected to take as long as the first.
        if took_s > _RETRY_AFTER_S_MAX or time_s + pause_s + max(took_s, 0.01) >= call.deadline:
            return 0
        granted = self._admission.grant_retry(call, pages)
        if granted:
            self._closing.wait(pause_s)
        return granted

    def _judge(self, call: Call, failed: int) -> CallResult:
        """A call has failed if half of its pages have: fewer mean that the store works."""
        if 2 * failed < call.pages:
            return CallResult.GOOD
        return CallResult.UNKNOWN if self._was_short(call) else CallResult.ERROR

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
        """What a verb of the backend answers; None for an exception, which is counted. This is where the code of
        others ends, and their exceptions with it."""
        try:
            return call()
        except InvalidInput:
            raise  # the arguments are wrong, which is for the caller to know
        except Exception as error:
            kind = type(error).__name__
            self.count(f"raised_{kind}")
            if kind not in self._raised:
                self._raised.add(kind)
                logger.exception("storage %s: unexpected %s; counted from now on", self.name, kind)
            return None


# A tree of backends as its guards see it


@dataclass(frozen=True, slots=True)
class LeafStatistics:
    """What one store shows. `name` is unique in its tree; `usage` is None as long as it is not known, `guard` for a
    store without one."""

    name: str
    statistics: BackendStatistics
    usage: Usage | None
    guard: GuardStatistics | None


def guards_of(backend: StorageBackend) -> Iterator[GuardedBackend]:
    """All guards in `backend`: itself, or those among its parts."""
    if isinstance(backend, GuardedBackend):
        yield backend
    elif isinstance(backend, Composite):
        for part in backend.parts:
            yield from guards_of(part)


def may_pass(backend: StorageBackend, direction: Direction) -> bool:
    """True if some store in `backend` would be asked now. Does not block; for each step of a scheduler."""
    if isinstance(backend, GuardedBackend):
        return backend.may_pass(direction)
    # Not by `isinstance`, which takes 8 us for a protocol.
    parts: Sequence[StorageBackend] | None = getattr(backend, "parts", None)
    return parts is None or any(may_pass(part, direction) for part in parts)


def leaf_statistics(backend: StorageBackend) -> tuple[LeafStatistics, ...]:
    """What each store counts, in the order in which they are read; the second of a name is called `name-2`.

    Does not block for a store behind a guard; one without is asked for its usage.
    """
    found: list[LeafStatistics] = []
    for name, leaf in named_leaves(backend):
        if isinstance(leaf, GuardedBackend):
            found.append(LeafStatistics(name, leaf.statistics(), leaf.usage_sample(), leaf.guard_statistics()))
        else:
            found.append(LeafStatistics(name, leaf.statistics(), leaf.usage(), None))
    return tuple(found)


def named_leaves(backend: StorageBackend) -> list[tuple[str, StorageBackend]]:
    """Return each store with its name, in the order in which they are read: its guard, or without one itself. The
    second store of a name is called `name-2`."""
    return list(zip(unique_names([name for name, _ in _leaves(backend)]), [leaf for _, leaf in _leaves(backend)],
                    strict=True))  # fmt: skip


def unique_names(names: Sequence[str]) -> list[str]:
    """Return the names of stores, of which the second of a name has `-2` behind it."""
    found: dict[str, None] = {}
    seen: Counter[str] = Counter()
    for name in names:
        unique = name
        while unique in found:
            seen[name] += 1
            unique = f"{name}-{seen[name] + 1}"
        found[unique] = None
    return list(found)


def _leaves(backend: StorageBackend) -> Iterator[tuple[str, StorageBackend]]:
    if isinstance(backend, GuardedBackend):
        yield backend.name, backend
    elif isinstance(backend, Composite):
        found = [leaf for part in backend.parts for leaf in _leaves(part)]
        if len(backend.parts) == len(found) == 1 and not isinstance(found[0][1], GuardedBackend):
            # A wrapper without a guard, such as a limit, counts what it does besides what is below it.
            found = [(found[0][0], backend)]
        yield from found
    else:
        yield type(backend).__name__.removesuffix("Backend").lower(), backend
