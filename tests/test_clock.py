"""The manual clock moves only when it is advanced, and ends the waits whose time has come."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.clock import SYSTEM_CLOCK, Clock
from hicache_lab.clocks import ManualClock
from tests.waiting import wait_for

HOUR_S = 3600.0


def waiters(clock: ManualClock) -> int:
    return len(clock._waiting)


def test_the_system_s_clock_is_that_of_deadlines_and_the_wall() -> None:
    before_s, wall_s = time.monotonic(), time.time()
    assert before_s <= SYSTEM_CLOCK() <= time.monotonic()
    assert wall_s <= SYSTEM_CLOCK.wall_s() <= time.time()


@pytest.mark.parametrize("clock", [SYSTEM_CLOCK, ManualClock()])
def test_a_wait_whose_time_is_over_returns_at_once(clock: Clock) -> None:
    condition = threading.Condition()
    with condition:
        assert not clock.wait(condition, 0.0)
        assert not clock.wait(condition, -1.0)
        assert not clock.wait_for(condition, lambda: False, clock() - 1.0)
        assert clock.wait_for(condition, lambda: True, clock() - 1.0)
    assert not clock.wait_set(threading.Event(), -1.0)
    clock.sleep(-1.0)


def test_a_manual_clock_stands_still_until_it_is_advanced() -> None:
    clock = ManualClock()
    start_s, wall_s = clock(), clock.wall_s()
    assert clock() == start_s
    clock.advance(HOUR_S)
    assert clock.wall_s() - wall_s == pytest.approx(HOUR_S, abs=1e-6)
    assert HOUR_S < clock() - start_s < HOUR_S + 1e-6, "a deadline that is a sum has come in spite of rounding"


def test_advancing_ends_a_wait_whose_time_has_come_and_no_other() -> None:
    clock, condition, ended = ManualClock(), threading.Condition(), []

    def wait(seconds: float) -> None:
        with condition:
            ended.append((seconds, clock.wait_for(condition, lambda: False, start_s + seconds)))

    start_s = clock()
    with ThreadPoolExecutor(2) as threads:
        threads.submit(wait, 1.0)
        threads.submit(wait, HOUR_S)
        wait_for(lambda: waiters(clock) == 2)
        clock.advance(1.0)
        wait_for(lambda: ended == [(1.0, False)])
        wait_for(lambda: waiters(clock) == 1)
        clock.advance(HOUR_S)
    assert ended == [(1.0, False), (HOUR_S, False)]


def test_a_sleeper_counts_until_its_time_has_come() -> None:
    clock = ManualClock()
    with ThreadPoolExecutor(1) as threads:
        sleeping = threads.submit(clock.sleep, HOUR_S)
        wait_for(lambda: clock.sleepers == 1)
        clock.advance(HOUR_S / 2)
        assert clock.sleepers == 1 and not sleeping.done()
        clock.advance(HOUR_S / 2)
        assert clock.sleepers == 0, "also before the thread runs again"
        sleeping.result()


def test_a_notification_ends_a_wait_before_its_time() -> None:
    clock, condition, arrived = ManualClock(), threading.Condition(), threading.Event()
    with ThreadPoolExecutor(1) as threads:

        def wait() -> bool:
            with condition:
                return clock.wait_for(condition, arrived.is_set, clock() + HOUR_S)

        result = threads.submit(wait)
        wait_for(lambda: waiters(clock) == 1)
        arrived.set()
        with condition:
            condition.notify_all()
        assert result.result()
    assert waiters(clock) == 0


def test_advancing_ends_sleeps_and_waits_for_events() -> None:
    clock = ManualClock()
    with ThreadPoolExecutor(2) as threads:
        sleep, event = threads.submit(clock.sleep, 10.0), threads.submit(clock.wait_set, threading.Event(), 10.0)
        wait_for(lambda: waiters(clock) == 1)
        assert not sleep.done()
        while not (sleep.done() and event.done()):
            clock.advance(10.0)
        assert not event.result()


def test_a_set_event_is_seen_although_the_clock_stands_still() -> None:
    event = threading.Event()
    event.set()
    assert ManualClock().wait_set(event, HOUR_S)
