"""The longest prefix of a chain whose pages are on several levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# The limit of lookups. Usually one level has the whole prefix, or one its head and another its tail: 3 lookups with two
# levels. If pages alternate more often between levels, the answer is the pages found so far.
LOOKUPS_MAX = 16


def interleaved_prefix(count: int, looks: Sequence[Callable[[int], int]]) -> int:
    """Return how many of `count` pages any level has up to the first hole. `looks[n](found)` returns how many pages
    level n has from the page `found` on.

    Looks in one level after the other, each time from the first page not found so far, until no level finds more.
    """
    found = without = calls = 0
    while found < count and without < len(looks) and calls < LOOKUPS_MAX:
        more = looks[calls % len(looks)](found)
        calls += 1
        found += more
        # A level that found pages stopped at one that it does not have.
        without = 1 if more else without + 1
    return found
