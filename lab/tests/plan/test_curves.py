"""Curves of hits over sizes, and where they bend."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_lab.plan.curves import bends, curve, reach, smallest_size
from hicache_lab.plan.reuse import Counts, KnownPages


def counts(*values: int) -> Counts:
    """An array of numbers."""
    return np.array(values, np.int64)


# Request 0 knows no page, request 1 three pages at distances 2 to 4 and two at 10 and 11, request 2 one at 0.
KNOWN = KnownPages(counts(0, 0, 2, 3), counts(2, 10, 0), counts(3, 2, 1), counts(2, 1, 1))


def test_pages_below_a_distance_are_counted_by_request() -> None:
    assert KNOWN.nearer(4).tolist() == [0, 2, 1]
    assert KNOWN.nearer(11).tolist() == [0, 4, 1]
    assert KNOWN.nearer(0).tolist() == [0, 0, 0]
    assert KNOWN.nearer(None).tolist() == [0, 5, 1]
    assert KNOWN.used(2).tolist() == [0, 3, 0]


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [((0, 0, 0), (9, 9, 9), [0, 1, 1, 2, 3, 4, 4, 5, 6, 6]), ((0, 1, 0), (9, 4, 0), [0, 0, 0, 0, 1, 2, 2, 3, 3, 3])],
)
def test_the_reach_is_the_number_of_pages_below_each_size(
    first: tuple[int, ...], end: tuple[int, ...], expected: list[int]
) -> None:
    found = reach(KNOWN, counts(*first), counts(*end))
    assert found(counts(0, 1, 2, 3, 4, 5, 10, 11, 12, 99)).tolist() == expected


def test_the_smallest_size_is_found_exactly() -> None:
    found = reach(KNOWN, counts(0, 0, 0), counts(9, 9, 9))
    sizes = [smallest_size(found, pages, 20) for pages in range(8)]
    assert sizes == [0, 1, 3, 4, 5, 11, 12, None]
    assert smallest_size(found, 6, 11) is None


def test_a_curve_bends_where_its_slope_falls_to_less_than_half() -> None:
    sizes = counts(10, 20, 30, 40, 50, 60)
    # Slopes: 10 up to 20, then 4, then 0.5 from 40 on: falls by 60 % and by 87.5 %.
    assert bends(sizes, counts(100, 200, 240, 280, 285, 290)) == [3, 1]
    # 10, then 6: not a bend.
    assert bends(sizes, counts(100, 200, 260, 320, 380, 440)) == []


def test_a_step_is_a_bend_at_its_top_and_the_sizes_below_it_are_not() -> None:
    # A loop over 40 pages: nothing below, everything from there on.
    assert bends(counts(10, 20, 30, 40, 50), counts(0, 0, 5, 400, 400)) == [3]


def test_a_bend_after_a_small_part_of_the_curve_does_not_count() -> None:
    assert bends(counts(1, 100, 200), counts(40, 500, 1000)) == []
    assert bends(counts(1, 100, 200), counts(60, 500, 1000)) == [0]


def test_at_most_three_bends_are_returned() -> None:
    sizes, slopes = counts(1, 2, 3, 4, 5, 6), counts(1000, 450, 200, 95, 40, 1)
    assert bends(sizes, slopes.cumsum()) == [3, 1, 0]


def test_a_curve_without_hits_has_neither_bends_nor_a_size_that_is_enough() -> None:
    empty = curve(reach(KNOWN, counts(0, 0, 0), counts(0, 0, 0)), 50, 64, 2)
    assert (empty.bends, empty.enough) == ((), None)
    assert {point.found_tokens for point in empty.points} == {0}


def test_points_are_whole_pages_up_to_the_footprint() -> None:
    points = curve(reach(KNOWN, counts(0, 0, 0), counts(9, 9, 9)), 12, 64, 2).points
    assert [point.size.tokens // 64 for point in points] == list(range(1, 13))
    assert all(point.size.bytes == 2 * point.size.tokens for point in points)
    assert points[-1].found_tokens == 6 * 64
