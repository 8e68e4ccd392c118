"""A guard with several threads: hanging calls, calls that wait for room, probes that close the breaker."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hicache.backends.base import Direction, GetOutcome, SetOutcome, Usage
from hicache.backends.calls import Refusal
from hicache.backends.errors import ErrorKind
from hicache.backends.guard import Override
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import PageReads, PageWrites
from hicache.backends.store import Store
from hicache.clock import SYSTEM_CLOCK
from hicache.config.guard import GuardConfig
from hicache_lab.conformance import HIT, MISS, STORED, empty_frames, full_frames, make_keys, soon
from hicache_lab.faults import FaultyDriver
from tests.backends._troubled import CODEC, Troubled
from tests.backends.guard.stores import (
    LONG_S,
    PAST,
    guard_of,
    patient,
    probe,
    refused,
    until_passing,
)
from tests.clocks import PassingClock
from tests.tuned import tuned
from tests.waiting import wait_for

READ, WRITE = Direction.READ, Direction.WRITE
GET_ERROR, SET_ERROR = GetOutcome.ERROR, SetOutcome.ERROR
SECOND = 1.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as pool:
        yield pool


@pytest.fixture
def clock() -> PassingClock:
    return PassingClock()


@pytest.fixture
def faulty(clock: PassingClock) -> FaultyDriver:
    return FaultyDriver(MemoryDriver(CODEC.frame_bytes), clock=clock)


def get(guard: Store, count: int = 1, *, deadline: float = math.inf) -> list[GetOutcome]:
    return guard.batch_get(make_keys(count), empty_frames(CODEC, count), deadline=deadline)


def put(guard: Store, count: int = 1, *, name: str = "page", deadline: float = math.inf) -> list[SetOutcome]:
    keys = make_keys(count, name)
    return guard.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=deadline)


# Calls that hang


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_calls_that_hang_past_their_deadline_open_the_breaker_while_they_hang(
    threads: ThreadPoolExecutor, faulty: FaultyDriver, clock: PassingClock, mode: str
) -> None:
    """Control: if the operator forces it on, it stays closed and calls still reach the store."""
    guard = guard_of(faulty, patient(grace=SECOND, read=mode), clock)
    faulty.hang()
    hanging = [threads.submit(get, guard, deadline=clock() + SECOND) for _ in range(3)]
    wait_for(lambda: faulty.hung_calls == 3)
    clock.advance(2 * SECOND)
    assert guard.guard_statistics().overdue_calls == 3
    assert not any(call.done() for call in hanging), "the guard has not abandoned them"
    assert guard.guard_statistics().in_flight_calls == 3
    if mode == "auto":
        assert not guard.may_pass(READ)
        assert guard.guard_statistics().breakers[READ].reason == "overdue"
        assert get(guard) == [GET_ERROR], "at once"
    else:
        assert guard.may_pass(READ)
    assert refused(guard, READ, Refusal.OPEN) == (mode == "auto")
    faulty.release()
    assert [call.result() for call in hanging] == [[GET_ERROR]] * 3
    assert guard.guard_statistics().overdue_calls == 0
    assert guard.guard_statistics().failures == {(READ, "overdue"): 3}, "once for each"
    guard.check()


def test_closing_waits_for_a_call_that_hangs_at_most_the_grace(
    threads: ThreadPoolExecutor, clock: PassingClock
) -> None:
    gate = Gate()
    guard = guard_of(gate, patient(grace=SECOND), clock=clock)
    (hanging,) = submit_in_order(threads, guard, [1])
    wait_for(lambda: gate.frames == 1)
    closing = threads.submit(guard.close)
    wait_for(closing.done, lambda: clock.advance(SECOND))
    assert not hanging.done()
    gate.open.set()
    assert hanging.result() == [MISS]


# Room


class Gate(MemoryDriver):
    """Holds each read until released, and records the maximum of frames in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.frames = self.frames_max = 0
        self.entered: list[int] = []
        self._count = threading.Lock()

    def read(self, pages: PageReads[bytes]) -> None:
        with self._count:
            self.frames += len(pages)
            self.frames_max = max(self.frames_max, self.frames)
            self.entered.append(len(pages))
        self.open.wait(60.0)
        with self._count:
            self.frames -= len(pages)
        super().read(pages)


