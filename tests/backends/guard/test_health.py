"""The health of a store: when it keeps nothing or cannot be read, since when, why, and when that ends."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.backends.base import Direction, SetOutcome
from hicache.backends.calls import Call
from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.file import FileDriver
from hicache.backends.guard import CallResult, HealthState, Override, Verb, grouped
from hicache.backends.guard.admission import AdmissionControl
from hicache.backends.guard.health import BUSY, CONFIRM_S, REJECTED, SWITCHED_OFF, HealthWatch, StoreHealth, problem
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import PageWrites
from hicache.backends.storage import store_statistics
from hicache.backends.store import Store
from hicache.config.guard import GuardConfig
from hicache.config.storage import FileStorageOptions
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import empty_frames, full_frames, make_keys
from tests.backends._troubled import CODEC, Troubled
from tests.backends.guard.stores import GUARDS, patient, probe, until_stopped
from tests.waiting import wait_for

READ, WRITE = Direction.READ, Direction.WRITE
DAY_S = 86400.0
KEPT = {HealthState.WORKING, HealthState.IDLE}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Hide the lines about outages, which would distract in the output of a test run."""
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def guard_of(clock: ManualClock) -> Callable[..., Store]:
    """A function that returns a guard with this clock, which is closed after the test."""

    def make(driver: MemoryDriver | FileDriver, options: GuardConfig | None = None) -> Store:
        GUARDS.append(Store(driver, CODEC, options or patient(), name="test", clock=clock))
        return GUARDS[-1]

    return make


chains = itertools.count()


def put(guard: Store, pages: int = 2) -> set[SetOutcome]:
    """Store new pages; return the outcomes."""
    keys = make_keys(pages, f"chain {next(chains)}")
    return set(guard.batch_set(keys, full_frames(guard.codec, keys), parent=None, deadline=math.inf))


def look_up(guard: Store) -> None:
    guard.batch_exists(make_keys(1), deadline=math.inf)


class Rejecting(Troubled):
    """A store that rejects pages while `is_full`, and can explain it."""

    is_full = True

    def write(self, pages: PageWrites) -> None:
        if self.is_full:
            pages.reject(0)
        else:
            super().write(pages)

    @property
    def rejection(self) -> str:
        return "the test lets it keep 0 pages; end the test"


def test_a_store_that_rejects_every_page_keeps_nothing_since_the_first_of_them(
    guard_of: Callable[..., Store], clock: ManualClock
) -> None:
    guard, since_s = guard_of(Rejecting()), clock.wall_s()
    put(guard, 3)
    assert guard.health().state in KEPT, "a moment without room is not a problem"
    clock.advance(CONFIRM_S)
    put(guard, 4)
    found = guard.health()
    assert (found.state, found.cause, found.pages) == (HealthState.KEEPS_NOTHING, REJECTED, 7)
    assert found.since_s == since_s
    assert found.what == "the test lets it keep 0 pages (none of 7 pages was kept)"
    assert found.advice == "End the test"
    for _ in range(3):
        put(guard)
    assert guard.may_pass(WRITE) and not guard.guard_statistics().failures, "a full store is not a failure"


class Full(Rejecting):
    """A store that answers PRESENT for its pages, and rejects all others while `is_full`."""

    def write(self, pages: PageWrites) -> None:
        is_here = [self.peek(pages.codec.namespace, key) is not None for key in pages.keys]
        if all(is_here) or not self.is_full:
            Troubled.write(self, pages)
            return
        self._reach("set", pages.keys, pages.deadline)
        for position in range(is_here.index(False)):
            pages.present(position)
        pages.reject(is_here.index(False))


def put_again(guard: Store, pages: int, new_pages: int = 0) -> list[SetOutcome]:
    """Store the same pages as ever, and after them new ones; return the outcomes."""
    keys = [*make_keys(pages), *make_keys(new_pages, f"chain {next(chains)}")]
    return guard.batch_set(keys, full_frames(guard.codec, keys), parent=None, deadline=math.inf)


