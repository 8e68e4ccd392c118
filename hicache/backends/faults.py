"""Injected faults: a wrapper that makes a good backend slow, unreliable, damaged or hanging.

For tests, and for trying out the effects of a failing store: `storage.guard.inject` in a configuration puts it between
the guard and the backend.

Locking design: one condition guards the random numbers, the bandwidth and the switch for hanging. It is not held while
the backend works or during a delay. Otherwise as `envelope`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from ..arguments import instance_or_new
from ..config.guard import InjectConfig
from ..frame import HEADER_BYTES, PageBuffer
from .base import GetOutcome, StorageBackend
from .envelope import Wrapper
from .errors import StoreError

INJECTED = "injected"  # the class of injected errors


class FaultyBackend(Wrapper):
    """See the module's docstring. Usage is measured without faults.

    It keeps the contract: delays end at the deadline, errors are outcomes and counted, damaged pages are removed. Only
    `hang` breaks it deliberately: calls then block until `release`, beyond their deadline.
    """

    def __init__(self, inner: StorageBackend, options: InjectConfig | None = None) -> None:
        super().__init__(inner)
        self.options = instance_or_new("options", options, InjectConfig)
        self._state = threading.Condition()
        self._dice = random.Random(self.options.seed)
        self._hanging = False
        self._failing = False
        self._free_at = 0.0  # the time when all bytes so far have been transferred
        self.hung_calls = 0  # calls that hang now

    # Manual faults

    def hang(self) -> None:
        """Make calls hang from now on."""
        with self._state:
            self._hanging = True

    def release(self) -> None:
        """Continue the calls that hang, and stop making calls hang."""
        with self._state:
            self._hanging = False
            self._state.notify_all()

    def fail(self, failing: bool = True) -> None:
        """Make every call fail from now on; with False, only those of `error_share`."""
        with self._state:
            self._failing = failing

    # Verbs, see Envelope

    def reach(self, pages: int, deadline: float) -> StorageBackend:
        """See Wrapper. Waits for the delay of the call."""
        options = self.options
        with self._state:
            delay_s = options.latency + options.jitter * self._dice.random()
            fails = self._failing or self._dice.random() < options.error_share
            time_s = time.monotonic()
            if options.bandwidth:
                size_bytes = pages * self.codec.frame_bytes
                self._free_at = max(self._free_at, time_s) + size_bytes / options.bandwidth
                delay_s += self._free_at - time_s
            self.hung_calls += 1
            self._state.wait_for(lambda: not self._hanging)
            self.hung_calls -= 1
        # Not a wait on the condition: `release` must not shorten the delay.
        if delay_s:
            time.sleep(max(0.0, min(delay_s, deadline - time_s)))
        if fails or time.monotonic() >= deadline:
            raise StoreError(INJECTED)
        return self._inner

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope."""
        return [
            self._damage(key, page, deadline) if outcome is GetOutcome.HIT and self._draws_damage() else outcome
            for key, page, outcome in zip(keys, pages, super().get(keys, pages, deadline), strict=True)
        ]

    def close(self) -> None:
        """See StorageBackend. Continues hanging calls."""
        self.release()
        super().close()

    # Inside

    def _draws_damage(self) -> bool:
        with self._state:
            return self._dice.random() < self.options.damage_share

    def _damage(self, key: bytes, page: PageBuffer, deadline: float) -> GetOutcome:
        """Flip a bit of a read page, as a bad cable might, then act like a backend that detects it."""
        payload = page[HEADER_BYTES:] if isinstance(page, memoryview) else next(filter(len, page.parts))
        payload[0] ^= 1
        if self.codec.accept(key, page, self.codec.frame_bytes) is None:
            return GetOutcome.HIT  # a codec without a tag accepts everything
        self._inner.delete([key], deadline=deadline)
        self._calls.count(corrupt=[INJECTED])
        return GetOutcome.CORRUPT
