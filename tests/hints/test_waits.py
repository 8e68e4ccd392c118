"""The record of a source: how far its times are trusted."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.hints import WaitRecord
from tests.seeds import rng, seeds

SECONDS = st.sampled_from([0.0, 1e-9, 0.1, 60.0, 60.01, 3600.0, 1e9]) | st.floats(0, 1e9)


def wait_s(numbers: random.Random) -> float:
    """Return a wait of an agent: half a second to some minutes."""
    return math.exp(numbers.gauss(math.log(20), 1.2))


def recorded(numbers: random.Random, waits: int, factor: float, bias: float = 1.0) -> WaitRecord:
    """Return the record of a source whose times are wrong by `factor` in the mean, after a constant factor."""
    record = WaitRecord()
    for _ in range(waits):
        real_s = wait_s(numbers)
        record.add(real_s * bias * math.exp(numbers.gauss(0, math.log(factor) * math.sqrt(math.pi / 2))), real_s)
    return record


def test_a_new_source_is_trusted() -> None:
    expected_s, trust = WaitRecord().expected(45)
    assert expected_s == pytest.approx(45) and trust == pytest.approx(1)


@pytest.mark.parametrize("seed", seeds(5))
@pytest.mark.parametrize("waits", [1, 30, 1000])
def test_exact_times_are_trusted_whole(seed: int, waits: int) -> None:
    expected_s, trust = recorded(rng(seed), waits, 1).expected(90)
    assert expected_s == pytest.approx(90) and trust == pytest.approx(1)


@pytest.mark.parametrize("seed", seeds(5))
@pytest.mark.parametrize("bias", [0.1, 7.0])
def test_a_constant_factor_is_corrected(seed: int, bias: float) -> None:
    expected_s, trust = recorded(rng(seed), 1000, 1, bias).expected(90 * bias)
    assert expected_s == pytest.approx(90, rel=0.1) and trust > 0.98


@pytest.mark.parametrize("seed", seeds(5))
def test_trust_falls_with_the_error(seed: int) -> None:
    trusts = [recorded(rng(seed), 600, factor).expected(60)[1] for factor in (1, 1.5, 3, 10)]
    assert trusts == sorted(trusts, reverse=True)
    assert 0.3 < trusts[2] < 0.8


@pytest.mark.parametrize("seed", seeds(20))
def test_noise_ends_without_trust(seed: int) -> None:
    numbers, record = rng(seed), WaitRecord()
    for _ in range(300):
        record.add(wait_s(numbers), wait_s(numbers))
    found = []
    for _ in range(300):
        record.add(wait_s(numbers), wait_s(numbers))
        found.append(record.expected(60)[1])
    assert sum(trust > 0 for trust in found) < len(found) / 10


@pytest.mark.parametrize("seed", seeds(5))
def test_one_time_for_all_waits_is_trusted_as_far_as_these_are_alike(seed: int) -> None:
    numbers, trusts = rng(seed), []
    for spread in (0.0, 0.5, 1.0, 2.0):
        record = WaitRecord()
        for _ in range(3000):
            record.add(60, 90 * math.exp(numbers.gauss(0, spread)))
        expected_s, trust = record.expected(60)
        assert expected_s == pytest.approx(90, rel=0.6)
        trusts.append(trust)
    assert trusts == sorted(trusts, reverse=True)
    assert trusts[0] > 0.99 and trusts[1] > 0.8 and trusts[3] < 0.6


def test_one_wrong_time_does_not_end_the_trust_in_a_new_source() -> None:
    record = WaitRecord()
    record.add(60, 600)
    assert record.expected(60)[1] > 0.5


def test_times_in_the_wrong_order_are_not_trusted() -> None:
    record = WaitRecord()
    for number in range(100):
        record.add(10 + number, 1000 / (10 + number))
    assert record.expected(60) == (60, 0.0)


def test_a_source_that_improves_is_trusted_again() -> None:
    numbers = rng(0)
    record = WaitRecord()
    for _ in range(300):
        record.add(wait_s(numbers), wait_s(numbers))
    assert record.expected(60)[1] < 0.3
    for _ in range(1500):
        real_s = wait_s(numbers)
        record.add(real_s, real_s)
    assert record.expected(60)[1] > 0.95


@given(waits=st.lists(st.tuples(SECONDS, SECONDS), max_size=60), times=st.sampled_from([1, 100]), announced_s=SECONDS)
def test_any_times_give_a_finite_wait_and_a_trust_from_0_to_1(
    waits: list[tuple[float, float]], times: int, announced_s: float
) -> None:
    record = WaitRecord()
    for announced, real in waits * times:
        record.add(announced, real)
    expected_s, trust = record.expected(announced_s)
    assert math.isfinite(expected_s) and expected_s >= 0
    assert 0 <= trust <= 1


def test_a_steep_line_does_not_overflow() -> None:
    record = WaitRecord()
    for number in range(6000):
        record.add(*((60, 0.1) if number % 2 else (60.01, 1e4)))
    assert record.expected(1e9)[1] > 0.9
    assert record.expected(1e9)[0] == pytest.approx(1e9)
    assert record.expected(0)[0] == pytest.approx(0.1)


@pytest.mark.parametrize("real_s", [60.0, 0.0])
def test_equal_times_for_ever_are_not_divided_by_their_variance(real_s: float) -> None:
    record = WaitRecord()
    for _ in range(10_000):
        record.add(60, real_s)
        assert 0 <= record.expected(60)[1] <= 1
    expected_s, trust = record.expected(60)
    assert expected_s == pytest.approx(max(real_s, 0.1), rel=0.01) and trust > 0.99