def test_a_store_that_rejects_new_pages_keeps_nothing_although_others_are_present(
    guard_of: Callable[..., Store], clock: ManualClock
) -> None:
    """Engines compute stored prompts again all the time."""
    store = Full()
    guard = guard_of(store)
    store.is_full = False
    put_again(guard, 4)
    store.is_full = True
    assert put_again(guard, 4, 2) == [SetOutcome.PRESENT] * 4 + [SetOutcome.REJECTED] * 2
    for _ in range(3):
        clock.advance(CONFIRM_S)
        assert put_again(guard, 4) == [SetOutcome.PRESENT] * 4
        found = guard.health()
        assert (found.state, found.cause, found.pages) == (HealthState.KEEPS_NOTHING, REJECTED, 2)
    store.is_full = False
    put_again(guard, 4, 1)
    assert guard.health() == StoreHealth(HealthState.WORKING)


def test_a_store_whose_new_pages_all_fail_is_not_used_although_others_are_present(
    guard_of: Callable[..., Store],
) -> None:
    store = Troubled()
    guard = guard_of(store)
    for number in range(3):
        store.fail_pages.clear()
        put_again(guard, 8)
        new = make_keys(1, f"fails {number}")
        store.fail_pages = set(new)
        keys = [*make_keys(8), *new]
        outcomes = guard.batch_set(keys, full_frames(guard.codec, keys), parent=None, deadline=math.inf)
        assert outcomes == [SetOutcome.PRESENT] * 8 + [SetOutcome.ERROR]
    assert not guard.may_pass(WRITE)
    assert (guard.health().state, guard.health().cause) == (HealthState.KEEPS_NOTHING, "down")


@pytest.mark.parametrize("is_full", [True, False])
def test_a_probe_proves_nothing_if_it_is_rejected_and_after_pages_were_rejected(
    guard_of: Callable[..., Store], clock: ManualClock, is_full: bool
) -> None:
    """A full store may have room for a probe page, which compresses to almost nothing."""
    store = Rejecting()
    guard = guard_of(store)
    if not is_full:
        assert put(guard) == {SetOutcome.REJECTED}
    store.is_full, store.down = False, True
    put(guard)
    until_stopped(guard, WRITE)
    store.is_full, store.down = is_full, False
    for _ in range(2):
        probe(guard, WRITE, clock)
    assert guard.may_pass(WRITE) and guard.health().state is HealthState.KEEPS_NOTHING
    store.is_full = False
    put(guard)
    assert not guard.health().is_problem


class Speechless(Rejecting):
    """A store of another package, whose reason is a bug."""

    @property
    def rejection(self) -> str:
        raise KeyError("a bug")


def test_a_store_that_cannot_say_why_it_rejects_pages_still_only_rejects_them(
    guard_of: Callable[..., Store], clock: ManualClock
) -> None:
    guard = guard_of(Speechless())
    assert put(guard) == {SetOutcome.REJECTED}
    clock.advance(CONFIRM_S)
    found = guard.health()
    assert (found.state, found.cause) == (HealthState.KEEPS_NOTHING, REJECTED)
    assert guard.statistics().errors == {"raised_KeyError": 1}


def test_silence_changes_nothing_and_one_kept_page_ends_it(
    guard_of: Callable[..., Store], clock: ManualClock
) -> None:
    store = Rejecting()
    guard = guard_of(store)
    put(guard)
    clock.advance(CONFIRM_S)
    found = guard.health()
    clock.advance(DAY_S)
    assert found.state is HealthState.KEEPS_NOTHING and guard.health() == found
    store.is_full = False
    put(guard, 1)
    assert guard.health() == StoreHealth(HealthState.WORKING)


