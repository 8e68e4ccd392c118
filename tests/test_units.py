"""Sizes and durations: what people write is read, what makes no sense is refused, what is printed reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.units import (
    DURATION_MAX_S,
    SIZE_MAX_BYTES,
    counted,
    exact_duration,
    exact_size,
    format_share,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("512B", 512), ("0", 0), ("0.0", 0),("200GiB", 200 << 30), ("64MB", 64_000_000), ("1.5KiB", 1536), (" 7 b ", 7),
     (12, 12), ("2TiB", 2 << 40)],
)
def test_a_size_is_read_in_binary_and_decimal_units(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("5s", 5.0), ("250ms", 0.25), ("2h", 7200.0), ("1d", 86400.0), (3, 3.0), ("0", 0.0), ("3m", 180.0)],
)
def test_a_duration_is_read_with_its_unit(text: str, duration_s: float) -> None:
    assert parse_duration(text) == pytest.approx(duration_s)


@pytest.mark.parametrize(
    "value", ["", "GiB", "-1GiB", "1 XiB", "1e3", "9" * 400, "1GiB2", "64", "1.5", "\u0663GiB", True, -1, float("nan")]
)
def test_an_invalid_size_is_rejected(value: object) -> None:
    with pytest.raises(ValueError, match=r"size|has no unit"):
        parse_size(value)


@pytest.mark.parametrize("value", ["", "7", "5 parsecs", "-5s", "1000d", False, float("inf"), -0.1])
def test_an_invalid_duration_is_rejected(value: object) -> None:
    with pytest.raises(ValueError, match=r"duration|has no unit"):
        parse_duration(value)


@given(st.integers(0, SIZE_MAX_BYTES))
def test_an_exact_size_reads_back(size_bytes: int) -> None:
    assert parse_size(exact_size(size_bytes)) == size_bytes


@given(st.floats(0, DURATION_MAX_S))
def test_an_exact_duration_reads_back_to_a_microsecond(duration_s: float) -> None:
    assert parse_duration(exact_duration(duration_s)) == pytest.approx(duration_s, abs=1e-6)


def test_the_error_for_a_duration_has_examples_up_to_days() -> None:
    with pytest.raises(ValueError, match="write it like 5s, 250ms, 2h or 7d"):
        parse_duration("a week")


def test_a_count_agrees_with_its_noun() -> None:
    assert [counted(number, "page") for number in (0, 1, 2000)] == ["0 pages", "1 page", "2,000 pages"]


def test_a_share_of_nothing_is_a_dash() -> None:
    assert (format_share(1, 3), format_share(0, 0)) == ("33.3 %", "-")


def test_a_printed_size_has_the_largest_unit_that_keeps_it_above_one() -> None:
    assert [format_size(size) for size in (1023, 1536, 5 << 40)] == ["1023 B", "1.5 KiB", "5.0 TiB"]


def test_exact_forms_are_short() -> None:
    assert [exact_size(10 << 30), exact_size(1000), exact_duration(0.25), exact_duration(5.0), exact_duration(1.5)] == [
        "10GiB", "1000B", "250ms", "5s", "1.5s",
    ]
