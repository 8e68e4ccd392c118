"""The mailbox: requests of operators to a scheduler thread, which serves a few of them in each step."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hicache.cache.mailbox import ITEMS_MAX, ITEMS_PER_POLL, Mailbox
from hicache.clock import SYSTEM_CLOCK
from hicache.errors import AdminError
from hicache_lab.clocks import ManualClock
from tests.waiting import wait_for


def posted(mailbox: Mailbox, pool: ThreadPoolExecutor, *answers: int, timeout_s: float = 30.0) -> list[Future[int]]:
    """Post requests that return these numbers, and wait until each is in the mailbox."""

    def answering(answer: int) -> int:
        return mailbox.ask(lambda: answer, timeout_s)

    futures = []
    for answer in answers:
        before = len(mailbox._items)
        futures.append(pool.submit(answering, answer))
        wait_for(lambda before=before: len(mailbox._items) > before)  # type: ignore[misc]
    return futures


def test_a_request_runs_on_the_thread_that_serves_the_mailbox() -> None:
    mailbox = Mailbox(SYSTEM_CLOCK)
    with ThreadPoolExecutor() as pool:
        requester = pool.submit(mailbox.ask, threading.get_ident, 30.0)
        wait_for(lambda: mailbox.pending)
        mailbox.serve()
        assert requester.result(30) == threading.get_ident()
    assert not mailbox.pending


def test_one_step_serves_a_few_requests_in_order() -> None:
    mailbox = Mailbox(SYSTEM_CLOCK)
    with ThreadPoolExecutor(ITEMS_MAX) as pool:
        futures = posted(mailbox, pool, *range(ITEMS_PER_POLL + 2))
        mailbox.serve()
        assert [future.result(30) for future in futures[:ITEMS_PER_POLL]] == list(range(ITEMS_PER_POLL))
        assert len(mailbox._items) == 2
        mailbox.serve()
        assert [future.result(30) for future in futures[ITEMS_PER_POLL:]] == [ITEMS_PER_POLL, ITEMS_PER_POLL + 1]


def test_long_work_is_divided_over_several_polls() -> None:
    mailbox, seen = Mailbox(SYSTEM_CLOCK), []

    def visit() -> Generator[None, None, str]:
        for number in range(3):
            seen.append(number)
            threading.Event().wait(0.001)  # longer than the time slice of one poll
            yield
        return "all"

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(mailbox.ask, visit(), 30.0)
        wait_for(lambda: mailbox.pending)
        for polls in range(1, 4):
            mailbox.serve()
            assert seen == list(range(polls))
        mailbox.serve()
        assert answer.result(30) == "all"


def test_an_error_of_the_work_is_raised_in_the_requester() -> None:
    mailbox = Mailbox(SYSTEM_CLOCK)

    def fail() -> None:
        raise KeyError("a bug")

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(mailbox.ask, fail, 30.0)
        wait_for(lambda: mailbox.pending)
        mailbox.serve()
        with pytest.raises(KeyError):
            answer.result(30)


def test_without_a_scheduler_a_request_fails_and_its_work_never_runs() -> None:
    clock, done = ManualClock(), []
    mailbox = Mailbox(clock)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(mailbox.ask, lambda: done.append(1), 60.0)
        wait_for(answer.done, lambda: clock.advance(60.0))
        with pytest.raises(AdminError, match="scheduler did not serve") as caught:
            answer.result(30)
    assert caught.value.kind == "scheduler_stopped"
    mailbox.serve()
    assert not done and not mailbox.pending


def test_abandoned_work_ends() -> None:
    clock, began, closed = ManualClock(), threading.Event(), []
    mailbox = Mailbox(clock)

    def endless() -> Generator[None, None, None]:
        began.set()
        try:
            while True:
                yield
        finally:
            closed.append(1)

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(mailbox.ask, endless(), 1.0)
        wait_for(began.is_set, mailbox.serve)
        wait_for(answer.done, lambda: clock.advance(1.0))
        with pytest.raises(AdminError):
            answer.result(30)
        mailbox.serve()
    del answer
    assert not mailbox.pending


def test_the_number_of_waiting_requests_is_limited() -> None:
    mailbox = Mailbox(SYSTEM_CLOCK)
    with ThreadPoolExecutor(ITEMS_MAX) as pool:
        futures = posted(mailbox, pool, *range(ITEMS_MAX))
        with pytest.raises(AdminError) as caught:
            mailbox.ask(lambda: 1, 30.0)
        assert caught.value.kind == "busy"
        while mailbox.pending:
            mailbox.serve()
        assert [future.result(30) for future in futures] == list(range(ITEMS_MAX))


def test_closing_rejects_waiting_and_later_requests() -> None:
    mailbox = Mailbox(SYSTEM_CLOCK)
    with ThreadPoolExecutor() as pool:
        (waiting,) = posted(mailbox, pool, 1)
        mailbox.close()
        with pytest.raises(AdminError, match="closed"):
            waiting.result(30)
    with pytest.raises(AdminError, match="closed"):
        mailbox.ask(lambda: 1, 30.0)
