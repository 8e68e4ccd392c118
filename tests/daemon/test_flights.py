"""Single flight: what a waiting call may rely on when it ends, and which flight a call joins."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hicache.clock import SYSTEM_CLOCK
from hicache.daemon.flights import Flights, Waiter
from hicache_lab.clocks import ManualClock
from tests.waiting import WAIT_S, wait_for

KEY = b"k" * 32


class Watched(threading.Condition):
    """A condition that tells when a thread waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)


def test_a_call_does_not_end_while_another_call_copies_into_its_buffers() -> None:
    """Its buffers belong to its caller again when it has ended."""
    buffer = memoryview(bytearray(8))
    waiter = Waiter[None]([buffer], SYSTEM_CLOCK)
    waiter._state = state = Watched()
    ending = threading.Thread(target=waiter.end, daemon=True)
    with waiter.copying() as targets:
        assert targets is not None and targets[0] is buffer
        ending.start()
        wait_for(lambda: state.is_awaited.is_set() or not ending.is_alive())
        assert ending.is_alive(), "the call ended during a copy"
        buffer[:] = b"received"
    ending.join(WAIT_S)
    assert not ending.is_alive() and bytes(buffer) == b"received"


def test_after_its_end_a_call_gets_neither_copies_nor_answers() -> None:
    waiter = Waiter[int]([memoryview(bytearray(8))], SYSTEM_CLOCK)
    assert waiter.give(3, 7)
    assert waiter.end() == [(3, 7)]
    with waiter.copying() as targets:
        assert targets is None
    assert not waiter.give(3, 8)
    assert waiter.end() == []


class Noting(ManualClock):
    """A clock that does not wait, and notes whether a waiting thread would have gone on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on: list[bool] = []

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool], deadline: float) -> bool:
        self.goes_on.append(predicate())
        return self.goes_on[-1]


def test_a_call_gets_each_answer_without_waiting_for_the_others() -> None:
    clock = Noting()
    waiter = Waiter[int]((), clock)
    waiter.expect()
    waiter.expect()
    assert waiter.wait(clock() + 1) == []
    waiter.give(0, 7)
    assert waiter.wait(clock() + 1) == [(0, 7)]
    waiter.give(1, 8)
    assert [waiter.wait(clock() + 1) for _ in range(2)] == [[(1, 8)], []]
    assert clock.goes_on == [False, True, True, True]


def test_the_end_of_a_detached_flight_does_not_end_the_flight_that_replaced_it() -> None:
    flights, waiter = Flights[int](), Waiter[int]((), SYSTEM_CLOCK)
    stale = flights.join(KEY, 0, waiter)
    assert stale is not None
    flights.detach([KEY])
    current = flights.join(KEY, 1, waiter)
    assert current is not None
    assert flights.land(stale) == []
    assert flights.join(KEY, 2, waiter) is None, "a call moves the page although another one is moving it"
    assert flights.land(current) == [(waiter, 2)]
    assert len(flights) == 0
