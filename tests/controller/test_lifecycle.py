"""Opening another backend: what hangs or fails keeps nothing that is wanted later from being opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from hicache.backends.base import StorageBackend
from hicache.controller.lifecycle import BackendLifecycle
from hicache.controller.storage import StorageJobs
from hicache.controller.worker import WorkerGroup
from hicache.errors import BackendError
from tests.waiting import WAIT_S, wait_for


class Backend:
    """A backend that can be closed."""

    def __init__(self, trouble: BackendError | None = None) -> None:
        self.closed = threading.Event()
        self.closes = 0
        self._trouble = trouble

    def close(self) -> None:
        self.closes += 1
        self.closed.set()
        if self._trouble is not None:
            raise self._trouble


class Jobs:
    """As far as the lifecycle looks at them."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self.in_flight = 0

    def retire(self) -> None:
        pass


def impatient(*arguments: Any, **options: Any) -> WorkerGroup[Any]:
    """Workers that count as stuck after 0.1 s."""
    return WorkerGroup[Any](*arguments, **{**options, "deadline_s": -1.9})


def lifecycle(backend: Backend, clock: Callable[[], float] = time.monotonic) -> BackendLifecycle:
    life = BackendLifecycle(cast("Callable[[StorageBackend], StorageJobs]", Jobs), impatient, clock)
    life.start(cast(StorageBackend, backend))
    return life


def opener(backend: Backend, gate: threading.Event | None = None) -> Callable[[], StorageBackend]:
    """Opens `backend` once `gate` is set."""

    def open_backend() -> StorageBackend:
        if gate is not None:
            gate.wait(WAIT_S)
        return cast(StorageBackend, backend)

    return open_backend


def test_an_opening_that_hangs_does_not_keep_the_next_from_being_opened() -> None:
    first, hanging, wanted = Backend(), Backend(), Backend()
    life, gate = lifecycle(first), threading.Event()
    life.replace(opener(hanging, gate))
    life.replace(opener(wanted))
    wait_for(lambda: life.jobs is not None, life.advance)
    assert life.jobs is not None and life.jobs.backend is cast(StorageBackend, wanted)
    assert life.opened == life.wanted == 3
    gate.set()
    wait_for(hanging.closed.is_set, life.advance)  # nobody wants it any more
    assert life.jobs.backend is cast(StorageBackend, wanted) and not wanted.closed.is_set()
    assert life.close(WAIT_S, workers_ended=True) and wanted.closed.is_set() and first.closed.is_set()


def test_an_earlier_opening_that_fails_late_does_not_delay_the_one_that_is_wanted() -> None:
    gate = threading.Event()

    def fails_late() -> StorageBackend:
        gate.wait(WAIT_S)
        raise OSError("the directory is gone")

    def fails() -> StorageBackend:
        raise OSError("not yet")

    life = lifecycle(Backend(), clock=lambda: 0.0)  # time stands still, so nothing is tried twice
    life.replace(fails_late)
    life.replace(fails)
    wait_for(lambda: life.open_failures == 1, life.advance)
    pause = (life._retry_at, life._retry_s)
    gate.set()
    wait_for(lambda: life.open_failures == 2, life.advance)
    assert (life._retry_at, life._retry_s) == pause
    assert life.close(WAIT_S, workers_ended=True)


def test_a_backend_that_fails_to_close_keeps_no_other_from_being_closed(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Backend(BackendError("the server does not answer")), Backend()
    life = lifecycle(first)
    assert life.jobs is not None
    life.jobs.in_flight = 1
    life.replace(opener(second))
    wait_for(lambda: life.jobs is not None, life.advance)
    assert not life.close(WAIT_S, workers_ended=True)
    assert first.closes == second.closes == 1
    assert "the server does not answer" in caplog.text


def test_what_was_closed_with_the_lifecycle_is_not_closed_again() -> None:
    backend, threads = Backend(), threading.active_count()
    life = lifecycle(backend)
    assert life.jobs is not None
    jobs = life.jobs
    jobs.in_flight = 1
    life.detach()
    jobs.in_flight = 0
    assert life.close(WAIT_S, workers_ended=True)
    life.advance()
    assert (backend.closes, threading.active_count()) == (1, threads)