def test_a_store_that_keeps_some_pages_works(guard_of: Callable[..., Store], clock: ManualClock) -> None:
    guard = guard_of(MemoryDriver(2 * CODEC.frame_bytes))
    for _ in range(5):
        assert put(guard, 4) == {SetOutcome.STORED, SetOutcome.REJECTED}
        clock.advance(CONFIRM_S)
        assert guard.health().state is HealthState.WORKING
    keys = make_keys(1)
    guard = guard_of(Troubled())
    for _ in range(3):  # pages that are already stored are kept
        guard.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=math.inf)
        clock.advance(CONFIRM_S)
        assert guard.health().state is HealthState.WORKING


def test_a_store_without_calls_is_idle_and_an_empty_one_that_answers_works(
    guard_of: Callable[..., Store], clock: ManualClock
) -> None:
    guard = guard_of(Troubled())
    clock.advance(DAY_S)
    assert guard.health() == StoreHealth(HealthState.IDLE)
    look_up(guard)
    guard.batch_get(make_keys(2), empty_frames(CODEC, 2), deadline=math.inf)
    clock.advance(DAY_S)
    assert guard.health() == StoreHealth(HealthState.WORKING)


def test_a_store_whose_writes_fail_keeps_nothing_once_its_breaker_is_open(
    guard_of: Callable[..., Store],
) -> None:
    store = Troubled()
    guard = guard_of(store)
    put(guard)
    store.down = True
    for _ in range(3):
        put(guard)
    found = guard.health()
    assert (found.state, found.cause) == (HealthState.KEEPS_NOTHING, "down")
    assert found.what.startswith("its calls fail (down)")
    pages = found.pages
    put(guard, 5)
    assert guard.health().pages == pages + 5, "pages of rejected calls were offered too"


@pytest.mark.parametrize(
    ("call", "direction", "state"), [(look_up, READ, HealthState.FAILING), (put, WRITE, HealthState.KEEPS_NOTHING)]
)
def test_an_open_breaker_is_a_problem_until_the_store_heals_without_a_call(
    guard_of: Callable[..., Store], clock: ManualClock, call: Callable[[Store], object], direction: Direction,
    state: HealthState,
) -> None:
    """A store that only reads need cannot be read, and keeps its pages."""
    store = Troubled()
    guard = guard_of(store)
    store.down = True
    call(guard)
    until_stopped(guard, direction)  # by the probe after the failure
    assert (guard.health().state, guard.health().cause) == (state, "down")
    store.down = False
    for _ in range(2):
        probe(guard, direction, clock)
    assert not guard.health().is_problem


def test_a_single_failure_before_a_good_probe_is_not_a_problem(
    guard_of: Callable[..., Store], clock: ManualClock
) -> None:
    store = Troubled()
    guard = guard_of(store)
    store.fail_calls = 1
    assert put(guard) == {SetOutcome.ERROR}
    wait_for(lambda: guard.guard_statistics().breakers[WRITE].good_probes > 0)
    clock.advance(DAY_S)
    assert not guard.health().is_problem


def test_the_operator_s_switch_is_a_problem_and_that_of_the_configuration_is_not(
    guard_of: Callable[..., Store], clock: ManualClock
) -> None:
    guard = guard_of(Troubled())
    guard.override(WRITE, Override.OFF)
    assert guard.health().cause == SWITCHED_OFF and "bypass STORE --end" in guard.health().advice
    guard.override(WRITE, Override.AUTO)
    assert not guard.health().is_problem
    guard = guard_of(Troubled(), patient(write=Override.OFF))
    assert put(guard) == {SetOutcome.ERROR}
    guard.override(READ, Override.ON)  # so that the guard looks at its breakers
    clock.advance(CONFIRM_S)
    assert not guard.health().is_problem


def test_a_bug_of_a_backend_is_a_cause(guard_of: Callable[..., Store]) -> None:
    store = Troubled()
    guard = guard_of(store)
    store.raises = KeyError("a bug")
    for _ in range(3):
        put(guard)
    assert guard.health().cause == "raised_KeyError" and "Report it" in guard.health().advice


