"""A slot opens a store in the background, replaces it, and closes each store once, after its last call."""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from hicache.backends.base import Direction, GetOutcome
from hicache.backends.calls import Call
from hicache.backends.guard import CONFIRM_S, Override
from hicache.backends.memory import MemoryDriver
from hicache.backends.slot import OPEN_DEADLINE_S, REOPEN_S_MIN, Entry, OpenBackend, Overrides, Slot
from hicache.backends.storage import Storage
from hicache.backends.store import Store
from hicache.clock import SYSTEM_CLOCK
from hicache.errors import BackendError, InvariantError
from hicache.frame import PageBuffer
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import in_threads, memory_store, soon
from tests.backends._troubled import CODEC
from tests.passing import Passing
from tests.seeds import seeds
from tests.waiting import WAIT_S, wait_for

READ = Direction.READ


class Backend(Passing):
    """A store in memory that counts its closes, reports calls after them, and may fail to close."""

    def __init__(self, trouble: BackendError | None = None) -> None:
        super().__init__(memory_store(CODEC))
        self.closed = threading.Event()
        self.closes = self.late_calls = 0
        self._trouble = trouble

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        self.late_calls += self.closes
        return super()._get(call, keys, pages)

    def close(self) -> None:
        self.closes += 1
        self.closed.set()
        if self._trouble is not None:
            raise self._trouble


Made = Slot[Entry]
Make = Callable[..., Made]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make(clock: ManualClock) -> Iterator[Make]:
    """A function that makes a slot, with an open store or none."""
    with contextlib.ExitStack() as ends:

        def begin(
            backend: Storage | None = None, *, attach: Callable[[Storage], Entry] = Entry, **options: Any
        ) -> Made:
            slot = Slot(attach, **{"name": "storage", "user": "the cache", "clock": clock, **options})
            if backend is not None:
                slot.start(backend)
            ends.callback(slot.end, WAIT_S)
            ends.callback(slot.check)
            return slot

        yield begin


def opener(
    backend: Storage, go: threading.Event | None = None, begun: threading.Event | None = None
) -> OpenBackend:
    """Opens `backend` once `go` is set. Sets `begun`."""

    def open_backend() -> Storage:
        if begun is not None:
            begun.set()
        if go is not None:
            go.wait(WAIT_S)
        return backend

    return open_backend


def failing(*errors: Exception, then: Storage | None = None) -> OpenBackend:
    """Fails with each of `errors` in turn, then with the last one for ever, or opens `then`."""
    left = list(errors)

    def open_backend() -> Storage:
        if then is not None and not left:
            return then
        raise left.pop(0) if len(left) > 1 or then is not None else left[0]

    return open_backend


def failed(slot: Made, attempts: int) -> bool:
    """Return True once that many attempts have failed."""
    return slot.open_failures == attempts


def backend_of(slot: Made) -> Storage | None:
    return next(slot.open_backends(), None)


# Opening


def test_a_hanging_open_does_not_block_the_next_open(make: Make, clock: ManualClock) -> None:
    first, hanging, wanted = Backend(), Backend(), Backend()
    slot, go = make(first), threading.Event()
    begun = threading.Event()
    slot.replace(opener(hanging, go, begun))
    assert begun.wait(WAIT_S)
    slot.replace(opener(wanted))
    slot.advance()
    assert slot.is_awaited, "the control"
    clock.advance(2 * OPEN_DEADLINE_S)
    wait_for(lambda: backend_of(slot) is wanted, slot.advance)
    assert slot.opened == slot.wanted == 3
    go.set()
    wait_for(hanging.closed.is_set, slot.advance)  # another backend is wanted now
    assert backend_of(slot) is wanted and not wanted.closes
    assert slot.end(WAIT_S) and slot.close() and (wanted.closes, first.closes) == (1, 1)


def test_the_failure_of_an_earlier_open_does_not_delay_the_wanted_one(make: Make, clock: ManualClock) -> None:
    go, begun = threading.Event(), threading.Event()

    def fails_late() -> Storage:
        begun.set()
        go.wait(WAIT_S)
        raise OSError("the directory is gone")

    slot = make()
    slot.replace(fails_late)
    assert begun.wait(WAIT_S)
    slot.replace(failing(OSError("not yet")))
    clock.advance(2 * OPEN_DEADLINE_S)
    wait_for(lambda: slot.open_failures == 1, slot.advance)  # from now on no attempt is repeated
    go.set()
    wait_for(lambda: slot.open_failures == 2, slot.advance)
    wait_for(lambda: slot.advance() == clock() + REOPEN_S_MIN)


