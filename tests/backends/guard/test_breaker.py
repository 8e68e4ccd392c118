"""The breaker as pure logic, with simulated time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.guard import Override
from hicache.backends.guard.breaker import WINDOW_CALLS, Breaker, BreakerState
from hicache.config.guard import GuardConfig
from hicache.errors import InvariantError
from tests.tuned import tuned

OPTIONS = tuned(GuardConfig, failures=3, backoff_min=0.5, backoff_max=5.0)
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


class World:
    """A breaker, its clock, and a store that works or fails."""

    def __init__(self, options: GuardConfig = OPTIONS, jitter: float = 1.0) -> None:
        self.time_s = 1000.0
        self.breaker = Breaker(options, Override.AUTO, lambda: jitter)

    def call(self, ok: bool) -> bool:
        """Make one call; return whether the breaker let it pass."""
        admitted = self.state is not OPEN
        if admitted:
            self.breaker.record(self.breaker.round, ok, "error", self.time_s)
        self.breaker.check()
        return admitted

    def probe(self, ok: bool) -> None:
        """Make one probe when it is due. REQUIRES: one is planned."""
        assert self.breaker.probe_at < math.inf
        self.time_s = max(self.time_s, self.breaker.probe_at)
        self.breaker.probed(self.breaker.round, ok, self.time_s)
        self.breaker.check()

    @property
    def state(self) -> BreakerState:
        return self.breaker.state


def opened(options: GuardConfig = OPTIONS) -> World:
    world = World(options)
    for _ in range(options.failures):
        world.call(False)
    assert world.state is OPEN
    return world


def test_failures_in_a_row_open_the_breaker() -> None:
    world = World()
    assert [world.call(False) for _ in range(5)] == [True, True, True, False, False]
    assert world.breaker.statistics().opens == 1
    assert world.breaker.statistics().reason == "error"


def test_a_good_call_between_failures_keeps_the_breaker_closed() -> None:
    world = World()
    for _ in range(4):
        for ok in (False, False, True, True, True):
            assert world.call(ok)
    assert world.state is CLOSED


def test_a_share_of_failures_opens_the_breaker_although_some_calls_succeed() -> None:
    """The control: a smaller share does not."""
    world = World()
    assert sum(world.call(number % 2 == 0) for number in range(2 * WINDOW_CALLS)) == WINDOW_CALLS
    assert world.state is OPEN
    world = World()
    assert all(world.call(number % 3 > 0) for number in range(3 * WINDOW_CALLS))


def test_after_a_single_failure_a_failed_probe_opens_the_breaker() -> None:
    world = World()
    world.call(False)
    assert world.breaker.probe_at == world.time_s
    world.probe(False)
    assert world.state is OPEN
    assert world.time_s == 1000.0, "at once"


def test_a_good_probe_does_not_reset_the_count_of_failed_calls() -> None:
    world = World()
    for _ in range(2):
        world.call(False)
        world.probe(True)
    assert world.state is CLOSED and world.breaker.probe_at == math.inf
    world.call(False)
    assert world.state is OPEN, "three calls in a row have failed, despite good probes"


def test_a_failed_probe_is_ignored_after_a_good_call() -> None:
    world = World()
    world.call(False)
    begun = world.breaker.round
    world.call(True)
    world.breaker.probed(begun, False, world.time_s)
    assert world.state is CLOSED


def test_not_every_single_failure_triggers_a_probe() -> None:
    """A store that always loses one call in three does not get a probe for each of them."""
    world = World()
    began_s = world.time_s
    for number in range(3000):
        world.time_s += 0.01
        if world.breaker.probe_at <= world.time_s:
            world.probe(True)
        world.call(number % 3 > 0)
    assert world.state is CLOSED
    elapsed_s = world.time_s - began_s
    assert world.breaker.statistics().good_probes <= elapsed_s / OPTIONS.backoff_min + 1


def test_the_back_off_between_probes_doubles_up_to_its_maximum() -> None:
    world = opened()
    pauses = []
    for _ in range(7):
        before = world.time_s
        world.probe(False)
        pauses.append(world.time_s - before)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_after_a_good_probe_the_first_good_call_closes_the_breaker() -> None:
    world = opened()
    world.probe(True)
    assert world.state is HALF_OPEN
    assert world.call(True)
    assert world.state is CLOSED


def test_the_back_off_grows_for_a_store_that_passes_probes_and_fails_calls() -> None:
    world = opened()
    pauses = []
    for _ in range(5):
        before = world.time_s
        world.probe(True)
        pauses.append(world.time_s - before)
        world.call(False)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0]


def test_a_good_call_resets_the_back_off() -> None:
    world = opened()
    for _ in range(5):
        world.probe(False)
    world.probe(True)
    world.call(True)
    for _ in range(3):
        world.call(False)
    assert world.breaker.probe_at - world.time_s == 0.5


def test_a_call_and_a_probe_that_began_before_the_breaker_opened_are_ignored() -> None:
    world = World()
    old = world.breaker.round
    for _ in range(3):
        world.call(False)
    world.probe(True)
    begun = world.breaker.round
    for ok in (False, True):
        world.breaker.record(old, ok, "error", world.time_s)
        assert world.state is HALF_OPEN
    world.call(False)
    world.breaker.probed(begun, True, world.time_s)
    assert world.state is OPEN
    world.breaker.check()


def test_a_trip_has_its_own_back_off_and_probes_follow_as_usual() -> None:
    world = World()
    world.breaker.trip("damage", 30.0, world.time_s)
    assert (world.state, world.breaker.probe_at - world.time_s) == (OPEN, 30.0)
    world.probe(False)
    assert world.breaker.probe_at - world.time_s == OPTIONS.backoff_min
    world.probe(True)
    assert world.state is HALF_OPEN


def test_jitter_shortens_the_back_off() -> None:
    world = World(jitter=0.5)
    for _ in range(3):
        world.call(False)
    assert world.breaker.probe_at - world.time_s == 0.25


def test_the_operator_forces_a_breaker_off_on_and_back() -> None:
    world = World()
    world.breaker.set_override(Override.OFF)
    assert world.state is OPEN
    assert not world.call(True)
    assert world.breaker.probe_at == math.inf, "a direction that the operator switched off is not probed"
    world.breaker.set_override(Override.ON)
    assert all(world.call(False) for _ in range(50))
    world.breaker.trip("damage", 30.0, world.time_s)
    assert world.state is CLOSED
    world.breaker.set_override(Override.AUTO)
    assert world.call(False), "earlier failures do not count"
    assert world.state is CLOSED


def test_check_detects_an_open_breaker_without_a_planned_probe() -> None:
    world = opened()
    world.breaker.probe_at = math.inf
    with pytest.raises(InvariantError, match="no probe"):
        world.breaker.check()


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.booleans()),
        st.tuples(st.just("late call"), st.booleans()),
        st.tuples(st.just("probe"), st.booleans()),
        st.tuples(st.just("override"), st.sampled_from(list(Override))),
        st.tuples(st.just("trip"), st.booleans()),
    ),
    max_size=60,
)


@given(EVENTS)
def test_after_any_history_the_breaker_closes_once_the_store_works(events: list[tuple[str, bool | Override]]) -> None:
    world = World()
    early = world.breaker.round
    for kind, value in events:
        if kind == "call":
            world.call(bool(value))
        elif kind == "late call":
            world.breaker.record(early, bool(value), "late", world.time_s)
        elif kind == "probe" and world.breaker.probe_at < math.inf:
            world.probe(bool(value))
        elif kind == "override" and isinstance(value, Override):
            world.breaker.set_override(value)
        elif kind == "trip":
            world.breaker.trip("damage", 30.0, world.time_s)
        world.breaker.check()
    healed_s, tripped = world.time_s, world.breaker.statistics().reason == "damage"
    while world.state is not CLOSED and world.breaker.override is Override.AUTO:
        world.probe(True)
    assert world.time_s - healed_s <= (30.0 if tripped else 5.0) + 0.5


@given(st.lists(st.booleans(), max_size=200))
def test_the_breaker_opens_only_after_enough_failures(calls: list[bool]) -> None:
    world = World()
    failures = 0
    for ok in calls:
        if not world.call(ok):
            break
        failures += not ok
    assert world.state is CLOSED or failures >= OPTIONS.failures
