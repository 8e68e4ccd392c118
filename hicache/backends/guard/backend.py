"""GuardedBackend: one wrapper in front of every leaf backend, so that a store's troubles stay its own.

    deadline     a call that has none left is not made; one that hangs past it counts as failed while it still hangs
    bytes        frames under way are bounded; who finds no room waits, at most until its deadline
    breaker      a direction that fails is left alone, probed, and used again when it works
    damage       a reader to whom everything is damaged is stopped before it has removed everything
    retries      failed pages are tried once more, within a budget and the deadline
    containment  what a backend raises, or answers against the contract, is counted, and its pages are ERROR

Verbs that are not made return at once: 0 or ERROR. Nothing is abandoned here: a call that hangs keeps its thread and
its frames until it returns, which is the caller's to bear (`supervised`).

Locking design: verbs run on their callers' threads, several at once, with no lock held while the backend works. What
they share is in `Traffic`. Probes and the sampling of usage run on threads of their own (BackgroundTask), started when
needed.
"""

from __future__ import annotations

import enum
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from ...arguments import instance_or_new
from ...background import BackgroundTask
from ...config.guard import GuardConfig
from ...errors import BackendError, InvalidInput
from ...frame import PageBuffer
from ..base import BackendStatistics, GetOutcome, SetOutcome, StorageBackend, Usage, register_memory
from ..calls import check_batch, check_keys, parent_outside
from .options import Direction, Override
from .probes import Prober
from .sampler import UsageSampler
from .traffic import Call, GuardStatistics, Refusal, Traffic, Verb, Verdict

logger = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = TypeVar("Outcome", GetOutcome, SetOutcome)

# Before failed pages are tried again, between half of this and the whole: a moment for what was only a hiccup.
_RETRY_PAUSE_S = 0.05
# What failed only after so long has hung. Whoever waits would wait twice, and the breaker would learn of it late.
_RETRY_AFTER_S_MAX = 0.25
# A call that was given less time than this and has used it up says nothing about the store.
_SHORT_S = 0.1
# How long `close` waits for the guard's own threads before it closes the backend all the same.
_CLOSE_S = 3.0
_NOTHING = BackendStatistics({}, {}, {}, {}, 0, 0, 0)


