"""The pool of supervised threads, apart from what it works on: jobs, batches, and calls that may be left."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache.supervised import RESTART_S_MAX, RESTART_S_MIN, SUBSTITUTES_MAX, NoThread, SupervisedPool
from hicache_lab.clocks import ManualClock
from tests.log_records import records_of
from tests.waiting import wait_for

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Also: what a dying thread tells pytest belongs to its own test."""
    yield
    wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("hicache-test-")])


class Harness:
    """A pool whose jobs are functions, its clock, and the results of the jobs."""

    def __init__(self, count: int = 1, patience_s: float = 7.0, linger_s: float | None = None) -> None:
        self.clock = ManualClock()
        self.done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.failed: list[Callable[[], None]] = []
        self.pool = SupervisedPool[Callable[[], None]](
            "test", count, handle=lambda job, beat: job(), fail=self.failed.append, acknowledge=self.done.put,
            patience_s=patience_s, linger_s=linger_s, clock=self.clock,
        )

    def supervise_until(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, self.pool.supervise, timeout_s=WAIT_S)


def fail() -> None:
    raise ValueError("handler bug")


def die() -> None:
    raise SystemExit


def work() -> None:
    pass


class Hang:
    """A job that waits for `go`, and a call that then returns 1."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self._begun = threading.Semaphore(0)

    def __call__(self) -> Any:
        self._begun.release()
        self.go.wait(WAIT_S)
        return 1

    def wait_until_begun(self, times: int = 1) -> None:
        """Wait until it has been called so many more times."""
        for _ in range(times):
            assert self._begun.acquire(timeout=WAIT_S)


def test_jobs_are_acknowledged_once_and_in_order() -> None:
    harness = Harness()
    jobs = [lambda: None for _ in range(50)]
    for job in jobs:
        harness.pool.submit(job)
    assert [harness.done.get(timeout=WAIT_S) for _ in jobs] == jobs
    assert harness.pool.close(WAIT_S)
    assert harness.done.empty() and not harness.failed


def test_a_failing_handler_fails_its_job_and_is_logged_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    for job in (fail, fail, work):
        harness.pool.submit(job)
    assert [harness.done.get(timeout=WAIT_S) for _ in range(3)] == [fail, fail, work]
    assert harness.failed == [fail, fail]
    assert harness.pool.errors == {"ValueError": 2}
    assert len(records_of(caplog, "supervised")) == 1
    assert harness.pool.close(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_replaced_with_back_off_and_its_job_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hicache")
    harness = Harness()
    for restarts, delay_s in ((1, RESTART_S_MIN), (2, 2 * RESTART_S_MIN)):
        harness.pool.submit(die)
        assert harness.done.get(timeout=WAIT_S) is die
        harness.clock.advance(0.9 * delay_s)
        harness.pool.supervise()
        assert harness.pool.restarts == restarts - 1
        harness.clock.advance(0.2 * delay_s)
        harness.pool.supervise()
        assert harness.pool.restarts == restarts
    harness.pool.submit(work)
    assert harness.done.get(timeout=WAIT_S) is work
    assert harness.failed == [die, die]
    assert harness.pool.errors == {"ThreadDied": 2}
    wait_for(lambda: caplog.text.count("because one died") == 2)
    assert "worker test: a thread died; its job counts as failed" in caplog.text
    assert harness.pool.close(WAIT_S)


def test_a_stuck_thread_gets_a_substitute_and_its_job_stays_open_until_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "hicache")
    harness, hang = Harness(patience_s=1.0), Hang()
    harness.pool.submit(hang)
    hang.wait_until_begun()
    harness.pool.supervise()
    assert harness.pool.stuck_threads == 0, "the control"
    harness.clock.advance(2.0)
    harness.pool.supervise()
    assert harness.pool.stuck_threads == 1
    wait_for(lambda: "started another thread, because one hangs in a call" in caplog.text)
    harness.pool.submit(work)
    assert harness.done.get(timeout=WAIT_S) is work
    hang.go.set()
    assert harness.done.get(timeout=WAIT_S) is hang
    harness.supervise_until(lambda: len(harness.pool._threads) == 1)
    assert harness.pool.close(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stuck_thread_that_dies_still_acknowledges_its_job() -> None:
    harness, hang = Harness(patience_s=1.0), Hang()

    def hang_and_die() -> None:
        hang()
        raise SystemExit

    harness.pool.submit(hang_and_die)
    hang.wait_until_begun()
    harness.clock.advance(2.0)
    harness.pool.supervise()
    assert harness.pool.stuck_threads == 1
    hang.go.set()
    assert harness.done.get(timeout=WAIT_S) is hang_and_die
    assert harness.failed == [hang_and_die]
    assert harness.pool.close(WAIT_S)


def test_a_store_that_hangs_does_not_use_up_threads() -> None:
    harness, hang = Harness(patience_s=-1.0), Hang()  # stuck as soon as it has a job
    for _ in range(20):
        harness.pool.submit(hang)
    harness.supervise_until(lambda: harness.pool.stuck_threads == SUBSTITUTES_MAX)
    hang.wait_until_begun(5)  # the last substitute hangs too
    for _ in range(100):
        harness.pool.supervise()
    assert len(harness.pool._threads) == 5
    hang.go.set()
    for _ in range(20):
        harness.done.get(timeout=WAIT_S)
    assert harness.pool.close(WAIT_S)


def test_closing_leaves_a_hanging_thread_behind_and_says_so() -> None:
    harness, hang = Harness(), Hang()
    harness.pool.submit(hang)
    hang.wait_until_begun()
    assert not harness.pool.close(0.0)
    hang.go.set()
    assert harness.done.get(timeout=WAIT_S) is hang


@pytest.mark.parametrize("linger_s", [None, 10.0])
def test_a_waiting_job_can_be_withdrawn_and_a_running_one_cannot(linger_s: float | None) -> None:
    harness, hang = Harness(linger_s=linger_s), Hang()
    waiting = [lambda: None for _ in range(3)]
    harness.pool.submit(hang)
    for job in waiting:
        harness.pool.submit(job)
    hang.wait_until_begun()
    assert not harness.pool.withdraw(hang)
    assert harness.pool.withdraw(waiting[1]) and not harness.pool.withdraw(waiting[1])
    assert harness.pool.queued == 2
    hang.go.set()
    assert [harness.done.get(timeout=WAIT_S) for _ in range(3)] == [hang, waiting[0], waiting[2]]
    assert harness.pool.close(WAIT_S) and harness.done.empty()
    assert not harness.pool.withdraw(waiting[0]) and harness.pool._load == 0


def test_a_job_is_either_withdrawn_or_handled_while_threads_take_jobs_all_the_time() -> None:
    harness = Harness(count=4)
    jobs = [lambda: None for _ in range(5000)]
    withdrawn: set[int] = set()
    for number, job in enumerate(jobs):
        harness.pool.submit(job)
        candidate = jobs[max(0, number - 1)] if number % 3 else job
        if harness.pool.withdraw(candidate):
            withdrawn.add(id(candidate))
    handled = [id(harness.done.get(timeout=WAIT_S)) for _ in range(len(jobs) - len(withdrawn))]
    assert harness.pool.close(WAIT_S) and harness.done.empty() and harness.pool.queued == 0
    assert withdrawn and len(set(handled)) == len(handled) and withdrawn.isdisjoint(handled)


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Let no thread of Python start."""
    before = threading.stack_size(1 << 46)  # more than a machine has
    try:
        yield
    finally:
        threading.stack_size(before)


