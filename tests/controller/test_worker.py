"""Supervised workers, apart from what they work on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from hicache.controller.worker import WorkerGroup
from tests.waiting import wait_for

WAIT_S = 20.0


class Harness:
    """A group whose jobs are functions, and what became of them."""

    def __init__(self, count: int = 1, deadline_s: float = 5.0) -> None:
        self.done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.failed: list[Callable[[], None]] = []
        self.group = WorkerGroup[Callable[[], None]](
            "test", count, handle=lambda job, beat: job(), fail=self.failed.append, acknowledge=self.done.put,
            deadline_s=deadline_s,
        )  # fmt: skip

    def supervise_until(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, self.group.supervise, timeout_s=WAIT_S)


def fail() -> None:
    raise ValueError("handler bug")


def die() -> None:
    raise SystemExit


def work() -> None:
    pass


def test_jobs_are_acknowledged_once_and_in_order() -> None:
    harness = Harness()
    jobs = [lambda: None for _ in range(50)]
    for job in jobs:
        harness.group.submit(job)
    assert [harness.done.get(timeout=WAIT_S) for _ in jobs] == jobs
    assert harness.group.close(WAIT_S)
    assert harness.done.empty() and not harness.failed


def test_a_failing_handler_fails_its_job_and_is_logged_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    for job in (fail, fail, work):
        harness.group.submit(job)
    assert [harness.done.get(timeout=WAIT_S) for _ in range(3)] == [fail, fail, work]
    assert harness.failed == [fail, fail]
    assert harness.group.errors == {"ValueError": 2}
    assert len(caplog.records) == 1
    assert harness.group.close(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_replaced_with_back_off_and_its_job_fails() -> None:
    harness = Harness()
    for round_number in (1, 2):
        harness.group.submit(die)
        harness.supervise_until(lambda n=round_number: harness.group.restarts == n)  # type: ignore[misc]
        assert harness.done.get(timeout=WAIT_S) is die
    harness.group.submit(work)
    assert harness.done.get(timeout=WAIT_S) is work
    assert harness.failed == [die, die]
    assert harness.group.errors == {"ThreadDied": 2}
    assert harness.group.close(WAIT_S)


def test_a_stuck_thread_gets_a_substitute_and_its_job_stays_open_until_it_ends() -> None:
    harness = Harness(deadline_s=-1.9)  # with the grace period: stuck after a tenth of a second
    gate = threading.Event()

    def hang() -> None:
        gate.wait(WAIT_S)

    harness.group.submit(hang)
    harness.supervise_until(lambda: harness.group.stuck_threads == 1)
    harness.group.submit(work)
    assert harness.done.get(timeout=WAIT_S) is work
    gate.set()
    assert harness.done.get(timeout=WAIT_S) is hang
    harness.supervise_until(lambda: len(harness.group._threads) == 1)
    assert harness.group.close(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stuck_thread_that_dies_still_acknowledges_its_job() -> None:
    harness = Harness(deadline_s=-1.9)
    gate = threading.Event()

    def hang_and_die() -> None:
        gate.wait(WAIT_S)
        raise SystemExit

    harness.group.submit(hang_and_die)
    harness.supervise_until(lambda: harness.group.stuck_threads == 1)
    gate.set()
    harness.supervise_until(lambda: harness.failed == [hang_and_die])
    assert harness.done.get(timeout=WAIT_S) is hang_and_die
    assert harness.group.close(WAIT_S)


def test_a_store_that_hangs_does_not_eat_threads() -> None:
    harness = Harness(deadline_s=-3.0)  # with the grace period below nothing: stuck as soon as it has a job
    gate, entered = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        entered.release()
        gate.wait(WAIT_S)

    for _ in range(20):
        harness.group.submit(hang)
    harness.supervise_until(lambda: harness.group.stuck_threads == 4)
    assert all(entered.acquire(timeout=WAIT_S) for _ in range(5))  # the last substitute hangs too
    for _ in range(100):
        harness.group.supervise()
    assert len(harness.group._threads) == 5
    gate.set()
    for _ in range(20):
        harness.done.get(timeout=WAIT_S)
    assert harness.group.close(WAIT_S)


def test_closing_leaves_a_hanging_thread_behind_and_says_so() -> None:
    harness = Harness()
    gate, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        gate.wait(WAIT_S)

    harness.group.submit(hang)
    assert entered.wait(WAIT_S)
    assert not harness.group.close(0.05)
    gate.set()
    assert harness.done.get(timeout=WAIT_S) is hang


def test_a_job_that_waits_can_be_withdrawn_and_one_that_a_thread_has_cannot() -> None:
    harness = Harness()
    gate, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        gate.wait(WAIT_S)

    waiting = [lambda: None for _ in range(3)]
    for job in (hang, *waiting):
        harness.group.submit(job)
    assert entered.wait(WAIT_S)
    assert not harness.group.withdraw(hang)
    assert harness.group.withdraw(waiting[1]) and not harness.group.withdraw(waiting[1])
    assert harness.group.queued == 2
    gate.set()
    assert [harness.done.get(timeout=WAIT_S) for _ in range(3)] == [hang, waiting[0], waiting[2]]
    assert harness.group.close(WAIT_S) and harness.done.empty()
    assert not harness.group.withdraw(waiting[0])


def test_a_job_is_either_withdrawn_or_handled_while_threads_take_jobs_all_the_time() -> None:
    harness = Harness(count=4)
    jobs = [lambda: None for _ in range(5000)]
    withdrawn: set[int] = set()
    for number, job in enumerate(jobs):
        harness.group.submit(job)
        candidate = jobs[max(0, number - 1)] if number % 3 else job
        if harness.group.withdraw(candidate):
            withdrawn.add(id(candidate))
    handled = [id(harness.done.get(timeout=WAIT_S)) for _ in range(len(jobs) - len(withdrawn))]
    assert harness.group.close(WAIT_S) and harness.done.empty() and harness.group.queued == 0
    assert withdrawn and len(set(handled)) == len(handled) and withdrawn.isdisjoint(handled)
