"""Percentiles, and where the scheduler's time is charged."""

from __future__ import annotations

import statistics

import pytest

from hicache.replay.timing import Call, Cost, Histogram, SchedulerClock, empty_call, merged_latency, upper_bound
from tests.seeds import rng, seeds


@pytest.mark.parametrize("seed", seeds(5))
def test_percentiles_are_exact_to_three_percent(seed: int) -> None:
    numbers = rng(seed)
    values = [int(numbers.lognormvariate(10, 2)) for _ in range(2000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    latency = histogram.latency()
    for percent, rank in ((1, 20), (50, 1000), (90, 1800), (99, 1980), (99.9, 1998), (100, 2000)):
        exact_us = sorted(values)[rank - 1] / 1000
        assert exact_us <= latency.at(percent) <= exact_us * 1.04 + 0.001
    assert latency.at(99.9) == latency.p999_us
    assert latency.count == 2000
    assert latency.max_us == max(values) / 1000
    assert latency.total_us == pytest.approx(sum(values) / 1000)


@pytest.mark.parametrize("value", [0, 1, 31, 32, 33, 63, 64, 1000, 123_456_789, 1 << 50])
def test_a_value_lies_in_its_class_and_close_to_its_end(value: int) -> None:
    assert value <= upper_bound(value) <= value * (1 + 1 / 32)
    assert upper_bound(upper_bound(value)) == upper_bound(value)


def test_no_values_have_percentiles_of_zero() -> None:
    latency = Histogram().latency()
    assert (latency.count, latency.p99_us, latency.max_us, latency.classes) == (0, 0.0, 0.0, ())


def test_parts_merged_are_as_if_counted_together() -> None:
    parts, whole = [Histogram(), Histogram()], Histogram()
    for value in range(0, 5_000_000, 1237):
        parts[value % 2].add(value)
        whole.add(value)
    merged, expected = merged_latency([part.latency() for part in parts]), whole.latency()
    assert merged.classes == expected.classes
    assert (merged.p50_us, merged.p999_us, merged.max_us) == (expected.p50_us, expected.p999_us, expected.max_us)
    assert merged.total_us == pytest.approx(expected.total_us)


def busy() -> int:
    return statistics.median(range(3000)).__int__()


def test_a_call_is_charged_to_its_request_and_returns_what_it_returns() -> None:
    clock = SchedulerClock()
    account = clock.arrived()
    assert clock.timed(Call.BEGIN, account, busy) == busy()
    assert account.cpu_ns > 0 and account.elapsed_ns > 0
    assert clock.calls[Call.BEGIN].calls == 1


def test_a_call_that_fails_is_charged_too() -> None:
    clock = SchedulerClock()
    account = clock.arrived()
    with pytest.raises(ZeroDivisionError):
        clock.timed(Call.BEGIN, account, lambda: 1 // 0)
    assert account.elapsed_ns > 0


def test_requests_add_up_to_the_scheduler_with_shared_calls_divided_among_those_in_play() -> None:
    clock = SchedulerClock()
    early = [clock.arrived(), clock.arrived()]
    clock.timed(Call.POLL, None, busy)
    clock.end_step(2, worked=True)
    late = clock.arrived()
    clock.timed(Call.POLL, None, busy)
    clock.timed(Call.BEGIN, late, busy)
    clock.end_step(3, worked=True)
    for account in (*early, late):
        clock.ended(account)
    total_ns = sum(entry.cost.cpu_ns for entry in clock.calls.values())
    assert clock.request_cpu.latency().total_us * 1000 == pytest.approx(total_ns)
    assert clock.step_cpu.latency().total_us * 1000 == pytest.approx(total_ns)


def test_a_request_is_not_charged_for_steps_before_it_arrived() -> None:
    clock = SchedulerClock()
    clock.timed(Call.POLL, None, busy)
    clock.end_step(1, worked=True)
    clock.ended(clock.arrived())
    assert clock.request_cpu.latency().total_us == pytest.approx(0, abs=1e-6)


def test_a_step_without_work_is_no_step_but_its_time_is_charged() -> None:
    clock = SchedulerClock()
    account = clock.arrived()
    clock.timed(Call.POLL, None, busy)
    clock.end_step(1, worked=False)
    clock.ended(account)
    assert clock.step_cpu.latency().count == 0
    assert clock.request_cpu.latency().total_us > 0


def test_timing_itself_is_charged_to_nobody() -> None:
    clock = SchedulerClock()
    account = clock.arrived()
    for _ in range(500):
        clock.timed(Call.EXTEND, account, int)
    empty = empty_call()
    assert empty.cpu_ns > 0 and empty.elapsed_ns > 0
    assert account.cpu_ns >= 0
    clock._empty = Cost()  # negative control: without the subtraction
    charged = clock.arrived()
    for _ in range(500):
        clock.timed(Call.EXTEND, charged, int)
    assert charged.cpu_ns > account.cpu_ns


def test_costs_add_up() -> None:
    cost = Cost(1, 2)
    cost.add(Cost(10, 20))
    assert (cost.cpu_ns, cost.elapsed_ns) == (11, 22)