def test_a_pool_that_got_no_threads_gets_them_later_and_does_its_jobs() -> None:
    with no_threads():
        harness = Harness(count=2)
        harness.pool.submit(work)
        harness.pool.supervise()
        assert harness.pool.alive == 0 and harness.pool.errors["NoThread"] > 0
    harness.clock.advance(RESTART_S_MAX)
    harness.pool.supervise()
    assert harness.pool.alive == 2
    assert harness.done.get(timeout=WAIT_S) is work and not harness.failed
    assert harness.pool.close(WAIT_S)


def test_closing_a_pool_without_threads_fails_the_jobs_that_wait() -> None:
    with no_threads():
        harness = Harness()
        harness.pool.submit(work)
        assert harness.pool.close(WAIT_S)
    assert harness.failed == [work] and harness.done.get_nowait() is work and harness.done.empty()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_on_demand_start_with_the_work_end_when_idle_and_survive_a_death() -> None:
    harness = Harness(count=2, linger_s=0.0)
    assert harness.pool.alive == 0
    for job in (work, die, work, work):
        harness.pool.submit(job)
    assert {harness.done.get(timeout=WAIT_S) for _ in range(4)} == {work, die}
    wait_for(lambda: harness.pool.alive == 0)
    assert harness.failed == [die] and harness.pool.errors == {"ThreadDied": 1}
    assert harness.pool.close(WAIT_S)