class GuardedBackend(StorageBackend):
    """See the module's docstring. A Composite of one part. `name` is how it is called in metrics and messages.

    `clock` is that of deadlines, `jitter` draws from [0, 1); tests give
    their own.
    """

    def __init__(
        self,
        inner: StorageBackend,
        options: GuardConfig | None = None,
        *,
        name: str = "storage",
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner.codec)
        self.name = name
        self.options = instance_or_new("options", options, GuardConfig)
        self._inner = inner
        self._clock = clock
        self._jitter = jitter
        self._traffic = Traffic(self.options, clock, jitter)
        self._closing = threading.Event()
        self._last_usage: Usage | None = None
        self._last_statistics = _NOTHING
        self._prober = Prober(inner, self._traffic, self._contain)
        # One run makes a probe in each direction; what takes longer hangs.
        patience_s = 2 * (self.options.probe_timeout + self.options.grace)
        self._probes = BackgroundTask(f"probe-{name}", self._prober.run, patience_s)
        self._usage = UsageSampler(name, self._measure_usage_if_passing)

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """The backend behind it."""
        return (self._inner,)

    # Verbs

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. 0 where the call is not made."""
        check_keys(keys)

        def ask() -> object:
            return self._inner.batch_exists(keys, deadline=deadline)

        def is_answer(found: object) -> bool:
            return type(found) is int and 0 <= found <= len(keys)

        return self._look_up(ask, is_answer, deadline, whole=len(keys), nothing=0) if keys else 0

    def batch_has(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        """See StorageBackend. None is stored where the call is not made."""
        check_keys(keys)
        pages = len(keys)

        def ask() -> object:
            return self._inner.batch_has(keys, deadline=deadline)

        def is_answer(found: object) -> bool:
            return isinstance(found, list) and len(found) == pages and all(type(there) is bool for there in found)

        return self._look_up(ask, is_answer, deadline, whole=[True] * pages, nothing=[False] * pages) if keys else []

    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend. While nothing speaks for what is stored, the head of a batch is read before the rest."""
        check_batch(self.codec, keys, pages)

        def read(call: Call) -> tuple[list[GetOutcome], Verdict]:
            outcomes: list[GetOutcome] = []
            while len(outcomes) < len(keys):
                start = len(outcomes)
                end = start + (self._traffic.pages_at_once(outcomes) or len(keys))
                found = self._get(call, keys[start:end], pages[start:end])
                outcomes += found
                if not self._traffic.read_pages(call, found):
                    break
            outcomes += [GetOutcome.ERROR] * (len(keys) - len(outcomes))
            return outcomes, self._judge(call, outcomes.count(GetOutcome.ERROR), len(outcomes))

        return self._make(Verb.GET, len(keys), deadline, [GetOutcome.ERROR] * len(keys), read) if keys else []

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend."""
        check_batch(self.codec, keys, pages, parent)

        def write(call: Call) -> tuple[list[SetOutcome], Verdict]:
            outcomes = self._set(call, keys, pages, parent)
            for start, end in list(_runs(outcomes, SetOutcome.ERROR)):
                granted = self._may_retry(call, end - start)
                if granted:
                    again = slice(start, start + granted)
                    before = parent_outside(keys[again], keys[start - 1] if start else parent)
                    outcomes[again] = self._set(call, keys[again], pages[again], before)
            failed = outcomes.count(SetOutcome.ERROR)
            if failed:
                self._traffic.count_failed_write()
            return outcomes, self._judge(call, failed, len(outcomes))

        return self._make(Verb.SET, len(keys), deadline, [SetOutcome.ERROR] * len(keys), write) if keys else []

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. 0 where the call is not made."""
        check_keys(keys)
        return self._remove(lambda: self._inner.delete(keys, deadline=deadline), deadline, len(keys)) if keys else 0

    def clear(self, *, deadline: float) -> int:
        """See StorageBackend. 0 where the call is not made."""
        return self._remove(lambda: self._inner.clear(deadline=deadline), deadline, math.inf)

    def usage(self) -> Usage:
        """See StorageBackend. What was found last, if the backend raises or is left alone; blocks as it does."""
        if self._traffic.may_pass(Direction.READ) or self._closing.is_set():
            self._measure_usage()
        return self._last_usage or Usage(0, 0, None)

    def statistics(self) -> BackendStatistics:
        """See StorageBackend. Those of the backend, with the pages of calls that were not made; as errors those calls,
        and what it raised."""
        inner = self._inner_statistics()
        errors = Counter(inner.errors)
        own = self._traffic.statistics()
        for (_, refusal), calls in own.refused.items():
            errors[f"guard_{refusal}"] += calls
        for kind, times in own.raised.items():
            errors[f"raised_{kind}"] += times
        for kind, times in dict(self._probes.errors).items():
            errors[f"prober_{kind}"] += times
        gets, sets = Counter(inner.gets), Counter(inner.sets)
        gets[GetOutcome.ERROR] += own.refused_pages.get(Verb.GET, 0)
        sets[SetOutcome.ERROR] += own.refused_pages.get(Verb.SET, 0)
        return replace(inner, gets=dict(+gets), sets=dict(+sets), errors=dict(errors))

    def close(self) -> None:
        """See StorageBackend. Raises the backend's own BackendError; whatever else it raises is counted."""
        self._closing.set()
        self._traffic.close()
        self._probes.close(_CLOSE_S)
        self._usage.close(_CLOSE_S)
        failures: list[BackendError] = []
        self._contain(lambda: self._close_inner(failures))
        if failures:
            raise failures[0]

    def _close_inner(self, failures: list[BackendError]) -> None:
        try:
            self._inner.close()
        except BackendError as error:
            failures.append(error)

    def register_memory(self, memory: memoryview) -> None:
        """See MemoryRegistration, for the backend behind it. A failure is counted and logged: pages are copied then."""
        self._contain(lambda: self._register(memory))

    def _register(self, memory: memoryview) -> None:
        try:
            register_memory(self._inner, memory)
        except BackendError as error:
            self._traffic.count_raised("registration")
            logger.warning("storage %s: host memory is not registered, so its pages are copied: %s", self.name, error)

    # What a guard adds

    def may_pass(self, direction: Direction) -> bool:
        """Whether a call of this direction would be made now. Does not block; for each step of a scheduler."""
        passes = self._traffic.may_pass(direction)
        self._tend()
        return passes

    def override(self, direction: Direction, mode: Override) -> None:
        """Switch a direction on or off, or leave it to the breaker. Does not block."""
        self._traffic.set_override(direction, mode)

    def usage_sample(self) -> Usage | None:
        """Usage as it was a moment ago, None before it was first known. Does not wait for a store that is slow."""
        return self._usage.sample()

    def guard_statistics(self) -> GuardStatistics:
        """What the guard itself has counted. Does not block."""
        return self._traffic.statistics()

    def check(self) -> None:
        """Raises InvariantError if the guard's books do not add up."""
        self._traffic.check()

    # Inside

    def _make(
        self, verb: Verb, pages: int, deadline: float, refused: T, work: Callable[[Call], tuple[T, Verdict]]
    ) -> T:
        """Make a call and take in what it says about the store; `refused` for one that is not made."""
        # A lookup or removal, of any number of keys, moves no bytes and is refused as one page would be.
        size_bytes = pages * self.codec.frame_bytes if verb in (Verb.GET, Verb.SET) else 0
        call = self._traffic.enter(verb, pages, size_bytes, deadline)
        self._tend()
        if isinstance(call, Refusal):
            return refused
        verdict = Verdict(None)
        try:
            answer, verdict = work(call)
        finally:
            self._traffic.leave(call, verdict)
            self._tend()
        return answer

    def _tend(self) -> None:
        """Wake the probe thread if a probe is planned; replace it if it died or hangs."""
        probe_at = self._traffic.probe_at
        if probe_at < math.inf:
            self._probes.wake(probe_at)

    def _look_up(
        self, ask: Callable[[], object], is_answer: Callable[[object], bool], deadline: float, *, whole: T, nothing: T
    ) -> T:
        """The answer of a lookup, and once more where it failed. `whole` is that of a store that has all pages.

        A store that is down has nothing, as one that is empty has: only its count of errors tells them apart.
        """

        def find(call: Call) -> tuple[T, Verdict]:
            errors_before = sum(self._inner_statistics().errors.values())
            writes_before = self._traffic.failed_writes
            answer = self._contain(ask)
            if not is_answer(answer):
                return nothing, Verdict(False, "raised")
            found = cast(T, answer)
            if found == whole or sum(self._inner_statistics().errors.values()) == errors_before:
                return found, Verdict(True)
            if self._traffic.failed_writes != writes_before or self._was_short(call):
                return found, Verdict(None)  # the errors may be those of a write that ended meanwhile
            return found, Verdict(False, "lookup")

        def find_or_retry(call: Call) -> tuple[T, Verdict]:
            found, verdict = find(call)
            return find(call) if verdict.ok is False and self._may_retry(call, 1) else (found, verdict)

        return self._make(Verb.EXISTS, 1, deadline, nothing, find_or_retry)

    def _remove(self, ask: Callable[[], object], deadline: float, most: float) -> int:
        def remove(_: Call) -> tuple[int, Verdict]:
            removed = self._contain(ask)
            if type(removed) is int and 0 <= removed <= most:
                return removed, Verdict(None)  # none removed: there were none, or the store is down
            return 0, Verdict(False, "raised")

        return self._make(Verb.DELETE, 1, deadline, 0, remove)

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        """Read, and what failed once more."""

        def read(positions: Sequence[int]) -> list[GetOutcome]:
            some_keys, some_pages = [keys[i] for i in positions], [pages[i] for i in positions]
            answer = self._contain(lambda: self._inner.batch_get(some_keys, some_pages, deadline=call.deadline))
            return self._outcomes(answer, GetOutcome, len(positions))

        outcomes = read(range(len(keys)))
        failed = [i for i, outcome in enumerate(outcomes) if outcome is GetOutcome.ERROR]
        granted = self._may_retry(call, len(failed)) if failed else 0
        if granted:
            for i, outcome in zip(failed, read(failed[:granted]), strict=False):
                outcomes[i] = outcome
        return outcomes

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        answer = self._contain(lambda: self._inner.batch_set(keys, pages, parent=parent, deadline=call.deadline))
        return self._outcomes(answer, SetOutcome, len(keys))

    def _outcomes(self, answer: object, kind: type[Outcome], pages: int) -> list[Outcome]:
        """The answer, if it is one outcome per page; else all pages failed."""
        if isinstance(answer, list) and len(answer) == pages and all(type(outcome) is kind for outcome in answer):
            return answer
        if answer is not None:
            self._traffic.count_raised("WrongAnswer")
        return [kind("error")] * pages

    def _may_retry(self, call: Call, pages: int) -> int:
        """How many pages to try again, after a short pause; 0 if the rest of the time would not do, or for a store that
        hangs."""
        time_s = self._clock()
        took_s = time_s - call.began_s
        pause_s = _RETRY_PAUSE_S * (0.5 + 0.5 * self._jitter())
        # A second try is expected to take as long as the first.
        if took_s > _RETRY_AFTER_S_MAX or time_s + pause_s + max(took_s, 0.01) >= call.deadline:
            return 0
        granted = self._traffic.grant_retry(call, pages)
        if granted:
            self._closing.wait(pause_s)
        return granted

    def _judge(self, call: Call, failed: int, pages: int) -> Verdict:
        """A call has failed if half of its pages have: fewer mean that the store works."""
        if 2 * failed < pages:
            return Verdict(True)
        return Verdict(None) if self._was_short(call) else Verdict(False, "error")

    def _was_short(self, call: Call) -> bool:
        return call.deadline - call.began_s < _SHORT_S and self._clock() >= call.deadline

    def _measure_usage(self) -> Usage | None:
        usage = self._contain(self._inner.usage)
        if isinstance(usage, Usage):
            self._last_usage = usage
            return usage
        return None

    def _measure_usage_if_passing(self) -> Usage | None:
        return self._measure_usage() if self._traffic.may_pass(Direction.READ) else None

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
            if self._traffic.count_raised(kind):
                logger.exception("storage %s: unexpected %s; counted from now on", self.name, kind)
            return None


def _runs(outcomes: Sequence[enum.StrEnum], wanted: enum.StrEnum) -> Iterator[tuple[int, int]]:
    """The half-open intervals of positions where `outcomes` are `wanted`."""
    start: int | None = None
    for position, outcome in enumerate(outcomes):
        if outcome is wanted and start is None:
            start = position
        elif outcome is not wanted and start is not None:
            yield start, position
            start = None
    if start is not None:
        yield start, len(outcomes)
