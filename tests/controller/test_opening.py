"""Opening another backend: what hangs or fails keeps nothing that is wanted later from being opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from hicache.backends.base import StorageBackend
from hicache.controller.gate import REOPEN_S_MIN, StorageGate
from hicache.errors import BackendError
from hicache.supervised import SupervisedPool
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


def impatient(*arguments: Any, **options: Any) -> SupervisedPool[Any]:
    """Workers that count as stuck after 0.1 s."""
    return SupervisedPool[Any](*arguments, **{**options, "patience_s": 0.1})


def gate_of(backend: Backend, clock: Callable[[], float] = time.monotonic) -> StorageGate:
    gate = StorageGate(memoryview(b""), impatient, clock)
    gate.start(cast(StorageBackend, backend))
    return gate


def opener(backend: Backend, go: threading.Event | None = None) -> Callable[[], StorageBackend]:
    """Opens `backend` once `go` is set."""

    def open_backend() -> StorageBackend:
        if go is not None:
            go.wait(WAIT_S)
        return cast(StorageBackend, backend)

    return open_backend


def test_an_opening_that_hangs_does_not_keep_the_next_from_being_opened() -> None:
    first, hanging, wanted = Backend(), Backend(), Backend()
    gate, go = gate_of(first), threading.Event()
    gate.replace(opener(hanging, go))
    gate.replace(opener(wanted))
    wait_for(lambda: gate.storage is not None, gate.advance)
    assert gate.storage is not None and gate.storage.backend is cast(StorageBackend, wanted)
    assert gate.opened == gate.wanted == 3
    go.set()
    wait_for(hanging.closed.is_set, gate.advance)  # nobody wants it any more
    assert gate.storage.backend is cast(StorageBackend, wanted) and not wanted.closed.is_set()
    assert gate.close(WAIT_S, workers_ended=True) and wanted.closed.is_set() and first.closed.is_set()


def test_an_earlier_opening_that_fails_late_does_not_delay_the_one_that_is_wanted() -> None:
    go = threading.Event()

    def fails_late() -> StorageBackend:
        go.wait(WAIT_S)
        raise OSError("the directory is gone")

    def fails() -> StorageBackend:
        raise OSError("not yet")

    gate = gate_of(Backend(), clock=lambda: 0.0)  # time stands still, so nothing is tried twice
    gate.replace(fails_late)
    gate.replace(fails)
    wait_for(lambda: gate.open_failures == 1, gate.advance)
    assert gate._retry_at == REOPEN_S_MIN
    go.set()
    wait_for(lambda: gate.open_failures == 2, gate.advance)
    assert gate._retry_at == REOPEN_S_MIN
    assert gate.close(WAIT_S, workers_ended=True)


def test_a_backend_that_fails_to_close_keeps_no_other_from_being_closed(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Backend(BackendError("the server does not answer")), Backend()
    gate = gate_of(first)
    assert gate.storage is not None
    gate.storage.in_flight = 1
    gate.replace(opener(second))
    wait_for(lambda: gate.storage is not None, gate.advance)
    assert not gate.close(WAIT_S, workers_ended=True)
    assert first.closes == second.closes == 1
    assert "the server does not answer" in caplog.text


def test_what_was_closed_with_the_gate_is_not_closed_again() -> None:
    backend, threads = Backend(), threading.active_count()
    gate = gate_of(backend)
    assert gate.storage is not None
    store = gate.storage
    store.in_flight = 1
    gate.replace(None)
    store.in_flight = 0
    assert gate.close(WAIT_S, workers_ended=True)
    gate.advance()
    assert (backend.closes, threading.active_count()) == (1, threads)