def submit_in_order(
    threads: ThreadPoolExecutor, guard: Store, counts: Sequence[int]
) -> list[Future[list[GetOutcome]]]:
    """Start one read per count; each has entered or waits before the next begins."""
    submitted: list[Future[list[GetOutcome]]] = []
    for count in counts:
        submitted.append(threads.submit(get, guard, count))
        wait_for(lambda: guard.guard_statistics().in_flight_calls + len(guard._admission._waiting) == len(submitted))
    return submitted


@pytest.mark.parametrize(
    ("bound", "counts", "at_first", "at_most"), [(5, (2, 2, 5, 1, 5), 4, 5), (1, (1, 9, 1), 1, 9)]
)
def test_frames_in_flight_stay_within_the_limit_and_a_larger_batch_goes_alone(
    threads: ThreadPoolExecutor, bound: int, counts: tuple[int, ...], at_first: int, at_most: int
) -> None:
    # Of the calls that wait, no two fit together: two that are admitted together reach the store in any order.
    gate = Gate()
    guard = guard_of(gate, patient(in_flight=bound * CODEC.frame_bytes))
    calls = submit_in_order(threads, guard, counts)
    assert guard.guard_statistics().in_flight_bytes == at_first * CODEC.frame_bytes
    gate.open.set()
    assert [call.result() for call in calls] == [[MISS] * count for count in counts]
    assert gate.frames_max <= at_most
    assert gate.entered == list(counts), "in the order of arrival"
    guard.check()


def test_without_a_limit_all_frames_are_in_flight_at_once(threads: ThreadPoolExecutor) -> None:
    """The control of the test above."""
    gate = Gate()
    guard = guard_of(gate, patient())
    calls = submit_in_order(threads, guard, [2, 2, 2, 1, 3])
    wait_for(lambda: gate.frames == 10)
    gate.open.set()
    assert all(call.result() for call in calls)


def test_a_call_without_room_by_its_deadline_is_busy_and_not_a_failure(
    threads: ThreadPoolExecutor, clock: PassingClock
) -> None:
    gate = Gate()
    guard = guard_of(gate, patient(in_flight=1), clock=clock)
    (first,) = submit_in_order(threads, guard, [1])
    late = [threads.submit(get, guard, 1, deadline=clock() + SECOND) for _ in range(4)]
    wait_for(lambda: len(guard._admission._waiting) == 4)
    clock.advance(SECOND)
    assert [call.result() for call in late] == [[GET_ERROR]] * 4
    assert refused(guard, READ, Refusal.BUSY) == 4
    assert guard.batch_exists(make_keys(1), deadline=soon()) == 0, "a lookup does not wait for room"
    gate.open.set()
    assert first.result() == [MISS]
    assert guard.guard_statistics().failures == {}


@pytest.mark.parametrize("end", [Store.close, lambda guard: guard.override(READ, Override.OFF)], ids=["close", "off"])
def test_the_end_of_a_direction_rejects_calls_that_wait_for_room(
    threads: ThreadPoolExecutor, end: Callable[[Store], object]
) -> None:
    gate = Gate()
    guard = guard_of(gate, patient(in_flight=1))
    calls = submit_in_order(threads, guard, [1, 1, 1])
    ending = threads.submit(end, guard)
    assert [call.result() for call in calls[1:]] == [[GET_ERROR]] * 2
    gate.open.set()
    ending.result()
    assert calls[0].result() in ([MISS], [GET_ERROR])


# Probes


