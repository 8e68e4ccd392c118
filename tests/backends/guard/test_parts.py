"""The smaller parts of a guard: budget, damage, latencies, options."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.base import GetOutcome
from hicache.backends.guard import BOUNDS_S, Verb
from hicache.backends.guard.admission import (
    BURST_CALLS,
    BURST_PAGES,
    AdmissionControl,
    DamageWatch,
    RetryBudget,
)
from hicache.config.guard import GuardConfig, InjectConfig
from hicache.errors import ConfigError

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


def test_over_a_long_outage_a_tenth_is_tried_again() -> None:
    budget = RetryBudget(0.1)
    retried = 0
    for _ in range(10_000):
        budget.earn(16)
        retried += budget.spend(16)
    assert 0.09 <= retried / 160_000 <= 0.1 + BURST_PAGES / 160_000


def test_a_large_batch_is_tried_again_as_far_as_the_budget_goes() -> None:
    budget = RetryBudget(0.1)
    assert budget.spend(1000) == int(BURST_PAGES)
    assert budget.spend(1000) == 0


def test_damaged_pages_without_a_sound_one_raise_the_alarm() -> None:
    watch = DamageWatch(GuardConfig(damage_pages=3, damage_backoff=30.0))
    assert watch.saw([CORRUPT, MISS, CORRUPT, ERROR]) is None
    assert watch.saw([CORRUPT]) == 30.0


def test_damaged_pages_among_sound_ones_do_not() -> None:
    watch = DamageWatch(GuardConfig(damage_pages=3))
    assert [watch.saw([CORRUPT, CORRUPT, HIT]) for _ in range(50)] == [None] * 50


def test_after_an_alarm_one_damaged_page_is_the_next_until_a_sound_one_was_read() -> None:
    watch = DamageWatch(GuardConfig(damage_pages=3, damage_backoff=30.0))
    assert [watch.saw([CORRUPT] * count) for count in (3, 1, 1)] == [30.0, 120.0, 480.0]
    assert [watch.saw([CORRUPT]) for _ in range(5)][-1] == 3600.0
    assert watch.saw([HIT, CORRUPT, CORRUPT]) is None
    assert watch.saw([CORRUPT]) == 30.0


def test_the_head_of_a_batch_is_read_alone_as_long_as_nothing_speaks_for_the_store() -> None:
    watch = DamageWatch(GuardConfig(damage_pages=3))
    heads = [watch.pages_at_once([])]
    for outcome in (MISS, HIT, CORRUPT, HIT, CORRUPT, CORRUPT, CORRUPT, HIT):
        watch.saw([outcome])
        heads.append(watch.pages_at_once([]))
    assert heads == [3, 3, None, 3, None, 3, 3, 1, None]


def test_what_follows_a_head_without_damage_is_read_at_once_but_not_after_an_alarm() -> None:
    watch = DamageWatch(GuardConfig(damage_pages=3))
    assert [watch.pages_at_once(read) for read in ([MISS], [CORRUPT], [MISS, CORRUPT])] == [None, 3, 3]
    watch.saw([CORRUPT] * 3)
    assert watch.pages_at_once([MISS]) == 1


@given(st.lists(st.floats(0, 1000, allow_nan=False), max_size=50))
def test_every_call_is_in_the_bucket_of_its_time(seconds: list[float]) -> None:
    time_s = [0.0]
    admission = AdmissionControl(GuardConfig(), lambda: time_s[0], lambda at_s: None)
    for value in seconds:
        time_s[0] = 0.0
        with admission.enter(Verb.GET, 1, 0, deadline=2000.0):
            time_s[0] = value
    found = admission.statistics().latency[Verb.GET]
    assert found.calls == len(seconds)
    assert found.seconds == pytest.approx(sum(seconds))
    for number, bound in enumerate(BOUNDS_S):
        assert sum(found.counts[: number + 1]) == sum(value <= bound for value in seconds)


@pytest.mark.parametrize(
    "options",
    [
        {"failures": 0}, {"failures": True}, {"in_flight": 0}, {"damage_pages": -1}, {"failure_share": 0.0},
        {"failure_share": 1.1}, {"retry_share": -0.1}, {"backoff_min": 0}, {"backoff_min": 6.0}, {"grace": "soon"},
        {"read": "maybe"}, {"write": 1}, {"probe_timeout": float("nan")},
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)) if "min" not in str(options) else "backoff"):
        GuardConfig(**options)


@pytest.mark.parametrize(
    "options", [{"latency": -1}, {"error_share": 1.5}, {"damage_share": True}, {"seed": 1.5}, {"jitter": "soon"}]
)
def test_faults_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        InjectConfig(**options)