def test_no_job_is_lost_to_a_thread_that_ends_as_the_job_comes() -> None:
    harness = Harness(count=3, linger_s=0.0)
    for _ in range(2000):
        harness.pool.submit(work)
        assert harness.done.get(timeout=WAIT_S) is work
    assert harness.pool.close(WAIT_S) and harness.done.empty()


def test_threads_on_demand_are_no_more_than_their_maximum() -> None:
    harness, hang = Harness(count=2, linger_s=10.0), Hang()
    for _ in range(5):
        harness.pool.submit(hang)
    hang.wait_until_begun(2)
    assert harness.pool.alive == 2 and harness.pool.queued == 3
    hang.go.set()
    for _ in range(5):
        harness.done.get(timeout=WAIT_S)
    assert harness.pool.close(WAIT_S)


# Batches


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_each_page_of_a_batch_is_done_once_before_run_returns(threads: int, count: int) -> None:
    pool, pages = SupervisedPool[Any]("test", threads), list[int]()
    pool.run(count, pages.append)
    assert sorted(pages) == list(range(count))
    assert pool.close(WAIT_S)


def test_threads_help_with_a_batch_and_the_caller_takes_part() -> None:
    pool, together = SupervisedPool[Any]("test", 3), threading.Barrier(4)
    names: set[str] = set()

    def page(number: int) -> None:
        together.wait(WAIT_S)
        names.add(threading.current_thread().name)

    pool.run(4, page)
    assert names == {threading.current_thread().name, *(f"hicache-test-{n}" for n in (1, 2, 3))}
    assert pool.close(WAIT_S)


def test_an_exception_on_a_helping_thread_costs_only_its_page_and_is_counted() -> None:
    counted = list[int]()
    pool = SupervisedPool[Any]("test", 1, on_error=lambda: counted.append(1))
    caller, both = threading.current_thread(), threading.Barrier(2)
    pages = list[int]()

    def page(number: int) -> None:
        if number < 2:
            both.wait(WAIT_S)  # the caller has one of the first two pages, the thread the other
            if threading.current_thread() is not caller:
                raise ValueError("a bug")
        pages.append(number)

    pool.run(20, page)
    assert len(pages) == 19
    wait_for(lambda: counted == [1])
    assert pool.errors == {"ValueError": 1} and pool.alive == 1
    assert pool.close(WAIT_S)


def test_an_exception_on_the_caller_abandons_the_batch_and_is_raised() -> None:
    pool, pages = SupervisedPool[Any]("test", 0), list[int]()

    def page(number: int) -> None:
        if number == 3:
            raise ValueError("a bug")
        pages.append(number)

    with pytest.raises(ValueError, match="a bug"):
        pool.run(10, page)
    assert pages == [0, 1, 2]
    pool.run(1, pages.append)
    assert pages == [0, 1, 2, 0]