def test_a_store_that_heals_is_used_again_by_itself(clock: PassingClock) -> None:
    store = Troubled()
    guard = guard_of(store, clock=clock)
    put(guard, 3)
    store.down = True
    for _ in range(3):
        get(guard, 3)
        put(guard, 3)
    assert not guard.may_pass(READ) and not guard.may_pass(WRITE)
    for _ in range(3):
        probe(guard, WRITE, clock)
    assert not guard.may_pass(READ) and not guard.may_pass(WRITE)
    store.down = False
    until_passing(guard, READ, clock)
    until_passing(guard, WRITE, clock)
    assert get(guard, 3) == [HIT] * 3
    assert put(guard, 2, name="new") == [STORED] * 2
    guard.check()
    wait_for(lambda: store.count == 5)  # all probe pages are removed


def test_a_closed_breaker_over_a_good_store_makes_no_probes() -> None:
    """The control: only failures trigger probes."""
    store = Troubled()
    clock = PassingClock()
    guard = guard_of(store, clock=clock)
    for _ in range(20):
        put(guard, 2)
        get(guard, 2)
        clock.advance(LONG_S)
    assert all(not b.good_probes + b.failed_probes for b in guard.guard_statistics().breakers.values())
    assert not guard._probes._pool.alive


class HalfDeaf(Troubled):
    """Reads hang on request; writes work."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()
        self.reads = 0

    def read(self, pages: PageReads[bytes]) -> None:
        self.reads += 1
        self.heard.wait(60.0)
        super().read(pages)


@pytest.mark.parametrize(("failures", "reason"), [(1, "overdue"), (3, "probe")])
def test_a_hanging_probe_opens_the_breaker_but_does_not_keep_it_open(
    threads: ThreadPoolExecutor, clock: PassingClock, failures: int, reason: str
) -> None:
    store = HalfDeaf()
    guard = guard_of(store, patient(probe_timeout=SECOND, grace=SECOND, failures=failures), clock=clock)
    threads.submit(get, guard, deadline=clock() + SECOND)
    wait_for(lambda: store.reads == 1)
    clock.advance(2 * SECOND)
    assert guard.may_pass(READ) is (failures > 1), "the call counts as failed"
    clock.advance(LONG_S if failures == 1 else 0.0)
    wait_for(lambda: store.reads == 2)  # by the probe
    clock.advance(LONG_S)
    assert not guard.may_pass(READ) and guard.guard_statistics().breakers[READ].reason == reason
    assert guard._probes._pool.stuck_threads == 1, "another thread tries"
    store.heard.set()
    until_passing(guard, READ, clock)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_probe_thread_is_replaced(clock: PassingClock) -> None:
    class Deadly(Troubled):
        deaths = 0

        def read(self, pages: PageReads[bytes]) -> None:
            if threading.current_thread() is not threading.main_thread() and self.deaths < 3:
                self.deaths += 1
                raise SystemExit
            super().read(pages)

    store = Deadly()
    guard = guard_of(store, patient(failures=1, probe_timeout=LONG_S), clock=clock)
    store.down = True
    get(guard)
    assert not guard.may_pass(READ)
    store.down = False
    wait_for(lambda: guard.may_pass(READ), lambda: clock.advance(LONG_S / 10))
    assert store.deaths == 3


def test_probes_of_a_full_store_are_good(faulty: FaultyDriver, clock: PassingClock) -> None:
    guard = guard_of(faulty, clock=clock)
    put(guard)
    faulty.fail()
    for _ in range(3):
        put(guard)
    assert not guard.may_pass(WRITE)
    faulty.fail(False)
    until_passing(guard, WRITE, clock)


def test_a_probe_whose_page_belongs_to_a_dead_node_is_good_because_the_others_may_work(clock: PassingClock) -> None:
    class OneNodeDown(Troubled):
        kind = "down"

        def write(self, pages: PageWrites) -> None:
            for position in range(len(pages.keys)):
                pages.fail(position, self.kind)

    store = OneNodeDown()
    guard = guard_of(store, clock=clock)
    for _ in range(3):
        put(guard)
    assert not guard.may_pass(WRITE)
    probe(guard, WRITE, clock)
    assert not guard.may_pass(WRITE), "the control"
    store.kind = ErrorKind.NODE_DOWN
    probe(guard, WRITE, clock)
    assert guard.may_pass(WRITE)


def test_a_later_probe_removes_the_leftover_pages_of_earlier_probes(clock: PassingClock) -> None:
    class Sticky(Troubled):
        sticks = 2

        def remove(
            self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[bytes] | None = None
        ) -> tuple[int, Sequence[str]]:
            self.sticks -= 1
            return (0, ()) if self.sticks >= 0 else super().remove(namespace, keys, deadline, found)

    store = Sticky()
    guard = guard_of(store, clock=clock)
    for _ in range(4):
        store.down = True
        for _ in range(3):
            put(guard, name="some")
        store.down = False
        until_passing(guard, WRITE, clock)
        assert put(guard, name="some")[0].is_stored
    wait_for(lambda: store.count == 1)


# Usage


def test_a_usage_sample_does_not_wait_for_a_hanging_store() -> None:
    class Slow(Troubled):
        hold = threading.Event()

        def measure(self) -> Usage:
            self.hold.wait(60.0)
            return super().measure()

    store = Slow()
    guard = guard_of(store, patient())
    put(guard, 3)
    assert [guard.usage_sample() for _ in range(20)] == [None] * 20
    store.hold.set()
    wait_for(lambda: guard.usage_sample() is not None)
    usage = guard.usage_sample()
    assert usage is not None and usage.pages == 3


def test_a_store_with_an_open_breaker_is_not_asked_for_its_usage(clock: PassingClock) -> None:
    class Counting(Troubled):
        asked = 0

        def measure(self) -> Usage:
            self.asked += 1
            return super().measure()

    store = Counting()
    guard = guard_of(store, clock=clock)
    put(guard, 2)
    assert guard.usage().pages == 2
    put(guard, 1, name="more")
    guard.override(READ, Override.OFF)
    assert guard.usage().pages == 2
    wait_for(lambda: guard._usage_due_s > -math.inf, guard.usage_sample)
    assert (guard.usage_sample(), store.asked) == (guard.usage(), 1)
    guard.override(READ, Override.AUTO)
    clock.advance(SECOND)
    wait_for(lambda: (sample := guard.usage_sample()) is not None and sample.pages == 3)
    guard.override(READ, Override.OFF)
    assert guard.usage().pages == 3, "the latest usage, from a sample or a call"


# All at once


def test_random_traffic_over_an_unstable_store_leaves_nothing_in_flight(
    threads: ThreadPoolExecutor, threads_switch_often: None
) -> None:
    store = Troubled()
    guard = guard_of(
        store, tuned(GuardConfig, backoff_min=0.005, backoff_max=0.01, in_flight=4 * CODEC.frame_bytes),
        clock=SYSTEM_CLOCK,
    )
    stop = threading.Event()
    done: list[int] = []

    def use(number: int) -> None:
        rounds = 0
        while not stop.is_set():
            rounds += 1
            name = f"{number} {rounds % 7}"
            stored = put(guard, 3, name=name)
            keys = make_keys(3, name)
            found = guard.batch_get(keys, empty_frames(CODEC, 3), deadline=soon() if rounds % 5 else PAST)
            assert set(stored) <= set(SetOutcome) and set(found) <= set(GetOutcome)
            guard.batch_exists(keys, deadline=soon())
            guard.check()
        done.append(rounds)

    users = [threads.submit(use, number) for number in range(6)]
    for opens in range(1, 5):
        store.down = True
        wait_for(lambda opens=opens: guard.guard_statistics().breakers[WRITE].opens >= opens)  # type: ignore[misc]
        store.down = False
        wait_for(lambda: guard.may_pass(WRITE))
    stop.set()
    for user in users:
        user.result()
    found = guard.guard_statistics()
    assert (found.in_flight_calls, found.in_flight_bytes, found.overdue_calls) == (0, 0, 0)
    assert min(done) > 0
    guard.check()
