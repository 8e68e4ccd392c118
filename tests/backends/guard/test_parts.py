"""The smaller parts of a guard: budget, damage, latencies, options; and which configured stores get a guard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.base import Direction, GetOutcome
from hicache.backends.calls import Call, CallResult
from hicache.backends.compose import Levels, Part
from hicache.backends.guard import Override, Verb
from hicache.backends.guard.admission import BURST_CALLS, BURST_PAGES, AdmissionControl, DamageWatch, RetryBudget
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.store import Store
from hicache.cache import HiRadixCache, create_cache
from hicache.config import HiCacheConfig
from hicache.config.guard import GuardConfig
from hicache.errors import ConfigError
from hicache.frame import FrameCodec
from hicache.histogram import BOUNDS_S
from hicache_lab.clocks import ManualClock
from tests.backends._troubled import CODEC
from tests.cache.world import NAMESPACE
from tests.tuned import tuned

HIT, MISS, CORRUPT, ERROR = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT, GetOutcome.ERROR


@given(st.lists(st.integers(1, 128), max_size=300), st.sampled_from([0.0, 0.05, 0.1, 0.5, 1.0]))
def test_retries_stay_within_their_share_of_calls_and_pages(calls: list[int], share: float) -> None:
    budget = RetryBudget(share)
    retried_calls = retried_pages = 0
    for pages in calls:
        budget.earn(pages)
        granted = budget.spend(pages)  # every page of every call fails
        retried_calls += granted > 0
        retried_pages += granted
    assert retried_calls <= share * len(calls) + BURST_CALLS + 1e-6
    assert retried_pages <= share * sum(calls) + BURST_PAGES + 1e-6


def test_a_large_batch_is_retried_up_to_the_budget() -> None:
    budget = RetryBudget(0.1)
    assert budget.spend(1000) == int(BURST_PAGES)
    assert budget.spend(1000) == 0


def test_damaged_pages_without_a_sound_one_raise_the_alarm() -> None:
    watch = DamageWatch(tuned(GuardConfig, damage_pages=3, damage_backoff=30.0))
    assert watch.saw([CORRUPT, MISS, CORRUPT, ERROR]) is None
    assert watch.saw([CORRUPT]) == 30.0


def test_damaged_pages_among_sound_ones_raise_no_alarm() -> None:
    watch = DamageWatch(tuned(GuardConfig, damage_pages=3))
    assert [watch.saw([CORRUPT, CORRUPT, HIT]) for _ in range(50)] == [None] * 50


def test_after_an_alarm_each_damaged_page_is_the_next_until_a_sound_one() -> None:
    watch = DamageWatch(tuned(GuardConfig, damage_pages=3, damage_backoff=30.0))
    assert [watch.saw([CORRUPT] * count) for count in (3, 1, 1)] == [30.0, 120.0, 480.0]
    assert [watch.saw([CORRUPT]) for _ in range(5)][-1] == 3600.0
    assert watch.saw([HIT, CORRUPT, CORRUPT]) is None
    assert watch.saw([CORRUPT]) == 30.0


def test_until_a_sound_page_the_head_of_a_batch_is_read_alone() -> None:
    watch = DamageWatch(tuned(GuardConfig, damage_pages=3))
    heads = [watch.pages_at_once([])]
    for outcome in (MISS, HIT, CORRUPT, HIT, CORRUPT, CORRUPT, CORRUPT, HIT):
        watch.saw([outcome])
        heads.append(watch.pages_at_once([]))
    assert heads == [3, 3, None, 3, None, 3, 3, 1, None]


def test_after_an_undamaged_head_the_rest_is_read_unless_after_an_alarm() -> None:
    watch = DamageWatch(tuned(GuardConfig, damage_pages=3))
    assert [watch.pages_at_once(read) for read in ([MISS], [CORRUPT], [MISS, CORRUPT])] == [None, 3, 3]
    watch.saw([CORRUPT] * 3)
    assert watch.pages_at_once([MISS]) == 1


def test_calls_that_began_before_an_alarm_stop_and_raise_no_second_one() -> None:
    """A second alarm would lengthen the pause although nothing was read since the first."""
    admission = AdmissionControl(tuned(GuardConfig, damage_pages=2), 1, ManualClock(), lambda at_s: None)
    calls = [Call(Verb.GET, 2, 0, math.inf) for _ in range(2)]
    for call in calls:
        admission.enter(call)
    for call in calls:
        assert not admission.saw_pages(call, [CORRUPT] * 2)
    assert admission.guard_statistics().breakers[Direction.READ].opens == 1


@pytest.mark.parametrize(("verb", "first_s"), [(Verb.GET, 0.25), (Verb.SET, 0.5)])
def test_the_first_probe_is_short_and_later_ones_have_the_configured_time(
    verb: Verb, first_s: float
) -> None:
    clock = ManualClock()
    admission = AdmissionControl(tuned(GuardConfig, probe_timeout=2.0), 1, clock, lambda at_s: None)
    admission.enter(call := Call(verb, 1, 0, math.inf))
    call.result = CallResult.ERROR
    admission.leave(call, [ERROR])
    first = admission.begin_probe(verb.direction)
    assert first is not None and first[1] == clock() + first_s
    admission.probed(verb.direction, first[0], ok=False)
    clock.advance(10.0)
    later = admission.begin_probe(verb.direction)
    assert later is not None and later[1] == clock() + 2.0


@given(st.lists(st.floats(0, 1000, allow_nan=False), max_size=50))
def test_each_call_is_counted_in_the_bucket_of_its_latency(seconds: list[float]) -> None:
    clock, taken = ManualClock(), []
    admission = AdmissionControl(GuardConfig(), 1, clock, lambda at_s: None)
    for value in seconds:
        began_s = clock()
        admission.enter(call := Call(Verb.GET, 1, 0, math.inf))
        clock.advance(value)
        admission.leave(call, [HIT])
        taken.append(clock() - began_s)  # the value, rounded
    found = admission.guard_statistics().latency[Verb.GET]
    assert sum(found.counts) == len(seconds)
    assert found.total == pytest.approx(sum(taken))
    for number, bound in enumerate(BOUNDS_S):
        assert sum(found.counts[: number + 1]) == sum(value <= bound for value in taken)


@pytest.mark.parametrize(
    "options",
    [
        {"in_flight": 0}, {"in_flight": True}, {"in_flight": "much"}, {"read": "maybe"}, {"write": 1}, {"raed": "off"},
    ],
)
def test_options_that_cannot_work_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        GuardConfig(**options)


# Guards from a configuration


ENTRIES: dict[str, Any] = {"page_size": 4, "device": {"tokens": 32}, "host": {"tokens": 32}}


@pytest.fixture
def guard() -> Iterator[Store]:
    """The guard of a cache whose configuration sets one up."""
    section = {"in_flight": "1MiB", "write": False}
    config = HiCacheConfig.model_validate({**ENTRIES, "storage": {"type": "memory", "options": {}, "guard": section}})
    with create_cache(config, NAMESPACE) as cache:
        assert isinstance(cache, HiRadixCache)
        backend = cache.controller.backend
        assert isinstance(backend, Store)
        yield backend


def test_a_cache_has_the_configured_guard(guard: Store) -> None:
    assert (guard.name, guard.guard.in_flight) == ("memory", 1 << 20)
    assert guard.guard_statistics().breakers[Direction.WRITE].override is Override.OFF, "YAML reads off as false"


def open_pair(codec: FrameCodec) -> Levels:
    """Return a composition whose parts have their own guards."""
    return Levels(codec, [Part(name, open_spec(BackendSpec("memory", name=name), codec)) for name in "ab"])


def test_a_composition_gets_no_second_guard() -> None:
    with closing(open_spec(BackendSpec(f"{__name__}:open_pair"), CODEC)) as backend:
        assert isinstance(backend, Levels)
        assert [store.name for store in backend.stores] == ["a", "b"]