def test_a_batch_waits_for_the_pages_of_other_threads() -> None:
    pool, gate, entered, ended = SupervisedPool[Any]("test", 1), threading.Event(), threading.Event(), list[int]()
    caller = threading.current_thread()

    def page(number: int) -> None:
        if threading.current_thread() is caller:
            assert entered.wait(WAIT_S)
            gate.set()
            raise ValueError("a bug")
        entered.set()
        gate.wait(WAIT_S)
        ended.append(number)

    with pytest.raises(ValueError, match="a bug"):
        pool.run(2, page)
    assert len(ended) == 1
    assert pool.close(WAIT_S)


def test_a_batch_that_is_done_is_not_held_by_threads_that_were_busy_all_the_time() -> None:
    pool, hang = SupervisedPool[Any]("test", 1), Hang()
    other = threading.Thread(target=pool.call, args=(hang, math.inf))
    other.start()
    hang.wait_until_begun()

    class Frame:
        """What a job refers to."""

    def run() -> weakref.ref[Frame]:
        frame = Frame()

        def page(number: int) -> None:
            assert isinstance(frame, Frame)

        pool.run(4, page)
        return weakref.ref(frame)

    assert run()() is None
    hang.go.set()
    other.join(WAIT_S)
    assert pool.close(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_in_a_batch_is_replaced_by_a_later_batch() -> None:
    clock = ManualClock()
    pool, caller = SupervisedPool[Any]("test", 1, clock=clock), threading.current_thread()
    both = threading.Barrier(2)

    def page(number: int) -> None:
        both.wait(WAIT_S)
        if threading.current_thread() is not caller:
            raise SystemExit

    pool.run(2, page)
    wait_for(lambda: bool(pool.errors))
    pool.run(2, lambda number: None)
    assert pool.alive == 0, "the control"
    clock.advance(RESTART_S_MIN)
    pool.run(2, lambda number: None)
    assert pool.alive == 1
    assert pool.restarts == 1 and pool.errors == {"ThreadDied": 1}
    assert pool.close(WAIT_S)


def test_concurrent_batches_of_many_callers_are_each_complete() -> None:
    pool, sums = SupervisedPool[Any]("test", 3), list[int]()

    def call() -> None:
        for _ in range(50):
            pages = list[int]()
            pool.run(16, pages.append)
            sums.append(sum(pages))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT_S)
    assert sums == [120] * 200
    assert pool.close(WAIT_S)


# Calls


def calling(threads: int = 4, linger_s: float | None = 10.0) -> SupervisedPool[Any]:
    return SupervisedPool("test", threads, linger_s=linger_s)


def soon() -> float:
    return time.monotonic() + WAIT_S


def leave(pool: SupervisedPool[Any], function: Callable[[], object], late: Callable[[object], None]) -> None:
    """Make a call that hangs, and leave it once it has begun."""
    patience_s, entered = 0.001, threading.Event()

    def enter() -> object:
        entered.set()
        return function()

    def tell(result: object) -> None:
        if entered.is_set():
            late(result)

    while not entered.is_set():
        patience_s *= 2
        assert pool.call(enter, time.monotonic() + patience_s, tell) is None