def test_attempts_are_repeated_with_growing_delays(make: Make, clock: ManualClock) -> None:
    slot, delays = make(), []
    slot.replace(failing(BackendError("down")))
    for attempt in range(1, 12):
        wait_for(partial(failed, slot, attempt))
        wait_for(lambda: slot.advance() < clock() + OPEN_DEADLINE_S)
        delays.append(round((slot.advance() - clock()) / REOPEN_S_MIN))
        assert slot.open_failures == attempt, "an attempt before its time"
        clock.advance(slot.advance() - clock() + 1e-6)
        slot.advance()
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    wait_for(partial(failed, slot, 12))
    slot.replace(failing(BackendError("down too")))
    wait_for(partial(failed, slot, 13))
    wait_for(lambda: slot.advance() == clock() + REOPEN_S_MIN)


def test_the_owner_is_notified_when_there_is_something_to_do(make: Make, clock: ManualClock) -> None:
    """As in a daemon, whose thread does not look at a slot that has nothing to do."""
    notified = threading.Event()
    store = Backend()
    slot = make(changed=notified.set)
    slot.replace(failing(BackendError("down"), BackendError("down"), then=store))
    while slot.is_awaited:
        assert notified.wait(WAIT_S)
        notified.clear()
        if slot.advance() < clock() + OPEN_DEADLINE_S:
            clock.advance(slot.advance() - clock() + 1e-6)
            slot.advance()
    assert backend_of(slot) is store and slot.open_failures == 2


def test_a_store_that_is_not_open_tells_why_until_it_is(make: Make, clock: ManualClock) -> None:
    slot = make()
    slot.replace(failing(OSError("a bug"), BackendError("the server\n does not answer"), then=memory_store(CODEC)))
    assert slot.leaves() == (), "a moment without a store is not a problem"
    wait_for(lambda: slot.open_failures == 1, slot.advance)
    (first,) = slot.leaves()
    assert "which is in the log" in first.health.what
    clock.advance(REOPEN_S_MIN)
    wait_for(lambda: slot.open_failures == 2, slot.advance)
    (second,) = slot.leaves()
    assert (second.health.what, second.health.since_s) == ("the server does not answer", first.health.since_s)
    clock.advance(2 * REOPEN_S_MIN)
    wait_for(lambda: slot.store is not None, slot.advance)
    assert [leaf.health.is_problem for leaf in slot.leaves()] == [False] and not slot.is_awaited
    slot.replace(None)
    assert slot.leaves() == () and not slot.is_awaited


def test_a_store_that_does_not_answer_while_it_is_opened_is_a_problem_after_some_time(
    make: Make, clock: ManualClock
) -> None:
    slot, go = make(), threading.Event()
    slot.replace(opener(Backend(), go))
    assert slot.leaves() == ()
    clock.advance(CONFIRM_S)
    (leaf,) = slot.leaves()
    assert leaf.health.what == "it does not answer while it is opened"
    go.set()


@pytest.mark.parametrize("error", [BackendError("no registered memory"), OSError("a bug")])
def test_a_store_that_cannot_be_attached_is_closed_and_opened_again(
    make: Make, clock: ManualClock, error: Exception
) -> None:
    stores = [Backend(), Backend()]
    attached: list[Storage] = []

    def attach(backend: Storage) -> Entry:
        attached.append(backend)
        if backend is stores[0]:
            raise error
        return Entry(backend)

    slot = make(attach=attach)
    slot.replace(lambda: stores[len(attached)])
    wait_for(lambda: slot.open_failures == 1)
    clock.advance(REOPEN_S_MIN)
    wait_for(lambda: backend_of(slot) is stores[1], slot.advance)
    assert [store.closes for store in stores] == [1, 0]


def test_a_wait_ends_with_the_store_with_a_failure_or_at_its_deadline(make: Make, clock: ManualClock) -> None:
    slot, go = make(), threading.Event()
    slot.wait(math.inf)  # no store is wanted
    slot.replace(opener(Backend(), go))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(slot.wait, clock() + 1.0)
        wait_for(waiting.done, lambda: clock.advance(1.0))
    assert slot.is_awaited
    go.set()
    slot.wait(math.inf)
    assert slot.store is not None
    slot.replace(failing(BackendError("down")))
    slot.wait(math.inf)
    assert slot.open_failures


# Retiring and closing


def test_a_call_ends_with_its_store_which_is_closed_after_the_last_call(make: Make) -> None:
    old, new = Backend(), Backend()
    slot = make(old)
    calls = [slot.enter(), slot.enter()]
    slot.replace(opener(new))
    wait_for(lambda: backend_of(slot) is new, slot.advance)
    for store in calls:
        assert store is not None and store.backend is old and not old.closes
        slot.check()
        slot.leave(store)
    assert old.closed.wait(WAIT_S) and (old.closes, new.closes) == (1, 0)


def test_a_store_of_a_hanging_call_stays_open(make: Make) -> None:
    store = Backend()
    slot = make(store)
    entry = slot.enter()
    assert entry is not None and not slot.wait_idle(0.0)
    slot.replace(None)
    assert not slot.wait_idle(0.0)
    assert slot.end(WAIT_S)
    slot.leave(entry)
    assert slot.wait_idle(0.0) and not store.closed.is_set(), "the owner has ended and closes it itself"
    assert slot.close() and store.closes == 1


