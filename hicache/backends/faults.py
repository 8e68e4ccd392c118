"""Faults on purpose: a wrapper that makes a good backend slow, unreliable, damaged or hanging.

For tests, and for trying out what a store's troubles cost: `storage.guard.inject` in a configuration puts one between
the guard and the backend.

Locking design: one condition guards the dice, the counters, the bandwidth's book and whether calls hang. It is not held
while the backend works, nor while a delay passes.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import InvalidInput
from ..frame import HEADER_BYTES
from .base import BackendStatistics, GetOutcome, SetOutcome, StorageBackend, Usage
from .calls import check_batch, check_keys

INJECTED = "injected"  # the class of errors that are made here


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """What goes wrong. Delays are per call: `latency_s`, plus up to `jitter_s` drawn evenly; `bandwidth_bytes_per_s` is
    shared by all calls, 0 for no limit. `error_share` is of calls, `damage_share` of pages that are read. Equal seeds
    draw the same faults for equal calls in the same order.

    Raises InvalidInput for values that cannot work.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    error_share: float = 0.0
    damage_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("latency_s", "jitter_s", "bandwidth_bytes_per_s", "error_share", "damage_share"):
            value = getattr(self, name)
            most = 1.0 if name.endswith("_share") else float("inf")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise InvalidInput(f"faults: {name} must be a number from 0 to {most}, got {value!r}")
        if type(self.seed) is not int:
            raise InvalidInput(f"faults: seed must be a whole number, got {self.seed!r}")


class FaultyBackend(StorageBackend):
    """See the module's docstring. A Composite of one part.

    It keeps the contract: delays end at the deadline, errors are outcomes and counted, damaged pages are removed. Only
    `hang` breaks it, on purpose: calls then stay until `release`, whatever their deadline.
    """

    def __init__(self, inner: StorageBackend, options: FaultOptions | None = None) -> None:
        super().__init__(inner.codec)
        self.options = options or FaultOptions()
        self._inner = inner
        self._state = threading.Condition()
        self._dice = random.Random(self.options.seed)
        self._hanging = False
        self._failing = False
        self._free_at = 0.0  # when the line has carried what was sent so far
        self._errors: Counter[str] = Counter()
        self._corrupt = self._failed_gets = self._failed_sets = 0
        self.hung_calls = 0  # that hang now

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """The backend behind it."""
        return (self._inner,)

    # Faults by hand

    def hang(self) -> None:
        """From now on calls hang."""
        with self._state:
            self._hanging = True

    def release(self) -> None:
        """Let the calls that hang go on, and no other hang."""
        with self._state:
            self._hanging = False
            self._state.notify_all()

    def fail(self, failing: bool = True) -> None:
        """From now on every call fails, or none but those of `error_share`."""
        with self._state:
            self._failing = failing

    # Verbs

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        check_keys(keys)
        if self._goes_wrong(0, deadline):
            self._count(1)
            return 0
        return self._inner.batch_exists(keys, deadline=deadline)

    def batch_get(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend."""
        check_batch(self.codec, keys, frames)
        if self._goes_wrong(len(keys) * self.codec.frame_bytes, deadline):
            self._count(len(keys), gets=len(keys))
            return [GetOutcome.ERROR] * len(keys)
        outcomes = self._inner.batch_get(keys, frames, deadline=deadline)
        return [
            self._damage(key, frame, deadline) if outcome is GetOutcome.HIT and self._draws_damage() else outcome
            for key, frame, outcome in zip(keys, frames, outcomes, strict=True)
        ]

    def batch_set(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend."""
        check_batch(self.codec, keys, frames, parent)
        if self._goes_wrong(len(keys) * self.codec.frame_bytes, deadline):
            self._count(len(keys), sets=len(keys))
            return [SetOutcome.ERROR] * len(keys)
        return self._inner.batch_set(keys, frames, parent=parent, deadline=deadline)

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        check_keys(keys)
        if self._goes_wrong(0, deadline):
            self._count(1)
            return 0
        return self._inner.delete(keys, deadline=deadline)

    def usage(self) -> Usage:
        """See StorageBackend."""
        return self._inner.usage()

    def statistics(self) -> BackendStatistics:
        """See StorageBackend. Those of the backend, with the faults that were made."""
        inner = self._inner.statistics()
        with self._state:
            gets, sets = Counter(inner.gets), Counter(inner.sets)
            gets[GetOutcome.ERROR] += self._failed_gets
            gets[GetOutcome.CORRUPT] += self._corrupt
            gets[GetOutcome.HIT] -= self._corrupt
            sets[SetOutcome.ERROR] += self._failed_sets
            errors = Counter(inner.errors) + self._errors
            corrupt = Counter(inner.corrupt) + Counter({INJECTED: self._corrupt})
        return replace(inner, gets=dict(+gets), sets=dict(+sets), errors=dict(errors), corrupt=dict(corrupt))

    def close(self) -> None:
        """See StorageBackend. Ends what hangs."""
        self.release()
        self._inner.close()

    # Inside

    def _goes_wrong(self, size_bytes: int, deadline: float) -> bool:
        """Let the delay of a call pass; whether the call then fails."""
        options = self.options
        with self._state:
            delay_s = options.latency_s + options.jitter_s * self._dice.random()
            fails = self._failing or self._dice.random() < options.error_share
            time_s = time.monotonic()
            if options.bandwidth_bytes_per_s:
                self._free_at = max(self._free_at, time_s) + size_bytes / options.bandwidth_bytes_per_s
                delay_s += self._free_at - time_s
            self.hung_calls += 1
            self._state.wait_for(lambda: not self._hanging)
            self.hung_calls -= 1
        # Not a call of the condition: a release is no reason to be faster.
        if delay_s:
            time.sleep(max(0.0, min(delay_s, deadline - time_s)))
        return fails or time.monotonic() >= deadline

    def _draws_damage(self) -> bool:
        with self._state:
            return self._dice.random() < self.options.damage_share

    def _damage(self, key: bytes, frame: memoryview, deadline: float) -> GetOutcome:
        """Flip a bit on the way in, as a bad cable does, and then do as a backend does that finds one."""
        frame[HEADER_BYTES] ^= 1
        if self.codec.check(key, frame) is None:
            return GetOutcome.HIT  # a codec without a tag believes everything
        self._inner.delete([key], deadline=deadline)
        with self._state:
            self._corrupt += 1
        return GetOutcome.CORRUPT

    def _count(self, errors: int, *, gets: int = 0, sets: int = 0) -> None:
        with self._state:
            self._errors[INJECTED] += errors
            self._failed_gets += gets
            self._failed_sets += sets