@pytest.mark.parametrize("linger_s", [None, 0.0, 10.0])
def test_a_call_in_time_returns_its_result_or_raises_its_error(linger_s: float | None) -> None:
    pool, late = calling(linger_s=linger_s), list[object]()
    assert pool.call(lambda: 7, soon(), late.append) == 7
    with pytest.raises(ZeroDivisionError):
        pool.call(lambda: 1 // 0, soon(), late.append)
    assert pool.close() and not late and not pool.errors


@pytest.mark.parametrize("is_behind", [True, False])
def test_deadlines_are_times_of_the_clock_of_the_pool(is_behind: bool) -> None:
    """Also where the system's clock has passed them, which are below zero, or is an hour behind."""
    clock = ManualClock()
    clock.advance(-clock() - 3600.0 if is_behind else 3600.0)
    pool, hang = SupervisedPool[Any]("test", 3, clock=clock), Hang()

    def answer() -> int:
        time.sleep(0.05)
        return 7

    assert pool.call(answer, clock() + WAIT_S) == 7
    assert pool.run_until(3, lambda number: time.sleep(0.05), clock() + WAIT_S)
    assert pool.call(hang, clock() + 0.1) is None
    hang.go.set()
    assert pool.close(WAIT_S)


def test_an_abandoned_call_reports_its_result_once_at_its_end() -> None:
    pool, hang, late = calling(), Hang(), list[object]()
    leave(pool, hang, late.append)
    assert not late
    assert pool.call(lambda: 7, soon(), late.append) == 7
    hang.go.set()
    assert pool.close()
    assert late == [1]


def test_a_failed_abandoned_call_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    pool, hang, late = calling(), Hang(), list[object]()

    def fail_late() -> None:
        hang()
        raise ValueError("not for the log")

    leave(pool, fail_late, late.append)
    hang.go.set()
    assert pool.close()
    assert late == [None]
    assert "ValueError" in caplog.text and "not for the log" not in caplog.text


def test_a_call_that_has_not_begun_by_its_deadline_never_does() -> None:
    pool, hang, begun, late = calling(threads=2), Hang(), list[int](), list[object]()
    callers = [threading.Thread(target=pool.call, args=(hang, soon())) for _ in range(2)]
    for caller in callers:
        caller.start()
    hang.wait_until_begun(2)
    assert pool.call(lambda: begun.append(1), -math.inf, late.append) is None
    hang.go.set()
    for caller in callers:
        caller.join()
    assert pool.close()
    assert (begun, late) == ([], [None])


def test_late_is_called_once_for_each_call_without_a_result() -> None:
    pool, late, results = calling(), list[object](), list[int | None]()
    numbers = itertools.count()
    for delay in range(400):
        results.append(pool.call(numbers.__next__, time.monotonic() + delay % 20 * 5e-6, late.append))
    assert pool.close()
    assert len(late) == results.count(None)
    told = [n for n in (*results, *late) if n is not None]
    assert len(told) == len(set(told)) == next(numbers)


def test_an_error_of_late_costs_no_thread() -> None:
    pool, hang = calling(threads=1), Hang()
    leave(pool, hang, lambda told: fail())
    hang.go.set()
    assert pool.call(lambda: 7, soon()) == 7
    assert pool.close() and pool.errors == {"ValueError": 1}


def test_a_call_without_a_thread_raises_and_the_next_one_with_a_thread_works() -> None:
    pool, late = calling(threads=2), list[object]()
    with no_threads():
        for _ in range(5):
            with pytest.raises(NoThread, match="cannot start more threads"):
                pool.call(lambda: 7, soon(), late.append)
    assert pool.call(lambda: 7, soon(), late.append) == 7
    assert pool.alive == 1 and pool.close() and not late


# Batches with a deadline


def leave_batch(pool: SupervisedPool[Any], hang: Hang, count: int, begun: int) -> list[int]:
    """Make a batch whose pages hang, and leave it once `begun` of them have begun. Return the list of these pages."""
    patience_s = 0.001
    while True:
        pages, entered = list[int](), threading.Semaphore(0)

        def page(number: int, pages: list[int] = pages, entered: threading.Semaphore = entered) -> None:
            pages.append(number)
            entered.release()
            hang()

        patience_s *= 2
        assert not pool.run_until(count, page, time.monotonic() + patience_s)
        if pages:
            for _ in range(begun):
                assert entered.acquire(timeout=WAIT_S), "fewer pages have begun"
            return pages


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_a_batch_in_time_is_complete_and_ran_on_the_threads_of_the_pool(count: int) -> None:
    pool, pages, names = SupervisedPool[Any]("test", 3), list[int](), set[str]()

    def page(number: int) -> None:
        pages.append(number)
        names.add(threading.current_thread().name)

    assert pool.run_until(count, page, math.inf)
    assert sorted(pages) == list(range(count)) and pool.abandoned == 0
    assert threading.current_thread().name not in names and all(name.startswith("hicache-test-") for name in names)
    assert pool.close(WAIT_S)


def test_a_batch_is_left_at_its_deadline_and_its_other_pages_are_never_made() -> None:
    """The control: pages of a batch that is not left are made after the hanging ones."""
    pool, hang = SupervisedPool[Any]("test", 2), Hang()
    pages = leave_batch(pool, hang, 10, 1)
    assert 1 <= pool.abandoned <= 2
    hang.go.set()
    wait_for(lambda: pool.abandoned == 0)
    more = list[int]()
    assert pool.run_until(10, more.append, soon()) and sorted(more) == list(range(10))
    assert sorted(pages) in ([0], [0, 1])
    assert pool.close(WAIT_S)


def test_abandoned_pages_are_counted_until_each_has_returned() -> None:
    pool, first, second = SupervisedPool[Any]("test", 3), Hang(), Hang()
    leave_batch(pool, first, 1, 1)
    assert pool.abandoned == 1
    leave_batch(pool, second, 1, 1)
    assert pool.abandoned == 2
    first.go.set()
    wait_for(lambda: pool.abandoned == 1)
    assert pool.run_until(5, lambda number: None, soon()) and pool.abandoned == 1
    second.go.set()
    wait_for(lambda: pool.abandoned == 0)
    assert pool.close(WAIT_S)


def test_while_all_threads_hang_a_batch_is_left_without_a_page() -> None:
    pool, hang, pages = SupervisedPool[Any]("test", 1), Hang(), list[int]()
    leave_batch(pool, hang, 1, 1)
    assert not pool.run_until(3, pages.append, -math.inf)
    assert pool.abandoned == 1
    hang.go.set()
    wait_for(lambda: pool.abandoned == 0)
    assert pool.run_until(1, lambda number: None, soon())
    assert pages == []
    assert pool.close(WAIT_S)


def test_a_failing_page_of_a_batch_with_a_deadline_costs_only_itself_and_is_counted() -> None:
    pool, pages = SupervisedPool[Any]("test", 2), list[int]()

    def page(number: int) -> None:
        if number == 1:
            raise ValueError("a bug")
        pages.append(number)

    assert pool.run_until(5, page, soon())
    wait_for(lambda: pool.errors == {"ValueError": 1})
    assert sorted(pages) == [0, 2, 3, 4] and pool.abandoned == 0 and pool.alive == 2
    assert pool.close(WAIT_S)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failing_page_leaves_no_later_page_undone(threads: int) -> None:
    pool, pages = SupervisedPool[Any]("test", threads), list[int]()

    def page(number: int) -> None:
        pages.append(number)
        raise ValueError("a bug")

    assert pool.run_until(5, page, time.monotonic() + WAIT_S), "the batch was left at its deadline"
    assert sorted(pages) == list(range(5))
    assert pool.close(WAIT_S)


def test_a_batch_with_a_deadline_and_no_thread_raises_at_once_and_the_next_one_with_a_thread_works() -> None:
    clock = ManualClock()
    with no_threads():
        pool = SupervisedPool[Any]("test", 2, clock=clock)
        with pytest.raises(NoThread, match="cannot start more threads"):
            pool.run_until(3, lambda number: None, math.inf)
        assert pool.run_until(0, lambda number: None, math.inf) and pool.abandoned == 0
    clock.advance(RESTART_S_MAX)
    pages = list[int]()
    assert pool.run_until(3, pages.append, soon()) and sorted(pages) == [0, 1, 2]
    assert pool.close(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_in_a_batch_with_a_deadline_costs_its_page() -> None:
    clock = ManualClock()
    pool, pages = SupervisedPool[Any]("test", 2, clock=clock), list[int]()

    def page(number: int) -> None:
        if number == 0:
            raise SystemExit
        pages.append(number)

    assert pool.run_until(4, page, soon())
    wait_for(lambda: pool.errors == {"ThreadDied": 1})
    assert sorted(pages) == [1, 2, 3] and pool.abandoned == 0
    clock.advance(RESTART_S_MAX)
    assert pool.run_until(4, lambda number: None, soon()) and pool.alive == 2
    assert pool.close(WAIT_S)
