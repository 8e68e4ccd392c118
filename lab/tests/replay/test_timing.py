"""Percentiles, and the accounting of the scheduler's time."""

from __future__ import annotations

import pytest

from hicache_lab.replay.timing import Call, CallTotal, Cost, Histogram, SchedulerClock, merged_latency, upper_bound
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
def test_a_value_is_in_its_class_and_close_to_the_end_of_the_class(value: int) -> None:
    assert value <= upper_bound(value) <= value * (1 + 1 / 32)
    assert upper_bound(upper_bound(value)) == upper_bound(value)


def test_no_values_have_percentiles_of_zero() -> None:
    latency = Histogram().latency()
    assert (latency.count, latency.p99_us, latency.max_us, latency.classes) == (0, 0.0, 0.0, ())


def test_merged_parts_equal_a_common_count() -> None:
    parts, whole = [Histogram(), Histogram()], Histogram()
    for value in range(0, 5_000_000, 1237):
        parts[value % 2].add(value)
        whole.add(value)
    merged, expected = merged_latency([part.latency() for part in parts]), whole.latency()
    assert merged.classes == expected.classes
    assert (merged.p50_us, merged.p999_us, merged.max_us) == (expected.p50_us, expected.p999_us, expected.max_us)
    assert merged.total_us == pytest.approx(expected.total_us)


class Times:
    """Both clocks of a thread. They advance only in `work`, and by `look_ns` when one of them is read."""

    def __init__(self, look_ns: int = 0) -> None:
        self.look_ns = look_ns
        self.cpu_ns = self.elapsed_ns = 0

    def work(self, rid: str | None, cpu_ns: int, waiting_ns: int = 0) -> int:
        """Advance the clocks as a call of the cache for `rid` does, by work and additional waiting."""
        self.cpu_ns += cpu_ns
        self.elapsed_ns += cpu_ns + waiting_ns
        return cpu_ns

    def cpu(self) -> int:
        self.work(None, self.look_ns)
        return self.cpu_ns

    def elapsed(self) -> int:
        self.work(None, self.look_ns)
        return self.elapsed_ns

    def clock(self) -> SchedulerClock:
        return SchedulerClock(cpu=self.cpu, elapsed=self.elapsed)


def charged(clock: SchedulerClock) -> tuple[float, float]:
    """Return the time charged to ended requests, in ns of both clocks."""
    return clock.request_cpu.latency().total_us * 1000, clock.request_elapsed.latency().total_us * 1000


def test_a_call_is_charged_to_its_request_and_its_result_is_passed_on() -> None:
    times = Times()
    clock = times.clock()
    assert clock.timed(Call.BEGIN, times.work, "a", 500, waiting_ns=70) == 500
    clock.ended("a")
    assert charged(clock) == pytest.approx((500, 570))
    assert clock.calls[Call.BEGIN] == CallTotal(1, 500 / 1e9, 570 / 1e9)


def test_a_failed_call_is_charged_too() -> None:
    times = Times()
    clock = times.clock()
    with pytest.raises(ZeroDivisionError):
        clock.timed(Call.BEGIN, lambda rid: times.work(rid, 500, 70) // 0, "a")
    clock.ended("a")
    assert charged(clock) == pytest.approx((500, 570))


def test_requests_add_up_to_the_scheduler_s_time_with_shared_calls_divided() -> None:
    times = Times()
    clock = times.clock()
    for rid in "ab":
        clock.timed(Call.PREFETCH, times.work, rid, 0)
    clock.timed(Call.POLL, times.work, None, 600, 20)
    clock.end_step(2, worked=True)
    clock.timed(Call.BEGIN, times.work, "late", 5000)
    clock.timed(Call.POLL, times.work, None, 900, 30)
    clock.end_step(3, worked=True)
    ended_ns = 0.0
    for rid, cpu_ns in {"a": 600 / 2 + 900 / 3, "b": 600 / 2 + 900 / 3, "late": 900 / 3 + 5000}.items():
        clock.ended(rid)
        ended_ns += cpu_ns
        assert charged(clock)[0] == pytest.approx(ended_ns)
    assert clock.request_elapsed.latency().total_us == clock.step_elapsed.latency().total_us == 6.55
    assert clock.request_cpu.latency().total_us == clock.step_cpu.latency().total_us == 6.5
    assert sum(total.cpu_s for total in clock.calls.values()) == pytest.approx(6500 / 1e9)
    assert clock.step_cpu.latency().max_us == 5.9


def test_a_step_without_work_is_not_counted_but_its_time_is() -> None:
    times = Times()
    clock = times.clock()
    clock.timed(Call.PREFETCH, times.work, "a", 0)
    clock.timed(Call.POLL, times.work, None, 600, 20)
    clock.end_step(1, worked=False)
    clock.ended("a")
    assert clock.step_cpu.latency().count == 0
    assert charged(clock) == pytest.approx((600, 620))


def test_the_cost_of_reading_clocks_is_not_charged() -> None:
    times = Times(look_ns=3)
    clock = times.clock()
    # Between the two looks at the inner clock is one of them, between those at the outer one are three.
    assert clock._empty == Cost(3, 9)
    for _ in range(500):
        clock.timed(Call.EXTEND, times.work, "a", 100, 10)
    clock.ended("a")
    assert charged(clock) == pytest.approx((500 * 100, 500 * 110))
    clock._empty = Cost()  # negative control: without the subtraction
    for _ in range(500):
        clock.timed(Call.EXTEND, times.work, "b", 100, 10)
    clock.ended("b")
    assert charged(clock) == pytest.approx((500 * 203, 500 * 229))


def test_a_call_measured_as_faster_than_an_empty_call_costs_nothing() -> None:
    times = Times(look_ns=3)
    clock = times.clock()
    times.look_ns = 1
    clock.timed(Call.EXTEND, times.work, "a", 0)
    clock.ended("a")
    assert charged(clock) == (0, 0)