def test_a_store_that_opens_after_the_end_is_closed(make: Make) -> None:
    go, late = threading.Event(), Backend()
    slot = make()
    slot.replace(opener(late, go))
    assert not slot.end(0.0)
    go.set()
    assert late.closed.wait(WAIT_S) and slot.store is None


def test_after_the_end_nothing_is_opened(make: Make) -> None:
    threads = set(threading.enumerate())
    store = Backend()
    slot = make(store)
    assert slot.end(WAIT_S)
    slot.replace(opener(Backend()))
    slot.advance()
    assert slot.close() and store.closes == 1 and backend_of(slot) is store
    assert set(threading.enumerate()) <= threads


def test_a_store_that_fails_to_close_does_not_block_closing_the_others(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Backend(BackendError("the server does not answer")), Backend()
    slot = make(first)
    assert slot.enter() is not None
    slot.replace(opener(second))
    wait_for(lambda: slot.store is not None, slot.advance)
    assert slot.end(WAIT_S) and not slot.close()
    assert first.closes == second.closes == 1
    assert "storage failed to close: the server does not answer" in caplog.text


def test_a_detached_store_that_fails_to_close_is_a_log_line(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    slot = make(Backend(BackendError("the server does not answer")))
    slot.replace(None)
    assert slot.end(WAIT_S)
    assert "a detached store failed to close: the server does not answer" in caplog.text


def test_check_finds_a_store_in_use_that_is_retired(make: Make) -> None:
    slot = make(Backend())
    assert slot.store is not None
    slot.store.is_retired = True
    with pytest.raises(InvariantError, match="1 wrong"):
        slot.check()
    slot.store.is_retired = False


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.usefixtures("threads_switch_often")
def test_calls_of_many_threads_never_meet_a_closed_store(make: Make, seed: int) -> None:
    """Threads call stores while others replace them."""
    slot, made = make(clock=SYSTEM_CLOCK), [Backend()]
    ended = threading.Event()

    def open_backend() -> Storage:
        made.append(Backend())
        return made[-1]

    def use(number: int) -> None:
        dice = random.Random(seed + number)
        try:
            for _ in range(200):
                if number < 2:
                    slot.replace(open_backend if dice.random() < 0.8 else None)
                    slot.wait(soon(0.001))
                else:
                    store = slot.enter()
                    if store is not None:
                        store.backend.batch_get([], [], deadline=soon())
                        slot.leave(store)
        finally:
            ended.set()

    slot.start(made[0])
    in_threads(6, use)
    assert slot.end(WAIT_S) and slot.close()
    assert not sum(store.late_calls for store in made)
    assert {store.closes for store in made} == {1}


# Overrides


def guarded() -> Store:
    return Store(MemoryDriver(), CODEC)


def test_an_override_holds_for_the_store_and_for_the_next_ones(make: Make) -> None:
    first, second = guarded(), guarded()
    slot = make(first)
    slot.override(READ, Override.OFF)
    assert not first.may_pass(READ)
    slot.replace(opener(second))
    wait_for(lambda: backend_of(slot) is second, slot.advance)
    assert not second.may_pass(READ)
    slot.override(READ, Override.AUTO)
    assert second.may_pass(READ) and not slot.overrides.modes
    assert slot.end(WAIT_S) and slot.close()


def test_one_store_stays_at_its_breaker_under_an_override_of_all_when_it_is_opened_again(make: Make) -> None:
    first, second = guarded(), guarded()
    slot = make(first)
    slot.override(READ, Override.OFF)
    slot.override(READ, Override.AUTO, first.name)
    assert first.may_pass(READ)
    slot.replace(opener(second))
    wait_for(lambda: backend_of(slot) is second, slot.advance)
    assert second.name == first.name and second.may_pass(READ)
    assert slot.end(WAIT_S) and slot.close()


def test_the_slots_of_a_daemon_share_the_overrides(make: Make) -> None:
    overrides, stores = Overrides(), [guarded(), guarded()]
    slots = [make(stores[0], overrides=overrides), make(overrides=overrides)]
    overrides.force(READ, Override.OFF, None, (one for slot in slots for one in slot.open_backends()))
    slots[1].start(stores[1])
    assert not any(store.may_pass(READ) for store in stores)
    overrides.force(READ, Override.AUTO, None, (one for slot in slots for one in slot.open_backends()))
    assert all(store.may_pass(READ) for store in stores)
    for slot in slots:
        assert slot.end(WAIT_S) and slot.close()


def test_an_override_of_one_store_of_a_composition_leaves_the_others(make: Make) -> None:
    store = guarded()
    slot = make(store)
    slot.override(READ, Override.OFF, "another")
    assert store.may_pass(READ)
    slot.override(READ, Override.OFF, store.name)
    slot.override(READ, Override.ON)  # the latest override of a store wins
    assert store.may_pass(READ) and len(slot.overrides.modes) == 1
    assert slot.end(WAIT_S) and slot.close()
