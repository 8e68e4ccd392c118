"""Single flight: two calls do not move the same page at the same time.

    Flights     the pages that calls are moving now, by key
    Waiter      one call that waits for pages that other calls move

A call first moves the pages that it leads, and then waits for those that it follows, until its own deadline. So two
calls never wait for each other.

Locking design: the owner of `Flights` locks it. A `Waiter` has its own lock, held for a few instructions; nothing else
is locked while it is held.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..backends.base import GetOutcome
from ..clock import Clock
from ..frame import PageBuffer
from .pool import PooledPage

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Arrival:
    """The result of a page that another call has read. `page` is held for the waiter; None if the bytes are already in
    the waiter's own buffer."""

    outcome: GetOutcome
    page: PooledPage | None


class Waiter(Generic[Answer]):
    """A call that waits for pages that other calls move, by their positions in its batch. `targets` are its buffers."""

    def __init__(self, targets: Sequence[PageBuffer], clock: Clock) -> None:
        self._clock = clock
        self._targets = targets
        self._state = threading.Condition()
        self._missing = 0
        self._answers: list[tuple[int, Answer]] = []
        self._copies = 0  # in progress, into buffers of this call
        self._is_over = False

    def expect(self) -> None:
        """Wait for one more page. REQUIRES: called by the waiting call, before the flight can end."""
        with self._state:
            self._missing += 1

    def give(self, position: int, answer: Answer) -> bool:
        """Give the answer for one page. Return False, without effect, if the call no longer waits."""
        with self._state:
            if self._is_over:
                return False
            self._missing -= 1
            self._answers.append((position, answer))
            self._state.notify()
            return True

    @contextlib.contextmanager
    def copying(self) -> Iterator[Sequence[PageBuffer] | None]:
        """Keep the call from returning while this block writes into its buffers. Yields the buffers of its batch, or
        None if the call no longer waits: then they must not be accessed."""
        with self._state:
            is_over = self._is_over
            self._copies += not is_over
        try:
            yield None if is_over else self._targets
        finally:
            if not is_over:
                with self._state:
                    self._copies -= 1
                    self._state.notify()

    def wait(self, deadline: float) -> list[tuple[int, Answer]]:
        """Wait for answers until the deadline; return an empty list after the last one, or after the deadline."""
        with self._state:
            self._clock.wait_for(self._state, lambda: bool(self._answers) or not self._missing, deadline)
            answers, self._answers = self._answers, []
            return answers

    def end(self) -> list[tuple[int, Answer]]:
        """Stop waiting, except for copies in progress, which take milliseconds; return the last answers."""
        with self._state:
            self._is_over = True
            self._state.wait_for(lambda: not self._copies)
            answers, self._answers = self._answers, []
            return answers


@dataclass(slots=True, eq=False)
class Flight(Generic[Answer]):
    """One page that a call is moving, and the waiting calls, each with a position of its batch."""

    key: bytes
    waiters: list[tuple[Waiter[Answer], int]] = field(default_factory=list)


class Flights(Generic[Answer]):
    """The pages that calls are moving now. The owner locks it."""

    def __init__(self) -> None:
        self._flights: dict[bytes, Flight[Answer]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def join(self, key: bytes, position: int, waiter: Waiter[Answer]) -> Flight[Answer] | None:
        """Let a call wait for a page in flight and return None; otherwise return the flight that the call now leads."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = Flight(key)
            return flight
        waiter.expect()
        flight.waiters.append((waiter, position))
        return None

    def land(self, flight: Flight[Answer]) -> Sequence[tuple[Waiter[Answer], int]]:
        """End a flight, so that calls no longer join it. Return the waiting calls."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        return flight.waiters

    def detach(self, keys: Sequence[bytes] | None) -> None:
        """Stop calls from joining the flights of these pages (None: all), because their bytes may be stale."""
        for key in list(self._flights) if keys is None else keys:
            self._flights.pop(key, None)
