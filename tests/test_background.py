"""Background work on a supervised thread: when it runs, and the replacement of a thread that dies or hangs."""

from __future__ import annotations

import math
import threading
from functools import partial

import pytest

from hicache.background import BackgroundTask
from hicache.backoff import Backoff
from hicache_lab.clocks import ManualClock
from tests.log_records import records_of
from tests.test_supervised import WAIT_S, no_thread_is_left
from tests.waiting import wait_for

__all__ = ["no_thread_is_left"]  # a fixture that each test here uses


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Work:
    """Work that counts its runs, waits at a gate, and returns the time of its next run."""

    def __init__(self, clock: ManualClock, next_in_s: float = math.inf) -> None:
        self.runs = 0
        self.clock = clock
        self.gate = threading.Event()
        self.gate.set()
        self.next_in_s = next_in_s
        self.error: BaseException | None = None

    def __call__(self) -> float:
        gate, next_in_s = self.gate, self.next_in_s  # before the count, after which a test replaces them
        self.runs += 1
        gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return self.clock() + next_in_s


def test_work_takes_no_thread_before_its_first_wake_and_then_repeats_at_the_returned_time(
    clock: ManualClock,
) -> None:
    work = Work(clock, next_in_s=1.0)
    task = BackgroundTask("test", work, clock=clock)
    task.tend()
    assert task._pool.alive == 0 and not work.runs
    task.wake()
    for runs in range(1, 6):
        wait_for(lambda n=runs: work.runs == n and task._next_at == clock() + 1.0)  # type: ignore[misc]
        clock.advance(1.0)
    assert task.close(WAIT_S)


def test_work_runs_again_for_wakes_that_come_after_its_start(clock: ManualClock) -> None:
    work = Work(clock)
    task = BackgroundTask("test", work, clock=clock)
    for runs in (1, 2, 3):
        task.wake()
        wait_for(lambda n=runs: work.runs == n)  # type: ignore[misc]
    work.gate = threading.Event()
    task.wake()
    wait_for(lambda: work.runs == 4)
    for _ in range(10):
        task.wake()
    work.gate.set()
    wait_for(lambda: work.runs == 5)
    assert task.close(WAIT_S) and work.runs == 5 and not task.errors


def test_a_wake_makes_work_run_earlier_and_never_later(clock: ManualClock) -> None:
    work = Work(clock, next_in_s=3600.0)
    task = BackgroundTask("test", work, clock=clock)
    task.wake(clock() + 3600.0)
    task.wake(clock() + 10.0)
    task.wake(clock() + 3600.0)
    clock.advance(10.0)
    wait_for(lambda: work.runs == 1)
    task.wake()
    wait_for(lambda: work.runs == 2)
    assert task.close(WAIT_S) and work.runs == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("error", "kind"), [(ValueError("a bug"), "ValueError"), (SystemExit(), "ThreadDied")])
def test_work_that_raises_or_dies_is_counted_logged_once_and_retried_after_a_back_off(
    error: BaseException, kind: str, caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    counted = list[int]()
    work = Work(clock)
    work.error = error
    task = BackgroundTask(
        "test", work, backoff=Backoff(1.0, 2.0), on_error=lambda: counted.append(1), clock=clock
    )
    task.wake()

    def is_due(runs: int, delay_s: float) -> bool:
        return (work.runs, task._next_at) == (runs, clock() + delay_s)

    for runs, delay_s in ((1, 1.0), (2, 2.0), (3, 2.0)):
        wait_for(partial(is_due, runs, delay_s))
        if runs == 3:
            work.error = None
        clock.advance(delay_s)
    wait_for(lambda: work.runs == 4 and task._next_at == math.inf and not task._is_submitted)
    assert task.errors[kind] == len(counted) == work.runs - 1
    assert sum(record.exc_info is not None for record in records_of(caplog, "supervised")) == 1
    assert task.close(WAIT_S)


def test_a_hanging_thread_is_replaced_and_its_late_result_is_ignored(clock: ManualClock) -> None:
    work = Work(clock, next_in_s=0.0)
    gate = work.gate = threading.Event()
    task = BackgroundTask("test", work, patience_s=1.0, clock=clock)
    task.wake()
    wait_for(lambda: work.runs == 1)
    work.gate, work.next_in_s = threading.Event(), math.inf
    work.gate.set()
    task.tend()
    assert task._pool.stuck_threads == 0, "the control"
    clock.advance(2.0)
    task.tend()
    wait_for(lambda: work.runs == 2)
    gate.set()  # the hanging run returns that it is due again
    wait_for(lambda: len(task._pool._threads) == 1)
    assert work.runs == 2
    assert task.close(WAIT_S)


def test_waiting_for_the_next_run_does_not_count_as_hanging(clock: ManualClock) -> None:
    work = Work(clock)
    task = BackgroundTask("test", work, patience_s=1.0, clock=clock)
    task.wake(clock() + 100.0)
    wait_for(lambda: bool(clock._waiting))
    clock.advance(99.0)
    task.tend()
    assert task._pool.stuck_threads == 0
    clock.advance(1.0)
    wait_for(lambda: work.runs == 1)
    assert task.close(WAIT_S)


def test_closing_ends_the_wait_and_no_work_runs_afterwards(clock: ManualClock) -> None:
    work = Work(clock)
    task = BackgroundTask("test", work, clock=clock)
    task.wake(clock() + 3600.0)
    assert task.close(WAIT_S) and task.close(WAIT_S)
    task.wake()
    task.tend()
    assert not work.runs and task._pool.alive == 0