def test_pages_that_wait_for_room_in_flight_until_their_deadline_are_not_kept() -> None:
    clock = ManualClock()
    admission = AdmissionControl(GuardConfig(in_flight=1 << 20), 1, clock, lambda at_s: None)
    admission.enter(call := Call(Verb.SET, 8, 1 << 20, math.inf))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(admission.enter, Call(Verb.SET, 3, 1 << 20, clock() + 1.0))
        wait_for(lambda: len(admission._waiting) == 1)
        clock.advance(1.0)
        with pytest.raises(StoreError, match="guard_busy"):
            waiting.result()
    clock.advance(CONFIRM_S)
    found = admission.health()
    assert (found.state, found.cause, found.pages) == (HealthState.KEEPS_NOTHING, BUSY, 3)
    call.result, call.kept = CallResult.GOOD, SetOutcome.STORED
    admission.leave(call, [SetOutcome.STORED] * 8)
    assert admission.health().state is HealthState.WORKING, "the call in flight has kept its pages"


@pytest.mark.parametrize("kind", sorted({*ErrorKind, "ENOSPC", "EACCES", "never heard of"}))
def test_every_cause_has_words_and_an_advice(kind: str) -> None:
    found = problem(HealthState.KEEPS_NOTHING, 0.0, kind)
    assert found.what and found.advice and "{" not in found.what + found.advice


def test_a_file_store_names_its_floor_and_the_free_space(
    guard_of: Callable[..., Store], clock: ManualClock, tmp_path: Path
) -> None:
    options = FileStorageOptions(path=tmp_path / "store", free_space_floor=900 << 40)
    guard = guard_of(FileDriver(CODEC, options))
    assert put(guard) == {SetOutcome.REJECTED}
    clock.advance(CONFIRM_S)
    (leaf,) = store_statistics(guard)
    assert "free_space_floor is 900.0 TiB" in leaf.health.what and "GiB free" in leaf.health.what


# News for the log


def test_the_log_hears_of_a_problem_once_and_of_its_end_once() -> None:
    woken: list[float] = []
    watch = HealthWatch(woken.append, ManualClock())
    watch.kept_nothing(2, REJECTED, "", 100.0)
    assert woken == [100.0 + CONFIRM_S]
    assert watch.news({}, 101.0) == (None, 100.0 + CONFIRM_S)
    found, next_s = watch.news({}, 100.0 + CONFIRM_S)
    assert found is not None and found.state is HealthState.KEEPS_NOTHING and next_s == math.inf
    assert watch.news({}, 200.0) == (None, math.inf)
    watch.kept(300.0)
    assert woken[-1] == 300.0
    ended, _ = watch.news({}, 300.0)
    assert ended is not None and not ended.is_problem
    assert watch.news({}, 301.0) == (None, math.inf)


def test_the_log_does_not_hear_of_a_moment() -> None:
    watch = HealthWatch(lambda at_s: None, ManualClock())
    watch.kept_nothing(2, REJECTED, "", 100.0)
    watch.kept(101.0)
    assert watch.news({}, 101.0) == (None, math.inf)
    off = {WRITE: (200.0, "error")}
    assert watch.news(off, 201.0) == (None, 200.0 + CONFIRM_S)
    assert watch.verdict(off, 201.0).is_problem, "other places show an open breaker at once"
    assert watch.news({}, 202.0) == (None, math.inf)


def test_problems_of_one_store_in_several_namespaces_are_one() -> None:
    early, late = (problem(HealthState.KEEPS_NOTHING, since_s, REJECTED) for since_s in (5.0, 9.0))
    other = problem(HealthState.FAILING, 1.0, "dns")
    found = grouped([("a", "n1", late), ("a", "n2", early), ("b", "n1", StoreHealth(HealthState.WORKING)),
                     ("a", "n3", other)])
    assert [(one.store, one.namespaces, one.health) for one in found] == [
        ("a", ("n1", "n2"), early), ("a", ("n3",), other),
    ]
    assert str(found[1]).startswith("a cannot be read since 1970-01-01T00:00:01Z: the server's name has no address. ")
