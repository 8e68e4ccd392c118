"""Injected faults: they make a good store slow, unreliable, damaged or hanging.

For tests, and for trying out the effects of a failing store: `storage.guard.inject` in a configuration puts them
between the guard and the driver.

Locking design: one condition guards the random numbers, the bandwidth and the switch for hanging. It is not held while
the driver works or during a delay.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence

from ..arguments import instance_or_new
from ..clock import SYSTEM_CLOCK, Clock
from ..config.guard import InjectConfig
from ..frame import HEADER_BYTES, FrameCodec, PageBuffer
from .base import GetOutcome
from .errors import StoreError

INJECTED = "injected"  # the class of injected errors


class Faults:
    """The faults of one store. See the module's docstring. Usage is measured without faults.

    Delays end at the deadline, errors are values, damaged pages are removed. Only `hang` breaks the contract of a
    store deliberately: calls then block until `release`, beyond their deadline.
    """

    def __init__(self, options: InjectConfig | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.options = instance_or_new("options", options, InjectConfig)
        self._state = threading.Condition()
        self._dice = random.Random(self.options.seed)
        self._hanging = False
        self._failing = False
        self._free_at = -math.inf  # the time when all bytes so far have been transferred
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

    # Called by the store

    def reach(self, size_bytes: int, deadline: float) -> None:
        """Wait for the delay of a call that moves so many bytes. Raises StoreError for a call that fails."""
        options = self.options
        with self._state:
            delay_s = options.latency + options.jitter * self._dice.random()
            fails = self._failing or self._dice.random() < options.error_share
            time_s = self._clock()
            if options.bandwidth:
                self._free_at = max(self._free_at, time_s) + size_bytes / options.bandwidth
                delay_s += self._free_at - time_s
            self.hung_calls += 1
            self._state.wait_for(lambda: not self._hanging)
            self.hung_calls -= 1
        # Not a wait on the condition: `release` must not shorten the delay.
        if delay_s:
            self._clock.sleep(min(delay_s, deadline - time_s))
        if fails or self._clock() >= deadline:
            raise StoreError(INJECTED)

    def damage(
        self, codec: FrameCodec, keys: Sequence[bytes], pages: Sequence[PageBuffer], outcomes: list[GetOutcome]
    ) -> list[bytes]:
        """Flip a bit of some of the read pages, as a bad cable might. Where `codec` detects it, the outcome becomes
        CORRUPT. Return the keys of these pages."""
        damaged: list[bytes] = []
        for position, page in enumerate(pages):
            if outcomes[position] is not GetOutcome.HIT or not self._draws_damage():
                continue
            payload = page[HEADER_BYTES:] if isinstance(page, memoryview) else next(filter(len, page.parts))
            payload[0] ^= 1
            if codec.accept(keys[position], page, codec.frame_bytes) is not None:  # without a tag it accepts everything
                outcomes[position] = GetOutcome.CORRUPT
                damaged.append(keys[position])
        return damaged

    def _draws_damage(self) -> bool:
        with self._state:
            return self._dice.random() < self.options.damage_share
