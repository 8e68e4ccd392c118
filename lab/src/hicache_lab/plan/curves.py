"""Hits of a tier as a function of its size: exact at every size, from stack distances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from .result import Curve, Point, Size
from .reuse import Counts, KnownPages

# Found pages at sizes in pages. Does not fall.
Found: TypeAlias = Callable[[Counts], Counts]

POINTS = 60
# The smallest point, as a share of the largest: a tier that has a ten-thousandth of all pages.
_SMALLEST_SHARE = 1e-4
# A tier of this share of what a larger one finds is enough.
ENOUGH_SHARE = 0.95
BENDS_MAX = 3
# At a bend, the slope falls to half or less, and the part before it adds this share of the tokens of the curve.
_BEND_DROP = 0.5
_BEND_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Reach:
    """The number of pages with a distance below a size. It is a sum of ramps: a run of pages counts nothing up to its
    first distance, and everything from its last one on. `starts` and `ends` are sorted."""

    starts: Counts
    ends: Counts

    def __call__(self, sizes: Counts) -> Counts:
        """Return the numbers of pages for these sizes."""
        return _ramps(self.starts, sizes) - _ramps(self.ends, sizes)


def reach(known: KnownPages, first: Counts, end: Counts) -> Reach:
    """Return the reach of the known pages of each request from page `first` to before page `end`."""
    of = np.repeat(np.arange(len(known.offsets) - 1), np.diff(known.offsets))
    upto = known.pages.cumsum()
    before = np.concatenate((np.zeros(1, np.int64), upto))[known.offsets[:-1]]
    place = upto - known.pages - before[of]
    low, high = np.maximum(place, first[of]), np.minimum(place + known.pages, end[of])
    shift = known.distances - place
    inside = high > low
    return Reach(np.sort((low + shift)[inside]), np.sort((high + shift)[inside]))


def _ramps(starts: Counts, sizes: Counts) -> Counts:
    """Return the sum of size - start over all starts below each size."""
    below = np.searchsorted(starts, sizes)
    upto: Counts = np.concatenate((np.zeros(1, np.int64), starts.cumsum()))
    total: Counts = sizes * below - upto[below]
    return total


def curve(found: Found, footprint_pages: int, page_size: int, token_bytes: int) -> Curve:
    """Return the curve of a tier with its bends, at most `POINTS` sizes up to the footprint, evenly spaced by their
    logarithm."""
    smallest = max(1.0, footprint_pages * _SMALLEST_SHARE)
    sizes = np.unique(np.geomspace(smallest, max(1, footprint_pages), POINTS).round().astype(np.int64))

    def points(at: Counts) -> list[Point]:
        return [
            Point(size=Size(tokens=size * page_size, bytes=size * page_size * token_bytes), found_tokens=n * page_size)
            for size, n in zip(at.tolist(), found(at).tolist(), strict=True)
        ]

    most = int(found(sizes[-1:])[0])
    enough = smallest_size(found, ENOUGH_SHARE * most, int(sizes[-1])) if most else None
    return Curve(
        points=tuple(points(sizes)),
        bends=tuple(points(sizes[bends(sizes, found(sizes))])),
        enough=None if enough is None else points(np.array([enough]))[0],
    )


def smallest_size(found: Found, pages: float, largest: int) -> int | None:
    """Return the smallest size up to `largest` with at least that many found pages, None if `largest` has fewer."""
    if found(np.array([largest]))[0] < pages:
        return None
    low, high = -1, largest  # `high` has enough, `low` does not
    while high - low > 1:
        middle = (low + high) // 2
        if found(np.array([middle]))[0] >= pages:
            high = middle
        else:
            low = middle
    return high


def bends(sizes: Counts, found: Counts) -> list[int]:
    """Return the indices of at most `BENDS_MAX` bends, the strongest first.

    Bends are vertices of the upper concave hull of the origin and all points, without the first and the last one. The
    hull has the sizes that are worth their bytes: any size between two vertices gains less per byte than the vertex
    after it. A bend is the stronger, the more of its slope the hull loses there.
    """
    points = [(0, 0), *zip(sizes.tolist(), found.tolist(), strict=True)]
    hull: list[int] = []
    for i, point in enumerate(points):
        while len(hull) > 1 and _slope(points[hull[-2]], points[hull[-1]]) <= _slope(points[hull[-1]], point):
            hull.pop()
        hull.append(i)
    strengths = []
    for (before, bend), (_, after) in pairwise(pairwise(hull)):
        slope = _slope(points[before], points[bend])
        drop = 1 - _slope(points[bend], points[after]) / slope if slope else 0.0
        if drop >= _BEND_DROP and points[bend][1] - points[before][1] >= _BEND_SHARE * points[-1][1]:
            strengths.append((drop, bend - 1))
    return [bend for _, bend in sorted(strengths, reverse=True)[:BENDS_MAX]]


def _slope(one: tuple[int, int], other: tuple[int, int]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
